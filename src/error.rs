//! Failures of the command.

use std::io;
use std::path::PathBuf;

use vmm::ErrorKind;

/// Failure of the command, in one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The options are valid, but there is nothing to do.
    #[error("{0}")]
    Usage(&'static str),
    /// The file of `--config` cannot be read.
    #[error("--config {}: cannot be read: {error}", path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The log file cannot be written.
    #[error("--log-file {}: {}", path.display(), vmm::why_no_file(path, error))]
    LogFile {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The logger cannot be started.
    #[error("cannot start logging: {0}")]
    Log(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    /// The VM cannot be configured or run.
    #[error(transparent)]
    Vmm(#[from] vmm::Error),
}

impl CommandError {
    /// The kind of this error, which determines the exit code.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Usage(_) => ErrorKind::Syntax,
            Self::ConfigFile { .. } | Self::LogFile { .. } | Self::Log(_) | Self::Output(_) => ErrorKind::Host,
            Self::Vmm(error) => error.kind(),
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm::MonitorError;
    use vmm::api::SocketError;
    use vmm::config::{ConfigError, Problem};

    use super::*;

    fn config(problem: Problem) -> vmm::Error {
        ConfigError { subject: String::new(), problem }.into()
    }

    #[test]
    fn only_text_that_cannot_be_read_is_an_error_of_usage() {
        let text = || "x".to_string();
        let io = || io::Error::from(io::ErrorKind::Other);
        let usage = [
            CommandError::Vmm(config(Problem::Syntax(text()))),
            CommandError::Vmm(SocketError::Syntax(text()).into()),
            CommandError::Vmm(MonitorError::Syntax(text()).into()),
            CommandError::Usage("x"),
        ];
        assert!(usage.iter().all(|error| error.kind().exit_code() == 2));
        let failures = [
            CommandError::Vmm(config(Problem::Value(text()))),
            CommandError::Vmm(config(Problem::Missing(text()))),
            CommandError::Vmm(config(Problem::Conflict(text()))),
            CommandError::Vmm(config(Problem::InUse { what: text(), user: text(), remedy: text() })),
            CommandError::Vmm(config(Problem::Limit(text()))),
            CommandError::Vmm(config(Problem::NotYet { what: text(), remedy: text() })),
            CommandError::Vmm(config(Problem::Host(text()))),
            CommandError::Vmm(SocketError::Fd(3).into()),
            CommandError::Vmm(MonitorError::Fd(3).into()),
            CommandError::Vmm(vmm::VmError::VcpuLeaving { vcpu: 1 }.into()),
            CommandError::Vmm(vmm::Error::Host { action: "x", error: io() }),
            CommandError::ConfigFile { path: "x".into(), error: io() },
            CommandError::LogFile { path: "x".into(), error: io() },
            CommandError::Output(io()),
        ];
        assert!(failures.iter().all(|error| error.kind().exit_code() == 1));
    }
}
