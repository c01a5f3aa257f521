//! The file of an image, read and written in whole blocks, as direct I/O requires.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use crate::block::image::aligned_buffer::AlignedBuffer;

/// A multiple of the blocks of usual storage, and at most a page: a write within one block is atomic.
const BLOCK: u64 = 4096;

/// An image's file, which nothing else reads or writes.
pub(super) struct Blocks<'f>(pub BorrowedFd<'f>);

impl Blocks<'_> {
    /// `len` bytes at `offset`. Bytes beyond the file's end are zero.
    pub(super) fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut span = Span::new(offset, len)?;
        self.fill(&mut span)?;
        Ok(span.part().to_vec())
    }

    /// Writes `bytes` at `offset`.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        testing::take()?;
        let mut span = Span::new(offset, bytes.len())?;
        self.fill(&mut span)?;
        span.part().copy_from_slice(bytes);
        let (start, mut rest) = (span.start, span.all());
        let mut at = start;
        while !rest.is_empty() {
            match rustix::io::pwrite(self.0, rest, at) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => {
                    rest = rest.get_mut(len..).unwrap_or_default();
                    at = at.saturating_add(len as u64);
                }
            }
        }
        Ok(())
    }

    /// Flushes everything to the medium.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(self.0)?)
    }

    fn fill(&self, span: &mut Span) -> io::Result<()> {
        let mut at = span.start;
        let mut rest = span.all();
        while !rest.is_empty() {
            match rustix::io::pread(self.0, &mut *rest, at) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                // The buffer is zero.
                Ok(0) => break,
                Ok(len) => {
                    rest = rest.get_mut(len..).unwrap_or_default();
                    at = at.saturating_add(len as u64);
                }
            }
        }
        Ok(())
    }
}

/// A part of the file, and the blocks that it lies in.
struct Span {
    buffer: AlignedBuffer,
    /// The place of the blocks in the file.
    start: u64,
    /// The length of the blocks.
    whole: usize,
    /// The offset of the part in the blocks.
    skip: usize,
    len: usize,
}

impl Span {
    fn new(offset: u64, len: usize) -> io::Result<Self> {
        let start = offset - offset % BLOCK;
        // Less than a block.
        let skip = (offset - start) as usize;
        let whole = skip.checked_add(len).and_then(|end| end.checked_next_multiple_of(BLOCK as usize));
        let whole = whole.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { buffer: AlignedBuffer::new(whole), start, whole, skip, len })
    }

    fn all(&mut self) -> &mut [u8] {
        self.buffer.bytes(self.whole)
    }

    fn part(&mut self) -> &mut [u8] {
        let (start, end) = (self.skip, self.skip + self.len);
        self.all().get_mut(start..end).unwrap_or_default()
    }
}

/// Injects write failures, as if the program had ended before them.
#[cfg(test)]
pub(super) mod testing {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        /// The number of further writes of this thread that succeed; `None`: all.
        pub(in crate::block::image::qcow2) static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
        static OUT: Cell<bool> = const { Cell::new(false) };
    }

    /// True if a write has failed since writes were limited.
    pub(in crate::block::image::qcow2) fn is_out() -> bool {
        OUT.take()
    }

    pub(super) fn take() -> io::Result<()> {
        match LEFT.get() {
            None => Ok(()),
            Some(0) => {
                OUT.set(true);
                Err(io::ErrorKind::Other.into())
            }
            Some(left) => {
                LEFT.set(Some(left - 1));
                Ok(())
            }
        }
    }
}
