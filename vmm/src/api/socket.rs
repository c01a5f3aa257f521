//! The API's sockets: `--api-socket`, and `--read-only-socket` for readers.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{FlockOperation, OFlags, flock, fstat};
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use thiserror::Error;
use virtio_devices::why_no_socket;

use crate::config::grammar::{PathOrFd, path_or_fd};
use crate::error_kind::ErrorKind;

/// The longest path of a Unix socket, in bytes: `sun_path` of unix(7) without the terminating NUL.
const LONGEST: usize = 107;

/// A socket of the API: `path=<path>`, a path alone, or `fd=<number>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiSocket {
    /// The path of a Unix socket to create.
    Path(PathBuf),
    /// A descriptor of this process, above 2: a Unix socket that is already bound and listening.
    Fd(RawFd),
}

/// Reason why a socket of the API cannot be opened: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The text has none of the forms.
    #[error("{0}: give path=<path>, a path alone, or fd=<number>")]
    Syntax(String),
    /// Another VMM uses the path.
    #[error("path={}: API socket {} is already in use; give another path", .0.display(), .0.display())]
    InUse(PathBuf),
    /// The path is another kind of file.
    #[error("path={}: exists and is not a socket; give another path, or remove it", .0.display())]
    NoSocket(PathBuf),
    /// The socket cannot be created.
    #[error("path={}: {}", path.display(), why_no_socket(path, error))]
    Unmade {
        /// The path.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The socket, or its lock file, cannot be used.
    #[error("path={}: cannot {action}: {error}; give another path", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Failed action.
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
    /// The descriptor is not a listening Unix socket.
    #[error("fd={0}: not a listening Unix socket; bind it and call listen() before the program starts")]
    Fd(RawFd),
    /// The socket is that of another option, whose clients it would serve.
    #[error("it is the socket of --api-socket; give another one")]
    Same,
}

impl SocketError {
    /// The kind of this error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Syntax(_) => ErrorKind::Syntax,
            Self::InUse(_) | Self::NoSocket(_) | Self::Unmade { .. } | Self::Path { .. } | Self::Fd(_) => {
                ErrorKind::Host
            }
            Self::Same => ErrorKind::Invalid,
        }
    }
}

impl FromStr for ApiSocket {
    type Err = SocketError;

    fn from_str(text: &str) -> Result<Self, SocketError> {
        let is_path = match text.split_once('=') {
            Some((key, _)) => key.contains('/'),
            None => !text.is_empty(),
        };
        if is_path {
            return Ok(Self::Path(text.into()));
        }
        match path_or_fd(text) {
            Some(PathOrFd::Path(path)) => Ok(Self::Path(path)),
            Some(PathOrFd::Fd(fd)) => Ok(Self::Fd(fd)),
            None => Err(SocketError::Syntax(text.to_string())),
        }
    }
}

/// A socket created by this process. Dropping it removes the socket file; the lock file stays.
#[derive(Debug)]
pub struct BoundSocket {
    path: PathBuf,
    /// Device and inode number: another process may have replaced the file.
    inode: (u64, u64),
    /// Locked while this process uses the path.
    _lock: File,
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If this fails, the next start removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl ApiSocket {
    /// The path of a socket that this process creates.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Fd(_) => None,
        }
    }

    /// Claims the path against other VMMs, which all lock `<path>.lock`.
    ///
    /// # Errors
    ///
    /// Fails with a [`SocketError`]. Only the lock file remains then.
    pub fn claim(&self) -> Result<Claim, SocketError> {
        match self {
            Self::Path(path) => lock(path).map(|lock| Claim(Claimed::Path(path.clone(), lock))),
            Self::Fd(fd) => take(*fd).map(|listener| Claim(Claimed::Listener(listener))).ok_or(SocketError::Fd(*fd)),
        }
    }

    /// Claims the path and creates the socket, as [`Claim::listen`] does.
    ///
    /// # Errors
    ///
    /// Fails with a [`SocketError`]. Only the lock file remains then.
    pub fn listen(&self) -> Result<(UnixListener, Option<BoundSocket>), SocketError> {
        self.claim()?.listen()
    }
}

/// A claimed socket path. No other VMM can claim it while this, or the socket made from it, lives.
#[derive(Debug)]
pub struct Claim(Claimed);

