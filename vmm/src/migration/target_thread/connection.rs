//! Connections from the source: the control connection, and one for descriptors.

use std::io;
use std::sync::Arc;

use rustls::ServerConfig;
use virtio_devices::Cancel;

use super::listening::Listening;
use super::message::{TargetMessage, Tasks};
use crate::migration::control_channel::ControlChannel;
use crate::migration::transport::{Listener, Stream};
use crate::migration::wire::{Features, Frame, Greeting, OLDEST, Role};

/// Connections from the source.
pub(super) struct SourceConnection {
    /// Listener, until the listening thread has started.
    listener: Option<Listener>,
    /// TLS identity of the target, if connections are encrypted.
    tls: Option<Arc<ServerConfig>>,
    /// Cancels waits for connections and for backends.
    cancel: Cancel,
    listening: Option<Listening>,
    /// Greeting of the source.
    greeting: Option<Greeting>,
    channel: Option<ControlChannel>,
    /// Connection for descriptors, if the source passes any.
    fd_passing: Option<Arc<Stream>>,
}

impl SourceConnection {
    /// Prepares to wait for a source at `listener`.
    pub(super) const fn new(listener: Option<Listener>, tls: Option<Arc<ServerConfig>>, cancel: Cancel) -> Self {
        Self { listener, tls, cancel, listening: None, greeting: None, channel: None, fd_passing: None }
    }

    /// Starts the listening thread.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn listen(&mut self, tasks: &Tasks) -> io::Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let messages = tasks.messages();
        let notify = move |connected| _ = messages.send(TargetMessage::Connected(connected));
        self.listening = Some(Listening::start(listener, self.tls.take(), self.cancel.clone(), notify)?);
        Ok(())
    }

    /// Stops waiting for connections.
    pub(super) fn stop_listening(&mut self) {
        self.listening = None;
    }

    /// Starts the control channel to a source that has sent its greeting.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn open_channel(&mut self, stream: Stream, greeting: Greeting, tasks: &Tasks) -> io::Result<()> {
        let is_unix = stream.unix().is_some();
        let messages = tasks.messages();
        let notify = move |message| _ = messages.send(TargetMessage::Source(message));
        self.channel = Some(ControlChannel::new(stream, false, notify)?);
        // Descriptors cannot be passed over a network.
        let features = if is_unix { greeting.features } else { greeting.features.without(Features::LOCAL) };
        self.greeting = Some(Greeting { features, ..greeting });
        Ok(())
    }

    /// Replies to the greeting of the source; without one, nothing is sent.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(super) fn send_greeting(&mut self) -> io::Result<()> {
        let Some(greeting) = self.greeting else { return Ok(()) };
        let Ok(version) = greeting.common_version() else { return Ok(()) };
        let reply = Greeting { version, oldest: OLDEST, role: Role::Control, ..greeting };
        self.channel.as_mut().map_or(Ok(()), |channel| channel.send_greeting(&reply))
    }

    /// True if both sides are on the same host and pass descriptors instead of copying.
    pub(super) fn is_local(&self) -> bool {
        self.greeting.is_some_and(|greeting| greeting.features.has(Features::LOCAL))
    }

    /// Number of connections for pages.
    pub(super) fn page_connections(&self) -> u8 {
        self.greeting.map_or(0, |greeting| greeting.connections)
    }

    /// Keeps the connection for descriptors. Returns false if there is one.
    pub(super) fn set_passing(&mut self, stream: Stream) -> bool {
        self.fd_passing.replace(Arc::new(stream)).is_none()
    }

    /// Returns the connection for descriptors.
    pub(super) fn fd_passing(&self) -> Option<Arc<Stream>> {
        self.fd_passing.clone()
    }

    /// Canceller of waits for connections and for backends.
    pub(super) const fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Sends a frame; dropped without a channel, or if the connection is lost.
    pub(super) fn send(&mut self, frame: &Frame) {
        let _ = self.channel.as_mut().map(|channel| channel.send(frame));
    }

    /// Sends a keepalive if one is due. Returns true if the source has been silent for too long or the connection is
    /// lost.
    pub(super) fn is_dead(&mut self) -> bool {
        self.channel.as_mut().is_some_and(|channel| channel.keep_alive().is_err() || channel.is_silent())
    }

    /// Closes the connections.
    pub(super) fn close(&mut self) {
        self.cancel.cancel();
        self.channel = None;
        self.fd_passing.iter().for_each(|stream| stream.close());
    }
}
