//! Character devices of the host: nothing, a file, the process's own streams, a pseudo-terminal or a socket.
//!
//! A write never blocks forever. If the other end takes no output, the first write waits up to [`PATIENCE`], and output
//! is dropped until the other end takes some again. If the other end is not open, output is dropped at once, except
//! that a FIFO keeps what fits until it is read. Opening never blocks. Input stays at its source until it is read.

mod error;
mod pty;
mod socket;

#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

pub use error::CharError;
use pty::Pty;
use socket::Socket;

/// How long a write waits for the other end to take output.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How often to check for what cannot be waited for: an opened pseudo-terminal, or a free descriptor for a client.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };
/// What a writable pipe takes without blocking (`PIPE_BUF`).
const PIPE_PART: usize = 4096;

/// The other end of a console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CharSpec {
    /// Output is dropped, and there is no input.
    Null,
    /// Output goes to this file, which is truncated. It may be a FIFO without a reader, or a terminal.
    File(PathBuf),
    /// A pseudo-terminal of its own.
    Pty,
    /// A listening Unix socket, for one client at a time.
    Socket(PathBuf),
}

/// An open character device. It may be written and read by several threads at a time.
#[derive(Debug)]
pub struct CharDevice {
    kind: Kind,
    patience: Duration,
    /// The last output was not taken.
    stuck: AtomicBool,
}

#[derive(Debug)]
enum Kind {
    Null,
    Streams { input: Option<OwnedFd>, output: OwnedFd, part: usize },
    Pty(Pty),
    Socket(Socket),
}

/// What [`CharDevice::wait`] woke up for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Woken<const N: usize> {
    /// Which of the others are readable.
    pub others: [bool; N],
    /// There may be input.
    pub input: bool,
}

/// The descriptor of the other end, as long as it is used.
enum End<'d> {
    Own(BorrowedFd<'d>),
    Client(Arc<OwnedFd>),
}

impl AsFd for End<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) => *fd,
            Self::Client(fd) => fd.as_fd(),
        }
    }
}

impl CharDevice {
    /// Opens, creates or listens on what `spec` names.
    ///
    /// # Errors
    ///
    /// One line that says what to do; see [`CharError`].
    pub fn open(spec: &CharSpec) -> Result<Self, CharError> {
        let kind = match spec {
            CharSpec::Null => Kind::Null,
            CharSpec::File(path) => {
                let fail = |error| CharError::File { path: path.clone(), error };
                return Self::over(None, create(path).map_err(fail)?.into()).map_err(fail);
            }
            CharSpec::Pty => Kind::Pty(Pty::open().map_err(CharError::Pty)?),
            CharSpec::Socket(path) => Kind::Socket(Socket::listen(path)?),
        };
        Ok(Self::of(kind))
    }

    /// Descriptors that are open already: the process's own streams.
    ///
    /// # Errors
    ///
    /// When the output cannot be inspected.
    pub fn over(input: Option<OwnedFd>, output: OwnedFd) -> io::Result<Self> {
        // They may be shared with other programs, so they stay blocking; a write is small enough not to block.
        let part = match FileType::from_raw_mode(rustix::fs::fstat(&output)?.st_mode) {
            FileType::RegularFile => usize::MAX,
            FileType::Fifo => PIPE_PART,
            _ => 1,
        };
        Ok(Self::of(Kind::Streams { input, output, part }))
    }

    fn of(kind: Kind) -> Self {
        Self { kind, patience: PATIENCE, stuck: AtomicBool::new(false) }
    }

