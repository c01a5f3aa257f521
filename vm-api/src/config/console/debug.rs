//! The debug console: `--debug-console`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::config::console::ConsoleMode;
use crate::config::error::{ConfigError, Problem};
use crate::config::grammar::{Pair, pairs, quote, unquote};

/// Default port of the debug console.
const PORT: u16 = 0xe9;

/// The debug console, an I/O port for log output of firmware and loaders. Mode Socket is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct DebugConsoleConfig {
    /// Destination of the output; mode `Socket` is refused.
    pub mode: ConsoleMode,
    /// The file, in mode `File`. In mode `Pty`, the path of the pseudo-terminal once the VM is booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The I/O port. It must not be that of another device.
    #[serde(default = "port")]
    #[schema(maximum = 65_534)]
    pub iobase: u16,
}

const fn port() -> u16 {
    PORT
}

impl Default for DebugConsoleConfig {
    fn default() -> Self {
        Self { mode: ConsoleMode::Off, file: None, iobase: PORT }
    }
}

/// A port in decimal digits, or as `0xe9`.
fn read_port(text: &str) -> Option<u16> {
    match text.strip_prefix("0x") {
        // `from_str_radix` would take a sign.
        Some(digits) if !digits.starts_with('+') => u16::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        None => None,
    }
}

impl FromStr for DebugConsoleConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |what: &str| ConfigError::new(format!("--debug-console {text}"), Problem::Syntax(what.to_string()));
        let none = || wrong("not a debug console; give off, null, tty, pty or file=<path>, and iobase=<port>");
        let (mut found, mut config) = (None, Self::default());
        for Pair { key, value } in pairs(text).map_err(|what| wrong(&what))? {
            let value = value.map(unquote).transpose().map_err(|what| wrong(&what))?;
            let mode = match (key.as_str(), value) {
                ("off", None) => ConsoleMode::Off,
                ("null", None) => ConsoleMode::Null,
                ("tty", None) => ConsoleMode::Tty,
                ("pty", None) => ConsoleMode::Pty,
                ("file", Some(path)) if !path.is_empty() => {
                    config.file = Some(path.into());
                    ConsoleMode::File
                }
                ("iobase", Some(port)) if port.is_empty() => continue,
                ("iobase", Some(port)) => {
                    let port = read_port(&port).ok_or_else(|| wrong("iobase is a port from 0 to 0xffff"))?;
                    config.iobase = port;
                    continue;
                }
                _ => return Err(none()),
            };
            if found.replace(mode).is_some() {
                return Err(none());
            }
        }
        Ok(Self { mode: found.ok_or_else(none)?, ..config })
    }
}

impl fmt::Display for DebugConsoleConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.mode, &self.file) {
            (ConsoleMode::File, Some(path)) => write!(f, "file={}", quote(&path.to_string_lossy())),
            (mode, _) => f.write_str(&format!("{mode:?}").to_ascii_lowercase()),
        }?;
        write!(f, ",iobase={:#x}", self.iobase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> DebugConsoleConfig {
        text.parse().unwrap()
    }

    #[test]
    fn the_command_line_and_json_say_the_same() {
        for (text, json) in [
            ("off", serde_json::json!({"mode": "Off", "iobase": 0xe9})),
            ("null,iobase=", serde_json::json!({"mode": "Null", "iobase": 0xe9})),
            ("iobase=0x402,pty", serde_json::json!({"mode": "Pty", "iobase": 0x402})),
            ("tty,iobase=233", serde_json::json!({"mode": "Tty", "iobase": 233})),
            ("file=\"/a,b\"", serde_json::json!({"mode": "File", "file": "/a,b", "iobase": 0xe9})),
        ] {
            assert_eq!(serde_json::to_value(read(text)).unwrap(), json, "{text}");
            assert_eq!(serde_json::from_value::<DebugConsoleConfig>(json).unwrap(), read(text), "{text}");
            assert_eq!(read(&read(text).to_string()), read(text), "{text}");
        }
        let short = serde_json::from_str::<DebugConsoleConfig>(r#"{"mode": "Off"}"#).unwrap();
        assert_eq!(short, DebugConsoleConfig::default());
    }

    #[test]
    fn a_debug_console_has_one_mode_and_a_port() {
        for text in ["", "on", "iobase=1", "tty,pty", "file", "file=", "socket=/s", "off,id=d", "tty=1", "file=\"a"] {
            assert!(text.parse::<DebugConsoleConfig>().is_err(), "{text}");
        }
        for port in ["0x10000", "65536", "-1", "0x", "0x+1", "e9", "x"] {
            let said = format!("off,iobase={port}").parse::<DebugConsoleConfig>().unwrap_err().to_string();
            assert_eq!(said, format!("--debug-console off,iobase={port}: iobase is a port from 0 to 0xffff"));
        }
    }
}
