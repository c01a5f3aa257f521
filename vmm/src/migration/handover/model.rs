//! Exhaustive model of a migration: both state machines, their connection, and failures of each at any time, in any
//! order. Visits and checks each reachable state once.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::Outcome;
use super::source::{self, SourceMachine};
use super::target::{self, TargetMachine};
use crate::migration::precopy::Decision;
use crate::migration::wire::Kind;

/// Message between the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Message {
    Greeting,
    /// A complete offer.
    Offer,
    /// The remaining pages and the complete state.
    FinalState,
    Frame(Kind),
}

/// Pending work of a side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    Connect,
    Pass,
    Stop,
    FinalPass,
    Release,
    /// The locks are released, which is not reported yet.
    Released,
    Lock,
    Prepare,
    Load,
    Start,
}

/// State of a side.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Side {
    is_alive: bool,
    runs: bool,
    has_locks: bool,
    /// Messages that have arrived and are not handled yet.
    inbox: VecDeque<Message>,
    /// Sorted, because any of it may finish next.
    work: Vec<Work>,
    /// True once the side has closed its end.
    has_closed: bool,
    /// True once the side has noticed the loss of the connection.
    knows_loss: bool,
    reports: Vec<Outcome>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    source_machine: SourceMachine,
    target_machine: TargetMachine,
    source: Side,
    target: Side,
    is_cut: bool,
    passes: u8,
    go_sent: bool,
    is_off: bool,
    is_forced: bool,
    /// True if the source could not take its locks back, and has ended or waits for a user.
    is_locked_out: bool,
    /// True while dirty logs are on.
    logs: bool,
}

impl Side {
    fn begin(&mut self, work: Work) {
        self.work.push(work);
        self.work.sort_unstable();
    }
}

impl World {
    fn new() -> Self {
        let side = Side { is_alive: true, ..Side::default() };
        let source = Side { runs: true, has_locks: true, work: vec![Work::Connect], ..side.clone() };
        let (source_machine, target_machine) = (SourceMachine::new(), TargetMachine::new());
        Self {
            source_machine,
            target_machine,
            source,
            target: side,
            is_cut: false,
            passes: 0,
            go_sent: false,
            is_off: false,
            is_forced: false,
            is_locked_out: false,
            logs: false,
        }
    }

    fn carries(&self) -> bool {
        let open = |side: &Side| side.is_alive && !side.has_closed;
        !self.is_cut && open(&self.source) && open(&self.target)
    }

    fn send_to_target(&mut self, message: Message) {
        if self.carries() {
            self.target.inbox.push_back(message);
        }
    }

    fn send_to_source(&mut self, message: Message) {
        if self.carries() {
            self.source.inbox.push_back(message);
        }
    }

    fn at_source(mut self, event: source::Event) -> Self {
        for action in self.source_machine.on(event) {
            use source::Action;
            match action {
                Action::SendGreeting => self.send_to_target(Message::Greeting),
                Action::SendOffer => self.send_to_target(Message::Offer),
                Action::StartLogs => self.logs = true,
                Action::CopyPass => self.source.begin(Work::Pass),
                Action::StopGuest => {
                    self.source.runs = false;
                    self.source.begin(Work::Stop);
                }
                Action::SendFinalPass => self.source.begin(Work::FinalPass),
                Action::ReleaseLocks => self.source.begin(Work::Release),
                Action::SendGo => {
                    assert!(!self.go_sent, "Go is sent once");
                    self.go_sent = true;
                    self.send_to_target(Message::Frame(Kind::Go));
                }
                Action::Send(kind) => self.send_to_target(Message::Frame(kind)),
                Action::Close => {
                    self.source.has_closed = true;
                    // Pending work at the disks continues.
                    self.source.work.retain(|work| matches!(work, Work::Release | Work::Released));
                    self.source.inbox.clear();
                }
                Action::StopLogs => self.logs = false,
                Action::TakeLocks => self.source.begin(Work::Lock),
                Action::ResumeGuest => self.source.runs = !self.is_off,
                Action::ReleaseGuest => assert!(!self.source.runs),
                Action::Report(outcome) => self.source.reports.push(outcome),
            }
        }
        self
    }

