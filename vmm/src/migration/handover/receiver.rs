//! State machine of the target.

use std::time::Duration;

use super::Outcome;
use crate::migration::wire::Kind;

/// Stage of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Waits for the source.
    Listening,
    /// Waits for the source's greeting.
    Greeting,
    /// Waits for the offer.
    Offering,
    /// Creates the VM, and opens all backends.
    Preparing,
    /// Receives pages, and then the state.
    Receiving,
    /// Loads the state.
    Loading,
    /// Has the whole state, and waits for Go.
    Held,
    /// Takes the locks.
    Locking,
    /// Starts the guest.
    Starting,
    /// Runs the guest.
    Running,
    /// Has discarded the guest.
    Ended,
}

impl Stage {
    /// Limit of the stage. `None` if the stage ends by itself or with the target's own work.
    pub const fn deadline(self) -> Option<Duration> {
        match self {
            Self::Listening => Some(Duration::from_secs(3600)),
            Self::Greeting => Some(Duration::from_secs(10)),
            // The source makes all connections before it sends the offer.
            Self::Offering => Some(Duration::from_secs(90)),
            // Longer than the source waits before Go.
            Self::Held => Some(Duration::from_secs(60)),
            Self::Preparing | Self::Receiving | Self::Loading => None,
            Self::Locking | Self::Starting | Self::Running | Self::Ended => None,
        }
    }

    /// Name in the progress.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Greeting => "greeting",
            Self::Offering => "offering",
            Self::Preparing => "preparing",
            Self::Receiving => "receiving",
            Self::Loading => "loading",
            Self::Held => "held",
            Self::Locking => "locking",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Ended => "ended",
        }
    }
}

/// Event at the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// A source has connected.
    Accepted,
    /// The source has sent its greeting.
    Greeted,
    /// The offer is complete.
    Offered,
    /// The VM is created, and its backends are open.
    Prepared,
    /// All pages and the state have arrived.
    Received,
    /// The state is loaded: the guest can run.
    Loaded,
    /// The source has sent a frame of this kind, other than for the events above.
    Heard(Kind),
    /// The locks are taken.
    Locked,
    /// The locks cannot be taken, and none is held.
    NotLocked,
    /// The guest runs.
    Started,
    /// The guest cannot run, and is discarded with its locks.
    NotStarted,
    /// A user cancels the migration.
    Cancelled,
    /// The stage's deadline has passed.
    Late,
    /// The connection is lost, or the source is silent.
    Lost,
    /// The target itself has failed.
    Broke,
}

/// Action of the target. Actions are performed in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Accepts no other source, and removes the socket's path.
    StopListening,
    /// Replies to the greeting.
    Greet,
    /// Creates the VM and opens its backends. [`Event::Prepared`] follows.
    Prepare,
    /// Loads the state. [`Event::Loaded`] follows.
    Load,
    /// Takes the locks. [`Event::Locked`] or [`Event::NotLocked`] follows.
    TakeLocks,
    /// Starts the guest. [`Event::Started`] or [`Event::NotStarted`] follows.
    Start,
    /// Sends a frame if the connection still works.
    Tell(Kind),
    /// Discards the guest, its backends and its locks.
    Discard,
    /// Closes the connections.
    HangUp,
    /// Reports the outcome.
    Report(Outcome),
}

/// State machine of the target.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Receiver {
    stage: Stage,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::new()
    }
}

impl Receiver {
    /// Starts in the stage of listening.
    pub const fn new() -> Self {
        Self { stage: Stage::Listening }
    }

    /// Current stage.
    pub const fn stage(&self) -> Stage {
        self.stage
    }

    /// True if a user can still cancel the migration: before Go.
    pub fn can_cancel(&self) -> bool {
        self.stage < Stage::Locking
    }

