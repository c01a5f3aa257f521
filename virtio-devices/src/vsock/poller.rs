//! Event sources of the worker: its doorbell, new clients, and the sockets of all connections.
//!
//! Sockets are edge-triggered, and the last known state of each is kept with it. So a socket that stays readable while
//! its guest has no room costs nothing, and a full table of connections costs no more than an empty one.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{Timespec, epoll};

/// The most events read at once.
const EVENTS: usize = 64;

/// A set of descriptors, each with a token.
#[derive(Debug)]
pub(crate) struct Poller(OwnedFd);

/// Event of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub token: u64,
    /// True if there may be data to read, or the end.
    pub readable: bool,
    /// True if there may be room to write.
    pub writable: bool,
    /// True if the peer has closed both directions.
    pub hung_up: bool,
}

impl Poller {
    /// # Errors
    ///
    /// Fails if the host has no descriptor for the poll set.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Watches a doorbell, level-triggered.
    ///
    /// # Errors
    ///
    /// Fails with the error of the system call.
    pub(crate) fn add_doorbell(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?)
    }

    /// Watches a listening socket for new clients.
    ///
    /// # Errors
    ///
    /// Fails with the error of the system call.
    pub(crate) fn add_listener(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        let interest = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), interest)?)
    }

    /// Watches a connection's socket.
    ///
    /// # Errors
    ///
    /// Fails with the error of the system call.
    pub(crate) fn add(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), Self::interest())?)
    }

    /// Changes the token of a watched socket.
    ///
    /// # Errors
    ///
    /// Fails with the error of the system call.
    pub(crate) fn rename(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), Self::interest())?)
    }

    /// Removes a descriptor that stays open. Closed ones are removed by the kernel.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.0, fd);
    }

    fn interest() -> epoll::EventFlags {
        use epoll::EventFlags as Flags;
        Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET
    }

    /// Waits for at most `timeout`, or indefinitely, and appends the events to `happened`. A failed wait (a signal, no
    /// memory) appends none.
    pub(crate) fn wait(&self, timeout: Option<&Timespec>, happened: &mut Vec<Event>) {
        use epoll::EventFlags as Flags;
        let mut events = [MaybeUninit::uninit(); EVENTS];
        let Ok((events, _)) = epoll::wait(&self.0, &mut events, timeout) else { return };
        happened.extend(events.iter().map(|event| {
            let flags = event.flags;
            let hung_up = flags.intersects(Flags::HUP | Flags::ERR);
            Event {
                token: event.data.u64(),
                readable: hung_up || flags.intersects(Flags::IN | Flags::RDHUP),
                writable: flags.contains(Flags::OUT),
                hung_up,
            }
        }));
    }
}