    fn at_target(mut self, event: target::Event) -> Self {
        for action in self.target_machine.on(event) {
            use target::Action;
            match action {
                Action::StopListening => {}
                Action::SendGreeting => self.send_to_source(Message::Greeting),
                Action::PrepareVm => self.target.begin(Work::Prepare),
                Action::LoadState => self.target.begin(Work::Load),
                Action::TakeLocks => self.target.begin(Work::Lock),
                Action::StartGuest => self.target.begin(Work::Start),
                Action::Send(kind) => self.send_to_source(Message::Frame(kind)),
                Action::DiscardGuest => {
                    self.target.runs = false;
                    self.target.has_locks = false;
                    self.target.work.clear();
                }
                Action::Close => {
                    self.target.has_closed = true;
                    self.target.inbox.clear();
                }
                Action::Report(outcome) => self.target.reports.push(outcome),
            }
        }
        self
    }

    /// Returns the next states after the source handles a message, if any.
    fn source_receives(&self) -> Option<Self> {
        let mut next = self.clone();
        let event = match next.source.inbox.pop_front()? {
            Message::Greeting => source::Event::Greeted,
            Message::Frame(kind) => source::Event::Frame(kind),
            message => panic!("{message:?} is not the target's"),
        };
        Some(next.at_source(event))
    }

    fn target_receives(&self) -> Option<Self> {
        let mut next = self.clone();
        let event = match next.target.inbox.pop_front()? {
            Message::Greeting => {
                // The connection is accepted before its greeting arrives.
                next = next.at_target(target::Event::Accepted);
                target::Event::Greeted
            }
            Message::Offer => target::Event::Offered,
            Message::FinalState => target::Event::Received,
            Message::Frame(kind) => target::Event::Frame(kind),
        };
        Some(next.at_target(event))
    }

    /// Returns the next states after a piece of the source's work ends, in any order.
    fn source_works(&self) -> Vec<Self> {
        (0..self.source.work.len()).flat_map(|index| self.source_does(index)).collect()
    }

    fn source_does(&self, index: usize) -> Vec<Self> {
        use source::Event;
        let mut done = self.clone();
        let work = done.source.work.remove(index);
        let ends: &[Event] = match work {
            Work::Connect => &[Event::Connected, Event::Disconnected],
            Work::Pass if self.passes == 0 => {
                done.passes += 1;
                &[Event::Copied(Decision::CopyAgain), Event::Copied(Decision::StopGuest), Event::Copied(Decision::Fail)]
            }
            Work::Pass => &[Event::Copied(Decision::StopGuest)],
            Work::Stop => &[Event::Stopped, Event::Failed],
            Work::FinalPass => {
                done.send_to_target(Message::FinalState);
                &[Event::Sent, Event::Failed]
            }
            // Locks are released here, before the event.
            Work::Release => {
                let failed = done.clone().at_source(Event::NotReleased);
                done.source.has_locks = false;
                let half = done.clone().at_source(Event::NotReleased);
                done.source.begin(Work::Released);
                return vec![failed, half, done];
            }
            Work::Released => &[Event::Released],
            Work::Lock => return done.source_locks(),
            work => panic!("{work:?} is not the source's"),
        };
        let mut nexts: Vec<_> = ends.iter().map(|event| done.clone().at_source(*event)).collect();
        if work == Work::Released && !self.carries() {
            // The connection is known to be closed before Go: no byte is sent.
            let gone = done.at_source(Event::Released);
            nexts.push(gone.at_source(Event::GoNotSent));
        }
        nexts
    }

    /// Returns the states after the source tries to take its locks, which the target or another program may hold.
    fn source_locks(self) -> Vec<Self> {
        use source::Event;
        let (mut locked, mut refused) = (self.clone(), self);
        let can = !locked.target.has_locks;
        (locked.source.has_locks, locked.is_locked_out) = (true, false);
        (refused.source.has_locks, refused.is_locked_out) = (false, true);
        let locked = can.then(|| locked.at_source(Event::Locked));
        locked.into_iter().chain([refused.at_source(Event::NotLocked)]).collect()
    }

