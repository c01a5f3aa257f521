//! The end of a wait, from another thread.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::os::eventfd::borrow;

/// Ends the waits for backends that are being connected. Clones end the same waits.
#[derive(Debug, Clone)]
pub struct Cancel(Arc<EventFd>);

impl Cancel {
    /// A handle that has not been cancelled.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?)))
    }

    /// Ends all waits, now and from now on.
    pub fn cancel(&self) {
        // A full counter has ended them already.
        let _ = self.0.write(1);
    }

    /// True if all waits have ended.
    pub fn is_cancelled(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Readable once the waits have ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        borrow(&self.0)
    }
}
