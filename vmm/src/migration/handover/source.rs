//! State machine of the source.

use std::time::Duration;

use super::Outcome;
use crate::migration::precopy::Decision;
use crate::migration::wire::Kind;

/// Phase of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Connects to the target.
    Connecting,
    /// Waits for the target's greeting.
    Greeting,
    /// Waits until the target has created its VM.
    Preparing,
    /// Copies memory while the guest runs.
    Copying,
    /// Stops the guest and its devices.
    Stopping,
    /// Sends the remaining pages, and the state.
    Finishing,
    /// Waits until the target has loaded the state.
    Loading,
    /// Flushes the guest's disks and releases their locks.
    Releasing,
    /// Has sent Go.
    Gone,
    /// The guest's owner is unknown.
    Unknown,
    /// Waits for a pending release of the locks, to take them back.
    Undoing,
    /// Takes the locks back, because the source has the guest or a user forces it.
    Locking,
    /// The target has the guest.
    Finished,
    /// The source has the guest, or the guest is off.
    Ended,
}

impl Phase {
    /// Fixed limit of the phase. `None` if the limit depends on the client's request (copying, finishing), or the phase
    /// waits for a user or for the host's disks.
    pub const fn deadline(self) -> Option<Duration> {
        match self {
            Self::Connecting | Self::Greeting => Some(Duration::from_secs(10)),
            // Plus time for each GiB: vhost-user backends touch all of guest memory.
            Self::Preparing => Some(Duration::from_secs(600)),
            Self::Stopping | Self::Releasing => Some(Duration::from_secs(30)),
            Self::Loading => Some(Duration::from_secs(60)),
            Self::Gone => Some(Duration::from_secs(10)),
            Self::Copying | Self::Finishing | Self::Unknown => None,
            Self::Undoing | Self::Locking | Self::Finished | Self::Ended => None,
        }
    }

    /// Name in the progress.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Greeting => "greeting",
            Self::Preparing => "preparing",
            Self::Copying => "copying",
            Self::Stopping => "stopping",
            Self::Finishing => "finishing",
            Self::Loading => "loading",
            Self::Releasing => "releasing",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
            Self::Undoing => "undoing",
            Self::Locking => "locking",
            Self::Finished => "finished",
            Self::Ended => "ended",
        }
    }
}

/// Event at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The source is connected to the target.
    Connected,
    /// The target has sent its greeting.
    Greeted,
    /// The target has sent a frame of this kind.
    Frame(Kind),
    /// A pass over the memory is complete.
    Copied(Decision),
    /// The guest and its devices are stopped, and their state is saved.
    Stopped,
    /// The remaining pages and the state are sent.
    Sent,
    /// The disk locks are released.
    Released,
    /// Releasing has failed for some locks, and has ended.
    NotReleased,
    /// The locks are taken back.
    Locked,
    /// The locks cannot be taken back: another program holds one.
    NotLocked,
    /// Go could not be sent, not even its first byte.
    GoNotSent,
    /// A user cancels the migration.
    Cancelled,
    /// A user forces the source to resume, although the target may have the guest.
    Forced,
    /// The phase's deadline has passed.
    TimedOut,
    /// The connection is lost, or the target is silent.
    Disconnected,
    /// The source itself has failed.
    Failed,
    /// The guest powers off.
    GuestOff,
}

/// Action of the source. Actions are performed in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Sends the greeting.
    SendGreeting,
    /// Sends the offer.
    SendOffer,
    /// Starts the dirty logs.
    StartLogs,
    /// Sends the pages of the next pass. [`Event::Copied`] follows.
    CopyPass,
    /// Stops the guest and its devices, and saves their state. [`Event::Stopped`] follows.
    StopGuest,
    /// Sends the remaining pages and the state. [`Event::Sent`] follows.
    SendFinalPass,
    /// Flushes the guest's disks and releases their locks. [`Event::Released`] or [`Event::NotReleased`] follows.
    ReleaseLocks,
    /// Sends Go.
    SendGo,
    /// Sends a frame if the connection still works.
    Send(Kind),
    /// Closes the connections, whatever is being sent.
    Close,
    /// Stops the dirty logs.
    StopLogs,
    /// Takes the locks back. [`Event::Locked`] or [`Event::NotLocked`] follows.
    TakeLocks,
    /// Resumes the guest if it ran before the migration.
    ResumeGuest,
    /// Releases the guest, which the target runs.
    ReleaseGuest,
    /// Reports the outcome.
    Report(Outcome),
}

/// State machine of the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SourceMachine {
    phase: Phase,
    /// Outcome to report once the locks are taken back.
    outcome: Option<Outcome>,
}

