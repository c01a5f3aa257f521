//! Reasons why a socket device cannot be opened.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::ErrorKind;
use crate::os::unmade_file::why_no_socket;

/// Reason why a socket device cannot be opened: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum VsockError {
    /// Another program listens on the path.
    #[error("socket={}: another program is listening there; stop it, or give another path", .0.display())]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("socket={}: exists and is not a socket; give another path, or remove it", .0.display())]
    NotASocket(PathBuf),
    /// Listening on the socket failed.
    #[error("socket={}: {}", path.display(), why_no_socket(path, error))]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
}

impl VsockError {
    /// Class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InUse(_) => ErrorKind::Busy,
            Self::NotASocket(_) => ErrorKind::Unsuitable,
            Self::Listen { error, .. } => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ErrorKind::Missing,
                io::ErrorKind::PermissionDenied => ErrorKind::Denied,
                io::ErrorKind::InvalidInput => ErrorKind::Invalid,
                _ => ErrorKind::Host,
            },
        }
    }
}
