//! Executes calls on an image: many at a time through io_uring, or one at a time on this thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use log::debug;
use rustix::io::Errno;

use super::call::{Call, zeroing};
use super::image::aligned_buffer::AlignedBuffer;
use super::image::raw;
use super::image::{Contents, Image};
use super::operation::Range;
use super::uring::Uring;
use crate::queue::iovecs::IoVecs;

/// Size of the aligned buffer in bytes, a multiple of any block.
const BOUNCE: usize = 256 << 10;

/// Most bytes that a call on this thread transfers, so that a stop does not wait long; a multiple of any block.
const CHUNK: usize = 2 << 20;

/// Executor of calls on an image.
pub(crate) struct Engine {
    /// Declared before `image`: dropping the ring waits for its calls, which need the image to be open.
    ring: Option<Uring>,
    image: Arc<Image>,
    bounce: Option<AlignedBuffer>,
}

impl Engine {
    /// Creates an engine for one call at a time.
    pub(crate) const fn new(image: Arc<Image>) -> Self {
        Self { ring: None, image, bounce: None }
    }

    /// Creates an engine for up to `depth` calls at a time on a raw image, unless the kernel has no io_uring.
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

    /// Starts `call` under `tag`; returns its result if it is complete already. A transfer on this thread may stop
    /// after its beginning.
    ///
    /// # Safety
    ///
    /// The call's segments, and the memory that they name, stay valid until the call is complete, either at once or as
    /// reported by [`Self::next_complete`].
    pub(crate) unsafe fn start(&mut self, tag: usize, call: Call<'_>) -> Option<io::Result<usize>> {
        #[cfg(test)]
        if let Err(error) = self.image.admit(&call) {
            return Some(Err(error));
        }
        if let (Contents::Raw(raw), Call::Zero { unmap, .. }) = (self.image.contents(), call)
            && !self.image.lacking.has(unmap)
        {
            // Until the storage has shown that it can do this, a refusal must be known before the request counts as
            // taken: the fallback may take long, and a stop puts the request back. SAFETY: the call names no memory.
            let result = unsafe { execute(raw.as_fd(), call) };
            if result.is_ok() {
                self.image.lacking.note_success(unmap);
            }
            return Some(result);
        }
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

    /// Submits the started calls.
    pub(crate) fn submit(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.submit();
        }
    }

    /// True if calls are not submitted yet, because the kernel had no memory for them.
    pub(crate) fn has_backlog(&mut self) -> bool {
        self.ring.as_mut().is_some_and(Uring::has_backlog)
    }

    /// The tag and result of a complete call.
    pub(crate) fn next_complete(&mut self) -> Option<(usize, io::Result<usize>)> {
        self.ring.as_mut()?.next_complete()
    }

