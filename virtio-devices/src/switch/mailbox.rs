//! A worker's mailbox: its messages, and the descriptors that it waits for.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::port::OpenPort;
use super::table::PortIndex;
use crate::os::eventfd::borrow;

/// The most events that are taken at once.
const EVENTS: usize = 64;
/// The longest wait, which fits into the milliseconds of the usual system call.
const LONGEST: Duration = Duration::from_secs(3600);
/// Shorter waits are precise to the microsecond.
const SHORT: Duration = Duration::from_secs(1);
/// The token of the worker's own eventfd.
const WAKE: u64 = u64::MAX;

/// A message to a worker.
pub(crate) enum Message {
    /// The queues of a port run: watch its doorbell.
    Opened(Arc<OpenPort>),
    /// The queues of a port have stopped.
    Closed(Arc<OpenPort>),
    /// The port's debt is due.
    Owes(PortIndex),
}

/// A worker's messages, and the descriptors that it waits for. All are watched edge-triggered, so that no doorbell has
/// to be read.
pub(crate) struct WorkerMailbox {
    epoll: OwnedFd,
    wake: EventFd,
    mail: Mutex<Vec<Message>>,
}

impl WorkerMailbox {
    /// The mailbox of a worker that has no thread yet.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptors left.
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

    /// Sends the worker a message, and wakes it. If a port closes before the worker has read that it was opened,
    /// neither message is delivered, so that the mailbox does not grow with the drivers' actions.
    pub(crate) fn tell(&self, message: Message) {
        let mut mail = self.mail.lock();
        let unheard = match &message {
            Message::Closed(port) => {
                mail.iter().position(|told| matches!(told, Message::Opened(other) if Arc::ptr_eq(other, port)))
            }
            Message::Opened(_) | Message::Owes(_) => None,
        };
        match unheard {
            Some(at) => _ = mail.remove(at),
            None => mail.push(message),
        }
        drop(mail);
        self.wake();
    }

    /// Takes the messages since the last call.
    pub(crate) fn take_mail(&self) -> Vec<Message> {
        std::mem::take(&mut *self.mail.lock())
    }

    /// Signals `token` when there may be something to read.
    ///
    /// # Errors
    ///
    /// Fails if the host has no memory for it.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        watch(&self.epoll, fd, token)
    }

    /// Stops watching a descriptor.
    pub(crate) fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for at most `timeout`, or forever, and appends the tokens of the descriptors that have signalled. Returns
    /// true if the worker was woken. A wait that fails (a signal, no memory) returns as if nothing had happened.
    pub(crate) fn wait(&self, timeout: Option<Duration>, tokens: &mut Vec<u64>) -> bool {
        let short = timeout.filter(|timeout| !timeout.is_zero() && *timeout < SHORT);
        if let Some(woken) = short.and_then(|timeout| self.wait_precisely(timeout, tokens)) {
            return woken;
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout.min(LONGEST)).ok());
        let mut events = [MaybeUninit::uninit(); EVENTS];
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, timeout.as_ref()) else { return false };
        told(events.iter().map(|event| event.data.u64()), tokens)
    }

    /// Waits with microsecond precision. `None` before Linux 5.11, which counts in milliseconds.
    fn wait_precisely(&self, timeout: Duration, tokens: &mut Vec<u64>) -> Option<bool> {
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let epoll = self.epoll.as_raw_fd();
        // SAFETY: the kernel reads the time and writes at most as many events as there is room for, while both are
        // borrowed. There is no signal mask.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                epoll,
                events.as_mut_ptr(),
                EVENTS as libc::c_int,
                &raw const timeout,
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        match usize::try_from(count) {
            Ok(count) => Some(told(events.iter().take(count).map(|event| event.u64), tokens)),
            Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) => None,
            Err(_) => Some(false),
        }
    }
}

/// Appends the tokens that have signalled to `tokens`. Returns true if the worker was woken.
fn told(signalled: impl Iterator<Item = u64>, tokens: &mut Vec<u64>) -> bool {
    let mut woken = false;
    for token in signalled {
        match token {
            WAKE => woken = true,
            token => tokens.push(token),
        }
    }
    woken
}

fn watch(epoll: &OwnedFd, fd: impl AsFd, token: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, EventData::new_u64(token), EventFlags::IN | EventFlags::ET)?)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn short_wait_is_under_a_millisecond_and_ends_on_a_signal() {
        let mailbox = WorkerMailbox::new().unwrap();
        let mut tokens = Vec::new();
        let mut least = Duration::MAX;
        for _ in 0..50 {
            let began = Instant::now();
            assert!(!mailbox.wait(Some(Duration::from_micros(25)), &mut tokens));
            least = least.min(began.elapsed());
        }
        assert!(least >= Duration::from_micros(25) && least < Duration::from_millis(1), "{least:?}");
        let doorbell = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap();
        mailbox.watch(borrow(&doorbell), 7).unwrap();
        for limit in [Duration::from_secs(10), Duration::from_secs(100)] {
            doorbell.write(1).unwrap();
            mailbox.wake();
            let began = Instant::now();
            assert!(mailbox.wait(Some(limit), &mut tokens));
            assert!(began.elapsed() < limit);
            assert_eq!(std::mem::take(&mut tokens), [7]);
        }
    }
}
