//! Event sources of the worker: its doorbell, new clients, and the sockets of all connections.
//!
//! Sockets are watched by their edges. What was seen of each is remembered with it, so a socket that stays readable
//! while its guest has no room costs nothing, and a full table of connections no more than an empty one.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{Timespec, epoll};

/// The most events that are taken at once.
const EVENTS: usize = 64;

/// A set of descriptors, each with a number to tell it by.
#[derive(Debug)]
pub(crate) struct Poller(OwnedFd);

/// Event of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub token: u64,
    /// There may be something to read, or the end.
    pub readable: bool,
    /// There may be room to write.
    pub writable: bool,
    /// The other end is closed in both directions.
    pub hung_up: bool,
}

impl Poller {
    /// # Errors
    ///
    /// Fails if the host has no descriptor for it.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Watches a doorbell for as long as it signals.
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

    /// Gives a socket that is watched another number.
    ///
    /// # Errors
    ///
    /// Fails with the error of the system call.
    pub(crate) fn rename(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), Self::interest())?)
    }

    /// No longer watches a descriptor that stays open. One that is closed leaves the set by itself.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.0, fd);
    }

    fn interest() -> epoll::EventFlags {
        use epoll::EventFlags as Flags;
        Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET
    }

    /// Waits for at most `timeout`, or without an end, and appends what happened to `happened`. A wait that fails (a
    /// signal, no memory) returns as if nothing had happened.
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
