//! Connections from the source to its target: first the control connection, then those for pages or descriptors.
//! Background threads make them, so that the source's thread stays responsive.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use virtio_devices::Cancel;
use vm_api::migration::SendMigration;

use super::message::{SourceMessage, Tasks};
use crate::migration::commands::SourceReply;
use crate::migration::control_channel::ControlChannel;
use crate::migration::event_loop::PhaseTimer;
use crate::migration::fd_passing;
use crate::migration::transport::{Address, Route, Stream};
use crate::migration::wire::{Features, Frame, Greeting, OLDEST, Part, Role, VERSION, parts};
use crate::threads::ThreadKind;

/// Time to make all connections for pages.
pub(super) const ALL_CONNECTIONS: Duration = Duration::from_secs(60);

/// Hint for a target that sends no greeting.
const WANTS_TLS: &str = "; if it was given a tls_dir, give this side one, too";

/// Connections to the target.
pub(super) struct TargetConnection {
    address: Address,
    /// TLS identity of the source, if connections are encrypted.
    tls: Option<Arc<ClientConfig>>,
    /// Greeting of the control connection.
    greeting: Greeting,
    /// Features of the target, once it has greeted.
    target_features: Features,
    /// Descriptors to pass to a target on the same host.
    fds: Option<Vec<OwnedFd>>,
    /// Cancels connecting.
    cancel: Cancel,
    /// True until the address is resolved and the first connection is made.
    is_connecting: bool,
    /// Request to end the migration, deferred until connecting has finished.
    deferred: Option<SourceReply>,
    /// Address of the target, once resolved.
    route: Option<Route>,
    channel: Option<ControlChannel>,
    /// Time at which the greeting was sent.
    greeted: Option<Instant>,
    /// Time until the target's greeting arrived.
    rtt: Duration,
    /// Connection whose descriptors the target may not have received yet.
    fd_passing: Option<Stream>,
}

/// The error of a first connection to `address`, with what to do.
fn not_connected(address: &Address, error: &io::Error) -> String {
    let address = match address {
        Address::Tcp(host, port) => format!("tcp:{host}:{port}"),
        Address::Unix(path) => format!("unix:{}", path.display()),
    };
    let what = match (error.kind(), address.starts_with("tcp:")) {
        (io::ErrorKind::ConnectionRefused, _) | (io::ErrorKind::NotFound, false) => {
            "; start vm.receive-migration there first"
        }
        (io::ErrorKind::PermissionDenied, true) => "; --landlock keeps this program from TCP: use unix:<path>",
        _ => "",
    };
    format!("cannot connect to {address}: {error}{what}")
}

impl TargetConnection {
    /// Prepares connections to `address`.
    pub(super) fn new(
        config: &SendMigration,
        address: Address,
        tls: Option<Arc<ClientConfig>>,
        fds: Option<Vec<OwnedFd>>,
        cancel: Cancel,
    ) -> Self {
        let greeting = Greeting {
            version: VERSION,
            oldest: OLDEST,
            role: Role::Control,
            // The configuration has a lower limit.
            connections: u8::try_from(config.connections).unwrap_or(u8::MAX),
            features: if config.local { Features::KNOWN } else { Features::KNOWN.without(Features::LOCAL) },
            session: [0; 16],
        };
        Self {
            address,
            tls,
            greeting,
            target_features: Features::default(),
            fds,
            cancel,
            is_connecting: true,
            deferred: None,
            route: None,
            channel: None,
            greeted: None,
            rtt: Duration::ZERO,
            fd_passing: None,
        }
    }

    /// Connects to the target in a thread.
    pub(super) fn connect(&self, tasks: &mut Tasks) {
        let (address, tls, cancel) = (self.address.clone(), self.tls.clone(), self.cancel.clone());
        let named = address.clone();
        let work = move || {
            let connected = Route::find(address, tls).and_then(|route| {
                let stream = route.connect(&cancel)?;
                Ok((route, stream))
            });
            connected.map_err(|error| not_connected(&named, &error))
        };
        tasks.spawn_or_fail(ThreadKind::Migration, work, SourceMessage::Connected);
    }

    /// Ends connecting early, and keeps `reply` until then. Gives it back once connecting has ended.
    pub(super) fn defer(&mut self, reply: SourceReply) -> Option<SourceReply> {
        if !self.is_connecting {
            return Some(reply);
        }
        self.cancel.cancel();
        self.deferred.get_or_insert(reply);
        None
    }

    /// Ends the phase of connecting. Returns the deferred request to end the migration, if any.
    pub(super) const fn end_connecting(&mut self) -> Option<SourceReply> {
        self.is_connecting = false;
        self.deferred.take()
    }

    /// Starts the control channel.
    ///
    /// # Errors
    ///
    /// Fails if the host has no random numbers or no thread.
    pub(super) fn open_channel(&mut self, route: Route, stream: Stream, tasks: &Tasks) -> io::Result<()> {
        rustix::rand::getrandom(&mut self.greeting.session, rustix::rand::GetRandomFlags::empty())?;
        let messages = tasks.messages();
        let notify = move |message| _ = messages.send(SourceMessage::Target(message));
        self.channel = Some(ControlChannel::new(stream, true, notify)?);
        self.route = Some(route);
        Ok(())
    }

