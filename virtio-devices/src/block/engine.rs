//! Carries out calls on an image: many at a time through io_uring, or one at a time on this thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use log::debug;
use rustix::io::Errno;

use super::aligned_buffer::AlignedBuffer;
use super::call::{Call, zeroing};
use super::image::{Contents, Image};
use super::operation::Range;
use super::uring::Uring;
use crate::iovecs::IoVecs;

/// How much goes through the aligned buffer at once in bytes, a multiple of any block.
const BOUNCE: usize = 256 << 10;

/// How many bytes one call on this thread transfers, so that a stop need not wait long; a multiple of any block.
const CHUNK: usize = 2 << 20;

/// What carries out calls on an image.
pub(crate) struct Engine {
    /// Before `image`: dropping it waits for its calls, which need the image to be open.
    ring: Option<Uring>,
    image: Arc<Image>,
    bounce: Option<AlignedBuffer>,
}

impl Engine {
    /// For one call at a time.
    pub(crate) const fn new(image: Arc<Image>) -> Self {
        Self { ring: None, image, bounce: None }
    }

    /// For up to `depth` calls at a time on a raw image, unless the kernel has no io_uring.
    pub(crate) fn with_io_uring(id: &str, image: Arc<Image>, depth: u16) -> Self {
        let ring = if matches!(image.contents(), Contents::Raw(_)) {
            Uring::new(depth.into())
                .inspect_err(|error| debug!("{id}: the kernel refuses io_uring ({error}); requests go one at a time"))
                .ok()
        } else {
            None
        };
        Self { ring, ..Self::new(image) }
    }

    /// Readable when a call is complete.
    pub(crate) fn completions(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(Uring::as_fd)
    }

    /// Starts `call` under `tag`; returns its result if it is complete already. A transfer on this thread may be one of
    /// only its beginning.
    ///
    /// # Safety
    ///
    /// The call's segments, and the memory that they name, stay as they are until the call is complete, either at once
    /// or as reported by [`Self::next_complete`].
    pub(crate) unsafe fn start(&mut self, tag: usize, call: Call<'_>) -> Option<io::Result<usize>> {
        match (self.image.contents(), &mut self.ring) {
            // SAFETY: the caller keeps what the call names until it is complete.
            (Contents::Raw(raw), Some(ring)) => unsafe { ring.start(raw.as_fd(), tag, call) },
            (Contents::Raw(raw), None) => {
                let mut part = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }];
                let call = call.beginning(CHUNK, &mut part);
                #[cfg(test)]
                self.image.dawdle(call.bytes());
                // SAFETY: as above; it is complete when this returns.
                Some(unsafe { execute(raw.as_fd(), call) })
            }
            (Contents::Qcow2(image), _) => Some(image.execute(call)),
        }
    }

    /// Submits the calls that were started.
    pub(crate) fn submit(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.submit();
        }
    }

    /// Whether calls could not be submitted yet, because the kernel had no memory for them.
    pub(crate) fn has_backlog(&mut self) -> bool {
        self.ring.as_mut().is_some_and(Uring::has_backlog)
    }

    /// A call that is complete: its tag and its result.
    pub(crate) fn next_complete(&mut self) -> Option<(usize, io::Result<usize>)> {
        self.ring.as_mut()?.next_complete()
    }

    /// Waits until a call is complete, if there is any that is not.
    pub(crate) fn wait(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.wait();
        }
    }

    /// Reads at `offset` through an aligned buffer, as much as that holds.
    pub(crate) fn read_bounced(&mut self, segments: &IoVecs<'_, '_>, offset: u64) -> io::Result<usize> {
        let len = segments.bytes().min(BOUNCE);
        let buffer = self.bounce.get_or_insert_with(|| AlignedBuffer::new(BOUNCE)).bytes(len);
        #[cfg(test)]
        self.image.dawdle(len);
        let read = match self.image.contents() {
            Contents::Raw(raw) => {
                let iovec = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
                // SAFETY: the segment is `buffer`, which is borrowed mutably until the call is complete.
                unsafe { execute(raw.as_fd(), Call::Read(&[iovec], offset)) }?.min(len)
            }
            Contents::Qcow2(image) => image.read(buffer, offset)?,
        };
        Ok(segments.write_at(0, &buffer[..read]))
    }

    /// Writes at `offset` through an aligned buffer, as much as that holds.
    pub(crate) fn write_bounced(&mut self, segments: &IoVecs<'_, '_>, offset: u64, stable: bool) -> io::Result<usize> {
        let len = segments.bytes().min(BOUNCE);
        let buffer = self.bounce.get_or_insert_with(|| AlignedBuffer::new(BOUNCE)).bytes(len);
        segments.read_at(0, buffer);
        #[cfg(test)]
        self.image.dawdle(len);
        match self.image.contents() {
            Contents::Raw(raw) => {
                let iovecs = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
                // SAFETY: as above.
                unsafe { execute(raw.as_fd(), Call::Write { iovecs: &iovecs, offset, stable }) }
            }
            Contents::Qcow2(image) => image.write(buffer, offset, stable),
        }
    }
}

/// Carries out `call` here and now.
///
/// # Safety
///
/// The segments of a read name memory that may be written and that no Rust reference covers but the caller's own
/// mutable one; those of a write name memory that may be read. Both stay mapped until this returns.
unsafe fn execute(image: BorrowedFd<'_>, call: Call<'_>) -> io::Result<usize> {
    match call {
        Call::Read(iovecs, offset) => {
            let (offset, count) = position(offset, iovecs)?;
            // SAFETY: the caller promises that the segments may be written until this returns.
            transferred(unsafe { libc::preadv(image.as_raw_fd(), iovecs.as_ptr(), count, offset) })
        }
        Call::Write { iovecs, offset, stable } => {
            let (offset, count) = position(offset, iovecs)?;
            // SAFETY: the caller promises that the segments may be read until this returns.
            let written = transferred(unsafe { libc::pwritev(image.as_raw_fd(), iovecs.as_ptr(), count, offset) })?;
            if stable {
                rustix::fs::fdatasync(image)?;
            }
            Ok(written)
        }
        Call::Sync => Ok(rustix::fs::fdatasync(image).map(|()| 0)?),
        Call::Zero { range: Range { offset, len }, unmap } => {
            Ok(rustix::fs::fallocate(image, zeroing(unmap), offset, len).map(|()| 0)?)
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
