//! The socket of a vhost-user backend: the backend listens on it, or connects to it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::cancel::Cancel;
use super::error::{PATIENCE, VhostUserError};
use crate::os::socket_path::{self, ListenError, OwnPath, connect};
use crate::os::unmade_file::why_no_socket;

/// The socket of a vhost-user backend, by path. A listening socket is removed when this is dropped.
#[derive(Debug)]
pub struct VhostUserSocket {
    path: PathBuf,
    listener: Option<Arc<UnixListener>>,
    _own: Option<OwnPath>,
}

impl VhostUserSocket {
    /// The time limit for peers to connect when their devices are plugged in.
    pub const PATIENCE: Duration = PATIENCE;

    /// A socket that the peer listens on.
    pub fn of_peer(path: PathBuf) -> Self {
        Self { path, listener: None, _own: None }
    }

    /// Listens at `path`. Removes a stale socket there.
    ///
    /// # Errors
    ///
    /// Fails if another program is listening there, or the path cannot be used.
    pub fn listen(path: PathBuf) -> Result<Self, VhostUserError> {
        let (listener, own) = socket_path::listen(&path).map_err(|error| match error {
            ListenError::InUse => VhostUserError::InUse(name(&path)),
            ListenError::NotASocket => VhostUserError::Occupied(name(&path)),
            ListenError::Denied(_) => VhostUserError::NoRight(name(&path)),
            ListenError::Failed(error) => unusable(&path, error),
        })?;
        Ok(Self { path, listener: Some(listener), _own: Some(own) })
    }

    /// The path, as users read it.
    pub(super) fn name(&self) -> String {
        name(&self.path)
    }

    /// The descriptor that becomes readable when a peer connects.
    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(|listener| listener.as_fd())
    }

    /// Connects to a peer, or accepts one that is waiting.
    ///
    /// # Errors
    ///
    /// The system's error; [`io::ErrorKind::WouldBlock`] if no peer is waiting to be accepted, or too many clients are
    /// waiting.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        match &self.listener {
            Some(listener) => listener.accept().map(|(stream, _)| stream),
            None => Ok(connect(&self.path)?),
        }
    }

    /// The first connection, when the device is plugged in: waits for a peer that has to connect until `end`, or until
    /// `cancel`.
    ///
    /// # Errors
    ///
    /// Fails with the remedy in one line.
    pub(super) fn first(&self, end: Instant, cancel: Option<&Cancel>) -> Result<UnixStream, VhostUserError> {
        while let Some(listener) = &self.listener {
            match listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The peer has closed the connection already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(source) => return Err(VhostUserError::Socket { path: self.name(), source }),
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(VhostUserError::NobodyCame { path: self.name() });
            }
            let left = Timespec::try_from(left).ok();
            let cancel = cancel.map(|cancel| PollFd::from_borrowed_fd(cancel.fd(), PollFlags::IN));
            let mut polled: Vec<_> = std::iter::once(PollFd::new(listener, PollFlags::IN)).chain(cancel).collect();
            // Interrupted by a signal: it is tried again.
            let _ = poll(&mut polled, left.as_ref());
            if polled.get(1).is_some_and(|cancel| !cancel.revents().is_empty()) {
                return Err(VhostUserError::Cancelled(self.name()));
            }
        }
        connect(&self.path).map_err(|errno| self.unreachable(errno))
    }

    pub(super) fn unreachable(&self, errno: Errno) -> VhostUserError {
        let path = self.name();
        let is_socket = std::fs::metadata(&self.path).is_ok_and(|found| found.file_type().is_socket());
        match errno {
            Errno::NOENT | Errno::NOTDIR => VhostUserError::Missing(path),
            Errno::ACCESS | Errno::PERM => VhostUserError::NoRight(path),
            Errno::CONNREFUSED if is_socket => VhostUserError::Refused(path),
            Errno::CONNREFUSED | Errno::PROTOTYPE => VhostUserError::NotASocket(path),
            Errno::AGAIN => VhostUserError::Busy(path),
            errno => VhostUserError::Socket { path, source: errno.into() },
        }
    }
}

/// The reason why listening at `path` failed.
fn unusable(path: &Path, source: io::Error) -> VhostUserError {
    let name = name(path);
    match source.kind() {
        io::ErrorKind::NotFound => VhostUserError::NoFolder(name),
        io::ErrorKind::PermissionDenied => VhostUserError::NoRightToListen(name),
        _ => VhostUserError::Socket { path: name, source: io::Error::other(why_no_socket(path, &source)) },
    }
}

fn name(path: &Path) -> String {
    path.display().to_string()
}
