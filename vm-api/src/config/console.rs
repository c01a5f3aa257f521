//! The serial port and the virtio console: `--serial` and `--console`.

pub mod debug;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::config::error::write_line;
use crate::config::grammar::{Pair, pairs, quote, unquote};
use crate::config::keys;
use crate::config::value::{self, Value};

/// Destination of a console's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum ConsoleMode {
    /// No such device.
    Off,
    /// A new pseudo-terminal.
    Pty,
    /// The terminal of this program.
    Tty,
    /// A file, which is appended to. A FIFO need not have a reader yet.
    File,
    /// A Unix socket that this program listens on.
    Socket,
    /// None: the device exists, and its output is dropped.
    Null,
}

/// The virtio console or the serial port. Only the virtio console has the settings of a PCI device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
pub struct ConsoleConfig {
    /// Destination of the output.
    pub mode: ConsoleMode,
    /// The file, in mode `File`. In mode `Pty`, the path of the pseudo-terminal once the VM is booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The socket, in mode `Socket` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Name of the virtio console, unique in the VM; by default `__console`. The serial port has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// PCI segment of the virtio console.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number of the virtio console, 1 to 31, or 0 on another segment than 0; by default the lowest free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(limits = SLOT)]
    pub pci_device_id: Option<u8>,
    /// True if the virtio console is behind the virtual IOMMU. Adds one to the VM.
    #[serde(default)]
    pub iommu: bool,
}

impl ConsoleConfig {
    /// A console without a file or socket.
    pub const fn new(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None, id: None, pci_segment: 0, pci_device_id: None, iommu: false }
    }

    /// No such device.
    pub const fn off() -> Self {
        Self::new(ConsoleMode::Off)
    }
}

/// The text is not a console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseConsoleError(String);

impl fmt::Display for ParseConsoleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_line(f, &self.0)
    }
}

impl std::error::Error for ParseConsoleError {}

/// The error for no mode, or for more than one.
fn no_console() -> ParseConsoleError {
    ParseConsoleError("not a console; give off, null, tty, pty, file=<path> or socket=<path>".to_string())
}

impl ConsoleConfig {
    /// Sets a key that is not a mode.
    fn set(&mut self, key: &str, value: &str) -> Result<(), ParseConsoleError> {
        fn read<T: Value>(key: &str, value: &str) -> Result<Option<T>, ParseConsoleError> {
            keys::check_given("--console", key, value)
                .and_then(|()| value::read(value))
                .map_err(|what| ParseConsoleError(format!("{key}={value}: {what}")))
        }
        match key {
            "id" => self.id = read(key, value)?,
            "pci_segment" => self.pci_segment = read(key, value)?.unwrap_or_default(),
            "pci_device_id" => self.pci_device_id = read(key, value)?,
            "iommu" => self.iommu = read(key, value)?.unwrap_or_default(),
            _ => return Err(no_console()),
        }
        Ok(())
    }
}

impl FromStr for ConsoleConfig {
    type Err = ParseConsoleError;

    fn from_str(text: &str) -> Result<Self, ParseConsoleError> {
        let (mut found, mut config) = (None, Self::off());
        for Pair { key, value } in pairs(text).map_err(|_| no_console())? {
            let path = || value.as_ref().and_then(|value| unquote(value).ok()).filter(|path| !path.is_empty());
            let mode = match (key.as_str(), &value) {
                ("off", None) => ConsoleMode::Off,
                ("null", None) => ConsoleMode::Null,
                ("tty", None) => ConsoleMode::Tty,
                ("pty", None) => ConsoleMode::Pty,
                ("file", Some(_)) => {
                    config.file = Some(path().ok_or_else(no_console)?.into());
                    ConsoleMode::File
                }
                ("socket", Some(_)) => {
                    config.socket = Some(path().ok_or_else(no_console)?.into());
                    ConsoleMode::Socket
                }
                (key, Some(value)) => {
                    config.set(key, value)?;
                    continue;
                }
                (_, None) => return Err(no_console()),
            };
            if found.replace(mode).is_some() {
                return Err(no_console());
            }
        }
        Ok(Self { mode: found.ok_or_else(no_console)?, ..config })
    }
}

impl fmt::Display for ConsoleConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Option<PathBuf>| quote(&path.as_deref().unwrap_or("".as_ref()).to_string_lossy());
        match self.mode {
            ConsoleMode::Off => f.write_str("off")?,
            ConsoleMode::Null => f.write_str("null")?,
            ConsoleMode::Tty => f.write_str("tty")?,
            ConsoleMode::Pty => f.write_str("pty")?,
            ConsoleMode::File => write!(f, "file={}", path(&self.file))?,
            ConsoleMode::Socket => write!(f, "socket={}", path(&self.socket))?,
        }
        let segment = (self.pci_segment != 0).then_some(self.pci_segment);
        let keys = [
            ("id", self.id.print()),
            ("pci_segment", segment.print()),
            ("pci_device_id", self.pci_device_id.print()),
            ("iommu", self.iommu.then_some(true).print()),
        ];
        keys.into_iter().try_for_each(|(key, value)| value.map_or(Ok(()), |value| write!(f, ",{key}={value}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line_whatever_the_value_holds() {
        let report = "tty,iommu=on\u{1f}\0\nx".parse::<ConsoleConfig>().unwrap_err().to_string();
        assert_eq!(report, "iommu=on\\u{1f}\\u{0}\\nx: give on or off");
    }
}
