//! The transfer of a peer's own state besides its rings, such as connections that it holds for the guest, to another
//! peer (vhost-user protocol, "Migrating back-end state"). It goes through a pipe, and only the peers interpret it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use super::connection::{ANSWER, Fault, PeerError};
use super::message::*;
use super::peer::Peer;
use crate::transport::features::has;

/// The longest state of a peer, in bytes.
pub const MAX_DEVICE_STATE: usize = 16 << 20;

/// Directions of a transfer.
const SAVE: u32 = 0;
const LOAD: u32 = 1;
/// The only phase in the protocol: the rings do not run.
const STOPPED: u32 = 0;
/// In an answer: the reason for a refusal; 0 if there is none.
const REFUSAL: u64 = 0xff;
/// The most bytes that are read at once.
const PIECE: usize = 64 << 10;

impl Peer {
    /// True if the peer has a state that can be transferred.
    pub(crate) fn has_state(&self) -> bool {
        has(self.protocol, PROTOCOL_F_DEVICE_STATE)
    }

    /// Reads the state of the peer, whose rings do not run, before `until`. [`Self::check_state`] checks that it is
    /// complete.
    ///
    /// # Errors
    ///
    /// See [`Fault::keeps_peer`] for those after which the peer can continue.
    pub(crate) fn save_state(&mut self, until: Instant) -> Result<Vec<u8>, PeerError> {
        let fault = |fault| PeerError { request: Request::SET_DEVICE_STATE_FD, fault };
        let (ours, theirs) = pipe().map_err(fault)?;
        self.transfer(SAVE, theirs, until)?;
        let state = read_to_end(&ours, until).map_err(fault)?;
        // A process that ends closes its pipe, too.
        if self.is_alive() { Ok(state) } else { Err(fault(Fault::Closed)) }
    }

    /// Sends the state of another peer to this one, whose rings do not run, before `until`. Returns once it has loaded
    /// all of it.
    ///
    /// # Errors
    ///
    /// Fails if the peer does not load it. Its state is undefined then.
    pub(crate) fn load_state(&mut self, state: &[u8], until: Instant) -> Result<(), PeerError> {
        let fault = |fault| PeerError { request: Request::SET_DEVICE_STATE_FD, fault };
        let (theirs, ours) = pipe().map_err(fault)?;
        self.transfer(LOAD, theirs, until)?;
        write_all(&ours, state, until).map_err(fault)?;
        // The end of the pipe marks the end of the state.
        drop(ours);
        self.check_state(until)
    }

    /// Asks the peer if the transfer was complete. A peer whose state was saved may exit after this.
    pub(crate) fn check_state(&mut self, until: Instant) -> Result<(), PeerError> {
        let request = Request::CHECK_DEVICE_STATE;
        let time = until.saturating_duration_since(Instant::now());
        self.connection.allow(time.max(ANSWER));
        self.connection.send(request, 0, &[], &[])?;
        // It may still process what it has read.
        if !self.connection.is_readable_within(time) {
            return Err(PeerError { request, fault: Fault::NoAnswer(time) });
        }
        self.acknowledged(request)
    }

    /// Begins a transfer through `pipe`, the peer's end.
    fn transfer(&mut self, direction: u32, pipe: OwnedFd, until: Instant) -> Result<(), PeerError> {
        let request = Request::SET_DEVICE_STATE_FD;
        self.connection.allow(until.saturating_duration_since(Instant::now()));
        self.connection.send(request, 0, &numbers(&[direction, STOPPED]), &[pipe.as_fd()])?;
        let answer = self.connection.answer(request)?;
        let fault = match u64_at(&answer.payload, 0) {
            None => Fault::Nonsense,
            Some(said) if said & REFUSAL != 0 => Fault::Refused,
            // This process's end would be shared with the peer, which could make reads of it block forever.
            Some(said) if said & NO_FD == 0 => Fault::OwnPipe,
            Some(_) => return Ok(()),
        };
        Err(PeerError { request, fault })
    }
}

/// Both ends of a pipe: the reading and the writing one.
fn pipe() -> Result<(OwnedFd, OwnedFd), Fault> {
    pipe_with(PipeFlags::CLOEXEC).map_err(|errno| Fault::Pipe(errno.into()))
}

/// Makes reads and writes of this process's end non-blocking. The peer's end has flags of its own.
fn set_nonblocking(pipe: &OwnedFd) -> Result<(), Fault> {
    rustix::fs::fcntl_setfl(pipe, OFlags::NONBLOCK).map_err(|errno| Fault::Pipe(errno.into()))
}

/// Reads until the other end is closed. The allocation follows the bytes that have arrived.
fn read_to_end(pipe: &OwnedFd, until: Instant) -> Result<Vec<u8>, Fault> {
    set_nonblocking(pipe)?;
    let (mut state, mut piece) = (Vec::new(), vec![0; PIECE]);
    loop {
        match rustix::io::read(pipe, &mut piece) {
            Ok(0) => return Ok(state),
            Ok(count) if state.len() + count > MAX_DEVICE_STATE => return Err(Fault::TooLong(MAX_DEVICE_STATE)),
            Ok(count) => state.extend_from_slice(piece.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN) => wait(pipe, PollFlags::IN, until)?,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Fault::Pipe(errno.into())),
        }
    }
}

/// Writes all of `state`.
fn write_all(pipe: &OwnedFd, mut state: &[u8], until: Instant) -> Result<(), Fault> {
    set_nonblocking(pipe)?;
    while !state.is_empty() {
        match rustix::io::write(pipe, state) {
            Ok(count) => state = state.get(count..).unwrap_or_default(),
            Err(Errno::AGAIN) => wait(pipe, PollFlags::OUT, until)?,
            Err(Errno::INTR) => {}
            Err(Errno::PIPE) => {
                let what = "the peer has closed its end before it had all of the state";
                return Err(Fault::Pipe(io::Error::new(io::ErrorKind::BrokenPipe, what)));
            }
            Err(errno) => return Err(Fault::Pipe(errno.into())),
        }
    }
    Ok(())
}

/// Waits until this process's end is ready.
fn wait(pipe: &OwnedFd, events: PollFlags, until: Instant) -> Result<(), Fault> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Fault::Unfinished);
    }
    let time = Timespec::try_from(left.max(Duration::from_millis(1))).ok();
    match poll(&mut [PollFd::new(pipe, events)], time.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Fault::Pipe(errno.into())),
    }
}
