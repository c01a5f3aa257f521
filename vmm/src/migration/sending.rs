//! The source's thread, which performs the actions of the source's state machine. The control thread changes the VM;
//! other threads read from the target and send pages.

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

/// Hint for a target that sends no greeting.
const WANTS_TLS: &str = "; if it was given a tls_dir, give this side one, too";

/// Parameters of an outgoing migration.
pub(crate) struct SendJob {
    /// Request of the client.
    pub config: SendMigration,
    /// Address of the target.
    pub address: Address,
    /// TLS identity of the source, if connections are encrypted.
    pub tls: Option<Arc<ClientConfig>>,
    /// Serialized offer.
    pub offer: Vec<u8>,
    /// Descriptors to pass instead of copying, for a target on the same host.
    pub passed: Option<Vec<OwnedFd>>,
    /// The guest's memory.
    pub memory: GuestMap,
    /// Persistent memory that is not sent, and must be unwritten.
    pub discarded: Discarded,
    /// Progress of the migration.
    pub progress: Progress,
    /// Orders to the control thread.
    pub control: ToControl<SourceOrder>,
}

/// Message to the source's thread.
enum Inbox {
    Control(SourceNote),
    /// Address and control connection of the target, or the reason for a failure.
    Connected(Result<(Route, Stream), String>),
    /// Connections for pages.
    Lanes(Result<Vec<Stream>, String>),
    /// Connection that descriptors were passed on.
    Passed(Result<Stream, String>),
    Target(Heard),
    /// Dirty log, which is on, or the reason for a failure.
    Logged(Result<DirtyLog, String>),
    Copied(Result<u64, String>),
    /// Result of flushing the guest's writes to its disks.
    Flushed(Result<(), String>),
    /// State of backends besides their queues, or the reason for a failure.
    Saved(Result<Vec<BackendState>, String>),
    /// Result of releasing the disk locks.
    Released(Result<(), String>),
    /// Result of taking the disk locks back.
    Locked(Result<(), String>),
}

/// Handle to an outgoing migration.
pub(crate) type Sending = Conducting<SourceNote>;

