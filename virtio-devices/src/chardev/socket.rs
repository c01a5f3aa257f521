//! A Unix socket that is listened on, for one client at a time. Others wait until that one leaves.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::epoll;

use super::error::CharError;

/// Nobody asks which of the two it is.
const NO_DATA: epoll::EventData = epoll::EventData::new_u64(0);

/// A socket that is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
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
            Ok(_) if UnixStream::connect(path).is_ok() => return Err(CharError::SocketInUse(path.to_owned())),
            Ok(_) => std::fs::remove_file(path).map_err(fail)?,
            // That it cannot be looked at shows when it is bound, too.
            Err(_) => {}
        }
        let listener = UnixListener::bind(path).map_err(fail)?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| {
            // There is no socket yet that would do it when it is dropped.
            let _ = std::fs::remove_file(path);
            fail(errno.into())
        })?;
        let socket =
            Self { listener, path: path.to_owned(), client: Mutex::new(None), short: AtomicBool::new(false), events };
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
        // Somebody may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}
