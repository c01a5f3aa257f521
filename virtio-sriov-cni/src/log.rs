//! The log: lines on standard error, or in a file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use crate::error::{Code, Error, Result};

/// Levels of sriov-cni.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing of this plugin.
    Panic,
    /// A command that failed.
    Error,
    /// A step that could not be done, while the command continued.
    Warning,
    /// A command that succeeded.
    #[default]
    Info,
    /// Each step.
    Debug,
}

impl Level {
    /// The level of this name.
    ///
    /// # Errors
    ///
    /// [`Code::Config`] for another one.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(match text {
            "panic" => Self::Panic,
            "error" => Self::Error,
            "warning" => Self::Warning,
            "info" => Self::Info,
            "debug" => Self::Debug,
            other => {
                let message = format!("logLevel={other}: give panic, error, warning, info or debug");
                return Err(Error::new(Code::Config, message));
            }
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

/// The log of one command.
#[derive(Debug, Clone, Default)]
pub struct Log {
    /// Smallest level that is written.
    pub level: Level,
    /// File; standard error without one.
    pub file: Option<PathBuf>,
    /// Words before each message: the command and its attachment.
    pub about: String,
}

impl Log {
    /// Writes a line, unless its level is below that of the log. A log that cannot be written never ends a command.
    pub fn write(&self, level: Level, message: &str) {
        if level > self.level {
            return;
        }
        // In one piece, because plugins that run at the same time share the file.
        let line = format!("{}\n", escaped(&format!("{}: {}: {message}", level.name(), self.about)));
        let written = match &self.file {
            Some(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                file.and_then(|mut file| file.write_all(line.as_bytes()))
            }
            None => std::io::stderr().write_all(line.as_bytes()),
        };
        if let (Err(error), Some(path)) = (written, &self.file) {
            // Standard error may be closed.
            let path = escaped(&path.display().to_string());
            let _ = writeln!(std::io::stderr(), "logFile={path}: {error}; {}", line.trim_end());
        }
    }

    /// Writes a warning.
    pub fn warn(&self, message: &str) {
        self.write(Level::Warning, message);
    }
}

/// The text in one line: a key of a configuration may have the end of a line, or colours of a terminal.
fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, one| {
        if one.is_control() {
            line.extend(one.escape_default());
        } else {
            line.push(one);
        }
        line
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_its_level_and_those_above() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("log");
        let log = Log { level: Level::Warning, file: Some(file.clone()), about: "ADD c1 net1".into() };
        for level in [Level::Error, Level::Warning, Level::Info, Level::Debug] {
            log.write(level, "x");
        }
        let text = std::fs::read_to_string(file).unwrap();
        assert_eq!(text, "error: ADD c1 net1: x\nwarning: ADD c1 net1: x\n");
    }

    #[test]
    fn a_message_is_one_line_whatever_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("log");
        let log = Log { level: Level::Info, file: Some(file.clone()), about: "ADD c1\n net1".into() };
        log.warn("k\nerror: DEL: \u{1b}[2J\u{9b}é: unknown");
        let text = std::fs::read_to_string(file).unwrap();
        assert_eq!(text, "warning: ADD c1\\n net1: k\\nerror: DEL: \\u{1b}[2J\\u{9b}é: unknown\n");
    }

    #[test]
    fn each_level_of_sriov_cni_is_accepted() {
        for level in ["panic", "error", "warning", "info", "debug"] {
            assert_eq!(Level::parse(level).unwrap().name(), level);
        }
        assert!(Level::parse("trace").unwrap_err().message.starts_with("logLevel=trace: "));
    }
}
