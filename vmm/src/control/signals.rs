//! Signals as file descriptors: those that end the program, SIGHUP, and SIGWINCH. SIGXFSZ is ignored.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};

/// Ignores SIGXFSZ. A write past the file size limit (RLIMIT_FSIZE, `LimitFSIZE=`) then fails with EFBIG, which is
/// reported as any other error, whereas the signal would kill the program and its guest.
pub(super) fn ignore_file_size_signal() {
    // SAFETY: no handler is installed that could run.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// SIGINT, SIGTERM and SIGQUIT, and separately SIGHUP and SIGWINCH. Dropping this restores their previous actions.
pub(super) struct Signals {
    end: UnixStream,
    hangup: UnixStream,
    window: UnixStream,
    /// The other ends of all, without which a signal that is ignored would seem to be pending.
    _senders: [UnixStream; 3],
    caught: Vec<SigId>,
}

impl Signals {
    /// Catches the signals, except those ignored at the program's start.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is left.
    pub(super) fn catch() -> io::Result<Self> {
        // nohup, for example, starts programs with a signal ignored; it stays ignored.
        Self::catch_unless(is_ignored)
    }

    fn catch_unless(is_ignored: fn(i32) -> bool) -> io::Result<Self> {
        let (end, end_sender) = UnixStream::pair()?;
        let (hangup, hangup_sender) = UnixStream::pair()?;
        let (window, window_sender) = UnixStream::pair()?;
        hangup.set_nonblocking(true)?;
        window.set_nonblocking(true)?;
        let mut caught = Vec::new();
        let ends = [SIGINT, SIGTERM, SIGQUIT].map(|signal| (signal, &end_sender));
        let others = [(SIGHUP, &hangup_sender), (SIGWINCH, &window_sender)];
        for (signal, sender) in ends.into_iter().chain(others) {
            if !is_ignored(signal) {
                caught.push(signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?);
            }
        }
        Ok(Self { end, hangup, window, _senders: [end_sender, hangup_sender, window_sender], caught })
    }

    /// Returns a descriptor that is readable after a signal that ends the program.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// Returns a descriptor that is readable while a SIGWINCH is pending.
    pub(super) fn window(&self) -> BorrowedFd<'_> {
        self.window.as_fd()
    }

    /// Consumes all pending SIGWINCHs.
    pub(super) fn take_window(&self) {
        drain(&self.window);
    }

    /// Returns a descriptor that is readable while a SIGHUP is pending.
    pub(super) fn hangup(&self) -> BorrowedFd<'_> {
        self.hangup.as_fd()
    }

    /// Consumes all pending SIGHUPs. Returns true if they came because the user's terminal was closed.
    pub(super) fn take_hangup(&self) -> bool {
        drain(&self.hangup);
        rustix::termios::tcgetattr(rustix::stdio::stdin()).is_err_and(|error| error == Errno::IO)
    }
}

fn drain(mut signals: &UnixStream) {
    let mut bytes = [0; 64];
    while matches!(signals.read(&mut bytes), Ok(1..)) {}
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: all-zeros is a valid value of this plain struct, which the call fills in; nothing else is changed.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action
    };
    action.sa_sigaction == libc::SIG_IGN
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.caught.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(fd: BorrowedFd<'_>) -> bool {
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1
    }

    /// Signals that are caught even if the tests were started with one ignored.
    fn caught() -> Signals {
        Signals::catch_unless(|_| false).unwrap()
    }

    #[test]
    fn terminal_resize_ends_nothing_and_is_reported_until_taken() {
        let signals = caught();
        for _ in 0..3 {
            assert!(!is_readable(signals.window()));
            for _ in 0..100 {
                signal_hook::low_level::raise(SIGWINCH).unwrap();
            }
            assert!(is_readable(signals.window()));
            signals.take_window();
        }
        assert!(!is_readable(signals.fd()));
    }

    #[test]
    fn hangup_ends_nothing_and_is_reported_until_taken() {
        let signals = caught();
        signal_hook::low_level::raise(SIGHUP).unwrap();
        assert!(is_readable(signals.hangup()));
        signals.take_hangup();
        assert!(!is_readable(signals.hangup()) && !is_readable(signals.fd()));
    }

    #[test]
    fn an_ignored_signal_does_not_seem_to_be_pending() {
        let signals = Signals::catch_unless(|_| true).unwrap();
        let fds = [signals.hangup(), signals.window(), signals.fd()];
        assert_eq!(fds.map(is_readable), [false; 3]);
    }
}