    /// Waits until a call is complete, if any is in flight.
    pub(crate) fn wait(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.wait();
        }
    }

    /// Reads at `offset` through the aligned buffer, at most its size.
    pub(crate) fn read_bounced(&mut self, segments: &IoVecs<'_, '_>, offset: u64) -> io::Result<usize> {
        let piece = self.piece(offset, segments.bytes());
        #[cfg(test)]
        self.image.dawdle(piece.len);
        let read = match self.image.contents() {
            Contents::Raw(raw) => {
                let buffer = bounce(&mut self.bounce, piece.whole);
                read(&self.image, raw.as_fd(), buffer, piece.start)?
            }
            Contents::Qcow2(image) => image.read(bounce(&mut self.bounce, piece.whole), offset)?,
        };
        let buffer = bounce(&mut self.bounce, piece.whole);
        let end = read.min(piece.skip + piece.len);
        Ok(segments.write_at(0, buffer.get(piece.skip..end).unwrap_or_default()))
    }

    /// Writes at `offset` through the aligned buffer, at most its size. Storage blocks that the data covers only partly
    /// are read first: no other write to them may be in flight then.
    pub(crate) fn write_bounced(&mut self, segments: &IoVecs<'_, '_>, offset: u64, stable: bool) -> io::Result<usize> {
        let len = segments.bytes();
        self.write_piece(offset, len, stable, |buffer| _ = segments.read_at(0, buffer))
    }

    /// Writes zeros at the beginning of `range`, at most the buffer's size. Returns the number of bytes.
    pub(crate) fn write_zeros(&mut self, range: Range) -> io::Result<usize> {
        let len = usize::try_from(range.len).unwrap_or(usize::MAX);
        match self.write_piece(range.offset, len, false, |buffer| buffer.fill(0))? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            written => Ok(written),
        }
    }

    /// Discards or zeroes a range of a block device that is not whole blocks: the device handles the whole blocks, and
    /// the rest is written if it must be zero.
    pub(crate) fn zero_parts(&mut self, range: Range, unmap: bool, must_zero: bool) -> io::Result<usize> {
        let image = Arc::clone(&self.image);
        let Contents::Raw(raw) = image.contents() else { return Err(Errno::INVAL.into()) };
        let unit = raw.range_unit.max(1);
        // The sums lie within the disk.
        let end = range.offset.saturating_add(range.len);
        let (first, last) = (range.offset.next_multiple_of(unit), end / unit * unit);
        let parts = if first > last { [(range.offset, end), (end, end)] } else { [(range.offset, first), (last, end)] };
        for (mut at, to) in parts {
            while at < to && must_zero {
                at = at.saturating_add(self.write_zeros(Range { offset: at, len: to - at })? as u64);
            }
        }
        if first < last {
            let range = Range { offset: first, len: last - first };
            let call = Call::Zero { range, unmap };
            #[cfg(test)]
            image.admit(&call)?;
            // SAFETY: the call names no memory.
            unsafe { execute(raw.as_fd(), call) }?;
        }
        Ok(0)
    }

    /// Writes the output of `fill`, at most `len` bytes at `offset`. Returns the number of bytes.
    fn write_piece(
        &mut self,
        offset: u64,
        len: usize,
        stable: bool,
        fill: impl FnOnce(&mut [u8]),
    ) -> io::Result<usize> {
        let piece = self.piece(offset, len);
        let image = Arc::clone(&self.image);
        let buffer = bounce(&mut self.bounce, piece.whole);
        let raw = match image.contents() {
            Contents::Raw(raw) => raw,
            Contents::Qcow2(image) => {
                fill(buffer);
                return image.write(buffer, offset, stable);
            }
        };
        for at in piece.partial_blocks() {
            let block = buffer.get_mut(at..at + piece.unit).unwrap_or_default();
            let len = block.len();
            if read(&image, raw.as_fd(), block, piece.start + at as u64)? < len {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        fill(buffer.get_mut(piece.skip..piece.skip + piece.len).unwrap_or_default());
        if image.keeps_raw && piece.start == 0 && raw::format(buffer).is_some() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        #[cfg(test)]
        image.dawdle(piece.len);
        let iovecs = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
        let call = Call::Write { iovecs: &iovecs, offset: piece.start, stable };
        #[cfg(test)]
        image.admit(&call)?;
        // SAFETY: the segment is `buffer`, which is borrowed mutably until the call is complete.
        let written = unsafe { execute(raw.as_fd(), call) }?;
        Ok(written.saturating_sub(piece.skip).min(piece.len))
    }

    /// The part of `len` bytes at `offset` that fits the buffer, in whole blocks of the storage.
    fn piece(&self, offset: u64, len: usize) -> Piece {
        let unit = self.image.alignment.max(1);
        // Less than a block.
        let skip = (offset % unit as u64) as usize;
        let len = len.min(BOUNCE - skip);
        Piece { start: offset - skip as u64, skip, len, whole: (skip + len).next_multiple_of(unit), unit }
    }
}

/// A part of a transfer that goes through the buffer.
struct Piece {
    /// Offset of the first block in the image.
    start: u64,
    /// Offset of the part in the blocks.
    skip: usize,
    /// Length of the part.
    len: usize,
    /// The length of the blocks.
    whole: usize,
    /// The length of a block.
    unit: usize,
}

impl Piece {
    /// Offsets, from the first block's start, of partly covered blocks.
    fn partial_blocks(&self) -> impl Iterator<Item = usize> + use<> {
        let last = self.whole.saturating_sub(self.unit);
        let (is_head, is_tail) = (self.skip > 0, self.skip + self.len < self.whole);
        let head = is_head.then_some(0);
        let tail = (is_tail && !(is_head && last == 0)).then_some(last);
        [head, tail].into_iter().flatten()
    }
}

/// `len` bytes of the buffer.
fn bounce(buffer: &mut Option<AlignedBuffer>, len: usize) -> &mut [u8] {
    buffer.get_or_insert_with(|| AlignedBuffer::new(BOUNCE)).bytes(len)
}

/// Reads into `buffer`. Returns the number of bytes.
fn read(image: &Image, file: BorrowedFd<'_>, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let iovecs = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
    let call = Call::Read(&iovecs, offset);
    #[cfg(test)]
    image.admit(&call)?;
    #[cfg(not(test))]
    let _ = image;
    // SAFETY: the segment is `buffer`, which is borrowed mutably until the call is complete.
    Ok(unsafe { execute(file, call) }?.min(buffer.len()))
}

/// Executes `call` on this thread.
///
/// # Safety
///
/// The segments of a read name memory that may be written and that no Rust reference covers except the caller's own
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
