//! State machine of the source.

use std::time::Duration;

use super::Outcome;
use crate::migration::precopy::Verdict;
use crate::migration::wire::Kind;

/// Stage of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
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

impl Stage {
    /// Fixed limit of the stage. `None` if the limit depends on the client's request (copying, finishing), or the stage
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
    Heard(Kind),
    /// A pass over the memory is complete.
    Copied(Verdict),
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
    Unsent,
    /// A user cancels the migration.
    Cancelled,
    /// A user forces the source to resume, although the target may have the guest.
    Forced,
    /// The stage's deadline has passed.
    Late,
    /// The connection is lost, or the target is silent.
    Lost,
    /// The source itself has failed.
    Broke,
    /// The guest powers off.
    GuestOff,
}

/// Action of the source. Actions are performed in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Sends the greeting.
    Greet,
    /// Sends the offer.
    Offer,
    /// Starts the dirty logs.
    StartLogs,
    /// Sends the pages of the next pass. [`Event::Copied`] follows.
    CopyPass,
    /// Stops the guest and its devices, and saves their state. [`Event::Stopped`] follows.
    StopGuest,
    /// Sends the remaining pages and the state. [`Event::Sent`] follows.
    SendRest,
    /// Flushes the guest's disks and releases their locks. [`Event::Released`] or [`Event::NotReleased`] follows.
    ReleaseLocks,
    /// Sends Go.
    SendGo,
    /// Sends a frame if the connection still works.
    Tell(Kind),
    /// Closes the connections, whatever is being sent.
    HangUp,
    /// Stops the dirty logs.
    StopLogs,
    /// Takes the locks back. [`Event::Locked`] or [`Event::NotLocked`] follows.
    TakeLocks,
    /// Resumes the guest if it ran before the migration.
    ResumeGuest,
    /// Releases the guest, which the target runs.
    EndGuest,
    /// Reports the outcome.
    Report(Outcome),
}

/// State machine of the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sender {
    stage: Stage,
    /// Outcome to report once the locks are taken back.
    outcome: Option<Outcome>,
}

impl Default for Sender {
    fn default() -> Self {
        Self::new()
    }
}

impl Sender {
    /// Starts in the stage of connecting.
    pub const fn new() -> Self {
        Self { stage: Stage::Connecting, outcome: None }
    }

    /// Current stage.
    pub const fn stage(&self) -> Stage {
        self.stage
    }

    /// True if a user can still cancel the migration: before Go.
    pub fn can_cancel(&self) -> bool {
        self.stage < Stage::Gone
    }

