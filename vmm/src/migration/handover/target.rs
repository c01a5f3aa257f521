//! State machine of the target.

use std::time::Duration;

use super::Outcome;
use crate::migration::wire::Kind;

/// Phase of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
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

impl Phase {
    /// Limit of the phase. `None` if the phase ends by itself or with the target's own work.
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
    Frame(Kind),
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
    /// The phase's deadline has passed.
    TimedOut,
    /// The connection is lost, or the source is silent.
    Disconnected,
    /// The target itself has failed.
    Failed,
}

/// Action of the target. Actions are performed in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Accepts no other source, and removes the socket's path.
    StopListening,
    /// Replies to the greeting.
    SendGreeting,
    /// Creates the VM and opens its backends. [`Event::Prepared`] follows.
    PrepareVm,
    /// Loads the state. [`Event::Loaded`] follows.
    LoadState,
    /// Takes the locks. [`Event::Locked`] or [`Event::NotLocked`] follows.
    TakeLocks,
    /// Starts the guest. [`Event::Started`] or [`Event::NotStarted`] follows.
    StartGuest,
    /// Sends a frame if the connection still works.
    Send(Kind),
    /// Discards the guest, its backends and its locks.
    DiscardGuest,
    /// Closes the connections.
    Close,
    /// Reports the outcome.
    Report(Outcome),
}

/// State machine of the target.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TargetMachine {
    phase: Phase,
}

impl Default for TargetMachine {
    fn default() -> Self {
        Self::new()
    }
}

impl TargetMachine {
    /// Starts in the phase of listening.
    pub const fn new() -> Self {
        Self { phase: Phase::Listening }
    }

    /// Current phase.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// True if a user can still cancel the migration: before Go.
    pub fn can_cancel(&self) -> bool {
        self.phase < Phase::Locking
    }

    /// True once the migration is over.
    pub const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Ended)
    }

    /// Returns the actions for `event`.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let phase = self.phase;
        let (next, actions) = match (phase, event) {
            (Phase::Running | Phase::Ended, _) => return Vec::new(),
            (Phase::Listening, Event::Accepted) => (Phase::Greeting, vec![Action::StopListening]),
            (Phase::Greeting, Event::Greeted) => (Phase::Offering, vec![Action::SendGreeting]),
            (Phase::Offering, Event::Offered) => (Phase::Preparing, vec![Action::PrepareVm]),
            (Phase::Preparing, Event::Prepared) => (Phase::Receiving, vec![Action::Send(Kind::Prepared)]),
            (Phase::Receiving, Event::Received) => (Phase::Loading, vec![Action::LoadState]),
            (Phase::Loading, Event::Loaded) => (Phase::Held, vec![Action::Send(Kind::Ready)]),
            (Phase::Held, Event::Frame(Kind::Go)) => (Phase::Locking, vec![Action::TakeLocks]),
            (Phase::Locking, Event::Locked) => (Phase::Starting, vec![Action::StartGuest]),
            (Phase::Starting, Event::Started) => {
                let report = Action::Report(Outcome::Finished);
                (Phase::Running, vec![Action::Send(Kind::Running), Action::Close, report])
            }
            // The target owns the guest: it reports a failure only once the guest is discarded.
            (Phase::Locking, Event::NotLocked) | (Phase::Starting, Event::NotStarted) => {
                let report = Action::Report(Outcome::Failed);
                (Phase::Ended, vec![Action::DiscardGuest, Action::Send(Kind::Failed), Action::Close, report])
            }
            (Phase::Locking | Phase::Starting, _) | (_, Event::Frame(Kind::Keepalive)) => return Vec::new(),
            (_, Event::Cancelled) => return self.give_up(Outcome::Cancelled, Some(Kind::Cancel)),
            (_, Event::Frame(Kind::Cancel)) => return self.give_up(Outcome::Cancelled, None),
            (_, Event::Frame(Kind::Failed) | Event::Disconnected) => return self.give_up(Outcome::Failed, None),
            // A failure of the target, a deadline, or an unexpected frame.
            _ => return self.give_up(Outcome::Failed, Some(Kind::Failed)),
        };
        self.phase = next;
        actions
    }

    fn give_up(&mut self, outcome: Outcome, frame: Option<Kind>) -> Vec<Action> {
        let phase = self.phase;
        self.phase = Phase::Ended;
        let mut actions = Vec::new();
        if phase == Phase::Listening {
            actions.push(Action::StopListening);
        } else {
            actions.extend(frame.map(Action::Send));
        }
        actions.push(Action::Close);
        if phase >= Phase::Preparing {
            actions.push(Action::DiscardGuest);
        }
        actions.push(Action::Report(outcome));
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(phase: Phase) -> TargetMachine {
        let mut machine = TargetMachine::new();
        for event in [
            Event::Accepted,
            Event::Greeted,
            Event::Offered,
            Event::Prepared,
            Event::Received,
            Event::Loaded,
            Event::Frame(Kind::Go),
            Event::Locked,
            Event::Started,
        ] {
            if machine.phase() == phase {
                break;
            }
            machine.on(event);
        }
        assert_eq!(machine.phase(), phase);
        machine
    }

    const BEFORE_GO: [Phase; 7] = [
        Phase::Listening,
        Phase::Greeting,
        Phase::Offering,
        Phase::Preparing,
        Phase::Receiving,
        Phase::Loading,
        Phase::Held,
    ];

    #[test]
    fn a_guest_is_started_by_go_in_its_turn_and_by_nothing_else() {
        for phase in BEFORE_GO {
            let actions = at(phase).on(Event::Frame(Kind::Go));
            assert_eq!(actions == [Action::TakeLocks], phase == Phase::Held, "{phase:?}");
            assert!(phase == Phase::Held || actions.contains(&Action::Report(Outcome::Failed)));
        }
        assert_eq!(at(Phase::Locking).on(Event::Locked), [Action::StartGuest]);
    }

    #[test]
    fn any_failure_before_go_discards_the_guest() {
        for phase in BEFORE_GO {
            for event in
                [Event::Cancelled, Event::TimedOut, Event::Disconnected, Event::Failed, Event::Frame(Kind::Failed)]
            {
                let mut machine = at(phase);
                let actions = machine.on(event);
                assert_eq!(machine.phase(), Phase::Ended, "{phase:?} {event:?}");
                assert_eq!(actions.contains(&Action::DiscardGuest), phase >= Phase::Preparing);
                assert_eq!(actions.contains(&Action::StopListening), phase == Phase::Listening);
                assert!(machine.on(Event::Frame(Kind::Go)).is_empty());
            }
        }
    }

    #[test]
    fn after_go_only_the_targets_own_failure_discards_then_reports() {
        for event in [
            Event::Cancelled,
            Event::TimedOut,
            Event::Disconnected,
            Event::Frame(Kind::Cancel),
            Event::Frame(Kind::Pages),
        ] {
            for phase in [Phase::Locking, Phase::Starting] {
                let mut machine = at(phase);
                assert!(machine.on(event).is_empty() && !machine.can_cancel());
                assert!(machine.on(Event::Failed).is_empty());
                assert_eq!(machine.phase(), phase);
            }
        }
        for (phase, event) in [(Phase::Locking, Event::NotLocked), (Phase::Starting, Event::NotStarted)] {
            let actions = at(phase).on(event);
            assert_eq!(actions[..2], [Action::DiscardGuest, Action::Send(Kind::Failed)]);
        }
    }
}
