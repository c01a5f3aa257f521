//! A call on an image: one system call, or one entry of an io_uring.

use rustix::fs::FallocateFlags;

use super::operation::Range;

/// One system call's worth of work.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call<'c> {
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
    /// Zeroes a range, and gives its space back if `unmap`.
    Zero {
        /// What is to be zero.
        range: Range,
        /// Whether its space is not needed any more.
        unmap: bool,
    },
}

/// How a file zeroes a range: by a hole, or without giving its space back.
pub(crate) fn zeroing(unmap: bool) -> FallocateFlags {
    FallocateFlags::KEEP_SIZE | if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE }
}