    /// The same, with another limit for writes.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The path of the pseudo-terminal's other end.
    pub fn pty(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Pty(pty) => Some(pty.path()),
            _ => None,
        }
    }

    /// The descriptor that takes output now.
    fn reader(&self) -> Option<(End<'_>, usize)> {
        match &self.kind {
            Kind::Null => None,
            Kind::Streams { output, part, .. } => Some((End::Own(output.as_fd()), *part)),
            Kind::Pty(pty) => pty.is_open().then(|| (End::Own(pty.as_fd()), usize::MAX)),
            Kind::Socket(socket) => socket.client().map(|client| (End::Client(client), usize::MAX)),
        }
    }

    /// Writes `bytes`, or drops what the other end does not take.
    pub fn write(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some((end, part)) = self.reader() else { return };
            let patience = if self.stuck.load(Ordering::Relaxed) { Duration::ZERO } else { self.patience };
            let taken = is_ready(end.as_fd(), PollFlags::OUT, patience);
            self.stuck.store(!taken, Ordering::Relaxed);
            if !taken {
                return;
            }
            match self.write_some(&end, &bytes[..bytes.len().min(part)]) {
                Ok(written @ 1..) => bytes = &bytes[written.min(bytes.len())..],
                Err(Errno::INTR) => {}
                // Lost, as on an unconnected serial line.
                _ => return,
            }
        }
    }

    fn write_some(&self, end: &End<'_>, bytes: &[u8]) -> Result<usize, Errno> {
        let End::Client(client) = end else { return rustix::io::write(end.as_fd(), bytes) };
        let result = rustix::net::send(client, bytes, rustix::net::SendFlags::NOSIGNAL);
        if let (Err(error), Kind::Socket(socket)) = (result, &self.kind)
            && !matches!(error, Errno::AGAIN | Errno::INTR)
        {
            socket.forget(client);
        }
        result
    }

    /// Reads available input. `Ok(0)` is its end. A client that leaves is not the end, because another may come.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none now; any other means that no more will come.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let nothing = Err(io::ErrorKind::WouldBlock.into());
        match &self.kind {
            Kind::Null => Ok(0),
            Kind::Streams { input, .. } => {
                let Some(input) = input else { return Ok(0) };
                // It may be shared with other programs, so it stays blocking.
                if !is_ready(input.as_fd(), PollFlags::IN, Duration::ZERO) {
                    return nothing;
                }
                match rustix::io::read(input, bytes) {
                    Err(Errno::INTR) => nothing,
                    result => Ok(result?),
                }
            }
            Kind::Pty(pty) => match rustix::io::read(pty, bytes) {
                // The other end is not open.
                Ok(0) | Err(Errno::IO | Errno::AGAIN | Errno::INTR) => nothing,
                result => Ok(result?),
            },
            Kind::Socket(socket) => {
                let Some(client) = socket.client() else { return nothing };
                match rustix::io::read(&*client, bytes) {
                    Ok(len @ 1..) => Ok(len),
                    Err(Errno::AGAIN | Errno::INTR) => nothing,
                    _ => {
                        socket.forget(&client);
                        nothing
                    }
                }
            }
        }
    }

    /// Waits until one of `others` is readable or, if `input`, there may be input. It may return without either.
    ///
    /// # Errors
    ///
    /// When the system cannot wait.
    pub fn wait<const N: usize>(&self, others: [BorrowedFd<'_>; N], input: bool) -> io::Result<Woken<N>> {
        let end = if input { self.writer() } else { None };
        // Without a descriptor to wait for, this polls.
        let may_come = matches!(&self.kind, Kind::Pty(_) | Kind::Socket(_));
        let timeout = (input && may_come && end.is_none()).then_some(RETRY);
        let own = end.as_ref().map(AsFd::as_fd);
        let watched = others.into_iter().chain(own);
        let mut fds: Vec<_> = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(Woken { others: [false; N], input: false }),
            result => result?,
        };
        let readable = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Woken { others: std::array::from_fn(readable), input: readable(N) })
    }

    /// The descriptor that input, or a new client, comes from now.
    fn writer(&self) -> Option<End<'_>> {
        match &self.kind {
            Kind::Null => None,
            Kind::Streams { input, .. } => input.as_ref().map(|input| End::Own(input.as_fd())),
            Kind::Pty(pty) => pty.is_open().then(|| End::Own(pty.as_fd())),
            // A client that cannot be accepted would wake this again and again.
            Kind::Socket(socket) if socket.short.swap(false, Ordering::Relaxed) => None,
            Kind::Socket(socket) => Some(End::Own(socket.as_fd())),
        }
    }
}

/// Creates or truncates the file at `path`, without blocking.
fn create(path: &Path) -> io::Result<File> {
    // A terminal must not become the controlling terminal, and a modem line must not block.
    let flags = i32::try_from((OFlags::NOCTTY | OFlags::NONBLOCK).bits()).unwrap_or_default();
    // Opening a FIFO without a reader for writing fails, so it is opened for reading, too, and never read.
    let is_fifo = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    OpenOptions::new().read(is_fifo).write(true).create(true).truncate(true).custom_flags(flags).open(path)
}

/// Whether `fd` takes output or has input, as `direction` says, within `patience`. A signal ends the wait: it may be
/// the one that stops a vCPU.
fn is_ready(fd: BorrowedFd<'_>, direction: PollFlags, patience: Duration) -> bool {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut fds = [PollFd::from_borrowed_fd(fd, direction)];
    // A hang-up also counts; the read or write then fails.
    matches!(poll(&mut fds, Some(&timeout)), Ok(1..))
}
