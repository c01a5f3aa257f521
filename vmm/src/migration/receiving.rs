//! The target's thread, which performs the actions of the target's state machine. The control thread changes the VM;
//! other threads wait for the source, read from it, receive pages, and create the VM.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use virtio_devices::{Cancel, Holds};
use vm_memory::GuestAddressSpace as _;

use super::conducting::Conducting;
use super::course::{Conducts, Course};
use super::errands::Errands;
use super::handover::Outcome;
use super::handover::receiver::{Action, Event, Receiver as Machine, Stage};
use super::link::{Heard, Link};
use super::listening::{Connected, Listening};
use super::loader::Loader;
use super::offer::Rest;
use super::orders::{TargetNote, TargetOrder, ToControl};
use super::pages_in::PagesIn;
use super::preparer::{Made, Preparer};
use super::progress::Progress;
use super::transport::{Listener, Stream};
use super::wire::{Features, Frame, Greeting, Kind, OLDEST, Role};
use crate::machine_state::backend_state::{self, BackendState};
use crate::snapshot::restorer::Restored;

/// Interval of checks for deadlines.
const TICK: Duration = Duration::from_millis(50);

/// Reason for discarding the guest when the target's program ends.
const QUITS: &str = "the target's program ends";

/// Parameters of an incoming migration.
pub(crate) struct ReceiveJob {
    /// Listener for a source.
    pub listener: Option<Listener>,
    /// TLS identity of the target, if connections are encrypted.
    pub tls: Option<Arc<ServerConfig>>,
    /// Time to wait for a source.
    pub patience: Duration,
    /// Creates the VM.
    pub preparer: Preparer,
    /// Descriptors that came with the request.
    pub fds: Vec<OwnedFd>,
    /// Progress of the migration.
    pub progress: Progress,
    /// Orders to the control thread.
    pub control: ToControl<TargetOrder>,
}

/// Message to the target's thread.
enum Inbox {
    Control(TargetNote),
    Connected(Connected),
    Source(Heard),
    Made(Result<Box<Made>, String>),
    /// Result of loading backend states.
    Given(Result<(), String>),
    /// Result of taking the disk locks; after a failure none is held.
    Locked(Result<(), String>),
    /// Result of receiving a further pass on a connection.
    Flushed(Result<(), String>),
}

/// Handle to an incoming migration.
pub(crate) type Receiving = Conducting<TargetNote>;

impl Receiving {
    /// Starts to wait for a source.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(crate) fn begin(job: ReceiveJob) -> io::Result<Self> {
        Self::new(Inbox::Control, |cancel, own, inbox| Conductor::new(job, cancel, own, inbox).run())
    }
}

struct Conductor {
    job: ReceiveJob,
    machine: Machine,
    /// Cancels waits for connections and for backends.
    cancel: Cancel,
    own: Sender<Inbox>,
    inbox: Receiver<Inbox>,
    listening: Option<Listening>,
    greeting: Option<Greeting>,
    link: Option<Link>,
    /// Connections for pages that wait until the memory exists.
    waiting: Vec<(u8, Stream)>,
    pages: PagesIn,
    errands: Errands,
    /// Report to send once the background threads have ended.
    last_word: Option<(Outcome, Option<String>)>,
    /// Host storage that the guest writes, from loading the machine until its locks are taken.
    holds: Holds,
    offer: Option<Vec<u8>>,
    /// Connection for descriptors, if the source passes any.
    passing: Option<Arc<Stream>>,
    made: Option<Box<Made>>,
    rest: Option<Rest>,
    course: Course,
    /// Arrival time of Go.
    went: Option<Instant>,
    /// True once the control thread no longer performs orders.
    quits: bool,
}

impl Conductor {
    fn new(job: ReceiveJob, cancel: Cancel, own: Sender<Inbox>, inbox: Receiver<Inbox>) -> Self {
        Self {
            course: Course::new(&job.progress, Some(job.patience)),
            job,
            machine: Machine::new(),
            cancel,
            own,
            inbox,
            listening: None,
            greeting: None,
            link: None,
            waiting: Vec::new(),
            pages: PagesIn::default(),
            errands: Errands::default(),
            last_word: None,
            holds: Holds::default(),
            offer: None,
            passing: None,
            made: None,
            rest: None,
            went: None,
            quits: false,
        }
    }

