//! The source's conductor: a thread that carries out what the state machine of the source decides. The control thread
//! does what concerns the VM, threads of their own hear the target and send pages.

mod actions;
mod connecting;
mod limits;
mod passes;
#[cfg(test)]
mod tests;
mod throttle;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use virtio_devices::{Cancel, GuestMap, HoldError, Holds};
use vm_api::migration::SendMigration;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::conducting::Conducting;
use super::course::{Conducts as _, Course};
use super::errands::Errands;
use super::handover::Outcome;
use super::handover::sender::{Event, Sender as Machine, Stage};
use super::link::{Heard, Link};
use super::offer::Rest;
use super::orders::{SourceNote, SourceOrder, ToControl};
use super::pages_out::PagesOut;
use super::precopy::Verdict;
use super::progress::{Part, Progress};
use super::transport::{Address, Route, Stream};
use super::wire::{Frame, Kind, Role, parts};
use crate::dirty::{DirtyLog, DirtySource};
use crate::lazy_memory::discarded::Discarded;
use crate::machine_state::MachineState;
use crate::machine_state::backend_state::{self, BackendState, StatefulBackend};
use limits::Limits;
use passes::Passes;
use throttle::Throttle;

/// Interval of checks for deadlines.
const TICK: Duration = Duration::from_millis(50);

/// Hint for a target that does not answer.
const WANTS_TLS: &str = "; if it was given a tls_dir, give this side one, too";

/// Parameters of a migration that is sent.
pub(crate) struct SendJob {
    /// Request of the client.
    pub config: SendMigration,
    /// Address of the target.
    pub address: Address,
    /// Identity of the source, if connections are encrypted.
    pub tls: Option<Arc<ClientConfig>>,
    /// The offer, as bytes.
    pub offer: Vec<u8>,
    /// Descriptors that are passed instead of copies, if both sides are on the same host.
    pub passed: Option<Vec<OwnedFd>>,
    /// The guest's memory.
    pub memory: GuestMap,
    /// Persistent memory that is not sent, and must be as its file is.
    pub discarded: Discarded,
    /// Progress of the migration.
    pub progress: Progress,
    /// Orders to the control thread.
    pub control: ToControl<SourceOrder>,
}

/// Message to the conductor.
enum Inbox {
    Control(SourceNote),
    /// The way to the target, and the connection on which both sides talk; or why there is none.
    Connected(Result<(Route, Stream), String>),
    /// The connections for pages.
    Lanes(Result<Vec<Stream>, String>),
    /// The connection on which descriptors were passed.
    Passed(Result<Stream, String>),
    Target(Heard),
    /// Dirty log, which is on from now on, or the reason why there is none.
    Logged(Result<DirtyLog, String>),
    Copied(Result<u64, String>),
    /// Result of flushing the guest's writes so far to its disks.
    Flushed(Result<(), String>),
    /// States of backends besides their queues, or the reason why they cannot be had.
    Saved(Result<Vec<BackendState>, String>),
    /// The disks' locks are given up, or why not.
    Released(Result<(), String>),
    /// They are taken again, or why not.
    Locked(Result<(), String>),
}

/// A migration that is under way.
pub(crate) type Sending = Conducting<SourceNote>;

impl Sending {
    /// Begins to send.
    ///
    /// # Errors
    ///
    /// The host has no thread left.
    pub(crate) fn begin(job: SendJob) -> io::Result<Self> {
        Self::new(Inbox::Control, |cancel, own, inbox| Conductor::new(job, cancel, own, inbox).run())
    }
}

