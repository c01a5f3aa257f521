//! The control channel of a migration: a reader thread, and writes by the owner.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use virtio_devices::{NewThread, Thread};

use super::incoming::{Incoming, Item, ReadError};
use super::transport::Stream;
use super::wire::{Document, Frame, Greeting, Kind, MAX_OFFER, WireError};
use crate::threads::{self, ThreadKind};

/// Stack of the reader thread, in bytes.
pub(crate) const STACK: usize = 512 << 10;
/// Interval at which each side sends a keepalive.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(2);
/// Silence after which a peer counts as lost.
pub(crate) const SILENCE: Duration = Duration::from_secs(8);
/// Limit on a peer's control frames, without document chunks and keepalives: twice what the protocol needs.
const MOST_FRAMES: usize = 16;

/// Message from the peer.
#[derive(Debug)]
pub(crate) enum Heard {
    /// The target's greeting.
    Greeting(Greeting),
    /// A complete offer.
    Offer(Vec<u8>),
    /// A complete machine state.
    State(Vec<u8>),
    /// Any other frame.
    Frame(Frame),
    /// The connection is lost, with the reason.
    Lost(String),
}

/// Control channel to the peer.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Arc<Stream>,
    /// Time of the peer's last message, in milliseconds since `began`.
    heard: Arc<AtomicU64>,
    began: Instant,
    said: Instant,
    thread: Option<Thread>,
}

impl Link {
    /// Starts the reader thread of `stream`, which calls `tell` for each message. `is_awaited`: the peer sends a
    /// greeting first.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(crate) fn new(stream: Stream, is_awaited: bool, tell: impl FnMut(Heard) + Send + 'static) -> io::Result<Self> {
        let (stream, heard, began) = (Arc::new(stream), Arc::new(AtomicU64::new(0)), Instant::now());
        let listens = Listens { stream: Arc::clone(&stream), heard: Arc::clone(&heard), began };
        let run = move || listens.run(is_awaited, tell);
        let kind = ThreadKind::Migration;
        let thread = threads::start(kind, NewThread::new("migration-link", STACK, run))?;
        Ok(Self { stream, heard, began, said: Instant::now(), thread: Some(thread) })
    }

    /// Sends a greeting.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(crate) fn greet(&mut self, greeting: &Greeting) -> io::Result<()> {
        self.said = Instant::now();
        (&*self.stream).write_all(&greeting.bytes())
    }

    /// Sends a frame.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(crate) fn say(&mut self, frame: &Frame) -> io::Result<()> {
        self.said = Instant::now();
        (&*self.stream).write_all(&frame.bytes())
    }

    /// Sends a frame that must not be sent twice.
    ///
    /// # Errors
    ///
    /// Fails if not all of it was sent: with true if none of it was.
    pub(crate) fn say_once(&mut self, frame: &Frame) -> Result<(), bool> {
        self.said = Instant::now();
        let bytes = frame.bytes();
        let mut sent = 0;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            match (&*self.stream).write(rest) {
                Ok(0) => return Err(sent == 0),
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(sent == 0),
            }
        }
        Ok(())
    }

    /// Sends a keepalive if nothing was sent for a while.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(crate) fn keep_alive(&mut self) -> io::Result<()> {
        if self.said.elapsed() < KEEPALIVE { Ok(()) } else { self.say(&Frame::Keepalive) }
    }

    /// True if the peer has been silent for too long.
    pub(crate) fn is_silent(&self) -> bool {
        let last = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last) > SILENCE
    }

    /// Closes the connection and ends the reader thread.
    pub(crate) fn close(&mut self) {
        self.stream.close();
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// The reader thread.
struct Listens {
    stream: Arc<Stream>,
    heard: Arc<AtomicU64>,
    began: Instant,
}

impl Listens {
    fn run(self, is_awaited: bool, mut tell: impl FnMut(Heard)) {
        let lost = match self.listen(is_awaited, &mut tell) {
            Ok(()) => "the peer sent more than there is to say".to_string(),
            Err(ReadError::Lost(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                "the peer closed the connection".to_string()
            }
            Err(error) => error.to_string(),
        };
        tell(Heard::Lost(lost));
    }

    fn listen(&self, is_awaited: bool, tell: &mut impl FnMut(Heard)) -> Result<(), ReadError> {
        let mut incoming = Incoming::new(&*self.stream);
        if is_awaited {
            let greeting = incoming.greeting()?;
            self.note();
            tell(Heard::Greeting(greeting));
        }
        let (mut offer, mut state) = (Document::new(MAX_OFFER), Document::default());
        for _ in 0..MOST_FRAMES {
            let frame = loop {
                let Item::Frame(frame) = incoming.receive()? else {
                    return Err(WireError::Field("connection").into());
                };
                self.note();
                match frame {
                    Frame::Keepalive => {}
                    Frame::Offer(part) if !offer.add(&part)? => {}
                    Frame::State(part) if !state.add(&part)? => {}
                    frame => break frame,
                }
            };
            tell(match frame.kind() {
                Kind::Offer => Heard::Offer(offer.take()),
                Kind::State => Heard::State(state.take()),
                _ => Heard::Frame(frame),
            });
        }
        Ok(())
    }

    fn note(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard.store(now, Ordering::Relaxed);
    }
}