    /// True once the migration is over.
    pub const fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Ended)
    }

    /// Returns the actions for `event`.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let stage = self.stage;
        let (next, actions) = match (stage, event) {
            (Stage::Running | Stage::Ended, _) => return Vec::new(),
            (Stage::Listening, Event::Accepted) => (Stage::Greeting, vec![Action::StopListening]),
            (Stage::Greeting, Event::Greeted) => (Stage::Offering, vec![Action::Greet]),
            (Stage::Offering, Event::Offered) => (Stage::Preparing, vec![Action::Prepare]),
            (Stage::Preparing, Event::Prepared) => (Stage::Receiving, vec![Action::Tell(Kind::Prepared)]),
            (Stage::Receiving, Event::Received) => (Stage::Loading, vec![Action::Load]),
            (Stage::Loading, Event::Loaded) => (Stage::Held, vec![Action::Tell(Kind::Ready)]),
            (Stage::Held, Event::Heard(Kind::Go)) => (Stage::Locking, vec![Action::TakeLocks]),
            (Stage::Locking, Event::Locked) => (Stage::Starting, vec![Action::Start]),
            (Stage::Starting, Event::Started) => {
                let report = Action::Report(Outcome::Finished);
                (Stage::Running, vec![Action::Tell(Kind::Running), Action::HangUp, report])
            }
            // The target owns the guest: it reports a failure only once the guest is discarded.
            (Stage::Locking, Event::NotLocked) | (Stage::Starting, Event::NotStarted) => {
                let report = Action::Report(Outcome::Failed);
                (Stage::Ended, vec![Action::Discard, Action::Tell(Kind::Failed), Action::HangUp, report])
            }
            (Stage::Locking | Stage::Starting, _) | (_, Event::Heard(Kind::Keepalive)) => return Vec::new(),
            (_, Event::Cancelled) => return self.give_up(Outcome::Cancelled, Some(Kind::Cancel)),
            (_, Event::Heard(Kind::Cancel)) => return self.give_up(Outcome::Cancelled, None),
            (_, Event::Heard(Kind::Failed) | Event::Lost) => return self.give_up(Outcome::Failed, None),
            // A failure of the target, a deadline, or an unexpected frame.
            _ => return self.give_up(Outcome::Failed, Some(Kind::Failed)),
        };
        self.stage = next;
        actions
    }

    fn give_up(&mut self, outcome: Outcome, tell: Option<Kind>) -> Vec<Action> {
        let stage = self.stage;
        self.stage = Stage::Ended;
        let mut actions = Vec::new();
        if stage == Stage::Listening {
            actions.push(Action::StopListening);
        } else {
            actions.extend(tell.map(Action::Tell));
        }
        actions.push(Action::HangUp);
        if stage >= Stage::Preparing {
            actions.push(Action::Discard);
        }
        actions.push(Action::Report(outcome));
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(stage: Stage) -> Receiver {
        let mut receiver = Receiver::new();
        for event in [
            Event::Accepted,
            Event::Greeted,
            Event::Offered,
            Event::Prepared,
            Event::Received,
            Event::Loaded,
            Event::Heard(Kind::Go),
            Event::Locked,
            Event::Started,
        ] {
            if receiver.stage() == stage {
                break;
            }
            receiver.on(event);
        }
        assert_eq!(receiver.stage(), stage);
        receiver
    }

    const BEFORE_GO: [Stage; 7] = [
        Stage::Listening,
        Stage::Greeting,
        Stage::Offering,
        Stage::Preparing,
        Stage::Receiving,
        Stage::Loading,
        Stage::Held,
    ];

    #[test]
    fn a_guest_is_started_by_go_in_its_turn_and_by_nothing_else() {
        for stage in BEFORE_GO {
            let actions = at(stage).on(Event::Heard(Kind::Go));
            assert_eq!(actions == [Action::TakeLocks], stage == Stage::Held, "{stage:?}");
            assert!(stage == Stage::Held || actions.contains(&Action::Report(Outcome::Failed)));
        }
        assert_eq!(at(Stage::Locking).on(Event::Locked), [Action::Start]);
    }

    #[test]
    fn whatever_fails_before_go_discards_the_guest() {
        for stage in BEFORE_GO {
            for event in [Event::Cancelled, Event::Late, Event::Lost, Event::Broke, Event::Heard(Kind::Failed)] {
                let mut receiver = at(stage);
                let actions = receiver.on(event);
                assert_eq!(receiver.stage(), Stage::Ended, "{stage:?} {event:?}");
                assert_eq!(actions.contains(&Action::Discard), stage >= Stage::Preparing);
                assert_eq!(actions.contains(&Action::StopListening), stage == Stage::Listening);
                assert!(receiver.on(Event::Heard(Kind::Go)).is_empty());
            }
        }
    }

    #[test]
    fn after_go_only_the_targets_own_failure_discards_then_reports() {
        for event in [Event::Cancelled, Event::Late, Event::Lost, Event::Heard(Kind::Cancel), Event::Heard(Kind::Pages)]
        {
            for stage in [Stage::Locking, Stage::Starting] {
                let mut receiver = at(stage);
                assert!(receiver.on(event).is_empty() && !receiver.can_cancel());
                assert!(receiver.on(Event::Broke).is_empty());
                assert_eq!(receiver.stage(), stage);
            }
        }
        for (stage, event) in [(Stage::Locking, Event::NotLocked), (Stage::Starting, Event::NotStarted)] {
            let actions = at(stage).on(event);
            assert_eq!(actions[..2], [Action::Discard, Action::Tell(Kind::Failed)]);
        }
    }
}
