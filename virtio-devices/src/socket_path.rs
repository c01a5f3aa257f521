//! The path of a Unix socket.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects to the program that listens at `path`, without waiting, even if the backlog is full.
///
/// # Errors
///
/// What the system says: `CONNREFUSED` for a socket that a program left behind, `AGAIN` for one that is busy.
pub(crate) fn connect(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// The path of a socket that this process listens on. Dropping it removes the socket, unless another file has replaced
/// it.
#[derive(Debug)]
pub(crate) struct OwnPath {
    path: PathBuf,
    inode: (u64, u64),
}

impl OwnPath {
    /// The path of the socket that has just been bound there.
    ///
    /// # Errors
    ///
    /// When it is gone already.
    pub(crate) fn of(path: PathBuf) -> io::Result<Self> {
        Ok(Self { inode: inode(&path)?, path })
    }
}

impl Drop for OwnPath {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If it cannot be removed, the next start does.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}
