//! The path of a Unix socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
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
pub(crate) fn listen(path: &Path) -> Result<(Arc<UnixListener>, OwnPath), ListenError> {
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
    Ok((Arc::new(listener), own))
}

/// As [`listen`]; or uses the listener of `passed` for this path, which its program owns until [`SocketHandle::own`].
///
/// # Errors
///
/// Fails as [`listen`] does, or if the listener is not that of the socket at `path`.
pub(crate) fn listen_or_take(path: &Path, passed: &PassedSockets) -> Result<(Arc<UnixListener>, OwnPath), ListenError> {
    let Some(listener) = passed.find(path) else { return listen(path) };
    let is_listening = socket_acceptconn(listener).unwrap_or(false);
    let is_stream = socket_type(listener).is_ok_and(|kind| kind == SocketType::STREAM);
    let listener = UnixListener::from(listener.try_clone().map_err(ListenError::Failed)?);
    let is_here = listener.local_addr().is_ok_and(|address| address.as_pathname() == Some(path));
    if !(is_listening
        && is_stream
        && is_here
        && std::fs::symlink_metadata(path).is_ok_and(|at| at.file_type().is_socket()))
    {
        let why = "the source passes a listener that is not the socket at this path here";
        return Err(ListenError::Failed(io::Error::other(why)));
    }
    let own = OwnPath::of(path.to_owned()).map_err(ListenError::Failed)?;
    own.is_owned.store(false, Ordering::Release);
    listener.set_nonblocking(true).map_err(ListenError::Failed)?;
    Ok((Arc::new(listener), own))
}

/// Listening sockets from another program on this host, by path.
#[derive(Debug, Default)]
pub struct PassedSockets(pub Vec<(PathBuf, OwnedFd)>);

impl PassedSockets {
    fn find(&self, path: &Path) -> Option<&OwnedFd> {
        self.0.iter().find(|(other, _)| other == path).map(|(_, listener)| listener)
    }
}

/// A listening socket of this program, which it may pass to another on this host.
#[derive(Debug, Clone)]
pub struct SocketHandle {
    path: PathBuf,
    listener: Arc<UnixListener>,
    is_owned: Arc<AtomicBool>,
}

impl SocketHandle {
    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Duplicates the listener for another program.
    ///
    /// # Errors
    ///
    /// Fails if no descriptor is left.
    pub fn pass(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// Makes this program the owner of the socket, or leaves it to the other program. Only the owner accepts new
    /// clients of a console, and removes the socket at its end.
    pub fn own(&self, is_owned: bool) {
        self.is_owned.store(is_owned, Ordering::Release);
    }
}

/// The path of a socket that this process listens on. Dropping it removes the socket, unless another file has replaced
/// it, or another program owns it.
#[derive(Debug)]
pub(crate) struct OwnPath {
    path: PathBuf,
    inode: (u64, u64),
    is_owned: Arc<AtomicBool>,
}

impl OwnPath {
    /// The path of the socket just bound there.
    ///
    /// # Errors
    ///
    /// Fails if the socket has already been removed.
    pub(crate) fn of(path: PathBuf) -> io::Result<Self> {
        Ok(Self { inode: inode(&path)?, path, is_owned: Arc::new(AtomicBool::new(true)) })
    }

    /// True unless another program owns the socket.
    pub(crate) fn is_owned(&self) -> bool {
        self.is_owned.load(Ordering::Acquire)
    }

    /// The handle by which `listener`, the socket at this path, is passed.
    pub(crate) fn handle(&self, listener: &Arc<UnixListener>) -> SocketHandle {
        SocketHandle { path: self.path.clone(), listener: Arc::clone(listener), is_owned: Arc::clone(&self.is_owned) }
    }
}

impl Drop for OwnPath {
    fn drop(&mut self) {
        if self.is_owned() && inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If it cannot be removed, the next start does that.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A listener that is passed in place of the one at `path`.
    fn passing(path: &Path, listener: &Arc<UnixListener>) -> PassedSockets {
        PassedSockets(vec![(path.to_owned(), listener.try_clone().unwrap().into())])
    }

    #[test]
    fn only_the_owner_of_a_passed_socket_removes_it() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("socket");
        let (listener, here) = listen(&path).unwrap();
        // A target that has not got the guest.
        drop(listen_or_take(&path, &passing(&path, &listener)).unwrap());
        assert!(path.exists());
        let (there, owner) = listen_or_take(&path, &passing(&path, &listener)).unwrap();
        here.handle(&listener).own(false);
        owner.handle(&there).own(true);
        drop((listener, here));
        connect(&path).unwrap();
        drop((there, owner));
        assert!(!path.exists());
    }

    #[test]
    fn a_listener_of_another_path_is_refused() {
        let folder = TempDir::new().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let (listener, _one) = listen(&one).unwrap();
        let (_other_listener, _other) = listen(&other).unwrap();
        assert!(matches!(listen_or_take(&other, &passing(&other, &listener)), Err(ListenError::Failed(_))));
        let (stream, _peer) = UnixStream::pair().unwrap();
        let passed = PassedSockets(vec![(one.clone(), stream.into())]);
        assert!(matches!(listen_or_take(&one, &passed), Err(ListenError::Failed(_))));
    }
}