    fn run(mut self) {
        if let Some(listener) = self.job.listener.take() {
            let own = self.own.clone();
            let tell = move |connected| _ = own.send(Inbox::Connected(connected));
            match Listening::begin(listener, self.job.tls.take(), self.cancel.clone(), tell) {
                Ok(listening) => self.listening = Some(listening),
                Err(error) => self.fail(format!("the host has no thread for it: {error}"), Event::Broke),
            }
        }
        while !self.machine.is_over() {
            match self.inbox.recv_timeout(TICK) {
                Ok(heard) => self.take(heard),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.tick();
        }
        self.hang_up();
        if let Some((outcome, why)) = self.last_word.take() {
            drop(std::mem::take(&mut self.errands));
            self.job.control.send(TargetOrder::Report(outcome, why));
        }
    }

    fn tick(&mut self) {
        if let Some(link) = &mut self.link
            && (link.keep_alive().is_err() || link.is_silent())
        {
            self.fail("the source does not answer any more".to_string(), Event::Lost);
        }
        if self.course.is_late() {
            let stage = self.machine.stage().name();
            self.fail(format!("the source took too long ({stage})"), Event::Late);
        }
    }

    fn take(&mut self, heard: Inbox) {
        match heard {
            Inbox::Control(note) => self.told(note),
            Inbox::Connected(Connected::Control(stream, greeting)) => self.connected(stream, greeting),
            Inbox::Connected(Connected::Pages(_, stream)) if self.is_local() => self.receive_passed(stream),
            Inbox::Connected(Connected::Pages(index, stream)) => {
                self.waiting.push((index, stream));
                self.receive_pages();
            }
            Inbox::Connected(Connected::Failed(why)) => self.fail(why, Event::Broke),
            Inbox::Source(Heard::Offer(offer)) => {
                self.offer = Some(offer);
                self.offered();
            }
            Inbox::Source(Heard::State(state)) => match Rest::read(&state) {
                Ok(rest) if self.machine.stage() == Stage::Receiving => {
                    self.rest = Some(rest);
                    self.look();
                }
                Ok(_) => self.fail("the source sent its state too early".to_string(), Event::Broke),
                Err(error) => self.fail(error.to_string(), Event::Broke),
            },
            Inbox::Source(Heard::Frame(Frame::Failed(line))) => {
                self.fail(format!("the source: {line}"), Event::Heard(Kind::Failed));
            }
            Inbox::Source(Heard::Frame(Frame::Cancel)) => {
                self.fail("it was ended at the source".to_string(), Event::Heard(Kind::Cancel));
            }
            Inbox::Source(Heard::Frame(frame)) => {
                self.course.doubt(format!("the source sent {:?} out of turn", frame.kind()));
                self.on(Event::Heard(frame.kind()));
            }
            Inbox::Source(Heard::Greeting(_)) => self.fail("the source greeted twice".to_string(), Event::Broke),
            Inbox::Source(Heard::Lost(why)) => self.fail(why, Event::Lost),
            Inbox::Given(Ok(())) if self.machine.stage() == Stage::Loading => {
                let failed = self.load();
                failed.into_iter().for_each(|event| self.on(event));
            }
            Inbox::Given(Ok(())) => {}
            Inbox::Given(Err(why)) => self.fail(why, Event::Broke),
            Inbox::Made(Ok(made)) => self.prepared(made),
            Inbox::Made(Err(why)) => self.fail(why, Event::Broke),
            Inbox::Locked(Ok(())) => self.on(Event::Locked),
            Inbox::Locked(Err(why)) => self.fail(why, Event::NotLocked),
            Inbox::Flushed(Ok(())) => self.look(),
            // The receiving threads have been ended.
            Inbox::Flushed(Err(_)) if self.machine.stage() >= Stage::Loading => {}
            Inbox::Flushed(Err(why)) => self.fail(why, Event::Lost),
        }
    }

    fn told(&mut self, note: TargetNote) {
        match note {
            TargetNote::Loaded(Ok(holds)) => {
                self.holds = holds;
                self.on(Event::Loaded);
            }
            TargetNote::Loaded(Err(why)) => self.fail(why, Event::Broke),
            TargetNote::Started(Ok(())) => self.on(Event::Started),
            TargetNote::Started(Err(why)) => self.fail(why, Event::NotStarted),
            TargetNote::Cancel => self.fail("it was ended (vm.cancel-migration)".to_string(), Event::Cancelled),
            TargetNote::Quit => {
                // Pending lock attempts finish before the guest's end is certain.
                self.quits = true;
                self.fail(QUITS.to_string(), Event::NotStarted);
            }
        }
    }

    /// Starts the control channel to a source that has sent its greeting.
    fn connected(&mut self, stream: Stream, greeting: Greeting) {
        self.job.control.send(TargetOrder::Accepted);
        let is_unix = stream.unix().is_some();
        let own = self.own.clone();
        match Link::new(stream, false, move |heard| _ = own.send(Inbox::Source(heard))) {
            Ok(link) => {
                self.link = Some(link);
                // Descriptors cannot be passed over a network.
                let features = if is_unix { greeting.features } else { Features::default() };
                self.greeting = Some(Greeting { features, ..greeting });
                self.on(Event::Accepted);
                self.on(Event::Greeted);
            }
            Err(error) => self.fail(format!("the host has no thread for it: {error}"), Event::Broke),
        }
    }

    /// True if both sides are on the same host and pass descriptors instead of copying.
    fn is_local(&self) -> bool {
        self.greeting.is_some_and(|greeting| greeting.features.has(Features::LOCAL))
    }

    /// Accepts the connection for descriptors, which are received once the offer has announced them.
    fn receive_passed(&mut self, stream: Stream) {
        if self.passing.replace(Arc::new(stream)).is_some() {
            return self.fail("the source passes descriptors twice".to_string(), Event::Broke);
        }
        self.offered();
    }

    /// Continues once the offer is complete, and with it the connection for descriptors, if any.
    fn offered(&mut self) {
        if self.offer.is_some() && (self.passing.is_some() || !self.is_local()) {
            self.on(Event::Offered);
        }
    }

    /// Starts receiving pages for the created VM.
    fn prepared(&mut self, made: Box<Made>) {
        if self.machine.stage() != Stage::Preparing {
            return;
        }
        let loader = Arc::new(Loader::new((*made.vm.memory().memory()).clone()));
        self.job.progress.set_memory(loader.size());
        self.pages.set_memory(loader, self.greeting.map_or(0, |greeting| greeting.connections));
        self.made = Some(made);
        self.receive_pages();
        self.on(Event::Prepared);
    }

    /// Starts receiving on waiting connections, once there is memory.
    fn receive_pages(&mut self) {
        if self.made.is_none() {
            return;
        }
        for (index, stream) in self.waiting.drain(..) {
            let own = self.own.clone();
            let tell = move |flushed| _ = own.send(Inbox::Flushed(flushed));
            if let Err(error) = self.pages.begin(index, stream, &self.job.progress, tell) {
                let _ = self.own.send(Inbox::Flushed(Err(format!("the host has no thread for it: {error}"))));
            }
        }
    }

    /// Continues once all pages and the state have arrived.
    fn look(&mut self) {
        let has_all = |rest: &Rest| self.pages.have(rest.passes);
        if self.machine.stage() == Stage::Receiving && self.rest.as_ref().is_some_and(has_all) {
            self.on(Event::Received);
        }
    }

    fn fail(&mut self, why: String, event: Event) {
        if matches!(event, Event::NotLocked | Event::NotStarted) {
            self.course.blame_only(why);
        } else if self.machine.stage() < Stage::Locking {
            self.course.blame(why);
        }
        self.on(event);
    }

    /// Creates the VM in a thread.
    fn prepare(&mut self) -> io::Result<()> {
        let (offer, preparer) = (self.offer.take().unwrap_or_default(), self.job.preparer.clone());
        let passing = self.passing.clone();
        let (own, cancel) = (self.own.clone(), self.cancel.clone());
        let run = move || {
            let made = preparer.make(&offer, passing.as_deref().and_then(Stream::unix), &cancel);
            let _ = own.send(Inbox::Made(made.map(Box::new).map_err(|error| error.to_string())));
        };
        self.errands.begin(run)
    }

    /// Loads the source's backend states into the backends, whose queues have never run.
    fn give_states(&mut self, states: Vec<BackendState>) -> Option<Event> {
        if states.is_empty() {
            return self.load();
        }
        let backends = self.made.as_ref().map(|made| made.vm.devices().memory_users().stateful()).unwrap_or_default();
        let own = self.own.clone();
        let begun = self.errands.begin(move || {
            let given = backend_state::load(&backends, &states);
            // The VM and its backends may be dropped as soon as the result is known.
            drop(backends);
            let _ = own.send(Inbox::Given(given));
        });
        if let Err(error) = begun {
            let _ = self.own.send(Inbox::Given(Err(format!("the host has no thread for it: {error}"))));
        }
        None
    }

    /// Requests the control thread to load the machine.
    fn load(&mut self) -> Option<Event> {
        let (Some(made), Some(rest)) = (self.made.take(), self.rest.take()) else { return Some(Event::Broke) };
        let Made { planned, vm, links, runs, is_local } = *made;
        let restored = Restored { planned, vm, machine: rest.machine, links };
        let fds = std::mem::take(&mut self.job.fds);
        self.job.control.send(TargetOrder::Load { restored: Box::new(restored), fds, runs, is_local });
        None
    }

    /// Takes all disk locks, or none, in a thread. Afterwards this thread keeps no reference to the storage.
    fn take_locks(&mut self) {
        let (own, holds) = (self.own.clone(), std::mem::take(&mut self.holds));
        if holds.is_empty() {
            // Starting a thread would add to the downtime.
            let _ = own.send(Inbox::Locked(Ok(())));
            return;
        }
        let begun = self.errands.begin(move || {
            let taken = holds.take().map_err(|error| error.to_string());
            if taken.is_err()
                && let Err(error) = holds.release()
            {
                log::warn!("{error}");
            }
            drop(holds);
            let _ = own.send(Inbox::Locked(taken));
        });
        if let Err(error) = begun {
            let _ = self.own.send(Inbox::Locked(Err(format!("the host has no thread for it: {error}"))));
        }
    }

    fn say(&mut self, kind: Kind) {
        let frame = match kind {
            Kind::Prepared => Frame::Prepared,
            Kind::Ready => Frame::Ready,
            Kind::Cancel => Frame::Cancel,
            Kind::Running => {
                let took = self.went.map_or(Duration::ZERO, |went| went.elapsed());
                Frame::Running(u64::try_from(took.as_micros()).unwrap_or(u64::MAX))
            }
            _ => Frame::Failed(self.course.why().unwrap_or_else(|| "the target failed".to_string())),
        };
        // Without the frame, the source detects the failure itself, or leaves the guest paused (`Outcome::Unknown`).
        let _ = self.link.as_mut().map(|link| link.say(&frame));
    }

    fn hang_up(&mut self) {
        self.cancel.cancel();
        self.link = None;
        self.passing.iter().for_each(|stream| stream.close());
        self.pages.close();
        self.waiting.clear();
        self.listening = None;
    }
}

impl Conducts for Conductor {
    type Event = Event;
    type Action = Action;

