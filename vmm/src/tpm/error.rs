//! Errors of the TPM.

use std::io;
use std::path::PathBuf;

use crate::error_kind::ErrorKind;

/// Failure of the TPM, in one line.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// The socket cannot be connected to.
    #[error(
        "--tpm socket={}: cannot be connected to: {error}; start swtpm first: swtpm socket --tpm2 --tpmstate dir=DIR \
         --ctrl type=unixio,path={}", path.display(), path.display()
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// Communication with swtpm has failed.
    #[error("--tpm socket={}: cannot {what}: {error}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Failed action.
        what: &'static str,
        /// Cause.
        error: io::Error,
    },
    /// swtpm has refused a command.
    #[error("--tpm socket={}: swtpm cannot {what} (result {result:#x}); look at its log", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Failed action.
        what: &'static str,
        /// Result code of swtpm.
        result: u32,
    },
    /// swtpm lacks required commands.
    #[error("--tpm socket={}: swtpm lacks commands that are needed (it has {abilities:#x}); update it", path.display())]
    Abilities {
        /// The socket.
        path: PathBuf,
        /// Capabilities of swtpm.
        abilities: u64,
    },
}

impl TpmError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { .. } => ErrorKind::Invalid,
            Self::Io { .. } | Self::Refused { .. } | Self::Abilities { .. } => ErrorKind::Host,
        }
    }
}
