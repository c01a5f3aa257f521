//! The serial port and the virtio console: `--serial` and `--console`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::grammar::{Pair, pairs, quote, unquote};

/// Where a console's characters go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConsoleMode {
    /// No such device.
    Off,
    /// A new pseudo-terminal.
    Pty,
    /// The terminal of this program.
    Tty,
    /// A file, which is truncated. A FIFO may still be without a reader.
    File,
    /// A Unix socket that this program listens on.
    Socket,
    /// Nowhere: the device exists, and its output is dropped.
    Null,
}

/// A console: `off`, `null`, `tty`, `pty`, `file=<path>` or `socket=<path>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleConfig {
    /// Where its characters go.
    pub mode: ConsoleMode,
    /// The file, in mode `File`. In mode `Pty`, the path of the pseudo-terminal once the VM is booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The socket, in mode `Socket` only.
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
