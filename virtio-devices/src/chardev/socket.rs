//! A Unix socket that is listened on, for one client at a time. Others wait until that one leaves.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::error::CharError;

/// Nobody asks which of the two it is.
const NO_DATA: epoll::EventData = epoll::EventData::new_u64(0);

/// A socket that is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Which file it is: somebody may put another one in its place.
    inode: (u64, u64),
    client: Mutex<Option<Arc<OwnedFd>>>,
    /// The last client could not be let in, for want of a descriptor.
    pub short: AtomicBool,
    /// Readable when there is input, or a client while there is none: whichever thread has accepted it.
    events: OwnedFd,
}

impl Socket {
    /// Listens at `path`. A socket that a program left behind there is removed.
    ///
    /// # Errors
    ///
    /// When another program listens there, or nobody can.
    pub fn listen(path: &Path) -> Result<Self, CharError> {
        let fail = |error: io::Error| CharError::Socket { path: path.to_owned(), error };
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(CharError::NotASocket(path.to_owned())),
            Ok(_) => match probe(path) {
                Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(fail)?,
                // Also one that is too busy, or a socket of another type.
                Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => return Err(CharError::SocketInUse(path.to_owned())),
                Err(errno) => return Err(fail(errno.into())),
            },
            // That it cannot be looked at shows when it is bound, too.
            Err(_) => {}
        }
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| fail(errno.into()))?;
        let listener = UnixListener::bind(path).map_err(fail)?;
        let inode = inode(path).map_err(fail)?;
        let (path, client) = (path.to_owned(), Mutex::new(None));
        let socket = Self { listener, path, inode, client, short: AtomicBool::new(false), events };
        socket.listener.set_nonblocking(true).map_err(fail)?;
        epoll::add(&socket.events, &socket.listener, NO_DATA, epoll::EventFlags::IN)
            .map_err(|errno| fail(errno.into()))?;
        Ok(socket)
    }

    /// The client; one that waits if there is none.
    pub fn client(&self) -> Option<Arc<OwnedFd>> {
        let mut client = self.client.lock();
        if client.is_none() {
            match self.accept() {
                Ok(stream) => *client = Some(Arc::new(stream)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => self.short.store(true, Ordering::Relaxed),
            }
        }
        client.clone()
    }

    fn accept(&self) -> io::Result<OwnedFd> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        epoll::add(&self.events, &stream, NO_DATA, epoll::EventFlags::IN)?;
        // Those who wait must not wake anybody until this one leaves.
        epoll::modify(&self.events, &self.listener, NO_DATA, epoll::EventFlags::empty())?;
        Ok(stream.into())
    }

    /// The client has left.
    pub fn forget(&self, gone: &Arc<OwnedFd>) {
        let mut client = self.client.lock();
        // Another thread may have been faster, and there may be another client.
        if client.as_ref().is_some_and(|client| Arc::ptr_eq(client, gone)) {
            // It may be closed later, by the thread that still uses it.
            let _ = epoll::delete(&self.events, gone);
            let _ = epoll::modify(&self.events, &self.listener, NO_DATA, epoll::EventFlags::IN);
            *client = None;
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If it cannot be removed, the next start does.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether somebody listens at `path`: connects without waiting. A program that does not accept its clients would hold this one up.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}
