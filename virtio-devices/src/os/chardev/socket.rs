//! A listening Unix socket that serves one client at a time. Others wait until it disconnects.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::epoll;

use super::error::CharError;
use crate::os::socket_path::{self, ListenError, OwnPath, PassedSockets, SocketHandle};

/// The poll set's data is not used.
const NO_DATA: epoll::EventData = epoll::EventData::new_u64(0);

/// A listening socket, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Socket {
    listener: Arc<UnixListener>,
    own: OwnPath,
    client: Mutex<Option<Arc<OwnedFd>>>,
    /// True if the last client could not be accepted: no descriptor was free, or another program owns the socket.
    pub short: AtomicBool,
    /// Readable when there is input or, without a client, when one connects. Shared by all threads.
    events: OwnedFd,
}

impl Socket {
    /// Listens at `path`, or uses the listener in `passed`. Removes a socket that an ended program left there.
    ///
    /// # Errors
    ///
    /// Fails if another program is listening there, or the path cannot be used.
    pub(crate) fn listen(path: &Path, passed: &PassedSockets) -> Result<Self, CharError> {
        let fail = |error: io::Error| CharError::Socket { path: path.to_owned(), error };
        let (listener, own) = socket_path::listen_or_take(path, passed).map_err(|error| match error {
            ListenError::InUse => CharError::SocketInUse(path.to_owned()),
            ListenError::NotASocket => CharError::NotASocket(path.to_owned()),
            ListenError::Denied(error) | ListenError::Failed(error) => fail(error),
        })?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| fail(errno.into()))?;
        let socket = Self { listener, own, client: Mutex::new(None), short: AtomicBool::new(false), events };
        epoll::add(&socket.events, &*socket.listener, NO_DATA, epoll::EventFlags::IN)
            .map_err(|errno| fail(errno.into()))?;
        Ok(socket)
    }

    /// The handle by which the socket is passed to another program.
    pub(crate) fn handle(&self) -> SocketHandle {
        self.own.handle(&self.listener)
    }

    /// The client; accepts a waiting one if there is none.
    pub(crate) fn client(&self) -> Option<Arc<OwnedFd>> {
        let mut client = self.client.lock();
        if client.is_none() && !self.own.is_owned() {
            // The owner accepts it. Until then, this must not be woken again and again.
            self.short.store(true, Ordering::Relaxed);
        } else if client.is_none() {
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
        // Waiting clients must not wake any thread until this one disconnects.
        epoll::modify(&self.events, &*self.listener, NO_DATA, epoll::EventFlags::empty())?;
        Ok(stream.into())
    }

    /// The client has left.
    pub(crate) fn forget(&self, gone: &Arc<OwnedFd>) {
        let mut client = self.client.lock();
        // Another thread may have been faster, and there may be a new client.
        if client.as_ref().is_some_and(|client| Arc::ptr_eq(client, gone)) {
            // The thread that still uses it may close it later.
            let _ = epoll::delete(&self.events, gone);
            let _ = epoll::modify(&self.events, &*self.listener, NO_DATA, epoll::EventFlags::IN);
            *client = None;
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}