struct Conductor {
    job: SendJob,
    machine: Machine,
    course: Course,
    own: Sender<Inbox>,
    inbox: Receiver<Inbox>,
    /// Ends what is being connected.
    cancel: Cancel,
    /// The way to the target, once it is known.
    route: Option<Route>,
    /// True while the address is resolved, and connected to for the first time.
    is_connecting: bool,
    /// Request to end the migration, deferred until connecting has finished.
    awaits_end: Option<SourceNote>,
    link: Option<Link>,
    /// Time of the greeting, and of the target's answer.
    greeted: Option<Instant>,
    rtt: Duration,
    out: Option<PagesOut>,
    /// Connection by which descriptors were passed that the target may not have taken yet.
    passing: Option<Stream>,
    session: [u8; 16],
    passes: Passes,
    limits: Limits,
    throttle: Throttle,
    rest: Option<Box<MachineState>>,
    /// States of backends besides their queues.
    states: Vec<BackendState>,
    /// Host storage that the guest writes.
    holds: Holds,
    /// True if that has been flushed, or is being flushed, while the guest runs.
    is_flushed: bool,
    errands: Errands,
    /// Report for the time when the errands have ended.
    last_word: Option<(Outcome, Option<String>)>,
    /// Reason why the locks could not be taken again.
    lock_error: Option<String>,
    /// Times at which the guest was stopped, and at which the last part of the downtime ended.
    still: Option<(Instant, Instant)>,
    quits: bool,
}

impl Conductor {
    fn new(job: SendJob, cancel: Cancel, own: Sender<Inbox>, inbox: Receiver<Inbox>) -> Self {
        let memory = job.memory.iter().map(|region| region.len()).sum();
        job.progress.set_memory(memory);
        Self {
            passes: Passes::new(&job.config, &job.memory),
            limits: Limits::new(&job.config, memory),
            course: Course::new(&job.progress, None),
            throttle: Throttle::new(),
            job,
            machine: Machine::new(),
            own,
            inbox,
            cancel,
            route: None,
            is_connecting: true,
            awaits_end: None,
            link: None,
            greeted: None,
            rtt: Duration::ZERO,
            out: None,
            passing: None,
            session: [0; 16],
            rest: None,
            states: Vec::new(),
            holds: Holds::default(),
            is_flushed: false,
            errands: Errands::default(),
            last_word: None,
            lock_error: None,
            still: None,
            quits: false,
        }
    }