#[derive(Debug)]
enum Claimed {
    Path(PathBuf, File),
    Listener(UnixListener),
}

impl Claim {
    /// Checks that this is another socket than `other`.
    ///
    /// # Errors
    ///
    /// Fails if both are duplicates of one descriptor.
    pub fn differ(&self, other: &Self) -> Result<(), SocketError> {
        let number = |claim: &Self| match &claim.0 {
            Claimed::Listener(listener) => fstat(listener).ok().map(|file| file.st_ino),
            Claimed::Path(..) => None,
        };
        match (number(self), number(other)) {
            (Some(one), Some(another)) if one == another => Err(SocketError::Same),
            _ => Ok(()),
        }
    }

    /// Creates the socket, or takes the passed one. Keep the [`BoundSocket`] while the socket is served.
    ///
    /// A socket file left by a program that has ended is removed.
    ///
    /// # Errors
    ///
    /// Fails with a [`SocketError`]. Only the lock file remains then.
    pub fn listen(self) -> Result<(UnixListener, Option<BoundSocket>), SocketError> {
        match self.0 {
            Claimed::Path(path, lock) => bind(path, lock).map(|(listener, bound)| (listener, Some(bound))),
            Claimed::Listener(listener) => Ok((listener, None)),
        }
    }
}

/// Turns a file system error into one of the socket at `path`.
fn fail(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> SocketError {
    let path = path.to_owned();
    move |error| SocketError::Path { path, action, error }
}

/// As [`fail`], of a file that cannot be created.
fn unmade(path: &Path) -> impl FnOnce(io::Error) -> SocketError {
    let path = path.to_owned();
    move |error| SocketError::Unmade { path, error }
}

fn lock(path: &Path) -> Result<File, SocketError> {
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let mut options = OpenOptions::new();
    options.create(true).write(true).truncate(false).mode(0o600).custom_flags(flags);
    let lock = options.open(lock_path).map_err(unmade(path))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::AGAIN) => Err(SocketError::InUse(path.to_owned())),
        locked => locked.map(|()| lock).map_err(|error| fail(path, "lock its lock file")(error.into())),
    }
}

fn bind(path: PathBuf, lock: File) -> Result<(UnixListener, BoundSocket), SocketError> {
    if is_socket(&path) == Some(false) {
        return Err(SocketError::NoSocket(path));
    }
    // A socket that is bound but not listening yet refuses clients, so it is created under a temporary name and
    // renamed. The lock covers that name as well.
    let beside = beside(&path);
    let made_at = beside.as_ref().unwrap_or(&path);
    match is_socket(made_at) {
        Some(true) => {
            fs::remove_file(made_at).map_err(fail(&path, "remove the socket that an earlier program left"))?
        }
        Some(false) => return Err(SocketError::NoSocket(made_at.clone())),
        None => {}
    }
    let listener = UnixListener::bind(made_at).map_err(unmade(&path))?;
    let inode = inode(made_at).map_err(fail(&path, "find the new socket"))?;
    if let Some(beside) = &beside {
        fs::rename(beside, &path).map_err(|error| {
            // If this fails as well, the next start replaces it.
            let _ = fs::remove_file(beside);
            fail(&path, "rename the new socket")(error)
        })?;
    }
    Ok((listener, BoundSocket { path, inode, _lock: lock }))
}

/// The temporary path of the socket for `path`. `None` if that is too long for a socket; the socket is then created at
/// `path` directly.
fn beside(path: &Path) -> Option<PathBuf> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    (beside.len() <= LONGEST).then(|| beside.into())
}

/// True if `path` is a socket; `None` if it does not exist.
fn is_socket(path: &Path) -> Option<bool> {
    fs::symlink_metadata(path).ok().map(|file| file.file_type().is_socket())
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// A duplicate of descriptor `fd`, if that is a listening Unix socket. `fd` itself stays open.
fn take(fd: RawFd) -> Option<UnixListener> {
    // SAFETY: the descriptor is borrowed for this function, which only queries and duplicates it; if the number is not
    // an open descriptor, these calls fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let listens = socket_acceptconn(fd).ok()? && socket_domain(fd).ok()? == AddressFamily::UNIX;
    let own: OwnedFd = rustix::io::fcntl_dupfd_cloexec(fd, 3).ok()?;
    listens.then(|| own.into())
}