    fn target_works(&self) -> Vec<Self> {
        use target::Event;
        let mut done = self.clone();
        let Some(work) = done.target.work.pop() else { return Vec::new() };
        assert!(done.target.work.is_empty(), "the target does one thing at a time: {self:?}");
        let (event, failure) = match work {
            Work::Prepare => (Event::Prepared, Event::Failed),
            Work::Load => (Event::Loaded, Event::Failed),
            Work::Lock => (Event::Locked, Event::NotLocked),
            Work::Start => (Event::Started, Event::NotStarted),
            work => panic!("{work:?} is not the target's"),
        };
        // After a failure the target holds no locks.
        let mut failed = done.clone();
        failed.target.has_locks = false;
        let failed = failed.at_target(failure);
        if work == Work::Lock && self.source.has_locks {
            return vec![failed];
        }
        done.target.has_locks |= work == Work::Lock;
        done.target.runs = work == Work::Start;
        vec![done.at_target(event), failed]
    }

    /// Returns the states after a side notices the loss of the connection. Messages that arrived before are handled
    /// first.
    fn losses(&self) -> Vec<Self> {
        let mut nexts = Vec::new();
        let is_lost = |other: &Side| self.is_cut || other.has_closed || !other.is_alive;
        let receives = |side: &Side| side.is_alive && !side.has_closed && !side.knows_loss && side.inbox.is_empty();
        if receives(&self.source) && is_lost(&self.target) {
            let mut next = self.clone();
            next.source.knows_loss = true;
            nexts.push(next.at_source(source::Event::Disconnected));
        }
        let was_accepted = self.target_machine.phase() > target::Phase::Listening;
        if receives(&self.target) && is_lost(&self.source) && was_accepted {
            let mut next = self.clone();
            next.target.knows_loss = true;
            nexts.push(next.at_target(target::Event::Disconnected));
        }
        nexts
    }

    /// Returns the next states of accidents, which may happen at any time.
    fn accidents(&self) -> Vec<Self> {
        let mut nexts = Vec::new();
        if self.source.is_alive {
            use source::Event;
            for event in [Event::Cancelled, Event::TimedOut, Event::Failed] {
                nexts.push(self.clone().at_source(event));
            }
            if self.source_machine.phase() == source::Phase::Unknown && !self.is_forced {
                // The user has not checked the target: the locks keep the guest from running twice.
                let mut forced = self.clone();
                forced.is_forced = true;
                nexts.push(forced.at_source(Event::Forced));
            }
            if self.source.runs {
                let mut off = self.clone();
                (off.is_off, off.source.runs) = (true, false);
                nexts.push(off.at_source(Event::GuestOff));
            }
            let mut dead = self.clone();
            dead.source = Side { inbox: VecDeque::new(), ..Side::default() };
            nexts.push(dead);
        }
        if self.target.is_alive {
            use target::Event;
            for event in [Event::Cancelled, Event::TimedOut, Event::Failed] {
                nexts.push(self.clone().at_target(event));
            }
            let mut dead = self.clone();
            dead.target = Side::default();
            nexts.push(dead);
        }
        if !self.is_cut {
            // Any prefix of the frames in flight may have arrived.
            for source_keeps in 0..=self.source.inbox.len() {
                for target_keeps in 0..=self.target.inbox.len() {
                    let mut cut = self.clone();
                    cut.is_cut = true;
                    cut.source.inbox.truncate(source_keeps);
                    cut.target.inbox.truncate(target_keeps);
                    nexts.push(cut);
                }
            }
        }
        nexts
    }

    fn nexts(&self) -> Vec<Self> {
        let mut nexts = Vec::new();
        if self.source.is_alive {
            nexts.extend(self.source_receives());
            nexts.extend(self.source_works());
        }
        if self.target.is_alive {
            nexts.extend(self.target_receives());
            nexts.extend(self.target_works());
        }
        nexts.extend(self.losses());
        nexts.extend(self.accidents());
        nexts
    }

    /// True if no work is pending, and no phase has a deadline.
    fn is_at_rest(&self) -> bool {
        let source_rests = self.source_machine.is_over() || self.source_machine.phase() == source::Phase::Unknown;
        let is_still = |side: &Side| !side.is_alive || (side.inbox.is_empty() && side.work.is_empty());
        (source_rests || !self.source.is_alive)
            && (self.target_machine.is_over() || !self.target.is_alive)
            && is_still(&self.source)
            && is_still(&self.target)
    }

