//! The host's sockets: the one that clients connect to, and those that the guest's connections go to.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::VsockError;
use crate::os::socket_path::{ListenError, OwnPath, PassedSockets, SocketHandle, connect, listen_or_take};

/// A listening socket, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct HostSocket {
    path: PathBuf,
    listener: Arc<UnixListener>,
    own: OwnPath,
}

impl HostSocket {
    /// Listens at `path`, or uses the listener in `passed`. Removes a socket that an ended program left there.
    ///
    /// # Errors
    ///
    /// Fails if another program is listening there, or the path cannot be used.
    pub(crate) fn listen(path: &Path, passed: &PassedSockets) -> Result<Self, VsockError> {
        let (listener, own) = listen_or_take(path, passed).map_err(|error| match error {
            ListenError::InUse => VsockError::InUse(path.to_owned()),
            ListenError::NotASocket => VsockError::NotASocket(path.to_owned()),
            ListenError::Denied(error) | ListenError::Failed(error) => {
                VsockError::Listen { path: path.to_owned(), error }
            }
        })?;
        Ok(Self { path: path.to_owned(), listener, own })
    }

    /// The handle by which the socket is passed.
    pub(crate) fn handle(&self) -> SocketHandle {
        self.own.handle(&self.listener)
    }

    /// Accepts a waiting client, without blocking.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none; another error if the host lacks a resource.
    pub(crate) fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }

    /// Connects to the program that listens at `<path>_<port>`, without waiting.
    ///
    /// # Errors
    ///
    /// Fails if no program listens on that port, or it is too busy.
    pub(crate) fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let mut path = OsString::from(&self.path);
        path.push(format!("_{port}"));
        Ok(connect(Path::new(&path))?)
    }
}

impl AsFd for HostSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}
