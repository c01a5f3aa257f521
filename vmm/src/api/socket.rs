//! The socket that clients find: `--api-socket`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{FlockOperation, flock};
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use thiserror::Error;

use crate::config_options::{PathOrFd, path_or_fd};

/// The longest path of a Unix socket in bytes: `sun_path` of unix(7), less the zero at its end.
const LONGEST: usize = 107;

/// Where clients find the API: `path=<path>`, a path alone, or `fd=<number>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiSocket {
    /// A Unix socket that is made there.
    Path(PathBuf),
    /// A Unix socket that is bound and listens already: this descriptor of the process, above 2.
    Fd(RawFd),
}

/// Why clients cannot find the API.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The text is none of the forms.
    #[error("--api-socket {0}: give path=<path>, a path alone, or fd=<number>")]
    Syntax(String),
    /// Another program has it.
    #[error("--api-socket path={}: API socket {} is already in use; give another path", .0.display(), .0.display())]
    InUse(PathBuf),
    /// Something else is there.
    #[error("--api-socket path={}: there is something that is no socket; give another path, or remove it", .0.display())]
    NoSocket(PathBuf),
    /// It cannot be made.
    #[error("--api-socket path={}: cannot {action}: {error}", path.display())]
    Path {
        /// Where.
        path: PathBuf,
        /// What failed.
        action: &'static str,
        /// Why.
        error: io::Error,
    },
    /// The descriptor is not one.
    #[error("--api-socket fd={0}: not a Unix socket that listens; bind it and call listen() before the program starts")]
    Fd(RawFd),
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

/// The socket as it was made. Dropped, it is gone from the file system; its lock file stays.
#[derive(Debug)]
pub struct BoundSocket {
    path: PathBuf,
    /// Which file it is: somebody may put another one in its place.
    inode: (u64, u64),
    /// Locked as long as this program has the path.
    _lock: File,
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If it cannot be removed, the next start does.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl ApiSocket {
    /// Makes sure that no other program has the place: each locks `<path>.lock`.
    ///
    /// # Errors
    ///
    /// See [`SocketError`]. Nothing is left behind but the lock file.
    pub fn claim(&self) -> Result<Claim, SocketError> {
        match self {
            Self::Path(path) => lock(path).map(|lock| Claim(Claimed::Path(path.clone(), lock))),
            Self::Fd(fd) => take(*fd).map(|listener| Claim(Claimed::Listener(listener))).ok_or(SocketError::Fd(*fd)),
        }
    }

    /// Claims the place and makes the socket there, as [`Claim::listen`] does.
    ///
    /// # Errors
    ///
    /// See [`SocketError`]. Nothing is left behind but the lock file.
    pub fn listen(&self) -> Result<(UnixListener, Option<BoundSocket>), SocketError> {
        self.claim()?.listen()
    }
}

/// A place for clients to find. No other program has it as long as this one keeps the claim, or the socket made of it.
#[derive(Debug)]
pub struct Claim(Claimed);

#[derive(Debug)]
enum Claimed {
    Path(PathBuf, File),
    Listener(UnixListener),
}

impl Claim {
    /// Makes the socket, or takes the one that was given. What comes with it is to be kept as long as it is served.
    ///
    /// A socket that is left of a program which has ended is removed.
    ///
    /// # Errors
    ///
    /// See [`SocketError`]. Nothing is left behind but the lock file.
    pub fn listen(self) -> Result<(UnixListener, Option<BoundSocket>), SocketError> {
        match self.0 {
            Claimed::Path(path, lock) => bind(path, lock).map(|(listener, bound)| (listener, Some(bound))),
            Claimed::Listener(listener) => Ok((listener, None)),
        }
    }
}

/// How an error of the file system is told of the socket at `path`.
fn fail(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> SocketError {
    let path = path.to_owned();
    move |error| SocketError::Path { path, action, error }
}

fn lock(path: &Path) -> Result<File, SocketError> {
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock = OpenOptions::new().create(true).write(true).truncate(false).mode(0o600).open(lock_path);
    let lock = lock.map_err(fail(path, "open its lock file"))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::AGAIN) => Err(SocketError::InUse(path.to_owned())),
        locked => locked.map(|()| lock).map_err(|error| fail(path, "lock its lock file")(error.into())),
    }
}

fn bind(path: PathBuf, lock: File) -> Result<(UnixListener, BoundSocket), SocketError> {
    if is_socket(&path) == Some(false) {
        return Err(SocketError::NoSocket(path));
    }
    // A socket that is bound and does not listen yet refuses clients. Under the lock, the place beside it is this program's, too.
    let beside = beside(&path);
    let made_at = beside.as_ref().unwrap_or(&path);
    if is_socket(made_at) == Some(true) {
        fs::remove_file(made_at).map_err(fail(&path, "remove the socket that an earlier program left"))?;
    }
    let listener = UnixListener::bind(made_at).map_err(fail(&path, "make the socket"))?;
    let inode = inode(made_at).map_err(fail(&path, "find the socket just made"))?;
    if let Some(beside) = &beside {
        fs::rename(beside, &path).map_err(|error| {
            // What cannot be removed either is replaced by the next start.
            let _ = fs::remove_file(beside);
            fail(&path, "put the socket in its place")(error)
        })?;
    }
    Ok((listener, BoundSocket { path, inode, _lock: lock }))
}

/// Where the socket for `path` is made. `None` if such a path is too long for a socket: it is made in its place then.
fn beside(path: &Path) -> Option<PathBuf> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    (beside.len() <= LONGEST).then(|| beside.into())
}

/// Whether what is at `path` is a socket; `None` if there is nothing.
fn is_socket(path: &Path) -> Option<bool> {
    fs::symlink_metadata(path).ok().map(|file| file.file_type().is_socket())
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// The listening socket that is descriptor `fd`. The descriptor itself stays open.
fn take(fd: RawFd) -> Option<UnixListener> {
    // SAFETY: the descriptor is borrowed for this function, which only asks what it is and duplicates it; a number that is no
    // descriptor makes these calls fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let listens = socket_acceptconn(fd).ok()? && socket_domain(fd).ok()? == AddressFamily::UNIX;
    let own: OwnedFd = rustix::io::fcntl_dupfd_cloexec(fd, 3).ok()?;
    listens.then(|| own.into())
}
