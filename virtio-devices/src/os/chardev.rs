//! Character devices of the host: nothing, a file, the process's own streams, a pseudo-terminal or a socket.
//!
//! A write never blocks forever. If the other end accepts no output, the first write waits up to [`PATIENCE`], and
//! later ones do not wait until the other end accepts some again. A pseudo-terminal and a socket buffer the most recent
//! MiB of unread output for the next reader; other devices drop it, except that a FIFO keeps what fits until it is
//! read. Opening never blocks. Input stays at its source until it is read.

mod backlog;
mod error;
mod pty;
mod socket;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::os::eventfd::borrow;
use crate::os::new_file::create_file;
use crate::os::socket_path::{PassedSockets, SocketHandle};
use backlog::Backlog;
pub use error::CharError;
use pty::Pty;
use socket::Socket;

/// Longest time that a write waits for the other end to accept output.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Polling interval for events without a descriptor: an opened pseudo-terminal, a free descriptor for a client, or a
/// reader for buffered output.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };
/// Bytes that a writable pipe accepts without blocking (`PIPE_BUF`).
const PIPE_PART: usize = 4096;

/// The other end of a console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CharSpec {
    /// Output is dropped, and there is no input.
    Null,
    /// Output is appended to this file. It may be a FIFO without a reader, or a terminal.
    File(PathBuf),
    /// A pseudo-terminal of its own.
    Pty,
    /// A listening Unix socket, for one client at a time.
    Socket(PathBuf),
}

/// An open character device. Several threads may write and read it at a time.
#[derive(Debug)]
pub struct CharDevice {
    kind: Kind,
    patience: Duration,
    /// True if the last output was not accepted.
    stuck: AtomicBool,
    /// Unread output, if a reader can connect later: for a pseudo-terminal or a socket.
    kept: Option<UnreadOutput>,
}

/// Buffered unread output.
#[derive(Debug)]
struct UnreadOutput {
    backlog: Mutex<Backlog>,
    /// Readable when output is buffered again: a waiting thread then polls for a reader.
    begun: EventFd,
}

impl UnreadOutput {
    fn new() -> io::Result<Self> {
        Ok(Self { backlog: Mutex::default(), begun: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }
}

#[derive(Debug)]
enum Kind {
    Null,
    Streams { input: Option<OwnedFd>, output: OwnedFd, part: usize },
    Pty(Pty),
    Socket(Socket),
}

/// Events that [`CharDevice::wait`] returned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Woken<const N: usize> {
    /// True for each of the others that is readable.
    pub others: [bool; N],
    /// True if there may be input.
    pub input: bool,
}

/// The descriptor of the other end, valid while it is used.
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
    /// Opens, creates or listens on the device of `spec`.
    ///
    /// # Errors
    ///
    /// Fails with one line that contains the remedy; see [`CharError`].
    pub fn open(spec: &CharSpec) -> Result<Self, CharError> {
        Self::open_with(spec, &PassedSockets::default())
    }

    /// As [`Self::open`], with the listener in `passed` if that has one.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::open`] does, or if the listener does not belong to the path.
    pub fn open_with(spec: &CharSpec, passed: &PassedSockets) -> Result<Self, CharError> {
        let kind = match spec {
            CharSpec::Null => Kind::Null,
            CharSpec::File(path) => {
                let fail = |error| CharError::File { path: path.clone(), error };
                return Self::over(None, create(path).map_err(fail)?.into()).map_err(fail);
            }
            CharSpec::Pty => Kind::Pty(Pty::open().map_err(CharError::Pty)?),
            CharSpec::Socket(path) => Kind::Socket(Socket::listen(path, passed)?),
        };
        let kept = match spec {
            CharSpec::Null | CharSpec::File(_) => None,
            CharSpec::Pty => Some(UnreadOutput::new().map_err(CharError::Pty)?),
            CharSpec::Socket(path) => {
                Some(UnreadOutput::new().map_err(|error| CharError::Socket { path: path.clone(), error })?)
            }
        };
        Ok(Self { kept, ..Self::of(kind) })
    }

    /// Uses descriptors that are open already: the process's own streams.
    ///
    /// # Errors
    ///
    /// Fails if the output cannot be inspected.
    pub fn over(input: Option<OwnedFd>, output: OwnedFd) -> io::Result<Self> {
        // Other programs may share them, so they stay blocking; a write is small enough not to block.
        let part = match FileType::from_raw_mode(rustix::fs::fstat(&output)?.st_mode) {
            FileType::RegularFile => usize::MAX,
            FileType::Fifo => PIPE_PART,
            _ => 1,
        };
        Ok(Self::of(Kind::Streams { input, output, part }))
    }

