//! Reasons why there is no TPM.

use std::io;
use std::path::PathBuf;

use crate::error_kind::ErrorKind;

/// Reason why there is no TPM, in one line.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// Nothing can be reached there.
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
    /// The conversation failed.
    #[error("--tpm socket={}: cannot {what}: {error}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Failed action.
        what: &'static str,
        /// Cause.
        error: io::Error,
    },
    /// It says that it cannot.
    #[error("--tpm socket={}: swtpm cannot {what} (result {result:#x}); look at its log", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Missing ability.
        what: &'static str,
        /// Result code of swtpm.
        result: u32,
    },
    /// It lacks something.
    #[error("--tpm socket={}: swtpm lacks commands that are needed (it has {abilities:#x}); update it", path.display())]
    Abilities {
        /// The socket.
        path: PathBuf,
        /// Abilities of swtpm.
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
