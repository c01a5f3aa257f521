//! Where the guest's console goes: `--serial` and `--console`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config_error::{ConfigError, Problem};
use crate::config_options::{Pair, pairs, quote, unquote};

/// Where a console's characters go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConsoleMode {
    /// There is no such device.
    Off,
    /// A pseudo-terminal of its own.
    Pty,
    /// The terminal of this program.
    Tty,
    /// A file, written from its beginning. A FIFO need not be read yet.
    File,
    /// A Unix socket that this program listens on.
    Socket,
    /// Nowhere: the device is there, and its output is dropped.
    Null,
}

/// A console: `off`, `null`, `tty`, `pty`, `file=<path>` or `socket=<path>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleConfig {
    /// Where its characters go.
    pub mode: ConsoleMode,
    /// The file, in mode `File`. In mode `Pty`, the path of the pseudo-terminal, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The socket, in mode `Socket` and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
}

impl ConsoleConfig {
    /// A console without a file or socket.
    pub const fn new(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None }
    }

    /// No such device.
    pub const fn off() -> Self {
        Self::new(ConsoleMode::Off)
    }

    /// Checks it as the serial port.
    pub(crate) fn check_serial(&self) -> Result<(), ConfigError> {
        self.check_path("--serial")
    }

    /// Checks it as the virtio console of a VM with this serial port.
    pub(crate) fn check_console(&self, serial: &Self) -> Result<(), ConfigError> {
        self.check_path("--console")?;
        if self.mode != serial.mode {
            return Ok(());
        }
        let (shared, way_out) = match self.mode {
            ConsoleMode::Tty => ("terminal", "mode"),
            // Each would overwrite the other. Not so with a device, as /dev/null.
            ConsoleMode::File if self.file == serial.file && !self.is_device() => ("file", "path"),
            ConsoleMode::Socket if self.socket == serial.socket => ("socket", "path"),
            _ => return Ok(()),
        };
        let what = format!("the {shared} is the serial port's (--serial {serial}); give one of them another {way_out}");
        Err(ConfigError::new(format!("--console {self}"), Problem::Conflict(what)))
    }

    fn is_device(&self) -> bool {
        self.file.as_ref().is_some_and(|path| path.starts_with("/dev"))
    }

    /// A path is there if and only if the mode has one.
    fn check_path(&self, option: &str) -> Result<(), ConfigError> {
        let wanted = (self.mode == ConsoleMode::File, self.mode == ConsoleMode::Socket);
        if self.mode == ConsoleMode::Pty && self.socket.is_none() {
            // As the VM was told to have been: it gets another one.
            return Ok(());
        }
        let fail = |what: &str| Err(ConfigError::new(format!("{option} {self}"), Problem::Conflict(what.to_string())));
        match (self.file.is_some(), self.socket.is_some()) {
            given if given == wanted => Ok(()),
            (false, _) if wanted.0 => fail("mode File needs a file; give one"),
            (_, false) if wanted.1 => fail("mode Socket needs a socket; give one"),
            (true, _) if !wanted.0 => fail("only mode File has a file; leave file out"),
            _ => fail("only mode Socket has a socket; leave socket out"),
        }
    }
}

/// The text is not a console.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a console; give off, null, tty, pty, file=<path> or socket=<path>")]
pub struct ParseConsoleError;

impl FromStr for ConsoleConfig {
    type Err = ParseConsoleError;

    fn from_str(text: &str) -> Result<Self, ParseConsoleError> {
        let [Pair { key, value }] = &pairs(text).map_err(|_| ParseConsoleError)?[..] else {
            return Err(ParseConsoleError);
        };
        let path = value.as_ref().map(unquote).transpose().map_err(|_| ParseConsoleError)?.map(PathBuf::from);
        let mode = match (key.as_str(), &path) {
            ("off", None) => ConsoleMode::Off,
            ("null", None) => ConsoleMode::Null,
            ("tty", None) => ConsoleMode::Tty,
            ("pty", None) => ConsoleMode::Pty,
            ("file", Some(path)) if !path.as_os_str().is_empty() => {
                return Ok(Self { file: Some(path.clone()), ..Self::new(ConsoleMode::File) });
            }
            ("socket", Some(path)) if !path.as_os_str().is_empty() => {
                return Ok(Self { socket: Some(path.clone()), ..Self::new(ConsoleMode::Socket) });
            }
            _ => return Err(ParseConsoleError),
        };
        Ok(Self::new(mode))
    }
}

impl fmt::Display for ConsoleConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Option<PathBuf>| quote(&path.as_deref().unwrap_or("".as_ref()).to_string_lossy());
        match self.mode {
            ConsoleMode::Off => f.write_str("off"),
            ConsoleMode::Null => f.write_str("null"),
            ConsoleMode::Tty => f.write_str("tty"),
            ConsoleMode::Pty => f.write_str("pty"),
            ConsoleMode::File => write!(f, "file={}", path(&self.file)),
            ConsoleMode::Socket => write!(f, "socket={}", path(&self.socket)),
        }
    }
}
