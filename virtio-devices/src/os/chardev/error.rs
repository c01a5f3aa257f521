//! Reasons why a character device cannot be opened.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::ErrorKind;
use crate::os::unmade_file::{why_no_file, why_no_socket};

/// Reason why a character device cannot be opened: one line, to follow the option's name and a space.
#[derive(Debug, Error)]
pub enum CharError {
    /// The file cannot be written.
    #[error("file={}: {}", path.display(), why_no_file(path, error))]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The host cannot provide a pseudo-terminal.
    #[error("pty: cannot open a pseudo-terminal: {0}; is devpts mounted at /dev/pts?")]
    Pty(io::Error),
    /// Another program listens on the path.
    #[error("socket={}: another program is listening there; stop it, or give another path", .0.display())]
    SocketInUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("socket={}: exists and is not a socket; give another path, or remove it", .0.display())]
    NotASocket(PathBuf),
    /// Listening on the socket failed.
    #[error("socket={}: {}", path.display(), why_no_socket(path, error))]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
}

impl CharError {
    /// Class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { error, .. } | Self::Socket { error, .. }
                if error.kind() == io::ErrorKind::PermissionDenied =>
            {
                ErrorKind::Denied
            }
            Self::File { .. } | Self::Pty(_) | Self::SocketInUse(_) | Self::NotASocket(_) | Self::Socket { .. } => {
                ErrorKind::Host
            }
        }
    }
}