    fn of(kind: Kind) -> Self {
        Self { kind, patience: PATIENCE, stuck: AtomicBool::new(false), kept: None }
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

    /// The handle by which a listening socket is passed to another program.
    pub fn socket(&self) -> Option<SocketHandle> {
        match &self.kind {
            Kind::Socket(socket) => Some(socket.handle()),
            _ => None,
        }
    }

    /// The descriptor that accepts output now.
    fn reader(&self) -> Option<(End<'_>, usize)> {
        match &self.kind {
            Kind::Null => None,
            Kind::Streams { output, part, .. } => Some((End::Own(output.as_fd()), *part)),
            Kind::Pty(pty) => pty.is_open().then(|| (End::Own(pty.as_fd()), usize::MAX)),
            Kind::Socket(socket) => socket.client().map(|client| (End::Client(client), usize::MAX)),
        }
    }

    /// Writes `bytes`. Output that the other end does not accept is buffered or dropped, depending on the kind of
    /// device.
    pub fn write(&self, bytes: &[u8]) {
        let Some(kept) = &self.kept else {
            self.offer(bytes, self.patience);
            return;
        };
        let mut backlog = kept.backlog.lock();
        self.deliver(&mut backlog, self.patience);
        // Buffered output comes first.
        let none_before = backlog.is_empty();
        let taken = if none_before { self.offer(bytes, self.patience) } else { 0 };
        backlog.keep(bytes.get(taken..).unwrap_or_default());
        if none_before && !backlog.is_empty() {
            // If the counter is full, the waiting thread has been woken already.
            let _ = kept.begun.write(1);
        }
    }

    /// The buffered output for the next reader, at most 1 MiB.
    pub fn kept(&self) -> Vec<u8> {
        self.kept.as_ref().map_or(Vec::new(), |kept| kept.backlog.lock().all())
    }

    /// Buffers `bytes` before all later output, as if unread; dropped by a device that has no buffer.
    pub fn keep(&self, bytes: &[u8]) {
        let Some(kept) = &self.kept else { return };
        kept.backlog.lock().keep(bytes);
        // If the counter is full, the waiting thread has been woken already.
        let _ = kept.begun.write(1);
    }

    /// Writes buffered output to the other end, as much as it accepts.
    fn deliver(&self, backlog: &mut Backlog, patience: Duration) {
        while !backlog.is_empty() {
            let taken = self.offer(backlog.oldest(), patience);
            if taken == 0 {
                return;
            }
            backlog.taken(taken);
        }
    }

    /// Writes `bytes` to the other end, and returns the number accepted.
    fn offer(&self, bytes: &[u8], patience: Duration) -> usize {
        let mut taken = 0;
        while let Some(rest) = bytes.get(taken..).filter(|rest| !rest.is_empty()) {
            let Some((end, part)) = self.reader() else { return taken };
            let patience = if self.stuck.load(Ordering::Relaxed) { Duration::ZERO } else { patience };
            let ready = is_ready(end.as_fd(), PollFlags::OUT, patience);
            self.stuck.store(!ready, Ordering::Relaxed);
            if !ready {
                return taken;
            }
            match self.write_some(&end, rest.get(..part).unwrap_or(rest)) {
                Ok(written @ 1..) => taken += written.min(rest.len()),
                Err(Errno::INTR) => {}
                // Dropped, as on an unconnected serial line.
                _ => return taken,
            }
        }
        taken
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

    /// Reads available input. `Ok(0)` is its end. A disconnecting client does not end the input, because another may
    /// connect.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none now; after any other error, no more input comes.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let nothing = Err(io::ErrorKind::WouldBlock.into());
        match &self.kind {
            Kind::Null => Ok(0),
            Kind::Streams { input, .. } => {
                let Some(input) = input else { return Ok(0) };
                // Other programs may share it, so it stays blocking.
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

    /// Waits until one of `others` is readable or, if `input`, there may be input. Spurious returns are possible.
    /// Writes buffered output to a new reader.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot wait.
    pub fn wait<const N: usize>(&self, others: [BorrowedFd<'_>; N], input: bool) -> io::Result<Woken<N>> {
        let keeps = self.deliver_kept();
        let end = if input { self.writer() } else { None };
        let taker = if keeps { self.reader().map(|(end, _)| end) } else { None };
        // Without a descriptor to wait for, this polls.
        let input_may_come = input && self.kept.is_some() && end.is_none();
        let timeout = (input_may_come || keeps && taker.is_none()).then_some(RETRY);
        let own = end.as_ref().map(AsFd::as_fd);
        let begun = self.kept.as_ref().map(|kept| borrow(&kept.begun));
        let readable = others.into_iter().chain(own).chain(begun).map(|fd| (fd, PollFlags::IN));
        let writable = taker.as_ref().map(|end| (end.as_fd(), PollFlags::OUT));
        let watched = readable.chain(writable);
        let mut fds: Vec<_> = watched.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)).collect();
        match poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(Woken { others: [false; N], input: false }),
            result => result?,
        };
        let readable = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Woken { others: std::array::from_fn(readable), input: own.is_some() && readable(N) })
    }

    /// Writes buffered output to the other end, as much as it accepts at once. Returns true if some is left.
    fn deliver_kept(&self) -> bool {
        let Some(kept) = &self.kept else { return false };
        let _ = kept.begun.read();
        // The thread that holds the lock is writing, and may leave some.
        kept.backlog.try_lock().is_none_or(|mut backlog| {
            self.deliver(&mut backlog, Duration::ZERO);
            !backlog.is_empty()
        })
    }

    /// The descriptor that provides input, or a new client, now.
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

/// Opens or creates the file at `path`, without blocking.
fn create(path: &Path) -> io::Result<File> {
    // Opening a FIFO without a reader for writing fails, so it is opened for reading, too, and never read.
    let is_fifo = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_fifo());
    // Opening a modem line must not block.
    create_file(path, is_fifo, OFlags::NONBLOCK)
}

/// Waits until `fd` is ready for `direction`, at most `patience`; returns true if it is. A signal ends the wait: it may
/// be the one that stops a vCPU.
fn is_ready(fd: BorrowedFd<'_>, direction: PollFlags, patience: Duration) -> bool {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut fds = [PollFd::from_borrowed_fd(fd, direction)];
    // A hang-up also counts; the read or write then fails.
    matches!(poll(&mut fds, Some(&timeout)), Ok(1..))
}
