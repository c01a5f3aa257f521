//! The other end of a console, be it the serial port or the virtio console: opened, and made the guest's.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use thiserror::Error;
use virtio_devices::{CharDevice, CharError, CharSpec, ConsoleSize, ConsoleWindow};

use crate::config::{ConsoleConfig, ConsoleMode};
use crate::terminal::{RawTerminal, is_background};

/// Why a console has no other end. `option` is how the user named it: `--serial` or `--console`.
#[derive(Debug, Error)]
pub enum Error {
    /// It cannot be opened.
    #[error("{option} {error}")]
    End {
        /// The console.
        option: &'static str,
        /// Why not.
        error: CharError,
    },
    /// The host has no file descriptors or threads left, or the terminal cannot be set.
    #[error("{option}: {error}")]
    Host {
        /// The console.
        option: &'static str,
        /// Why not.
        error: io::Error,
    },
}

impl Error {
    pub(crate) const fn host(option: &'static str, error: io::Error) -> Self {
        Self::Host { option, error }
    }
}

/// The other end of a console. A terminal is left as it was found when this is dropped.
#[derive(Debug)]
pub struct ConsoleEnd {
    option: &'static str,
    mode: ConsoleMode,
    device: Arc<CharDevice>,
    window: Option<Arc<ConsoleWindow>>,
    terminal: Option<RawTerminal>,
}

impl ConsoleEnd {
    /// Opens what `config` names for the console that the user calls `option`; `None` if there is no such console.
    ///
    /// # Errors
    ///
    /// When it cannot be opened.
    pub fn open(option: &'static str, config: &ConsoleConfig) -> Result<Option<Self>, Error> {
        let device = match (config.mode, &config.file, &config.socket) {
            (ConsoleMode::Off, ..) => return Ok(None),
            (ConsoleMode::Tty, ..) => streams().map_err(|error| Error::host(option, error))?,
            (mode, file, socket) => {
                let spec = match (mode, file, socket) {
                    (ConsoleMode::Pty, ..) => CharSpec::Pty,
                    (ConsoleMode::File, Some(path), _) => CharSpec::File(path.clone()),
                    (ConsoleMode::Socket, _, Some(path)) => CharSpec::Socket(path.clone()),
                    // A plan has refused a file or socket without a path.
                    _ => CharSpec::Null,
                };
                CharDevice::open(&spec).map_err(|error| Error::End { option, error })?
            }
        };
        let size = if config.mode == ConsoleMode::Tty { terminal_size() } else { None };
        let window = size.map(|size| Arc::new(ConsoleWindow::new(size)));
        Ok(Some(Self { option, mode: config.mode, device: Arc::new(device), window, terminal: None }))
    }

    /// In mode `tty`, makes the terminal a raw one until this is dropped. The caller keeps signals from ending the process before
    /// that.
    ///
    /// # Errors
    ///
    /// When the terminal cannot be set.
    pub fn take_terminal(&mut self) -> Result<(), Error> {
        if self.has_terminal() {
            let entered = RawTerminal::enter(io::stdin().as_fd());
            self.terminal = entered.map_err(|error| Error::host(self.option, error))?;
        }
        Ok(())
    }

    /// Whether standard input is this console's. A terminal that is another job's now would stop the whole process when it is
    /// read.
    fn has_terminal(&self) -> bool {
        self.mode == ConsoleMode::Tty && !is_background(io::stdin().as_fd())
    }

    /// Whether there may ever be input.
    pub fn has_input(&self) -> bool {
        matches!(self.mode, ConsoleMode::Pty | ConsoleMode::Socket) || self.has_terminal()
    }

    /// Where characters go to and come from.
    pub const fn device(&self) -> &Arc<CharDevice> {
        &self.device
    }

    /// The terminal that output goes to, if it goes to one that has a size.
    pub const fn window(&self) -> Option<&Arc<ConsoleWindow>> {
        self.window.as_ref()
    }

    /// Tells the guest the size that the terminal has now.
    pub fn follow_size(&self) {
        if let (Some(window), Some(size)) = (&self.window, terminal_size()) {
            window.resize(size);
        }
    }
}

/// The size of the terminal that is the program's output; `None` if that is none, or one that does not know its size and says 0.
fn terminal_size() -> Option<ConsoleSize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    let known = size.ws_col != 0 && size.ws_row != 0;
    known.then_some(ConsoleSize { columns: size.ws_col, rows: size.ws_row })
}

/// The program's own streams; without input if they are another job's.
fn streams() -> io::Result<CharDevice> {
    let (input, output) = (io::stdin(), io::stdout());
    let input = if is_background(input.as_fd()) { None } else { Some(input.as_fd().try_clone_to_owned()?) };
    CharDevice::over(input, output.as_fd().try_clone_to_owned()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_cannot_be_is_refused_with_the_consoles_option() {
        let config = ConsoleConfig { file: Some("/dev/null/x".into()), ..ConsoleConfig::new(ConsoleMode::File) };
        let error = ConsoleEnd::open("--console", &config).unwrap_err().to_string();
        assert!(error.starts_with("--console file=/dev/null/x: cannot be written: "), "{error}");
        let config = ConsoleConfig { socket: Some("/dev/null".into()), ..ConsoleConfig::new(ConsoleMode::Socket) };
        let error = ConsoleEnd::open("--serial", &config).unwrap_err().to_string();
        assert!(error.starts_with("--serial socket=/dev/null: there is a file that is no socket"), "{error}");
    }

    #[test]
    fn only_a_pseudo_terminal_has_a_path_and_only_a_terminal_a_size() {
        for mode in [ConsoleMode::Null, ConsoleMode::Pty] {
            let end = ConsoleEnd::open("--console", &ConsoleConfig::new(mode)).unwrap().unwrap();
            assert_eq!(end.device().pty().is_some(), mode == ConsoleMode::Pty);
            assert_eq!((end.window().is_some(), end.has_input()), (false, mode == ConsoleMode::Pty));
        }
        assert!(ConsoleEnd::open("--console", &ConsoleConfig::off()).unwrap().is_none());
    }
}
