//! Descriptors that were passed to this program by number.

use std::os::fd::{BorrowedFd, OwnedFd};

/// Duplicates a descriptor that was passed to this program by number.
///
/// # Errors
///
/// Fails if the number is that of a standard stream, or is not open.
pub(crate) fn duplicate(fd: i32) -> Result<OwnedFd, String> {
    if fd < 3 {
        return Err(format!("fd={fd}: a standard stream, not a tap or a device; open that as 3 or above"));
    }
    // SAFETY: the number is only used for this one call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    let missing = || format!("fd={fd}: not an open file descriptor; open it before starting ch-remote");
    passed.try_clone_to_owned().map_err(|_| missing())
}
