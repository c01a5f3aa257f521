//! Connections from the source to its target: first the control connection, then those for pages or descriptors.
//! Background threads make them, so that the source's thread stays responsive.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use virtio_devices::Cancel;

use super::{Conductor, Inbox};
use crate::migration::course::Conducts as _;
use crate::migration::handover::sender::{Event, Stage};
use crate::migration::link::Link;
use crate::migration::pages_out::PagesOut;
use crate::migration::passing;
use crate::migration::transport::{Route, Stream};
use crate::migration::wire::{Features, Greeting, OLDEST, Role, VERSION};

/// Time to make all connections for pages.
const ALL_CONNECTIONS: Duration = Duration::from_secs(60);

impl Conductor {
    /// Connects to the target in a thread.
    pub(super) fn connect(&mut self) {
        let (address, tls, cancel) = (self.job.address.clone(), self.job.tls.clone(), self.cancel.clone());
        let work = move || {
            let route = Route::find(address, tls)?;
            let stream = route.connect(&cancel)?;
            Ok((route, stream))
        };
        self.begin_outside(work, Inbox::Connected);
    }

    /// Handles the result of connecting.
    pub(super) fn connected(&mut self, connected: Result<(Route, Stream), String>) {
        self.is_connecting = false;
        if let Some(note) = self.awaits_end.take() {
            return self.told(note);
        }
        match connected.and_then(|(route, stream)| self.link(route, stream).map_err(|error| error.to_string())) {
            Ok(()) => self.on(Event::Connected),
            Err(why) => self.fail(format!("destination_url={}: {why}", self.job.config.destination_url), Event::Lost),
        }
    }

    fn link(&mut self, route: Route, stream: Stream) -> io::Result<()> {
        rustix::rand::getrandom(&mut self.session, rustix::rand::GetRandomFlags::empty())?;
        let own = self.own.clone();
        self.link = Some(Link::new(stream, true, move |heard| _ = own.send(Inbox::Target(heard)))?);
        self.route = Some(route);
        Ok(())
    }

    /// Creates the greeting of a connection for `role`.
    pub(super) fn greeting(&self, role: Role) -> Greeting {
        Greeting {
            version: VERSION,
            oldest: OLDEST,
            role,
            // The configuration has a lower limit.
            connections: u8::try_from(self.job.config.connections).unwrap_or(u8::MAX),
            features: if self.job.config.local { Features::LOCAL } else { Features::default() },
            session: self.session,
        }
    }

    /// Handles the target's greeting: makes the connections for pages.
    pub(super) fn greeted(&mut self, target: Greeting) {
        if let Some(fds) = self.job.passed.take() {
            return self.pass(target, fds);
        }
        self.rtt = self.greeted.map_or(Duration::ZERO, |greeted| greeted.elapsed());
        let connections = self.greeting(Role::Control).connections;
        let greetings: Vec<_> = (0..connections).map(|index| self.greeting(Role::Pages(index)).bytes()).collect();
        let Some((route, cancel)) = self.way() else { return };
        let work = move || {
            let connect = |greeting: &[u8]| {
                let stream = route.connect(&cancel)?;
                io::Write::write_all(&mut &stream, greeting)?;
                Ok(stream)
            };
            greetings.iter().map(|greeting| connect(greeting)).collect()
        };
        self.begin_outside(work, Inbox::Lanes);
    }

    /// Returns the address for further connections, and starts their deadline.
    fn way(&mut self) -> Option<(Route, Cancel)> {
        self.course.enter(Stage::Greeting.name(), Some(ALL_CONNECTIONS));
        Some((self.route.clone()?, self.cancel.clone()))
    }

    /// Starts sending pages over `streams`.
    pub(super) fn open_lanes(&mut self, streams: Vec<Stream>) {
        let own = self.own.clone();
        let tell = move |sent| _ = own.send(Inbox::Copied(sent));
        match PagesOut::new(streams, &self.job.memory, self.passes.to_send(), &self.job.progress, tell) {
            Ok(out) => {
                self.out = Some(out);
                self.on(Event::Greeted);
            }
            Err(error) => self.fail(format!("a connection for pages: {error}"), Event::Broke),
        }
    }

    /// Passes descriptors to a local target.
    fn pass(&mut self, target: Greeting, fds: Vec<OwnedFd>) {
        if !target.features.has(Features::LOCAL) {
            let why = "local=true: the target is none that memory can be passed to; leave local out";
            return self.fail(why.to_string(), Event::Broke);
        }
        let greeting = self.greeting(Role::Pages(0)).bytes();
        let Some((route, cancel)) = self.way() else { return };
        let work = move || {
            let stream = route.connect(&cancel)?;
            io::Write::write_all(&mut &stream, &greeting)?;
            stream.unix().map_or_else(|| Err(io::ErrorKind::Unsupported.into()), |unix| passing::send(unix, &fds))?;
            Ok(stream)
        };
        self.begin_outside(work, Inbox::Passed);
    }
}
