//! Eventfds as borrowed descriptors.

use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

/// The descriptor of `eventfd`.
pub fn borrow(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}
