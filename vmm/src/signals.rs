//! The signals that end the program, as something to wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// SIGINT, SIGTERM, SIGHUP and SIGQUIT, as something to wait for. Dropping it lets them do what they did before.
pub struct Signals {
    receiver: UnixStream,
    caught: Vec<SigId>,
}

impl Signals {
    /// Catches them, but for those that this program was started with ignored.
    ///
    /// # Errors
    ///
    /// When there is no file descriptor left.
    pub fn catch() -> io::Result<Self> {
        let (receiver, sender) = UnixStream::pair()?;
        let mut signals = Self { receiver, caught: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            // A program that is started with a signal ignored, as by nohup, leaves it so.
            if !is_ignored(signal) {
                signals.caught.push(signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?);
            }
        }
        Ok(signals)
    }

    /// Readable once one of them came.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: all-zeros is a valid value of this plain struct, which the call then fills in; nothing else is changed.
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
