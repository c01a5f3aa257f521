//! A connection whose greeting is not complete.

use std::io::{self, Read as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustls::ServerConfig;

use crate::migration::tls::Accepting;
use crate::migration::transport::Stream;
use crate::migration::wire::{Frame, GREETING, Greeting};

/// Time for the first byte. A source sends its greeting as soon as it has connected.
const SILENCE: Duration = Duration::from_secs(1);
/// Time for all further bytes: the TLS handshake, if any, and the greeting.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// A peer that may be a source.
#[derive(Debug)]
pub(super) struct Stranger {
    stream: Stream,
    tls: Option<Accepting>,
    greeting: [u8; GREETING],
    filled: usize,
    began: Instant,
    /// Arrival of the first byte.
    spoke: Option<Instant>,
}

impl Stranger {
    /// Wraps an accepted, non-blocking `stream`.
    ///
    /// # Errors
    ///
    /// Fails if TLS cannot be set up.
    pub(super) fn new(stream: Stream, tls: Option<&Arc<ServerConfig>>, now: Instant) -> io::Result<Self> {
        let tls = tls.map(Accepting::new).transpose()?;
        Ok(Self { stream, tls, greeting: [0; GREETING], filled: 0, began: now, spoke: None })
    }

    pub(super) const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the events to poll for.
    pub(super) fn awaits(&self) -> PollFlags {
        let room = self.tls.as_ref().is_some_and(Accepting::awaits_room);
        if room { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    /// True until the first byte arrives.
    pub(super) const fn is_silent(&self) -> bool {
        self.spoke.is_none()
    }

    /// Time since the connection was accepted.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    /// True once a time limit has passed.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        let (since, most) = self.spoke.map_or((self.began, SILENCE), |spoke| (spoke, PATIENCE));
        now.saturating_duration_since(since) >= most
    }

    /// Reads once. Returns the greeting when it is complete.
    ///
    /// # Errors
    ///
    /// Fails with one line that says why the peer is not a source.
    pub(super) fn advance(&mut self, now: Instant) -> Result<Option<Greeting>, String> {
        let place = self.greeting.get_mut(self.filled..).unwrap_or_default();
        let read = match (&mut self.tls, &self.stream) {
            (Some(tls), Stream::Tcp(stream)) => tls.advance(stream, place),
            (_, stream) => match { stream }.read(place) {
                Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection")),
                read => read,
            },
        };
        match read {
            Ok(count) => self.filled += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(None);
            }
            Err(error) => return Err(error.to_string()),
        }
        self.spoke.get_or_insert(now);
        if self.filled < GREETING {
            return Ok(None);
        }
        let greeting = Greeting::read(&self.greeting).map_err(|error| error.to_string())?;
        greeting.common_version().map_err(|error| error.to_string())?;
        if greeting.connections == 0 {
            return Err("a source without connections for pages".to_string());
        }
        Ok(Some(greeting))
    }

    /// Returns the connection, which blocks from now on.
    ///
    /// # Errors
    ///
    /// Fails if the socket's mode cannot be changed.
    pub(super) fn into_stream(self) -> io::Result<Stream> {
        self.stream.set_nonblocking(false)?;
        Ok(match (self.tls, self.stream) {
            (Some(tls), Stream::Tcp(stream)) => Stream::Tls(Box::new(tls.into_session(stream))),
            (_, stream) => stream,
        })
    }

    /// Sends the reason to the peer if the socket has room, and closes the connection.
    pub(super) fn refuse(mut self, why: &str) {
        let frame = Frame::Failed(why.to_string()).bytes();
        match (&mut self.tls, &self.stream) {
            (Some(tls), Stream::Tcp(stream)) => tls.send_last(stream, &frame),
            // The connection is closed in any case.
            (_, stream) => _ = { stream }.write(&frame),
        }
        self.stream.close();
    }
}