impl Sending {
    /// Starts the migration.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
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
    /// Cancels connecting.
    cancel: Cancel,
    /// Address of the target, once resolved.
    route: Option<Route>,
    /// True until the address is resolved and the first connection is made.
    is_connecting: bool,
    /// Request to end the migration, deferred until connecting has finished.
    awaits_end: Option<SourceNote>,
    link: Option<Link>,
    /// Time of the greeting.
    greeted: Option<Instant>,
    rtt: Duration,
    out: Option<PagesOut>,
    /// Connection whose descriptors the target may not have received yet.
    passing: Option<Stream>,
    session: [u8; 16],
    passes: Passes,
    limits: Limits,
    throttle: Throttle,
    rest: Option<Box<MachineState>>,
    /// State of backends besides their queues.
    states: Vec<BackendState>,
    /// Host storage that the guest writes.
    holds: Holds,
    /// True if the disks were flushed, or are being flushed, while the guest runs.
    is_flushed: bool,
    errands: Errands,
    /// Report to send once the background threads have ended.
    last_word: Option<(Outcome, Option<String>)>,
    /// Reason why the locks could not be taken again.
    lock_error: Option<String>,
    /// Time at which the guest was stopped, and end of the last part of the downtime.
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
            // Drops a log that was started late here, rather than when the control thread waits for this one.
            while self.inbox.try_recv().is_ok() {}
            self.job.control.send(SourceOrder::Report(outcome, why));
        }
    }

    /// Closes the VM of a guest that has moved. The kernel takes long for that, longer with more memory, while the
    /// control thread must serve clients.
    fn close_guest(&mut self) {
        // The dirty logs hold KVM's VM as well.
        self.passes.end();
        while !self.quits {
            match self.inbox.recv() {
                Ok(Inbox::Control(SourceNote::GivenUp(vm))) => {
                    let memory = std::mem::replace(&mut self.job.memory, GuestMap::new());
                    // Closes them here if the host cannot start a thread.
                    let _ = self.errands.begin(move || drop((vm, memory)));
                    return;
                }
                Ok(Inbox::Control(SourceNote::Quit)) => self.quits = true,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Throttles the vCPUs by the share that the policy asks for. Returns how long to wait before the next check.
    fn throttle(&mut self) -> Duration {
        let share = if self.machine.stage() == Stage::Copying { self.passes.throttle() } else { 0 };
        let (change, time) = self.throttle.follow(share, Instant::now());
        if let Some(is_slow) = change {
            self.job.control.send(SourceOrder::Slow(is_slow));
        }
        time.map_or(TICK, |time| time.min(TICK))
    }

    /// Ends throttling.
    fn let_go(&mut self) {
        if let (Some(is_slow), _) = self.throttle.follow(0, Instant::now()) {
            self.job.control.send(SourceOrder::Slow(is_slow));
        }
    }

    /// Sends keepalives, and checks for a silent target and for deadlines.
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

    /// Error for a copy that has reached its timeout.
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
            // The stage has ended since.
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
            // Any other message ends the migration, but only after connecting: reporting the end waits for all threads,
            // and name resolution cannot be interrupted.
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
            // Handled in `close_guest`.
            SourceNote::GivenUp(_) => {}
            SourceNote::GuestOff => self.fail("the guest shut down".to_string(), Event::GuestOff),
        }
    }

    /// Keeps the guest paused, because another program holds its disk locks.
    fn not_locked(&mut self, error: &str) {
        self.lock_error = Some(format!(
            "the guest stays paused here, because its disks are not this program's: {error}; then resume it (vm.resume)"
        ));
        self.on(Event::NotLocked);
    }

    /// Works on the guest's disks or their locks in a thread, because disks may block, and queues the result.
    fn have_done(
        &mut self,
        work: impl FnOnce(&Holds) -> Result<(), HoldError> + Send + 'static,
        say: fn(Result<(), String>) -> Inbox,
    ) {
        let holds = self.holds.clone();
        if holds.is_empty() {
            // Starting a thread would add to the downtime.
            let _ = self.own.send(say(Ok(())));
            return;
        }
        let work = move || {
            let done = work(&holds).map_err(|error| error.to_string());
            // Dropped before the result is queued, so that the result implies that no reference is left.
            drop(holds);
            done
        };
        self.begin_errand(work, say);
    }

    /// Does `work` in a thread, and queues the result.
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

    /// As [`Self::begin_errand`], for work outside of this host.
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

    /// Saves the state of backends besides their queues, which are stopped.
    fn save_states(&mut self, backends: Vec<StatefulBackend>) {
        if backends.is_empty() {
            return self.take(Inbox::Saved(Ok(Vec::new())));
        }
        self.begin_errand(move || backend_state::save(&backends), Inbox::Saved);
    }

    /// Starts the dirty log and the first pass. With no writers, all memory is sent in the final pass.
    fn begin_passes(&mut self, writers: Vec<Box<dyn DirtySource>>) {
        if self.machine.stage() != Stage::Copying {
            return;
        }
        if writers.is_empty() {
            return self.on(Event::Copied(Verdict::Stop));
        }
        // Backends switch their logs on one by one, and may be slow.
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

    /// Stops a dirty log in a thread, as it takes as long as starting one; without a thread, stops it here.
    fn stop_log(&mut self, log: Option<DirtyLog>) {
        if let Some(log) = log {
            let _ = self.errands.begin_outside(move || drop(log));
        }
    }

    /// Counts a connection that has sent its share of a pass, and ends the pass after the last one.
    fn copied(&mut self, sent: u64) {
        let is_last = self.passes.sent(sent);
        match self.machine.stage() {
            Stage::Copying if is_last => self.passed(),
            Stage::Finishing if is_last => self.send_state(),
            _ => {}
        }
    }

    /// Ends a pass while the guest runs.
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
            // Flushes the guest's disks while it still runs, to keep the host's writes out of the downtime. Another
            // pass sends the pages that the guest writes until then.
            Verdict::Stop if !self.is_flushed && !self.holds.is_empty() => {
                self.is_flushed = true;
                self.have_done(Holds::flush, Inbox::Flushed);
            }
            _ => self.on(Event::Copied(verdict)),
        }
    }

    /// Sends the machine state, after the last page.
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

    /// Starts a pass over the memory.
    fn send_pages(&mut self) {
        if let Some(out) = &self.out {
            self.passes.send(out);
            self.job.control.send(SourceOrder::Pass(self.passes.count()));
        }
    }

    /// Records a part of the downtime, which took `took`, or the time since the previous part.
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

    /// Handles a failure. The first one is the reported reason.
    fn fail(&mut self, why: String, event: Event) {
        if !self.machine.is_over() {
            self.course.blame(why);
        }
        self.on(event);
    }
}
