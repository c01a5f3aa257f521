//! A worker of a switch as others reach it: what it waits for, and what it is told.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::port::OpenPort;
use crate::eventfd::borrow;

/// The most events that are taken at once.
const EVENTS: usize = 64;
/// The longest wait, which fits into the milliseconds of the usual system call.
const LONGEST: Duration = Duration::from_secs(3600);
/// The token of the worker's own eventfd.
const WAKE: u64 = u64::MAX;

/// Something that a worker is told.
pub(crate) enum Message {
    /// A port's queues run: listen to its doorbell.
    Opened(Arc<OpenPort>),
    /// They do no longer.
    Closed(Arc<OpenPort>),
}

/// What a worker waits for, and what it is told. Everything is watched by its edges, so that no doorbell has to be
/// read.
pub(crate) struct Lane {
    epoll: OwnedFd,
    wake: EventFd,
    mail: Mutex<Vec<Message>>,
}

impl Lane {
    /// A worker that has no thread yet.
    ///
    /// # Errors
    ///
    /// When the host has no descriptors left.
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        watch(&epoll, borrow(&wake), WAKE)?;
        Ok(Self { epoll, wake, mail: Mutex::default() })
    }

    /// Wakes the worker.
    pub(crate) fn wake(&self) {
        // A full counter has woken it already.
        let _ = self.wake.write(1);
    }

    /// Tells the worker something, and wakes it. A port that was closed before the worker has heard that it was opened
    /// is not told at all, so that what waits here does not grow with what drivers do.
    pub(crate) fn tell(&self, message: Message) {
        let mut mail = self.mail.lock();
        let unheard = match &message {
            Message::Closed(port) => {
                mail.iter().position(|told| matches!(told, Message::Opened(other) if Arc::ptr_eq(other, port)))
            }
            Message::Opened(_) => None,
        };
        match unheard {
            Some(at) => _ = mail.remove(at),
            None => mail.push(message),
        }
        drop(mail);
        self.wake();
    }

    /// What the worker was told since the last call.
    pub(crate) fn take_mail(&self) -> Vec<Message> {
        std::mem::take(&mut *self.mail.lock())
    }

    /// Signals `token` when there may be something to read.
    ///
    /// # Errors
    ///
    /// When the host has no memory for it.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        watch(&self.epoll, fd, token)
    }

    /// No longer watches a descriptor.
    pub(crate) fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for at most `timeout`, or without end, and appends the tokens of what has signalled. Returns whether the
    /// worker was woken. A wait that fails (a signal, no memory) returns as if nothing had happened.
    pub(crate) fn wait(&self, timeout: Option<Duration>, tokens: &mut Vec<u64>) -> bool {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout.min(LONGEST)).ok());
        let mut events = [MaybeUninit::uninit(); EVENTS];
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, timeout.as_ref()) else { return false };
        let mut woken = false;
        for event in events.iter() {
            match event.data.u64() {
                WAKE => woken = true,
                token => tokens.push(token),
            }
        }
        woken
    }
}

fn watch(epoll: &OwnedFd, fd: impl AsFd, token: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, EventData::new_u64(token), EventFlags::IN | EventFlags::ET)?)
}
