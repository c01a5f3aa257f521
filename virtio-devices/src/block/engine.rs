//! Who carries out what is to be done with an image: the kernel, many things at a time, by io_uring; or this thread, one at a time.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use log::debug;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::image::{AlignedBuffer, Image};
use super::request::Range;
use super::uring::Uring;
use crate::iovecs::IoVecs;

/// How much goes through the aligned buffer at once in bytes, a multiple of any block.
const BOUNCE: usize = 256 << 10;

/// One system call's worth of work.
#[derive(Debug, Clone, Copy)]
pub enum Call<'c> {
    /// Reads into segments, from this offset on.
    Read(&'c [libc::iovec], u64),
    /// Writes segments, from this offset on; `stable` means to the medium.
    Write {
        /// What is written.
        iovecs: &'c [libc::iovec],
        /// Where.
        offset: u64,
        /// Whether it has to be on the medium when this is done.
        stable: bool,
    },
    /// Puts what was written onto the medium.
    Sync,
    /// Changes how a range is stored.
    Allocate(FallocateFlags, Range),
}

/// What carries out calls on an image.
pub struct Engine {
    image: Arc<Image>,
    ring: Option<Uring>,
    bounce: Option<AlignedBuffer>,
}

impl Engine {
    /// For up to `depth` calls at a time. Without `io_uring`, or a kernel that has it, one at a time.
    pub fn new(id: &str, image: Arc<Image>, depth: u16, io_uring: bool) -> Self {
        let ring = if io_uring {
            Uring::new(depth.into())
                .inspect_err(|error| debug!("{id}: the kernel refuses io_uring ({error}); requests go one at a time"))
                .ok()
        } else {
            None
        };
        Self { image, ring, bounce: None }
    }

    /// What can be waited for: readable when a call is complete.
    pub fn completions(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(Uring::as_fd)
    }

    /// Starts `call` for `slot`; returns its result if it is complete already.
    ///
    /// # Safety
    ///
    /// The call's segments, and the memory that they name, stay as they are until the call is complete, be it at once or told
    /// of by [`Self::next_complete`].
    pub unsafe fn start(&mut self, slot: usize, call: Call<'_>) -> Option<io::Result<usize>> {
        match &mut self.ring {
            // SAFETY: the caller keeps what the call names until it is complete.
            Some(ring) => unsafe { ring.start(self.image.as_fd(), slot, call) },
            None => Some(execute(self.image.as_fd(), call)),
        }
    }

    /// Tells the kernel of the calls that were started.
    pub fn submit(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.submit();
        }
    }

    /// Whether the kernel has yet to be told of calls: it had no memory for them.
    pub fn has_backlog(&mut self) -> bool {
        self.ring.as_mut().is_some_and(Uring::has_backlog)
    }

    /// A call that is complete: its slot and its result.
    pub fn next_complete(&mut self) -> Option<(usize, io::Result<usize>)> {
        self.ring.as_mut()?.next_complete()
    }

    /// Waits until a call is complete, if there is any that is not.
    pub fn wait(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.wait();
        }
    }

    /// Reads at `offset` through an aligned buffer, as much as that holds.
    pub fn read_bounced(&mut self, segments: &IoVecs<'_, '_>, offset: u64) -> io::Result<usize> {
        let len = segments.bytes().min(BOUNCE);
        let buffer = self.bounce.get_or_insert_with(|| AlignedBuffer::new(BOUNCE)).bytes(len);
        let iovec = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let read = execute(self.image.as_fd(), Call::Read(&[iovec], offset))?.min(len);
        Ok(segments.write_at(0, &buffer[..read]))
    }

    /// Writes at `offset` through an aligned buffer, as much as that holds.
    pub fn write_bounced(&mut self, segments: &IoVecs<'_, '_>, offset: u64, stable: bool) -> io::Result<usize> {
        let len = segments.bytes().min(BOUNCE);
        let buffer = self.bounce.get_or_insert_with(|| AlignedBuffer::new(BOUNCE)).bytes(len);
        segments.read_at(0, buffer);
        let iovecs = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
        execute(self.image.as_fd(), Call::Write { iovecs: &iovecs, offset, stable })
    }
}

/// Carries out `call` here and now.
fn execute(image: BorrowedFd<'_>, call: Call<'_>) -> io::Result<usize> {
    match call {
        Call::Read(iovecs, offset) => {
            let (offset, count) = position(offset, iovecs)?;
            // SAFETY: the segments are memory that may be written, and that no Rust reference covers: guest memory, or a buffer that
            // the caller has borrowed for this.
            transferred(unsafe { libc::preadv(image.as_raw_fd(), iovecs.as_ptr(), count, offset) })
        }
        Call::Write { iovecs, offset, stable } => {
            let (offset, count) = position(offset, iovecs)?;
            // SAFETY: as above; the segments are only read.
            let written = transferred(unsafe { libc::pwritev(image.as_raw_fd(), iovecs.as_ptr(), count, offset) })?;
            if stable {
                rustix::fs::fdatasync(image)?;
            }
            Ok(written)
        }
        Call::Sync => Ok(rustix::fs::fdatasync(image).map(|()| 0)?),
        Call::Allocate(flags, Range { offset, len }) => {
            Ok(rustix::fs::fallocate(image, flags, offset, len).map(|()| 0)?)
        }
    }
}

fn position(offset: u64, iovecs: &[libc::iovec]) -> io::Result<(libc::off_t, libc::c_int)> {
    let invalid = || io::Error::from(Errno::INVAL);
    Ok((
        libc::off_t::try_from(offset).map_err(|_| invalid())?,
        libc::c_int::try_from(iovecs.len()).map_err(|_| invalid())?,
    ))
}

fn transferred(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