impl Default for SourceMachine {
    fn default() -> Self {
        Self::new()
    }
}

impl SourceMachine {
    /// Starts in the phase of connecting.
    pub const fn new() -> Self {
        Self { phase: Phase::Connecting, outcome: None }
    }

    /// Current phase.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// True if a user can still cancel the migration: before Go.
    pub fn can_cancel(&self) -> bool {
        self.phase < Phase::Gone
    }

    /// True once the migration is over.
    pub const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Finished | Phase::Ended)
    }

    /// Returns the actions for `event`.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        match self.phase {
            Phase::Finished | Phase::Ended => Vec::new(),
            Phase::Gone | Phase::Unknown => self.after_go(event),
            // A release in progress would drop locks that are taken now.
            Phase::Undoing if matches!(event, Event::Released | Event::NotReleased) => self.take_locks(),
            Phase::Undoing => Vec::new(),
            Phase::Locking => self.locking(event),
            phase => self.before_go(phase, event),
        }
    }

    fn before_go(&mut self, phase: Phase, event: Event) -> Vec<Action> {
        let (next, action) = match (phase, event) {
            (Phase::Connecting, Event::Connected) => (Phase::Greeting, Action::SendGreeting),
            (Phase::Greeting, Event::Greeted) => (Phase::Preparing, Action::SendOffer),
            (Phase::Preparing, Event::Frame(Kind::Prepared)) => {
                self.phase = Phase::Copying;
                return vec![Action::StartLogs, Action::CopyPass];
            }
            (Phase::Copying, Event::Copied(Decision::CopyAgain)) => (Phase::Copying, Action::CopyPass),
            (Phase::Copying, Event::Copied(Decision::StopGuest)) => (Phase::Stopping, Action::StopGuest),
            (Phase::Stopping, Event::Stopped) => (Phase::Finishing, Action::SendFinalPass),
            (Phase::Finishing, Event::Sent) => {
                self.phase = Phase::Loading;
                return Vec::new();
            }
            (Phase::Loading, Event::Frame(Kind::Ready)) => (Phase::Releasing, Action::ReleaseLocks),
            (Phase::Releasing, Event::Released) => (Phase::Gone, Action::SendGo),
            (Phase::Releasing, Event::NotReleased) => return self.take_back(Some(Kind::Failed)),
            (_, Event::Frame(Kind::Keepalive)) | (_, Event::Forced) => return Vec::new(),
            (_, Event::Cancelled) => return self.give_up(Outcome::Cancelled, Some(Kind::Cancel)),
            // A user cancelled at the target.
            (_, Event::Frame(Kind::Cancel)) => return self.give_up(Outcome::Cancelled, None),
            (_, Event::Frame(Kind::Failed) | Event::Disconnected) => return self.give_up(Outcome::Failed, None),
            // A paused guest's power-off is left to the target.
            (_, Event::GuestOff) if phase > Phase::Copying => return Vec::new(),
            (_, Event::GuestOff) => return self.give_up(Outcome::GuestOff, Some(Kind::Cancel)),
            // A failure of the source, a deadline, or an unexpected frame.
            _ => return self.give_up(Outcome::Failed, Some(Kind::Failed)),
        };
        self.phase = next;
        vec![action]
    }

    fn after_go(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Frame(Kind::Running) => {
                self.phase = Phase::Finished;
                vec![Action::Close, Action::ReleaseGuest, Action::Report(Outcome::Finished)]
            }
            // The target has discarded the guest.
            Event::Frame(Kind::Failed | Kind::Cancel) => self.take_back(None),
            Event::GoNotSent if self.phase == Phase::Gone => self.take_back(None),
            // The disk locks show whether an unreachable target is running the guest.
            Event::Forced if self.phase == Phase::Unknown => {
                self.outcome = Some(Outcome::Forced);
                self.take_locks()
            }
            Event::Disconnected | Event::TimedOut | Event::Failed if self.phase == Phase::Gone => {
                self.phase = Phase::Unknown;
                vec![Action::Report(Outcome::Unknown)]
            }
            // A reply may still arrive.
            _ => Vec::new(),
        }
    }

    /// Handles events while the locks are taken back; nothing runs without them.
    fn locking(&mut self, event: Event) -> Vec<Action> {
        let outcome = self.outcome.unwrap_or(Outcome::Failed);
        let is_forced = outcome == Outcome::Forced;
        match event {
            Event::Locked => {
                self.phase = Phase::Ended;
                let undone = if is_forced { vec![Action::Close, Action::StopLogs] } else { Vec::new() };
                undone.into_iter().chain([Action::ResumeGuest, Action::Report(outcome)]).collect()
            }
            Event::NotLocked if is_forced => {
                self.phase = Phase::Unknown;
                vec![Action::Report(Outcome::Unknown)]
            }
            Event::NotLocked => {
                self.phase = Phase::Ended;
                vec![Action::Report(Outcome::Failed)]
            }
            // The missing reply has arrived.
            Event::Frame(Kind::Running) if is_forced => {
                self.phase = Phase::Finished;
                vec![Action::Close, Action::ReleaseGuest, Action::Report(Outcome::Finished)]
            }
            _ => Vec::new(),
        }
    }

    /// Ends the migration, and takes the locks back at once: no release is in progress.
    fn take_back(&mut self, frame: Option<Kind>) -> Vec<Action> {
        let mut actions = self.give_up(Outcome::Failed, frame);
        actions.extend(self.take_locks());
        actions
    }

    fn take_locks(&mut self) -> Vec<Action> {
        self.phase = Phase::Locking;
        vec![Action::TakeLocks]
    }

    /// Ends the migration with the guest at the source; from [`Phase::Releasing`] on, once its locks are taken back.
    fn give_up(&mut self, outcome: Outcome, frame: Option<Kind>) -> Vec<Action> {
        let phase = self.phase;
        let sent = frame.filter(|_| phase > Phase::Connecting).map(Action::Send);
        let closed = sent.into_iter().chain([Action::Close]);
        if phase >= Phase::Releasing {
            (self.phase, self.outcome) = (Phase::Undoing, Some(outcome));
            return closed.chain([Action::StopLogs]).collect();
        }
        self.phase = Phase::Ended;
        let report = [Action::Report(outcome)];
        match phase {
            // The target cannot run the guest, which resumes before the frame is sent: a target on this host then frees
            // its VM and slows the host down.
            Phase::Stopping | Phase::Finishing | Phase::Loading => {
                [Action::ResumeGuest, Action::StopLogs].into_iter().chain(closed).chain(report).collect()
            }
            Phase::Copying => closed.chain([Action::StopLogs]).chain(report).collect(),
            _ => closed.chain(report).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source in `phase`.
    fn at(phase: Phase) -> SourceMachine {
        let mut machine = SourceMachine::new();
        for event in [
            Event::Connected,
            Event::Greeted,
            Event::Frame(Kind::Prepared),
            Event::Copied(Decision::StopGuest),
            Event::Stopped,
            Event::Sent,
            Event::Frame(Kind::Ready),
            Event::Released,
            Event::Disconnected,
        ] {
            if machine.phase() == phase {
                break;
            }
            machine.on(event);
        }
        assert_eq!(machine.phase(), phase);
        machine
    }

    const BEFORE_GO: [Phase; 8] = [
        Phase::Connecting,
        Phase::Greeting,
        Phase::Preparing,
        Phase::Copying,
        Phase::Stopping,
        Phase::Finishing,
        Phase::Loading,
        Phase::Releasing,
    ];

    #[test]
    fn a_failure_before_go_undoes_exactly_what_was_done() {
        for phase in BEFORE_GO {
            for event in
                [Event::Disconnected, Event::TimedOut, Event::Failed, Event::Cancelled, Event::Frame(Kind::Failed)]
            {
                let mut machine = at(phase);
                let mut actions = machine.on(event);
                if phase >= Phase::Releasing {
                    // The locks are not taken while they are being released, and nothing runs before they are.
                    assert!(!actions.contains(&Action::TakeLocks) && !actions.contains(&Action::ResumeGuest));
                    assert!(machine.on(event).is_empty() && machine.phase() == Phase::Undoing);
                    actions.extend(machine.on(Event::Released));
                    assert_eq!(actions.last(), Some(&Action::TakeLocks), "{event:?}");
                    actions.extend(machine.on(Event::Locked));
                }
                assert_eq!(machine.phase(), Phase::Ended);
                let does = |action| actions.contains(&action);
                assert_eq!(does(Action::ResumeGuest), phase >= Phase::Stopping, "{phase:?} {event:?}");
                assert_eq!(does(Action::StopLogs), phase >= Phase::Copying, "{phase:?} {event:?}");
                assert_eq!(does(Action::TakeLocks), phase >= Phase::Releasing, "{phase:?} {event:?}");
                assert!(does(Action::Close) && !does(Action::ReleaseGuest) && !does(Action::SendGo));
                assert!(matches!(actions.last(), Some(Action::Report(Outcome::Failed | Outcome::Cancelled))));
                assert!(machine.on(Event::Disconnected).is_empty() && machine.is_over());
            }
        }
    }

    #[test]
    fn after_go_only_a_reply_or_a_user_ends_the_wait() {
        for event in [Event::Disconnected, Event::TimedOut, Event::Failed] {
            let mut machine = at(Phase::Gone);
            assert!(!machine.can_cancel());
            assert_eq!(machine.on(event), [Action::Report(Outcome::Unknown)]);
            for event in [
                Event::Disconnected,
                Event::TimedOut,
                Event::Cancelled,
                Event::Failed,
                Event::GoNotSent,
                Event::GuestOff,
            ] {
                assert!(machine.on(event).is_empty());
            }
            let mut running = machine.clone();
            assert!(running.on(Event::Frame(Kind::Running)).contains(&Action::ReleaseGuest));
            let mut failed = machine.clone();
            assert!(failed.on(Event::Frame(Kind::Failed)).contains(&Action::TakeLocks));
            assert!(failed.on(Event::Locked).contains(&Action::ResumeGuest));
            assert_eq!(machine.on(Event::Forced), [Action::TakeLocks]);
            let mut late = machine.clone();
            assert!(late.on(Event::Frame(Kind::Running)).contains(&Action::ReleaseGuest));
            assert!(machine.on(Event::Locked).contains(&Action::ResumeGuest));
        }
        // Only an unknown owner can be forced.
        assert!(at(Phase::Gone).on(Event::Forced).is_empty());
    }

    #[test]
    fn a_paused_guest_resumes_before_the_target_is_notified() {
        for phase in [Phase::Stopping, Phase::Finishing, Phase::Loading] {
            let actions = at(phase).on(Event::Cancelled);
            let expected = [Action::ResumeGuest, Action::StopLogs, Action::Send(Kind::Cancel), Action::Close];
            assert_eq!(actions, [&expected[..], &[Action::Report(Outcome::Cancelled)]].concat(), "{phase:?}");
        }
        // A running guest has nothing to wait for; hanging up first keeps pages from being sent without need.
        let actions = at(Phase::Copying).on(Event::Cancelled);
        assert_eq!(actions[..2], [Action::Send(Kind::Cancel), Action::Close]);
    }

    #[test]
    fn a_go_without_a_sent_byte_fails_as_before_go() {
        let mut machine = at(Phase::Gone);
        assert_eq!(machine.on(Event::GoNotSent), [Action::Close, Action::StopLogs, Action::TakeLocks]);
        assert_eq!(machine.on(Event::Locked), [Action::ResumeGuest, Action::Report(Outcome::Failed)]);
    }

    #[test]
    fn locks_that_cannot_be_given_up_are_taken_again_at_once() {
        let mut machine = at(Phase::Releasing);
        let undone = [Action::Send(Kind::Failed), Action::Close, Action::StopLogs, Action::TakeLocks];
        assert_eq!(machine.on(Event::NotReleased), undone);
        assert_eq!(machine.on(Event::Locked), [Action::ResumeGuest, Action::Report(Outcome::Failed)]);
    }

    #[test]
    fn without_its_locks_the_guest_stays_paused() {
        for phase in [Phase::Releasing, Phase::Gone] {
            let mut machine = at(phase);
            let failed = if phase == Phase::Gone { Event::Frame(Kind::Failed) } else { Event::Cancelled };
            machine.on(failed);
            machine.on(Event::NotReleased);
            assert_eq!(machine.on(Event::NotLocked), [Action::Report(Outcome::Failed)]);
            assert!(machine.is_over() && machine.on(Event::Locked).is_empty());
        }
        // If the target holds the locks, forcing fails and can be repeated.
        let mut machine = at(Phase::Unknown);
        for _ in 0..2 {
            machine.on(Event::Forced);
            assert_eq!(machine.on(Event::NotLocked), [Action::Report(Outcome::Unknown)]);
            assert_eq!(machine.phase(), Phase::Unknown);
        }
    }

    #[test]
    fn frame_out_of_order_fails_the_migration_and_notifies_target() {
        for phase in BEFORE_GO.into_iter().skip(1) {
            for kind in [Kind::Running, Kind::Pages, Kind::Go, Kind::Offer] {
                let actions = at(phase).on(Event::Frame(kind));
                assert!(actions.contains(&Action::Send(Kind::Failed)), "{phase:?} {kind:?}");
            }
            assert!(at(phase).on(Event::Frame(Kind::Keepalive)).is_empty());
        }
    }

    #[test]
    fn guest_power_off_ends_the_migration_without_a_resume() {
        for phase in BEFORE_GO {
            let actions = at(phase).on(Event::GuestOff);
            let is_paused = phase >= Phase::Stopping;
            assert_eq!(actions.is_empty(), is_paused, "{phase:?}");
            assert!(is_paused || actions.last() == Some(&Action::Report(Outcome::GuestOff)));
            assert!(!actions.contains(&Action::ResumeGuest));
        }
    }
}