    /// Checks the invariants of a state.
    fn check(&self) {
        let Self { source, target, source_machine, target_machine, .. } = self;
        let phase = source_machine.phase();
        assert!(!(source.runs && target.runs), "two run: {self:?}");
        assert!(!(source.has_locks && target.has_locks), "two have the locks: {self:?}");
        assert!(!target.runs || (self.go_sent && target.has_locks), "it runs without Go or locks: {self:?}");
        assert!(!source.runs || source.has_locks, "the source runs without locks: {self:?}");
        assert!(!(source.runs && self.is_locked_out), "the source runs without locks: {self:?}");
        let is_moving = (source::Phase::Stopping..=source::Phase::Locking).contains(&phase) || self.is_locked_out;
        if source.is_alive && !self.is_off && !source.runs && !target.runs {
            let target_died = phase == source::Phase::Finished && !target.is_alive;
            assert!(is_moving || target_died, "none runs: {self:?}");
        }
        if self.is_at_rest() && !self.is_off && source.is_alive && target.is_alive {
            let is_reported = source.reports.last() == Some(&Outcome::Unknown) || self.is_locked_out;
            assert!(source.runs || target.runs || is_reported, "none runs at the end: {self:?}");
            assert_eq!(target.runs, target_machine.phase() == target::Phase::Running, "{self:?}");
        }
        if source.is_alive && source_machine.is_over() {
            assert!((1..=3).contains(&source.reports.len()), "{self:?}");
            let has_all = (source.has_locks || self.is_locked_out) && !self.logs;
            assert!(phase == source::Phase::Finished || has_all, "left over: {self:?}");
        }
        // A target that has discarded the guest never runs it.
        assert!(!(source.is_alive && phase == source::Phase::Ended && target.runs), "taken back: {self:?}");
    }
}

#[test]
fn every_order_of_events_leaves_one_runner_or_a_named_window() {
    let first = World::new();
    let (mut seen, mut todo) = (HashSet::from([first.clone()]), vec![first]);
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    let (mut steps, mut phases) = (0_u64, HashSet::new());
    while let Some(world) = todo.pop() {
        world.check();
        phases.insert((world.source_machine.phase(), world.target_machine.phase()));
        if world.is_at_rest() {
            let runner = match (world.source.runs, world.target.runs) {
                (true, _) => "source",
                (_, true) => "target",
                _ if world.is_off => "off",
                _ if world.is_locked_out => "locked out",
                _ if !world.source.is_alive => "killed with the source",
                _ if world.source_machine.phase() == source::Phase::Finished => "killed with the target",
                _ => "unknown",
            };
            *ends.entry(runner.to_string()).or_default() += 1;
        }
        for next in world.nexts() {
            steps += 1;
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    println!("{} states, {steps} steps, {} pairs of phases, ends: {ends:?}", seen.len(), phases.len());
    for runner in
        ["source", "target", "off", "unknown", "locked out", "killed with the source", "killed with the target"]
    {
        assert!(ends.contains_key(runner), "{runner}");
    }
    assert!(seen.len() > 900, "{}", seen.len());
}

/// The owner is unknown only to a source that has sent Go.
#[test]
fn only_a_loss_after_go_leaves_the_owner_unknown() {
    let first = World::new();
    let (mut seen, mut todo) = (HashSet::from([first.clone()]), vec![first]);
    while let Some(world) = todo.pop() {
        if world.source.reports.contains(&Outcome::Unknown) {
            assert!(world.go_sent);
        }
        // No loss of the connection.
        let nexts: Vec<_> = world.nexts().into_iter().filter(|next| !next.is_cut).collect();
        for next in nexts {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
}

#[test]
fn a_forced_source_resumes_with_locks_and_without_logs() {
    let mut world = World::new();
    for event in [
        source::Event::Connected,
        source::Event::Greeted,
        source::Event::Frame(Kind::Prepared),
        source::Event::Copied(Decision::StopGuest),
        source::Event::Stopped,
        source::Event::Sent,
        source::Event::Frame(Kind::Ready),
        source::Event::Released,
        source::Event::Disconnected,
    ] {
        // The work is replaced by its event.
        world.source.work.clear();
        world.source.has_locks &= event != source::Event::Released;
        world = world.at_source(event);
    }
    assert!(!world.source.runs && !world.source.has_locks);
    world.is_forced = true;
    world = world.at_source(source::Event::Forced);
    assert!(!world.source.runs);
    world = world.source_works().swap_remove(0);
    assert!(world.source.runs && world.source.has_locks && !world.logs);
    assert_eq!(world.source.reports, [Outcome::Unknown, Outcome::Forced]);
}