    fn decide(&mut self, event: Event) -> Vec<Action> {
        let before = self.machine.stage();
        let actions = self.machine.on(event);
        let stage = self.machine.stage();
        if stage != before {
            self.course.enter(stage.name(), stage.deadline());
        }
        actions
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            // The listening thread accepts no other source, and ends once this one has all its connections.
            Action::StopListening if self.machine.stage() != Stage::Ended => {}
            Action::StopListening => self.listening = None,
            Action::Greet => {
                let greeting = self.greeting?;
                let version = greeting.common_version().ok()?;
                let features = greeting.features;
                let answer = Greeting { version, oldest: OLDEST, role: Role::Control, features, ..greeting };
                let sent = self.link.as_mut().map(|link| link.greet(&answer));
                return sent.and_then(Result::err).map(|_| Event::Lost);
            }
            Action::Prepare => {
                let error = self.prepare().err()?;
                self.course.blame(format!("the host has no thread for it: {error}"));
                return Some(Event::Broke);
            }
            Action::Load => {
                self.pages.end();
                let states = self.rest.as_mut().map(|rest| std::mem::take(&mut rest.backends)).unwrap_or_default();
                return self.give_states(states);
            }
            Action::TakeLocks => {
                self.went = Some(Instant::now());
                self.take_locks();
            }
            Action::Start if self.quits => {
                self.course.blame_only(QUITS.to_string());
                return Some(Event::NotStarted);
            }
            Action::Start => self.job.control.send(TargetOrder::Start),
            Action::Tell(kind) => self.say(kind),
            Action::Discard => {
                self.cancel.cancel();
                self.made = None;
                self.job.control.send(TargetOrder::Discard);
            }
            Action::HangUp => self.hang_up(),
            Action::Report(outcome) => {
                let why = if outcome == Outcome::Finished { None } else { self.course.why() };
                // Sent later, so that the control thread waits for no background thread.
                self.last_word = Some((outcome, why));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
