//! A connection to the peer: requests, answers and time limits.
//!
//! The frontend of the `vhost` crate is not suitable: it keeps reading after a socket time-out, so a peer that never
//! answers would block the thread forever.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::ReentrantMutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use thiserror::Error;

use super::cancel::Cancel;
use super::message::{HEADER, Header, MAX_ANSWER, MAX_FDS, REPLY, Request, u64_at};

/// The time limit for an answer.
pub(crate) const ANSWER: Duration = Duration::from_secs(2);

/// A failed request to a peer.
#[derive(Debug, Error)]
#[error("{request}: {fault}")]
pub(crate) struct PeerError {
    /// The request.
    pub request: Request,
    /// The cause.
    pub fault: Fault,
}

impl PeerError {
    /// True if the peer works, and only refuses a ring as the driver has set it up.
    pub(crate) fn is_about_a_ring(&self) -> bool {
        let request = self.request;
        matches!(request, Request::SET_VRING_NUM | Request::SET_VRING_BASE | Request::SET_VRING_ADDR)
            && matches!(self.fault, Fault::Refused | Fault::NotInMemory)
    }
}

/// The cause of a request's failure.
#[derive(Debug, Error)]
pub(crate) enum Fault {
    /// No answer in time.
    #[error("no answer within {} s", .0.as_secs())]
    NoAnswer(Duration),
    /// The answers together take too long.
    #[error("the handshake is not finished after {} s", .0.as_secs())]
    Slow(Duration),
    /// The request was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The peer has closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer has refused the request.
    #[error("the peer refuses it")]
    Refused,
    /// The ring is not in guest memory; the request was not sent.
    #[error("the ring does not lie in one region of guest memory")]
    NotInMemory,
    /// A transfer through a pipe does not end, or the peer does not read it.
    #[error("the transfer was not complete in time")]
    Unfinished,
    /// A pipe delivers more than this many bytes.
    #[error("more than {0} bytes come")]
    TooLong(usize),
    /// The peer sends a pipe of its own instead of using the one that it was given.
    #[error("the peer wants to use a pipe of its own, which is not supported")]
    OwnPipe,
    /// An error of the pipe.
    #[error("the pipe: {0}")]
    Pipe(io::Error),
    /// A malformed answer.
    #[error("the answer is malformed")]
    Nonsense,
    /// Any other error of the system.
    #[error("{0}")]
    System(io::Error),
}

impl Fault {
    /// True if the connection is as before the request, so that the peer can continue.
    pub(crate) fn keeps_peer(&self) -> bool {
        matches!(self, Self::Refused | Self::Unfinished | Self::TooLong(_) | Self::OwnPipe | Self::Pipe(_))
    }
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            errno => Self::System(errno.into()),
        }
    }
}

/// An answer: its payload, and the descriptor that came with it.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The payload.
    pub payload: Vec<u8>,
    /// The first descriptor.
    pub fd: Option<OwnedFd>,
}

/// Held from a request to its answer, so that no other thread's answer is mistaken for it. A thread may hold it
/// several times.
pub(crate) type ExchangeLock = Arc<ReentrantMutex<()>>;

/// A connection. It is useless after an error, because a late answer would be mistaken for another.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Arc<UnixStream>,
    turn: ExchangeLock,
    /// The time limit since [`Self::allow`], and the deadline.
    allowed: (Duration, Instant),
    /// Ends every wait.
    cancel: Option<Cancel>,
}

impl Connection {
    /// Over a connected socket. `cancel` ends every wait for the other end.
    pub(crate) fn new(stream: UnixStream, cancel: Option<Cancel>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let allowed = (Duration::ZERO, Instant::now());
        Ok(Self { stream: Arc::new(stream), turn: ExchangeLock::default(), allowed, cancel })
    }

    /// The same connection, with a time limit of its own, for another thread or for requests of another kind. They
    /// share the [turn](Self::turn).
    pub(crate) fn again(&self, until: Instant) -> Self {
        let allowed = (until.saturating_duration_since(Instant::now()), until);
        Self { stream: Arc::clone(&self.stream), turn: Arc::clone(&self.turn), allowed, cancel: None }
    }

    /// The lock that a thread holds from a request to its answer.
    pub(crate) fn turn(&self) -> ExchangeLock {
        Arc::clone(&self.turn)
    }

    /// Closes the connection for all of its users.
    pub(crate) fn hang_up(&self) {
        // An error means that the peer has closed it already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Ignores the [`Cancel`] from now on, so that only deadlines end a wait.
    pub(crate) fn forget_cancel(&mut self) {
        self.cancel = None;
    }

    /// The descriptors of a wait for `events`.
    fn polled(&self, events: PollFlags) -> Vec<PollFd<'_>> {
        let cancel = self.cancel.iter().map(|cancel| PollFd::from_borrowed_fd(cancel.fd(), PollFlags::IN));
        std::iter::once(PollFd::new(&*self.stream, events)).chain(cancel).collect()
    }

