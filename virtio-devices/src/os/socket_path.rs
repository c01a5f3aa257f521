//! The path of a Unix socket.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects to the program that listens at `path`, without waiting, even if the backlog is full.
///
/// # Errors
///
/// Fails with the error of the system call: `CONNREFUSED` for a socket that an ended program left, `AGAIN` for a busy
/// one.
pub(crate) fn connect(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Reason why a socket cannot be listened on.
#[derive(Debug)]
pub(crate) enum ListenError {
    /// Another program listens on the path.
    InUse,
    /// The path exists and is not a socket.
    NotASocket,
    /// The path is a socket that this user may not connect to, so that its use cannot be checked.
    Denied(io::Error),
    /// Error of a system call.
    Failed(io::Error),
}

/// Listens at `path`, without waiting for clients. Removes a socket that an ended program left there.
///
/// # Errors
///
/// Fails if another program is listening there, or the path cannot be used.
pub(crate) fn listen(path: &Path) -> Result<(UnixListener, OwnPath), ListenError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => return Err(ListenError::NotASocket),
        Ok(_) => match connect(path) {
            Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(ListenError::Failed)?,
            // Includes a busy socket, and one of another type.
            Ok(_) | Err(Errno::AGAIN | Errno::PROTOTYPE) => return Err(ListenError::InUse),
            Err(errno @ Errno::ACCESS) => return Err(ListenError::Denied(errno.into())),
            Err(errno) => return Err(ListenError::Failed(errno.into())),
        },
        // If it cannot be inspected, bind reports that, too.
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse,
        _ => ListenError::Failed(error),
    })?;
    let own = OwnPath::of(path.to_owned()).map_err(ListenError::Failed)?;
    listener.set_nonblocking(true).map_err(ListenError::Failed)?;
    Ok((listener, own))
}

/// The path of a socket that this process listens on. Dropping it removes the socket, unless another file has replaced
/// it.
#[derive(Debug)]
pub(crate) struct OwnPath {
    path: PathBuf,
    inode: (u64, u64),
}

impl OwnPath {
    /// The path of the socket just bound there.
    ///
    /// # Errors
    ///
    /// Fails if the socket has already been removed.
    pub(crate) fn of(path: PathBuf) -> io::Result<Self> {
        Ok(Self { inode: inode(&path)?, path })
    }
}

impl Drop for OwnPath {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If it cannot be removed, the next start does that.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}
