//! File descriptors that this process was given, by number.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// Duplicates the descriptor `fd`, which stays open. `None` if it is not open.
pub fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    // The configuration allows nothing below 3.
    if fd < 0 {
        return None;
    }
    // SAFETY: the number is used only for this call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    passed.try_clone_to_owned().ok()
}