    fn run(mut self) {
        match self.job.discarded.check() {
            Ok(()) => self.connect(),
            Err(why) => self.fail(why, Event::Broke),
        }
        while !self.machine.is_over() && !self.quits {
            let wait = self.throttle();
            match self.inbox.recv_timeout(wait) {
                Ok(heard) => self.take(heard),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.tick();
        }
        if self.machine.stage() == Stage::Finished {
            self.close_guest();
        }
        if let Some((outcome, why)) = self.last_word.take() {
            drop(std::mem::take(&mut self.errands));
            // A log that one of them has begun ends here, and not while the control thread waits for this one.
            while self.inbox.try_recv().is_ok() {}
            self.job.control.send(SourceOrder::Report(outcome, why));
        }
    }

    /// Has a thread close what was the guest's. The host's kernel takes its time for that, and longer the more memory
    /// there is; the control thread answers clients meanwhile.
    fn close_guest(&mut self) {
        // The logs keep KVM's VM, too.
        self.passes.end();
        while !self.quits {
            match self.inbox.recv() {
                Ok(Inbox::Control(SourceNote::GivenUp(vm))) => {
                    let memory = std::mem::replace(&mut self.job.memory, GuestMap::new());
                    // If the host has no thread for it, it is closed here.
                    let _ = self.errands.begin(move || drop((vm, memory)));
                    return;
                }
                Ok(Inbox::Control(SourceNote::Quit)) => self.quits = true,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Has vCPUs be held for the share of their time that the policy takes, so that they write less. Returns how long
    /// may be waited until there is more to do.
    fn throttle(&mut self) -> Duration {
        let share = if self.machine.stage() == Stage::Copying { self.passes.throttle() } else { 0 };
        let (change, time) = self.throttle.follow(share, Instant::now());
        if let Some(is_slow) = change {
            self.job.control.send(SourceOrder::Slow(is_slow));
        }
        time.map_or(TICK, |time| time.min(TICK))
    }

    /// Lets vCPUs run.
    fn let_go(&mut self) {
        if let (Some(is_slow), _) = self.throttle.follow(0, Instant::now()) {
            self.job.control.send(SourceOrder::Slow(is_slow));
        }
    }

    /// Carries out all that is due.
    fn tick(&mut self) {
        let Some(link) = &mut self.link else { return };
        let is_lost = link.keep_alive().is_err() || link.is_silent();
        if is_lost && self.machine.stage() < Stage::Unknown {
            self.fail("the target does not answer any more".to_string(), Event::Lost);
        } else if self.course.is_late() {
            let why = match self.machine.stage() {
                Stage::Copying => self.too_slow(),
                stage => format!("the target or this host took too long ({})", stage.name()),
            };
            self.fail(why, Event::Late);
        }
    }

    /// Reason for ending a copy that lasted as long as the client allows.
    fn too_slow(&self) -> String {
        if self.passes.count() > 1 {
            return self.too_fast();
        }
        let time = self.job.config.timeout_s;
        format!("after timeout_s={time}, the memory has not been copied once: the target takes it too slowly")
    }

    fn too_fast(&self) -> String {
        let SendMigration { timeout_s, downtime_ms, .. } = self.job.config;
        let rate = self.passes.dirty_rate() >> 20;
        format!(
            "after timeout_s={timeout_s}, the guest still writes {rate} MiB/s, too fast for downtime_ms={downtime_ms}"
        )
    }

    fn take(&mut self, heard: Inbox) {
        match heard {
            Inbox::Target(Heard::Greeting(greeting)) => match greeting.common_version() {
                Ok(_) if greeting.session == self.session && greeting.role == Role::Control => self.greeted(greeting),
                Ok(_) => self.fail("the target answered another source".to_string(), Event::Broke),
                Err(error) => self.fail(error.to_string(), Event::Broke),
            },
            Inbox::Target(Heard::Frame(Frame::Failed(line))) => {
                self.fail(format!("the target: {line}"), Event::Heard(Kind::Failed));
            }
            Inbox::Target(Heard::Frame(Frame::Cancel)) => {
                self.fail("it was ended at the target (vm.cancel-migration)".to_string(), Event::Heard(Kind::Cancel));
            }
            Inbox::Target(Heard::Frame(frame)) => self.heard(frame.kind()),
            Inbox::Target(Heard::Offer(_)) => self.heard(Kind::Offer),
            Inbox::Target(Heard::State(_)) => self.heard(Kind::State),
            Inbox::Target(Heard::Lost(why)) => {
                let may_want_tls = self.machine.stage() == Stage::Greeting && self.job.tls.is_none();
                let hint = if may_want_tls && !self.job.address.is_unix() { WANTS_TLS } else { "" };
                self.fail(format!("{why}{hint}"), Event::Lost);
            }
            Inbox::Connected(connected) => self.connected(connected),
            // It has ended meanwhile.
            Inbox::Lanes(_) | Inbox::Passed(_) if self.machine.stage() != Stage::Greeting => {}
            Inbox::Lanes(Ok(streams)) => self.open_lanes(streams),
            Inbox::Lanes(Err(why)) => self.fail(format!("a connection for pages: {why}"), Event::Broke),
            Inbox::Passed(Ok(stream)) => {
                self.passing = Some(stream);
                self.on(Event::Greeted);
            }
            Inbox::Passed(Err(why)) => self.fail(format!("the connection for descriptors: {why}"), Event::Broke),
            Inbox::Logged(log) => self.logged(log),
            Inbox::Copied(Ok(sent)) => self.copied(sent),
            Inbox::Copied(Err(why)) => self.fail(why, Event::Lost),
            Inbox::Control(note) => self.told(note),
            Inbox::Flushed(Ok(())) if self.machine.stage() == Stage::Copying => self.send_pages(),
            Inbox::Flushed(Ok(())) => {}
            Inbox::Flushed(Err(why)) => self.fail(why, Event::Broke),
            Inbox::Saved(Ok(states)) => {
                self.part(Part::Save, None);
                self.states = states;
                self.on(Event::Stopped);
            }
            Inbox::Released(Ok(())) => self.on(Event::Released),
            Inbox::Saved(Err(why)) => self.fail(why, Event::Broke),
            Inbox::Released(Err(why)) => self.fail(why, Event::NotReleased),
            Inbox::Locked(Ok(())) => self.on(Event::Locked),
            Inbox::Locked(Err(why)) => self.not_locked(&why),
        }
    }

    fn heard(&mut self, kind: Kind) {
        self.course.doubt(format!("the target sent {kind:?} out of turn"));
        self.on(Event::Heard(kind));
    }

    fn told(&mut self, note: SourceNote) {
        match note {
            SourceNote::Quit => self.quits = true,
            // All else ends it then. Who hears of the end waits for all threads of this, one of which may be looking a
            // name up, which nobody can end.
            note if self.is_connecting => {
                self.cancel.cancel();
                self.awaits_end.get_or_insert(note);
            }
            SourceNote::Writers(Ok(writers), holds, drivers) => {
                self.passes.expect(self.rtt, drivers);
                self.holds = holds;
                self.begin_passes(writers);
            }
            SourceNote::Stopped(Ok(stopped)) => {
                if let Err(why) = self.job.discarded.check() {
                    return self.fail(why, Event::Broke);
                }
                self.part(Part::Stop, Some(stopped.stop));
                (self.rest, self.holds) = (Some(stopped.machine), stopped.holds);
                self.save_states(stopped.stateful);
            }
            SourceNote::Writers(Err(why), ..) | SourceNote::Stopped(Err(why)) | SourceNote::Changed(why) => {
                self.fail(why, Event::Broke);
            }
            SourceNote::Cancel => self.fail("it was ended (vm.cancel-migration)".to_string(), Event::Cancelled),
            SourceNote::Force => {
                self.lock_error = None;
                self.on(Event::Forced);
            }
            // It is given up when there is nothing else to hear.
            SourceNote::GivenUp(_) => {}
            SourceNote::GuestOff => self.fail("the guest shut down".to_string(), Event::GuestOff),
        }
    }

    /// Another program has what the guest writes.
    fn not_locked(&mut self, error: &str) {
        self.lock_error = Some(format!(
            "the guest stays paused here, because its disks are not this program's: {error}; then resume it (vm.resume)"
        ));
        self.on(Event::NotLocked);
    }

    /// Has a thread do what takes as long as disks do, and say what came of it.
    fn have_done(
        &mut self,
        work: impl FnOnce(&Holds) -> Result<(), HoldError> + Send + 'static,
        say: fn(Result<(), String>) -> Inbox,
    ) {
        let holds = self.holds.clone();
        if holds.is_empty() {
            // A thread for nothing would be a part of the downtime.
            let _ = self.own.send(say(Ok(())));
            return;
        }
        let work = move || {
            let done = work(&holds).map_err(|error| error.to_string());
            // Before it is known that it is done, nobody here has them any more.
            drop(holds);
            done
        };
        self.begin_errand(work, say);
    }

    /// Has a thread do `work`, and say what came of it.
    fn begin_errand<T: 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
        say: fn(Result<T, String>) -> Inbox,
    ) {
        let own = self.own.clone();
        if let Err(error) = self.errands.begin(move || _ = own.send(say(work()))) {
            let _ = self.own.send(say(Err(format!("the host has no thread for it: {error}"))));
        }
    }

    /// The same, for what is done outside of this host.
    fn begin_outside<T: 'static>(
        &mut self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
        say: fn(Result<T, String>) -> Inbox,
    ) {
        let own = self.own.clone();
        let begun = self.errands.begin_outside(move || _ = own.send(say(work().map_err(|error| error.to_string()))));
        if let Err(error) = begun {
            let _ = self.own.send(say(Err(format!("the host has no thread for it: {error}"))));
        }
    }

    /// Takes what backends have beside their queues, which stand still.
    fn save_states(&mut self, backends: Vec<StatefulBackend>) {
        if backends.is_empty() {
            return self.take(Inbox::Saved(Ok(Vec::new())));
        }
        self.begin_errand(move || backend_state::save(&backends), Inbox::Saved);
    }

    /// Begins to note what is written, and to copy the memory. Where nobody writes, all of it is the rest.
    fn begin_passes(&mut self, writers: Vec<Box<dyn DirtySource>>) {
        if self.machine.stage() != Stage::Copying {
            return;
        }
        if writers.is_empty() {
            return self.on(Event::Copied(Verdict::Stop));
        }
        // Backends are told one after the other, and take their time.
        self.begin_outside(move || DirtyLog::start(writers), Inbox::Logged);
    }

    /// The dirty log is on; starts the passes unless the migration was cancelled.
    fn logged(&mut self, log: Result<DirtyLog, String>) {
        match log {
            Ok(log) if self.machine.stage() == Stage::Copying => {
                self.passes.begin(log);
                self.send_pages();
            }
            Ok(log) => self.stop_log(Some(log)),
            Err(why) => self.fail(why, Event::Broke),
        }
    }

    /// Has a thread end a log, which takes as long as its begin. If the host has no thread, it ends here.
    fn stop_log(&mut self, log: Option<DirtyLog>) {
        if let Some(log) = log {
            let _ = self.errands.begin_outside(move || drop(log));
        }
    }

    /// A connection has sent all of its part of a pass; the last of them ends it.
    fn copied(&mut self, sent: u64) {
        let is_last = self.passes.sent(sent);
        match self.machine.stage() {
            Stage::Copying if is_last => self.passed(),
            Stage::Finishing if is_last => self.send_state(),
            _ => {}
        }
    }

    /// A pass is complete while the guest runs: what was written meanwhile is the next.
    fn passed(&mut self) {
        let verdict = match self.passes.passed(&self.job.progress) {
            Ok(verdict) => verdict,
            Err(error) => return self.fail(error.to_string(), Event::Broke),
        };
        match verdict {
            Verdict::GiveUp => {
                let why = self.too_fast();
                self.fail(why, Event::Copied(verdict));
            }
            // What the host has to write of the guest's disks is not for the time in which it stands still. The pages
            // that it writes meanwhile are another pass.
            Verdict::Stop if !self.is_flushed && !self.holds.is_empty() => {
                self.is_flushed = true;
                self.have_done(Holds::flush, Inbox::Flushed);
            }
            _ => self.on(Event::Copied(verdict)),
        }
    }

    /// The rest of the memory was sent: the state follows.
    fn send_state(&mut self) {
        let Some(machine) = self.rest.take() else { return };
        let backends = std::mem::take(&mut self.states);
        let rest = Rest { passes: self.passes.count(), machine: *machine, backends };
        let sent = rest.bytes().map_err(io::Error::from).and_then(|bytes| self.document(Frame::State, &bytes));
        match sent {
            Ok(()) => {
                self.part(Part::Send, None);
                self.on(Event::Sent);
            }
            Err(error) => self.fail(format!("the state cannot be sent: {error}"), Event::Broke),
        }
    }

    fn document(&mut self, kind: fn(super::wire::Part) -> Frame, bytes: &[u8]) -> io::Result<()> {
        let link = self.link.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the target takes it too slowly");
        parts(bytes).try_for_each(|part| if self.course.is_past() { Err(late()) } else { link.say(&kind(part)) })
    }

    fn lost(&mut self, error: &io::Error) -> Event {
        self.course.blame(format!("the connection to the target: {error}"));
        Event::Lost
    }

    /// Begins a pass over the memory.
    fn send_pages(&mut self) {
        if let Some(out) = &self.out {
            self.passes.send(out);
            self.job.control.send(SourceOrder::Pass(self.passes.count()));
        }
    }

    /// A part of the downtime ends; it took so long, or since the part before.
    fn part(&mut self, part: Part, took: Option<Duration>) {
        if let Some((_, last)) = &mut self.still {
            let took = took.unwrap_or_else(|| last.elapsed());
            *last += took;
            self.job.progress.stood_still(part, took);
        }
    }

    fn told_why(&self) -> Option<String> {
        let both: Vec<_> = self.course.why().into_iter().chain(self.lock_error.clone()).collect();
        (!both.is_empty()).then(|| both.join("; "))
    }

    /// Something fails: `why` is what is told of it, if nothing has failed before.
    fn fail(&mut self, why: String, event: Event) {
        if !self.machine.is_over() {
            self.course.blame(why);
        }
        self.on(event);
    }
}
