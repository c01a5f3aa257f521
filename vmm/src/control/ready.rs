//! Readiness: the events that wake the control thread.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_devices::borrow_eventfd as borrow;
use vmm_sys_util::eventfd::EventFd;

use crate::control::signals::Signals;
use crate::error::Error;

/// Events that woke the control thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    pub signal: bool,
    pub hangup: bool,
    pub window: bool,
    pub guest: bool,
    /// A request of the guest waits.
    pub channel: bool,
    pub client: bool,
    pub opened: bool,
    /// The cancelled snapshot has ended.
    pub ended: bool,
    /// A VFIO device has signalled an error or a removal request.
    pub host: bool,
    pub migration: bool,
}

/// Sources of events. Absent ones are never ready.
pub(super) struct Sources<'s> {
    pub signals: &'s Signals,
    pub client: &'s EventFd,
    pub guest: Option<&'s EventFd>,
    pub channel: Option<&'s EventFd>,
    pub opened: Option<&'s EventFd>,
    pub ended: Option<&'s EventFd>,
    pub migration: Option<&'s EventFd>,
    pub host: Option<BorrowedFd<'s>>,
}

impl Sources<'_> {
    /// Waits for an event, or for `timeout`.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot wait.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Result<Ready, Error> {
        let client = borrow(self.client);
        // Missing descriptors are replaced by one that is polled anyway.
        let [guest, opened, migration, ended, channel] =
            [self.guest, self.opened, self.migration, self.ended, self.channel]
                .map(|event| event.map_or(client, borrow));
        let host = self.host.unwrap_or(client);
        let [end, window, hangup] = [self.signals.fd(), self.signals.window(), self.signals.hangup()];
        let mut fds = [end, window, client, guest, opened, host, migration, ended, hangup, channel]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::Host { action: "wait for the guest", error: error.into() }),
        }
        let ready = |n: usize| fds.get(n).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Ready {
            signal: ready(0),
            window: ready(1),
            client: ready(2),
            guest: self.guest.is_some() && ready(3),
            opened: self.opened.is_some() && ready(4),
            host: self.host.is_some() && ready(5),
            migration: self.migration.is_some() && ready(6),
            ended: self.ended.is_some() && ready(7),
            hangup: ready(8),
            channel: self.channel.is_some() && ready(9),
        })
    }
}
