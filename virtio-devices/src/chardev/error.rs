//! Why a console has no other end.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a console has no other end: one line, to follow the option's name and a space.
#[derive(Debug, Error)]
pub enum CharError {
    /// The file cannot be written.
    #[error("file={}: cannot be written: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The host gives no pseudo-terminal.
    #[error("pty: the host gives no pseudo-terminal: {0}; is devpts mounted at /dev/pts?")]
    Pty(io::Error),
    /// Another program listens there.
    #[error("socket={}: another program listens there; give another path, or end that", .0.display())]
    SocketInUse(PathBuf),
    /// There is a file of another kind.
    #[error("socket={}: there is a file that is no socket; give another path, or remove that", .0.display())]
    NotASocket(PathBuf),
    /// The socket cannot be listened on.
    #[error("socket={}: cannot be listened on: {error}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
}
