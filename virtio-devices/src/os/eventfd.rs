//! Eventfds as borrowed descriptors.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

/// The descriptor of `eventfd`.
pub fn borrow(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}

/// True if a signal waits in `eventfd`. The signal is not consumed: restoring it would wake other waiters.
pub(crate) fn is_signalled(eventfd: &EventFd) -> bool {
    let fd = borrow(eventfd);
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}
