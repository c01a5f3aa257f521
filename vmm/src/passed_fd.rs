//! Descriptors that this process was given, by their numbers.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// A descriptor of our own for the open file of `fd`, which stays open. `None` if there is none.
pub(crate) fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    // The configuration allows nothing below 3.
    if fd < 0 {
        return None;
    }
    // SAFETY: the number is only used for this one call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    passed.try_clone_to_owned().ok()
}