    /// Sends the greeting. Without a channel, nothing is sent.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(super) fn send_greeting(&mut self) -> io::Result<()> {
        self.greeted = Some(Instant::now());
        self.channel.as_mut().map_or(Ok(()), |channel| channel.send_greeting(&self.greeting))
    }

    /// True if `greeting` is the target's reply to the greeting of this source.
    pub(super) fn is_reply(&self, greeting: &Greeting) -> bool {
        greeting.session == self.greeting.session && greeting.role == Role::Control
    }

    /// Makes all other connections in a thread, after the target's greeting.
    ///
    /// # Errors
    ///
    /// Fails if descriptors cannot be passed to this target.
    pub(super) fn open_others(
        &mut self,
        target: Greeting,
        timer: &mut PhaseTimer,
        tasks: &mut Tasks,
    ) -> Result<(), String> {
        self.target_features = target.features;
        if let Some(fds) = self.fds.take() {
            if !target.features.has(Features::LOCAL) {
                return Err("local=true: the target cannot receive memory as descriptors; leave local out".to_string());
            }
            self.pass_descriptors(fds, timer, tasks);
        } else {
            self.rtt = self.greeted.map_or(Duration::ZERO, |greeted| greeted.elapsed());
            self.open_page_connections(timer, tasks);
        }
        Ok(())
    }

    fn open_page_connections(&self, timer: &mut PhaseTimer, tasks: &mut Tasks) {
        let greetings: Vec<_> = (0..self.greeting.connections).map(|index| self.page_greeting(index)).collect();
        let Some((route, cancel)) = self.route(timer) else { return };
        let connect = move |greeting: &[u8]| {
            let stream = route.connect(&cancel)?;
            io::Write::write_all(&mut &stream, greeting)?;
            Ok(stream)
        };
        let work = move || {
            let streams: io::Result<_> = greetings.iter().map(|greeting| connect(greeting)).collect();
            streams.map_err(|error| error.to_string())
        };
        tasks.spawn_or_fail(ThreadKind::Migration, work, SourceMessage::PageConnections);
    }

    fn pass_descriptors(&self, fds: Vec<OwnedFd>, timer: &mut PhaseTimer, tasks: &mut Tasks) {
        let greeting = self.page_greeting(0);
        let Some((route, cancel)) = self.route(timer) else { return };
        let pass = move || {
            let stream = route.connect(&cancel)?;
            io::Write::write_all(&mut &stream, &greeting)?;
            stream
                .unix()
                .map_or_else(|| Err(io::ErrorKind::Unsupported.into()), |unix| fd_passing::send(unix, &fds))?;
            Ok(stream)
        };
        let work = move || pass().map_err(|error: io::Error| error.to_string());
        tasks.spawn_or_fail(ThreadKind::Migration, work, SourceMessage::DescriptorsPassed);
    }

    /// Returns the greeting of connection `index` for pages or descriptors.
    fn page_greeting(&self, index: u8) -> Vec<u8> {
        Greeting { role: Role::Pages(index), ..self.greeting }.bytes().into()
    }

    /// Returns the address for further connections, and starts their deadline.
    fn route(&self, timer: &mut PhaseTimer) -> Option<(Route, Cancel)> {
        timer.extend(ALL_CONNECTIONS);
        Some((self.route.clone()?, self.cancel.clone()))
    }

    /// Keeps a connection whose descriptors the target may not have received yet.
    pub(super) fn keep(&mut self, stream: Stream) {
        self.fd_passing = Some(stream);
    }

    /// Sends a frame; dropped without a channel.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost.
    pub(super) fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.channel.as_mut().map_or(Ok(()), |channel| channel.send(frame))
    }

    /// Sends Go, with the time since the guest was stopped, in microseconds, if the target knows that.
    ///
    /// # Errors
    ///
    /// Fails if not all of it was sent: with true if none of it was.
    pub(super) fn send_go(&mut self, stopped_us: Option<u64>) -> Result<(), bool> {
        let go = Frame::Go(stopped_us.filter(|_| self.target_features.has(Features::DOWNTIME)));
        self.channel.as_mut().map_or(Err(true), |channel| channel.send_once(&go))
    }

    /// Sends a document in frames of `kind`.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost, or the phase's deadline passes.
    pub(super) fn send_document(
        &mut self,
        kind: fn(Part) -> Frame,
        bytes: &[u8],
        timer: &PhaseTimer,
    ) -> io::Result<()> {
        let channel = self.channel.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the target receives it too slowly");
        parts(bytes).try_for_each(|part| if timer.is_past() { Err(late()) } else { channel.send(&kind(part)) })
    }

    /// Sends a keepalive if one is due. Returns true if the target has been silent for too long or the connection is
    /// lost; `None` without a channel.
    pub(super) fn is_dead(&mut self) -> Option<bool> {
        let channel = self.channel.as_mut()?;
        Some(channel.keep_alive().is_err() || channel.is_silent())
    }

    /// Returns what to add to the error of a connection that ended before the target's greeting.
    pub(super) fn tls_hint(&self) -> &'static str {
        if self.tls.is_none() && !self.address.is_unix() { WANTS_TLS } else { "" }
    }

    /// Time that the target took for its greeting.
    pub(super) const fn rtt(&self) -> Duration {
        self.rtt
    }

    /// Closes the control connection, and cancels those that are being made.
    pub(super) fn close(&mut self) {
        self.cancel.cancel();
        (self.channel, self.fd_passing) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_cannot_be_reached_is_named_with_a_remedy() {
        let tcp = Address::Tcp("host".to_string(), 7000);
        let said = |address: &Address, kind: io::ErrorKind| not_connected(address, &kind.into());
        let refused = said(&tcp, io::ErrorKind::ConnectionRefused);
        assert_eq!(
            refused,
            "cannot connect to tcp:host:7000: connection refused; start vm.receive-migration there first"
        );
        assert!(said(&tcp, io::ErrorKind::PermissionDenied).contains("--landlock keeps this program from TCP"));
        let absent = said(&Address::Unix("/run/x".into()), io::ErrorKind::NotFound);
        assert!(absent.starts_with("cannot connect to unix:/run/x: ") && absent.ends_with("there first"), "{absent}");
    }
}
