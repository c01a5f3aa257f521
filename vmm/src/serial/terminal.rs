//! The user's terminal: raw mode, and its restoration.

use std::io::{self, IsTerminal};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Once;

use parking_lot::Mutex;
use rustix::termios::{InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios};

/// True if another job owns `terminal`. Reading or setting it would stop this process.
pub(super) fn is_background(terminal: BorrowedFd<'_>) -> bool {
    terminal.is_terminal()
        && rustix::termios::tcgetpgrp(terminal).is_ok_and(|foreground| foreground != rustix::process::getpgrp())
}

/// A terminal in raw mode, at most one at a time. Its settings are restored on drop and in a panic.
#[derive(Debug)]
pub(super) struct RawTerminal(());

/// The terminal and its original settings, while it is in raw mode.
static FOUND: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);

impl RawTerminal {
    /// Sets `terminal` to raw mode; `None` if it is not a terminal, or one is already in raw mode.
    ///
    /// # Errors
    ///
    /// Fails if the terminal cannot be set. Its settings are unchanged then.
    pub(super) fn enter(terminal: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        if !terminal.is_terminal() {
            return Ok(None);
        }
        let found = rustix::termios::tcgetattr(terminal)?;
        let mut raw = found.clone();
        // All keys go to the guest, including those for signals. Output processing stays on, for this program's own
        // lines.
        raw.input_modes &= !(InputModes::ICRNL | InputModes::INLCR | InputModes::IGNCR | InputModes::IXON);
        raw.local_modes &= !(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG | LocalModes::IEXTEN);
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        restore_in_a_panic();
        {
            let mut original = FOUND.lock();
            if original.is_some() {
                return Ok(None);
            }
            *original = Some((terminal.try_clone_to_owned()?, found));
        }
        let entered = Self(());
        rustix::termios::tcsetattr(terminal, OptionalActions::Now, &raw)?;
        Ok(Some(entered))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    // try_lock: a panic within this function must not deadlock.
    let Some((terminal, found)) = FOUND.try_lock().and_then(|mut found| found.take()) else { return };
    // If another job owns the terminal now, setting it would stop this process.
    let blocked = vmm_sys_util::signal::block_signal(libc::SIGTTOU).is_ok();
    // Fails if the terminal is gone.
    let _ = rustix::termios::tcsetattr(terminal, OptionalActions::Now, &found);
    if blocked {
        let _ = vmm_sys_util::signal::unblock_signal(libc::SIGTTOU);
    }
}

/// Restores the terminal in a panic, which aborts the process without drops.
fn restore_in_a_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            previous(panic);
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, FromRawFd};

    use super::*;

    /// Opens a terminal pair.
    fn terminal() -> (OwnedFd, OwnedFd) {
        let (mut ours, mut theirs) = (0, 0);
        let null = std::ptr::null_mut();
        // SAFETY: both numbers are valid to write; name, settings and size are left to the system.
        let result = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, null, null.cast(), null.cast()) };
        assert_eq!(result, 0);
        // SAFETY: the call has just opened both descriptors, and nothing else owns them.
        unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
    }

    fn modes(terminal: &OwnedFd) -> (InputModes, LocalModes) {
        let settings = rustix::termios::tcgetattr(terminal).unwrap();
        (settings.input_modes, settings.local_modes)
    }

    // One test, because there is one terminal in raw mode at a time.
    #[test]
    fn a_terminal_is_left_as_it_was_found() {
        let (_ours, terminal) = terminal();
        let found = modes(&terminal);
        assert!(found.1.contains(LocalModes::ECHO | LocalModes::ICANON));

        let raw = RawTerminal::enter(terminal.as_fd()).unwrap().unwrap();
        assert!(!modes(&terminal).1.intersects(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG));
        assert!(RawTerminal::enter(terminal.as_fd()).unwrap().is_none());
        drop(raw);
        assert_eq!(modes(&terminal), found);

        // A panic without drops, like one that aborts the process.
        std::mem::forget(RawTerminal::enter(terminal.as_fd()).unwrap());
        assert_ne!(modes(&terminal), found);
        std::panic::catch_unwind(|| panic!("on purpose")).unwrap_err();
        assert_eq!(modes(&terminal), found);
    }

    #[test]
    fn a_pipe_is_no_terminal() {
        let (reader, _writer) = io::pipe().unwrap();
        assert!(RawTerminal::enter(reader.as_fd()).unwrap().is_none());
        assert!(!is_background(reader.as_fd()));
    }
}
