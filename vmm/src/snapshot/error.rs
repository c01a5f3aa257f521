//! Errors of saving and restoring a VM.

use std::io;
use std::path::PathBuf;

use crate::config::ConfigError;
use crate::error_kind::ErrorKind;
use crate::landlock::LandlockError;
use crate::machine_state::error::{RestoreError, SaveError};

/// Failure to save or restore a VM, in one line.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The configuration is not valid on this host.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The program cannot be confined, or would leave its confinement.
    #[error(transparent)]
    Landlock(#[from] LandlockError),
    /// The URL does not name a folder.
    #[error("{key}={url}: not the URL of a folder; write it as file:///var/lib/vm/snapshot")]
    Url {
        /// Key of the URL.
        key: &'static str,
        /// The URL.
        url: String,
    },
    /// The destination folder cannot be used.
    #[error(
        "destination_url: {}: {error}; give a folder that exists and that this program may write to",
        path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The folder already has a snapshot.
    #[error("destination_url: {}: already has a snapshot; give an empty folder", .0.display())]
    Exists(PathBuf),
    /// A file of the snapshot cannot be written.
    #[error("{}: cannot be written: {error}; the files of this snapshot were removed", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The snapshot was cancelled.
    #[error("the VM ended before its snapshot was complete; the snapshot's files were removed")]
    Abandoned,
    /// The memory does not fit into a file.
    #[error("the guest's memory does not fit into a file")]
    TooLarge,
    /// A file of the snapshot cannot be read.
    #[error("{}: cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// A file of the snapshot is damaged or foreign.
    #[error("{}: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Fault, and remedy.
        what: String,
    },
    /// The request does not fit the snapshot or this host.
    #[error("{0}")]
    Unsuitable(String),
    /// The machine cannot be saved or restored.
    #[error("{0}")]
    Machine(String, ErrorKind),
    /// The host lacks a resource.
    #[error("cannot {action}: {error}")]
    Host {
        /// Failed action.
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
}

impl SnapshotError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(error) => (&error.problem).into(),
            Self::Landlock(error) => error.kind(),
            Self::Url { .. } | Self::Damaged { .. } | Self::Unsuitable(_) | Self::TooLarge => ErrorKind::Invalid,
            Self::Machine(_, kind) => *kind,
            Self::Exists(_) | Self::Abandoned => ErrorKind::Conflict,
            Self::Folder { error, .. } | Self::Read { error, .. } if error.kind() == io::ErrorKind::NotFound => {
                ErrorKind::NotFound
            }
            Self::Folder { error, .. } if error.kind() == io::ErrorKind::NotADirectory => ErrorKind::Invalid,
            Self::Folder { .. } | Self::Read { .. } | Self::Write { .. } | Self::Host { .. } => ErrorKind::Host,
        }
    }
}

impl From<SaveError> for SnapshotError {
    fn from(error: SaveError) -> Self {
        Self::Machine(error.to_string(), error.kind())
    }
}

impl From<RestoreError> for SnapshotError {
    fn from(error: RestoreError) -> Self {
        Self::Machine(error.to_string(), error.kind())
    }
}
