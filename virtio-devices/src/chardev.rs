//! Where a console's characters go to and come from: nowhere, a file, the program's own streams, a pseudo-terminal or a socket.
//!
//! Output never waits for good: if nobody takes it, who writes waits up to [`PATIENCE`], once, and what follows is dropped until
//! somebody takes it again. Where nobody is at the other end it is dropped at once, but for a FIFO, which keeps what fits in until
//! somebody reads it. Opening never waits for anybody. Input that nobody asks for stays where it is.

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

/// How long output waits for somebody to take it.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long until it is looked again whether somebody has opened a pseudo-terminal, which cannot be waited for, or can be let in.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };
/// What a pipe takes without waiting when it takes anything (`PIPE_BUF`).
const PIPE_PART: usize = 4096;

/// The other end of a console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CharSpec {
    /// Output is dropped, and there is no input.
    Null,
    /// Output is written to this file, from its beginning. It may be a FIFO that nobody reads yet, or a terminal.
    File(PathBuf),
    /// A pseudo-terminal of its own.
    Pty,
    /// A Unix socket that is listened on, for one client at a time.
    Socket(PathBuf),
}

/// An open character device. It may be written and read by several threads at a time.
#[derive(Debug)]
pub struct CharDevice {
    kind: Kind,
    patience: Duration,
    /// Nobody took output the last time.
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

    /// What is open already: the program's own streams, as a terminal is.
    ///
    /// # Errors
    ///
    /// When the output cannot be looked at.
    pub fn over(input: Option<OwnedFd>, output: OwnedFd) -> io::Result<Self> {
        // They may be shared with other programs, and must not be made not to wait: as much is written as never does.
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

    /// The same, which waits for as long as this for somebody to take its output.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The pseudo-terminal's path, which others open.
    pub fn pty(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Pty(pty) => Some(pty.path()),
            _ => None,
        }
    }

    /// Who takes output now.
    fn reader(&self) -> Option<(End<'_>, usize)> {
        match &self.kind {
            Kind::Null => None,
            Kind::Streams { output, part, .. } => Some((End::Own(output.as_fd()), *part)),
            Kind::Pty(pty) => pty.is_open().then(|| (End::Own(pty.as_fd()), usize::MAX)),
            Kind::Socket(socket) => socket.client().map(|client| (End::Client(client), usize::MAX)),
        }
    }

    /// Writes `bytes`, or drops what nobody takes.
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
                // What cannot be written is lost, as on a line that nobody listens to.
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

    /// Reads input that is there. `Ok(0)` is its end; a client that leaves is none, as another one may come.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none now; others when there will not be any more.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let nothing = Err(io::ErrorKind::WouldBlock.into());
        match &self.kind {
            Kind::Null => Ok(0),
            Kind::Streams { input, .. } => {
                let Some(input) = input else { return Ok(0) };
                // It may be shared with other programs, and must not be made not to wait.
                if !is_ready(input.as_fd(), PollFlags::IN, Duration::ZERO) {
                    return nothing;
                }
                match rustix::io::read(input, bytes) {
                    Err(Errno::INTR) => nothing,
                    result => Ok(result?),
                }
            }
            Kind::Pty(pty) => match rustix::io::read(pty, bytes) {
                // Nobody has it open.
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
        // Where there is nobody who can be waited for, it is looked again after a while.
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

    /// Where input comes from now, be it somebody who comes.
    fn writer(&self) -> Option<End<'_>> {
        match &self.kind {
            Kind::Null => None,
            Kind::Streams { input, .. } => input.as_ref().map(|input| End::Own(input.as_fd())),
            Kind::Pty(pty) => pty.is_open().then(|| End::Own(pty.as_fd())),
            // One that cannot be let in would wake at once, for ever.
            Kind::Socket(socket) if socket.short.swap(false, Ordering::Relaxed) => None,
            Kind::Socket(socket) => Some(End::Own(socket.as_fd())),
        }
    }
}

/// Creates or truncates the file at `path`, without waiting for anybody.
fn create(path: &Path) -> io::Result<File> {
    // A terminal must not become this program's, nor be waited for until somebody dials in.
    let flags = i32::try_from((OFlags::NOCTTY | OFlags::NONBLOCK).bits()).unwrap_or_default();
    // Linux refuses to open a FIFO for writing that nobody reads: this program may read it, too, and never does.
    let is_fifo = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    OpenOptions::new().read(is_fifo).write(true).create(true).truncate(true).custom_flags(flags).open(path)
}

/// Whether `fd` takes output or has input, as `direction` says, within `patience`. A signal ends the wait: it may be the one that
/// stops a vCPU.
fn is_ready(fd: BorrowedFd<'_>, direction: PollFlags, patience: Duration) -> bool {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut fds = [PollFd::from_borrowed_fd(fd, direction)];
    // Somebody who is gone shows as an error, which the write or read then finds.
    matches!(poll(&mut fds, Some(&timeout)), Ok(1..))
}
