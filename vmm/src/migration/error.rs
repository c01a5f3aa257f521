//! Errors of creating the target's VM.

use crate::config::ConfigError;
use crate::error_kind::ErrorKind;
use crate::landlock::LandlockError;
use crate::machine_state::error::RestoreError;

/// Failure to create the target's VM, in one line.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// The configuration is not valid on this host.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The program cannot be confined, or would leave its confinement.
    #[error(transparent)]
    Landlock(#[from] LandlockError),
    /// The source's offer does not fit this host.
    #[error("{0}")]
    Unsuitable(String),
    /// The machine cannot be created.
    #[error("{0}")]
    Machine(String, ErrorKind),
}

impl MigrationError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(error) => (&error.problem).into(),
            Self::Landlock(error) => error.kind(),
            Self::Unsuitable(_) => ErrorKind::Invalid,
            Self::Machine(_, kind) => *kind,
        }
    }
}

impl From<RestoreError> for MigrationError {
    fn from(error: RestoreError) -> Self {
        Self::Machine(error.to_string(), error.kind())
    }
}
