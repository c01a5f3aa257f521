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
/// Silence after which a peer counts as disconnected.
pub(crate) const SILENCE: Duration = Duration::from_secs(8);
/// Limit on a peer's control frames, without document chunks and keepalives: twice what the protocol needs.
const MOST_FRAMES: usize = 16;

/// Message from the peer.
#[derive(Debug)]
pub(crate) enum PeerMessage {
    /// The target's greeting.
    Greeting(Greeting),
    /// A complete offer.
    Offer(Vec<u8>),
    /// A complete machine state.
    State(Vec<u8>),
    /// Any other frame.
    Frame(Frame),
    /// The connection is closed, with the reason.
    Disconnected(String),
}

/// Control channel to the peer.
#[derive(Debug)]
pub(crate) struct ControlChannel {
    stream: Arc<Stream>,
    /// Time of the peer's last message, in milliseconds since `began`.
    last_received: Arc<AtomicU64>,
    began: Instant,
    last_sent: Instant,
    thread: Option<Thread>,
}

impl ControlChannel {
    /// Starts the reader thread of `stream`, which calls `notify` for each message. `has_greeting`: the peer sends a
    /// greeting first.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(crate) fn new(
        stream: Stream,
        has_greeting: bool,
        notify: impl FnMut(PeerMessage) + Send + 'static,
    ) -> io::Result<Self> {
        let (stream, last_received, began) = (Arc::new(stream), Arc::new(AtomicU64::new(0)), Instant::now());
        let reader = FrameReader { stream: Arc::clone(&stream), last_received: Arc::clone(&last_received), began };
        let run = move || reader.run(has_greeting, notify);
        let kind = ThreadKind::Migration;
        let thread = threads::start(kind, NewThread::new("migration-link", STACK, run))?;
        Ok(Self { stream, last_received, began, last_sent: Instant::now(), thread: Some(thread) })
    }

    /// Sends a greeting.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(crate) fn send_greeting(&mut self, greeting: &Greeting) -> io::Result<()> {
        self.last_sent = Instant::now();
        (&*self.stream).write_all(&greeting.bytes())
    }

    /// Sends a frame.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(crate) fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.last_sent = Instant::now();
        (&*self.stream).write_all(&frame.bytes())
    }

    /// Sends a frame that must not be sent twice.
    ///
    /// # Errors
    ///
    /// Fails if not all of it was sent: with true if none of it was.
    pub(crate) fn send_once(&mut self, frame: &Frame) -> Result<(), bool> {
        self.last_sent = Instant::now();
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
        if self.last_sent.elapsed() < KEEPALIVE { Ok(()) } else { self.send(&Frame::Keepalive) }
    }

    /// True if the peer has been silent for too long.
    pub(crate) fn is_silent(&self) -> bool {
        let last = Duration::from_millis(self.last_received.load(Ordering::Relaxed));
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

impl Drop for ControlChannel {
    fn drop(&mut self) {
        self.close();
    }
}

/// The reader thread.
struct FrameReader {
    stream: Arc<Stream>,
    last_received: Arc<AtomicU64>,
    began: Instant,
}

impl FrameReader {
    fn run(self, has_greeting: bool, mut notify: impl FnMut(PeerMessage)) {
        let reason = match self.read(has_greeting, &mut notify) {
            Ok(()) => "the peer sent more frames than a migration has".to_string(),
            Err(ReadError::Lost(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                "the peer closed the connection".to_string()
            }
            Err(error) => error.to_string(),
        };
        notify(PeerMessage::Disconnected(reason));
    }

    fn read(&self, has_greeting: bool, notify: &mut impl FnMut(PeerMessage)) -> Result<(), ReadError> {
        let mut incoming = Incoming::new(&*self.stream);
        if has_greeting {
            let greeting = incoming.greeting()?;
            self.mark_received();
            notify(PeerMessage::Greeting(greeting));
        }
        let (mut offer, mut state) = (Document::new(MAX_OFFER), Document::default());
        for _ in 0..MOST_FRAMES {
            let frame = loop {
                let Item::Frame(frame) = incoming.receive()? else {
                    return Err(WireError::Field("connection").into());
                };
                self.mark_received();
                match frame {
                    Frame::Keepalive => {}
                    Frame::Offer(part) if !offer.add(&part)? => {}
                    Frame::State(part) if !state.add(&part)? => {}
                    frame => break frame,
                }
            };
            notify(match frame.kind() {
                Kind::Offer => PeerMessage::Offer(offer.take()),
                Kind::State => PeerMessage::State(state.take()),
                _ => PeerMessage::Frame(frame),
            });
        }
        Ok(())
    }

    fn mark_received(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_received.store(now, Ordering::Relaxed);
    }
}
