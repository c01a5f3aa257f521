//! Reasons why the program ends, or a client's action fails.

use std::io;

use crate::api::SocketError;
use crate::config::ConfigError;
use crate::error_kind::ErrorKind;
use crate::landlock::LandlockError;
use crate::migration::error::MigrationError;
use crate::snapshot::error::SnapshotError;
use crate::telemetry::monitor::MonitorError;
use crate::vm::VmError;

/// Reason why the program ends, or a client's action fails, in one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The API socket cannot be opened.
    #[error("--api-socket {0}")]
    Api(#[from] SocketError),
    /// The socket for readers cannot be opened.
    #[error("--read-only-socket {0}")]
    ReadOnly(SocketError),
    /// The event monitor cannot be opened.
    #[error(transparent)]
    EventMonitor(#[from] MonitorError),
    /// The program cannot be confined, or would leave its confinement.
    #[error(transparent)]
    Landlock(#[from] LandlockError),
    /// The VM cannot be booted, changed or kept running.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The VM cannot be saved or restored.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The VM cannot be received.
    #[error(transparent)]
    Migration(#[from] MigrationError),
    /// The host is out of file descriptors, or a system call failed.
    #[error("cannot {action}: {error}")]
    Host {
        /// Failed action.
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
}

impl Error {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(error) => (&error.problem).into(),
            Self::Api(error) | Self::ReadOnly(error) => error.kind(),
            Self::EventMonitor(error) => error.kind(),
            Self::Landlock(error) => error.kind(),
            Self::Vm(error) => error.kind(),
            Self::Snapshot(error) => error.kind(),
            Self::Migration(error) => error.kind(),
            Self::Host { .. } => ErrorKind::Host,
        }
    }
}