    /// True once the migration is over.
    pub const fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Finished | Stage::Ended)
    }

    /// Returns the actions for `event`.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        match self.stage {
            Stage::Finished | Stage::Ended => Vec::new(),
            Stage::Gone | Stage::Unknown => self.after_go(event),
            // A release in progress would drop locks that are taken now.
            Stage::Undoing if matches!(event, Event::Released | Event::NotReleased) => self.take_locks(),
            Stage::Undoing => Vec::new(),
            Stage::Locking => self.locking(event),
            stage => self.before_go(stage, event),
        }
    }

    fn before_go(&mut self, stage: Stage, event: Event) -> Vec<Action> {
        let (next, action) = match (stage, event) {
            (Stage::Connecting, Event::Connected) => (Stage::Greeting, Action::Greet),
            (Stage::Greeting, Event::Greeted) => (Stage::Preparing, Action::Offer),
            (Stage::Preparing, Event::Heard(Kind::Prepared)) => {
                self.stage = Stage::Copying;
                return vec![Action::StartLogs, Action::CopyPass];
            }
            (Stage::Copying, Event::Copied(Verdict::Again)) => (Stage::Copying, Action::CopyPass),
            (Stage::Copying, Event::Copied(Verdict::Stop)) => (Stage::Stopping, Action::StopGuest),
            (Stage::Stopping, Event::Stopped) => (Stage::Finishing, Action::SendRest),
            (Stage::Finishing, Event::Sent) => {
                self.stage = Stage::Loading;
                return Vec::new();
            }
            (Stage::Loading, Event::Heard(Kind::Ready)) => (Stage::Releasing, Action::ReleaseLocks),
            (Stage::Releasing, Event::Released) => (Stage::Gone, Action::SendGo),
            (Stage::Releasing, Event::NotReleased) => return self.take_back(Some(Kind::Failed)),
            (_, Event::Heard(Kind::Keepalive)) | (_, Event::Forced) => return Vec::new(),
            (_, Event::Cancelled) => return self.give_up(Outcome::Cancelled, Some(Kind::Cancel)),
            // A user cancelled at the target.
            (_, Event::Heard(Kind::Cancel)) => return self.give_up(Outcome::Cancelled, None),
            (_, Event::Heard(Kind::Failed) | Event::Lost) => return self.give_up(Outcome::Failed, None),
            // A paused guest's power-off is left to the target.
            (_, Event::GuestOff) if stage > Stage::Copying => return Vec::new(),
            (_, Event::GuestOff) => return self.give_up(Outcome::GuestOff, Some(Kind::Cancel)),
            // A failure of the source, a deadline, or an unexpected frame.
            _ => return self.give_up(Outcome::Failed, Some(Kind::Failed)),
        };
        self.stage = next;
        vec![action]
    }

    fn after_go(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Heard(Kind::Running) => {
                self.stage = Stage::Finished;
                vec![Action::HangUp, Action::EndGuest, Action::Report(Outcome::Finished)]
            }
            // The target has discarded the guest.
            Event::Heard(Kind::Failed | Kind::Cancel) => self.take_back(None),
            Event::Unsent if self.stage == Stage::Gone => self.take_back(None),
            // The disk locks show whether an unreachable target is running the guest.
            Event::Forced if self.stage == Stage::Unknown => {
                self.outcome = Some(Outcome::Forced);
                self.take_locks()
            }
            Event::Lost | Event::Late | Event::Broke if self.stage == Stage::Gone => {
                self.stage = Stage::Unknown;
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
                self.stage = Stage::Ended;
                let undone = if is_forced { vec![Action::HangUp, Action::StopLogs] } else { Vec::new() };
                undone.into_iter().chain([Action::ResumeGuest, Action::Report(outcome)]).collect()
            }
            Event::NotLocked if is_forced => {
                self.stage = Stage::Unknown;
                vec![Action::Report(Outcome::Unknown)]
            }
            Event::NotLocked => {
                self.stage = Stage::Ended;
                vec![Action::Report(Outcome::Failed)]
            }
            // The missing reply has arrived.
            Event::Heard(Kind::Running) if is_forced => {
                self.stage = Stage::Finished;
                vec![Action::HangUp, Action::EndGuest, Action::Report(Outcome::Finished)]
            }
            _ => Vec::new(),
        }
    }

    /// Ends the migration, and takes the locks back at once: no release is in progress.
    fn take_back(&mut self, tell: Option<Kind>) -> Vec<Action> {
        let mut actions = self.give_up(Outcome::Failed, tell);
        actions.extend(self.take_locks());
        actions
    }

    fn take_locks(&mut self) -> Vec<Action> {
        self.stage = Stage::Locking;
        vec![Action::TakeLocks]
    }

    /// Ends the migration with the guest at the source; from [`Stage::Releasing`] on, once its locks are taken back.
    fn give_up(&mut self, outcome: Outcome, tell: Option<Kind>) -> Vec<Action> {
        let stage = self.stage;
        let told = tell.filter(|_| stage > Stage::Connecting).map(Action::Tell);
        let hung_up = told.into_iter().chain([Action::HangUp]);
        if stage >= Stage::Releasing {
            (self.stage, self.outcome) = (Stage::Undoing, Some(outcome));
            return hung_up.chain([Action::StopLogs]).collect();
        }
        self.stage = Stage::Ended;
        let report = [Action::Report(outcome)];
        match stage {
            // The target cannot run the guest, which resumes before the frame is sent: a target on this host then frees
            // its VM and slows the host down.
            Stage::Stopping | Stage::Finishing | Stage::Loading => {
                [Action::ResumeGuest, Action::StopLogs].into_iter().chain(hung_up).chain(report).collect()
            }
            Stage::Copying => hung_up.chain([Action::StopLogs]).chain(report).collect(),
            _ => hung_up.chain(report).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source in `stage`.
    fn at(stage: Stage) -> Sender {
        let mut sender = Sender::new();
        for event in [
            Event::Connected,
            Event::Greeted,
            Event::Heard(Kind::Prepared),
            Event::Copied(Verdict::Stop),
            Event::Stopped,
            Event::Sent,
            Event::Heard(Kind::Ready),
            Event::Released,
            Event::Lost,
        ] {
            if sender.stage() == stage {
                break;
            }
            sender.on(event);
        }
        assert_eq!(sender.stage(), stage);
        sender
    }

    const BEFORE_GO: [Stage; 8] = [
        Stage::Connecting,
        Stage::Greeting,
        Stage::Preparing,
        Stage::Copying,
        Stage::Stopping,
        Stage::Finishing,
        Stage::Loading,
        Stage::Releasing,
    ];

    #[test]
    fn a_failure_before_go_undoes_exactly_what_was_done() {
        for stage in BEFORE_GO {
            for event in [Event::Lost, Event::Late, Event::Broke, Event::Cancelled, Event::Heard(Kind::Failed)] {
                let mut sender = at(stage);
                let mut actions = sender.on(event);
                if stage >= Stage::Releasing {
                    // The locks are not taken while they are being released, and nothing runs before they are.
                    assert!(!actions.contains(&Action::TakeLocks) && !actions.contains(&Action::ResumeGuest));
                    assert!(sender.on(event).is_empty() && sender.stage() == Stage::Undoing);
                    actions.extend(sender.on(Event::Released));
                    assert_eq!(actions.last(), Some(&Action::TakeLocks), "{event:?}");
                    actions.extend(sender.on(Event::Locked));
                }
                assert_eq!(sender.stage(), Stage::Ended);
                let does = |action| actions.contains(&action);
                assert_eq!(does(Action::ResumeGuest), stage >= Stage::Stopping, "{stage:?} {event:?}");
                assert_eq!(does(Action::StopLogs), stage >= Stage::Copying, "{stage:?} {event:?}");
                assert_eq!(does(Action::TakeLocks), stage >= Stage::Releasing, "{stage:?} {event:?}");
                assert!(does(Action::HangUp) && !does(Action::EndGuest) && !does(Action::SendGo));
                assert!(matches!(actions.last(), Some(Action::Report(Outcome::Failed | Outcome::Cancelled))));
                assert!(sender.on(Event::Lost).is_empty() && sender.is_over());
            }
        }
    }

    #[test]
    fn after_go_only_an_answer_or_a_user_ends_the_wait() {
        for event in [Event::Lost, Event::Late, Event::Broke] {
            let mut sender = at(Stage::Gone);
            assert!(!sender.can_cancel());
            assert_eq!(sender.on(event), [Action::Report(Outcome::Unknown)]);
            for event in [Event::Lost, Event::Late, Event::Cancelled, Event::Broke, Event::Unsent, Event::GuestOff] {
                assert!(sender.on(event).is_empty());
            }
            let mut running = sender.clone();
            assert!(running.on(Event::Heard(Kind::Running)).contains(&Action::EndGuest));
            let mut failed = sender.clone();
            assert!(failed.on(Event::Heard(Kind::Failed)).contains(&Action::TakeLocks));
            assert!(failed.on(Event::Locked).contains(&Action::ResumeGuest));
            assert_eq!(sender.on(Event::Forced), [Action::TakeLocks]);
            let mut late = sender.clone();
            assert!(late.on(Event::Heard(Kind::Running)).contains(&Action::EndGuest));
            assert!(sender.on(Event::Locked).contains(&Action::ResumeGuest));
        }
        // Only an unknown owner can be forced.
        assert!(at(Stage::Gone).on(Event::Forced).is_empty());
    }

    #[test]
    fn a_guest_that_stands_still_goes_on_before_anybody_is_told() {
        for stage in [Stage::Stopping, Stage::Finishing, Stage::Loading] {
            let actions = at(stage).on(Event::Cancelled);
            let tells = [Action::ResumeGuest, Action::StopLogs, Action::Tell(Kind::Cancel), Action::HangUp];
            assert_eq!(actions, [&tells[..], &[Action::Report(Outcome::Cancelled)]].concat(), "{stage:?}");
        }
        // A running guest has nothing to wait for; hanging up first keeps pages from being sent in vain.
        let actions = at(Stage::Copying).on(Event::Cancelled);
        assert_eq!(actions[..2], [Action::Tell(Kind::Cancel), Action::HangUp]);
    }

    #[test]
    fn a_go_of_which_no_byte_left_is_a_failure_before_it() {
        let mut sender = at(Stage::Gone);
        assert_eq!(sender.on(Event::Unsent), [Action::HangUp, Action::StopLogs, Action::TakeLocks]);
        assert_eq!(sender.on(Event::Locked), [Action::ResumeGuest, Action::Report(Outcome::Failed)]);
    }

    #[test]
    fn locks_that_cannot_be_given_up_are_taken_again_at_once() {
        let mut sender = at(Stage::Releasing);
        let undone = [Action::Tell(Kind::Failed), Action::HangUp, Action::StopLogs, Action::TakeLocks];
        assert_eq!(sender.on(Event::NotReleased), undone);
        assert_eq!(sender.on(Event::Locked), [Action::ResumeGuest, Action::Report(Outcome::Failed)]);
    }

    #[test]
    fn without_its_locks_the_guest_stays_paused() {
        for stage in [Stage::Releasing, Stage::Gone] {
            let mut sender = at(stage);
            let failed = if stage == Stage::Gone { Event::Heard(Kind::Failed) } else { Event::Cancelled };
            sender.on(failed);
            sender.on(Event::NotReleased);
            assert_eq!(sender.on(Event::NotLocked), [Action::Report(Outcome::Failed)]);
            assert!(sender.is_over() && sender.on(Event::Locked).is_empty());
        }
        // If the target holds the locks, forcing fails and can be repeated.
        let mut sender = at(Stage::Unknown);
        for _ in 0..2 {
            sender.on(Event::Forced);
            assert_eq!(sender.on(Event::NotLocked), [Action::Report(Outcome::Unknown)]);
            assert_eq!(sender.stage(), Stage::Unknown);
        }
    }

    #[test]
    fn frame_out_of_order_fails_the_migration_and_notifies_target() {
        for stage in BEFORE_GO.into_iter().skip(1) {
            for kind in [Kind::Running, Kind::Pages, Kind::Go, Kind::Offer] {
                let actions = at(stage).on(Event::Heard(kind));
                assert!(actions.contains(&Action::Tell(Kind::Failed)), "{stage:?} {kind:?}");
            }
            assert!(at(stage).on(Event::Heard(Kind::Keepalive)).is_empty());
        }
    }

    #[test]
    fn guest_power_off_ends_the_migration_without_a_resume() {
        for stage in BEFORE_GO {
            let actions = at(stage).on(Event::GuestOff);
            let stands_still = stage >= Stage::Stopping;
            assert_eq!(actions.is_empty(), stands_still, "{stage:?}");
            assert!(stands_still || actions.last() == Some(&Action::Report(Outcome::GuestOff)));
            assert!(!actions.contains(&Action::ResumeGuest));
        }
    }
}
