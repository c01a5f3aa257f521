//! Host side of a console: the serial port's or the virtio console's.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use thiserror::Error;
use virtio_devices::{CharDevice, CharError, CharSpec, ConsoleSize, ConsoleWindow, PassedSockets};

use crate::config::{ConsoleConfig, ConsoleMode};
use crate::serial::terminal::{RawTerminal, is_background};

/// Failure to open the host side of a console. `option` is `--serial` or `--console`.
#[derive(Debug, Error)]
pub enum ConsoleError {
    /// The device cannot be opened.
    #[error("{option} {error}")]
    End {
        /// The console.
        option: &'static str,
        /// Cause.
        error: CharError,
    },
    /// No file descriptor or thread is left, or the terminal cannot be set.
    #[error("{option}: {error}")]
    Host {
        /// The console.
        option: &'static str,
        /// Cause.
        error: io::Error,
    },
}

impl ConsoleError {
    pub(crate) const fn host(option: &'static str, error: io::Error) -> Self {
        Self::Host { option, error }
    }
}

/// Host side of a console. Dropping it restores the terminal.
#[derive(Debug)]
pub struct ConsoleEnd {
    option: &'static str,
    mode: ConsoleMode,
    device: Arc<CharDevice>,
    window: Option<Arc<ConsoleWindow>>,
    terminal: Option<RawTerminal>,
    /// True for the console that reads the terminal.
    reads: bool,
}

impl ConsoleEnd {
    /// Opens the host side of the console `option`; `None` if it is off. In mode `tty`, it reads the terminal if
    /// `reads` is set: of several consoles on a terminal, only one can.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be opened.
    pub fn open(option: &'static str, config: &ConsoleConfig, reads: bool) -> Result<Option<Self>, ConsoleError> {
        Self::open_with(option, config, reads, &PassedSockets::default())
    }

    /// As [`Self::open`], with the listener in `passed` if that has one.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::open`] does.
    pub fn open_with(
        option: &'static str,
        config: &ConsoleConfig,
        reads: bool,
        passed: &PassedSockets,
    ) -> Result<Option<Self>, ConsoleError> {
        let device = match (config.mode, &config.file, &config.socket) {
            (ConsoleMode::Off, ..) => return Ok(None),
            (ConsoleMode::Tty, ..) => streams(reads).map_err(|error| ConsoleError::host(option, error))?,
            (mode, file, socket) => {
                let spec = match (mode, file, socket) {
                    (ConsoleMode::Pty, ..) => CharSpec::Pty,
                    (ConsoleMode::File, Some(path), _) => CharSpec::File(path.clone()),
                    (ConsoleMode::Socket, _, Some(path)) => CharSpec::Socket(path.clone()),
                    // The plan refuses a file or socket without a path.
                    _ => CharSpec::Null,
                };
                CharDevice::open_with(&spec, passed).map_err(|error| ConsoleError::End { option, error })?
            }
        };
        let size = if config.mode == ConsoleMode::Tty { terminal_size() } else { None };
        let window = size.map(|size| Arc::new(ConsoleWindow::new(size)));
        Ok(Some(Self { option, mode: config.mode, device: Arc::new(device), window, terminal: None, reads }))
    }

    /// In mode `tty`, sets the terminal to raw mode until this is dropped. The caller must already catch signals, so
    /// that the terminal is restored.
    ///
    /// # Errors
    ///
    /// Fails if the terminal cannot be set.
    pub fn take_terminal(&mut self) -> Result<(), ConsoleError> {
        if self.has_terminal() {
            let entered = RawTerminal::enter(io::stdin().as_fd());
            self.terminal = entered.map_err(|error| ConsoleError::host(self.option, error))?;
        }
        Ok(())
    }

    /// True if this console reads standard input. False if another job owns the terminal: reading it would stop this
    /// process (SIGTTIN).
    fn has_terminal(&self) -> bool {
        self.mode == ConsoleMode::Tty && self.reads && !is_background(io::stdin().as_fd())
    }

    /// True if there can be input.
    pub fn has_input(&self) -> bool {
        matches!(self.mode, ConsoleMode::Pty | ConsoleMode::Socket) || self.has_terminal()
    }

    /// The character device.
    pub const fn device(&self) -> &Arc<CharDevice> {
        &self.device
    }

    /// Size of the output terminal, if there is one with a known size.
    pub const fn window(&self) -> Option<&Arc<ConsoleWindow>> {
        self.window.as_ref()
    }

    /// Forwards the terminal's current size to the guest.
    pub fn follow_size(&self) {
        if let (Some(window), Some(size)) = (&self.window, terminal_size()) {
            window.resize(size);
        }
    }
}

/// Returns the size of the terminal on standard output; `None` without a terminal, or if the size is unknown (0).
fn terminal_size() -> Option<ConsoleSize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    let known = size.ws_col != 0 && size.ws_row != 0;
    known.then_some(ConsoleSize { columns: size.ws_col, rows: size.ws_row })
}

/// Opens standard input and output; without input unless `reads` is set, or if another job owns the terminal.
fn streams(reads: bool) -> io::Result<CharDevice> {
    let (input, output) = (io::stdin(), io::stdout());
    let reads = reads && !is_background(input.as_fd());
    let input = if reads { Some(input.as_fd().try_clone_to_owned()?) } else { None };
    CharDevice::over(input, output.as_fd().try_clone_to_owned()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_cannot_be_is_refused_with_the_consoles_option() {
        let config = ConsoleConfig { file: Some("/dev/null/x".into()), ..ConsoleConfig::new(ConsoleMode::File) };
        let error = ConsoleEnd::open("--console", &config, true).unwrap_err().to_string();
        assert!(error.starts_with("--console file=/dev/null/x: /dev/null is not a folder; "), "{error}");
        let config = ConsoleConfig { socket: Some("/dev/null".into()), ..ConsoleConfig::new(ConsoleMode::Socket) };
        let error = ConsoleEnd::open("--serial", &config, true).unwrap_err().to_string();
        assert!(error.starts_with("--serial socket=/dev/null: exists and is not a socket"), "{error}");
    }

    #[test]
    fn a_terminal_that_two_consoles_have_is_read_by_one() {
        let reads = |reads| {
            let config = ConsoleConfig::new(ConsoleMode::Tty);
            ConsoleEnd::open("--console", &config, reads).unwrap().unwrap().has_input()
        };
        assert_eq!((reads(true), reads(false)), (!is_background(io::stdin().as_fd()), false));
    }

    #[test]
    fn only_a_pseudo_terminal_has_a_path_and_only_a_terminal_a_size() {
        for mode in [ConsoleMode::Null, ConsoleMode::Pty] {
            let end = ConsoleEnd::open("--console", &ConsoleConfig::new(mode), true).unwrap().unwrap();
            assert_eq!(end.device().pty().is_some(), mode == ConsoleMode::Pty);
            assert_eq!((end.window().is_some(), end.has_input()), (false, mode == ConsoleMode::Pty));
        }
        assert!(ConsoleEnd::open("--console", &ConsoleConfig::off(), true).unwrap().is_none());
    }
}
