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
    /// Changes how a range is stored.
    Allocate(FallocateFlags, Range),
}