    /// Limits all further waits, until the next call, to `time`.
    pub(crate) fn allow(&mut self, time: Duration) {
        self.allowed = (time, Instant::now() + time);
    }

    /// Sends a request.
    pub(crate) fn send(
        &mut self,
        request: Request,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), PeerError> {
        let _turn = self.turn.lock();
        self.try_send(request, flags, payload, fds).map_err(|fault| PeerError { request, fault })
    }

    fn try_send(&self, request: Request, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let len = u32::try_from(payload.len()).map_err(|_| Fault::Nonsense)?;
        let message = [Header { request: request.0, flags, len }.bytes(), payload.to_vec()].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Fault::System(io::ErrorKind::ArgumentListTooLong.into()));
        }
        let until = Instant::now() + ANSWER;
        let mut rest = message.as_slice();
        while !rest.is_empty() {
            match sendmsg(&*self.stream, &[IoSlice::new(rest)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    rest = rest.get(sent..).unwrap_or_default();
                    // The descriptors went with the first byte.
                    ancillary.clear();
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, until)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Waits until the peer acknowledges `request`.
    pub(crate) fn acknowledged(&mut self, request: Request) -> Result<(), PeerError> {
        let answer = self.answer(request)?;
        match u64_at(&answer.payload, 0) {
            Some(0) => Ok(()),
            Some(_) => Err(PeerError { request, fault: Fault::Refused }),
            None => Err(PeerError { request, fault: Fault::Nonsense }),
        }
    }

    /// Waits for the answer to `request`.
    pub(crate) fn answer(&mut self, request: Request) -> Result<Answer, PeerError> {
        self.try_answer(request).map_err(|fault| PeerError { request, fault })
    }

    fn try_answer(&self, request: Request) -> Result<Answer, Fault> {
        let until = Instant::now() + ANSWER;
        let mut fd = None;
        let mut header = [0; HEADER];
        self.fill(&mut header, &mut fd, until)?;
        let header = Header::parse(header).ok_or(Fault::Nonsense)?;
        let len = header.len as usize;
        if header.request != request.0 || header.flags & REPLY == 0 || len > MAX_ANSWER {
            return Err(Fault::Nonsense);
        }
        let mut payload = vec![0; len];
        self.fill(&mut payload, &mut fd, until)?;
        Ok(Answer { payload, fd })
    }

    fn fill(&self, mut bytes: &mut [u8], fd: &mut Option<OwnedFd>, until: Instant) -> Result<(), Fault> {
        while !bytes.is_empty() {
            match receive(self.stream.as_fd(), bytes, fd) {
                Ok(0) => return Err(Fault::Closed),
                Ok(received) => bytes = bytes.get_mut(received..).unwrap_or_default(),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, until)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Waits up to `time` for the peer to send something or to close the connection, or for the end of all waits.
    /// Returns true if one of them happened.
    pub(crate) fn is_readable_within(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let waited = poll(&mut self.polled(PollFlags::IN), Timespec::try_from(left).ok().as_ref());
            match waited {
                Ok(ready) => return ready > 0,
                Err(Errno::INTR) if !left.is_zero() => {}
                Err(_) => return false,
            }
        }
    }

    /// Waits until the socket can be read or written.
    fn wait(&self, events: PollFlags, until: Instant) -> Result<(), Fault> {
        let (time, end) = self.allowed;
        let left = until.min(end).saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(if end < until { Fault::Slow(time) } else { Fault::NoAnswer(ANSWER) });
        }
        let left = Timespec::try_from(left).ok();
        let mut polled = self.polled(events);
        match poll(&mut polled, left.as_ref()) {
            Ok(_) if polled.get(1).is_some_and(|cancel| !cancel.revents().is_empty()) => Err(Fault::Cancelled),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// True if the peer is connected. A peer that sends something unasked counts as lost.
    pub(crate) fn is_alive(&self) -> bool {
        let _turn = self.turn.lock();
        let mut byte = [0];
        matches!(rustix::net::recv(&*self.stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT), Err(Errno::AGAIN))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Receives the available bytes. The first descriptor goes to `fd`, if that has none; all others are closed at once, so
/// that a peer cannot exhaust this process's descriptors with an answer in many pieces.
pub(crate) fn receive(from: BorrowedFd<'_>, bytes: &mut [u8], fd: &mut Option<OwnedFd>) -> Result<usize, Errno> {
    // The kernel drops descriptors for which there is no room here, before they are open.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            for received in received {
                fd.get_or_insert(received);
            }
        }
    }
    Ok(received.bytes)
}
