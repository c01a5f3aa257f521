//! Order of a migration at the target: [`PHASES`] if nothing fails, and the step for each action in
//! [`MigrationTarget::perform`]. A test compares the table with the state machine, and fails each phase.

use super::MigrationTarget;
use crate::migration::event_loop::EventLoop;
use crate::migration::handover::Outcome;
use crate::migration::handover::target::{Action, Event, Phase};
use crate::migration::wire::Kind;
use AfterFailure::{DiscardedHere, NeverHere, RunsHere, StaysAtSource};

/// Phase, the actions that start it, the event that ends it, and the guest after a failure in it.
type Row = (Phase, &'static [Action], Option<Event>, AfterFailure);

#[rustfmt::skip]
const PHASES: [Row; 10] = [
    // The target waits for a source.
    (Phase::Listening, &[], Some(Event::Accepted), NeverHere),
    // No other source is accepted.
    (Phase::Greeting, &[Action::StopListening], Some(Event::Greeted), NeverHere),
    // The source makes all its connections, then sends the offer.
    (Phase::Offering, &[Action::SendGreeting], Some(Event::Offered), NeverHere),
    // The VM is created, and every backend is opened and checked.
    (Phase::Preparing, &[Action::PrepareVm], Some(Event::Prepared), StaysAtSource),
    // Pages arrive while the guest runs at the source. It is paused for the last ones and the state.
    (Phase::Receiving, &[Action::Send(Kind::Prepared)], Some(Event::Received), StaysAtSource),
    // The state is loaded.
    (Phase::Loading, &[Action::LoadState], Some(Event::Loaded), StaysAtSource),
    // The source flushes its disks and releases their locks.
    (Phase::Held, &[Action::Send(Kind::Ready)], Some(Event::Frame(Kind::Go)), StaysAtSource),
    // From here on the source does not resume the guest without a reply.
    (Phase::Locking, &[Action::TakeLocks], Some(Event::Locked), DiscardedHere),
    (Phase::Starting, &[Action::StartGuest], Some(Event::Started), DiscardedHere),
    // The guest runs.
    (Phase::Running, &[Action::Send(Kind::Running), Action::Close, Action::Report(Outcome::Finished)], None, RunsHere),
];

/// The guest after a failure in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterFailure {
    NeverHere,
    StaysAtSource,
    DiscardedHere,
    RunsHere,
}

impl AfterFailure {
    const fn text(self) -> &'static str {
        match self {
            NeverHere => "is at the source",
            StaysAtSource => "is at the source; the VM is discarded here",
            DiscardedHere => "is discarded here, and resumes at the source once it receives the reply",
            RunsHere => "runs here",
        }
    }
}

impl EventLoop for MigrationTarget {
    type Event = Event;
    type Action = Action;

    fn decide(&mut self, event: Event) -> Vec<Action> {
        let before = self.machine.phase();
        let actions = self.machine.on(event);
        let phase = self.machine.phase();
        if phase != before {
            self.timer.enter(phase.name(), phase.deadline());
            log_phase(phase);
        }
        actions
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            // In the order of `PHASES`.
            Action::StopListening => self.stop_listening(),
            Action::SendGreeting => self.send_greeting(),
            Action::PrepareVm => self.prepare_vm(),
            Action::Send(kind) => self.send(kind),
            Action::LoadState => self.load_state(),
            Action::TakeLocks => self.take_locks(),
            Action::StartGuest => self.start_guest(),
            Action::Close => self.close(),
            Action::Report(outcome) => self.report(outcome),
            // After a failure.
            Action::DiscardGuest => self.discard_guest(),
        }
    }
}

fn log_phase(phase: Phase) {
    if let Some((_, actions, end, guest)) = PHASES.iter().find(|(row, ..)| *row == phase) {
        let (name, guest) = (phase.name(), guest.text());
        log::debug!("migration phase {name}: {actions:?} until {end:?}; after a failure the guest {guest}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::handover::target::TargetMachine;

    /// The event of a failure in a phase after Go.
    const fn failure_of(phase: Phase) -> Option<Event> {
        match phase {
            Phase::Locking => Some(Event::NotLocked),
            Phase::Starting => Some(Event::NotStarted),
            _ => None,
        }
    }

    #[test]
    fn target_phases_and_failures_are_those_of_the_table() {
        let mut machine = TargetMachine::new();
        let mut performed = Vec::new();
        for (phase, actions, end, guest) in PHASES {
            assert_eq!((machine.phase(), performed.as_slice()), (phase, actions));
            // After Go, only the target's own failures end the migration, and the source is notified last.
            let own = [Event::NotLocked, Event::NotStarted];
            let others = [Event::Failed, Event::Disconnected, Event::TimedOut, Event::Frame(Kind::Failed)];
            for event in own.into_iter().chain(others) {
                let actions = machine.clone().on(event);
                let discards = actions.iter().position(|action| *action == Action::DiscardGuest);
                let notifies = actions.iter().position(|action| *action == Action::Send(Kind::Failed));
                let found = match (discards, notifies) {
                    (Some(discards), Some(notifies)) if discards < notifies => DiscardedHere,
                    (Some(_), _) => StaysAtSource,
                    _ if actions.is_empty() => RunsHere,
                    _ => NeverHere,
                };
                let is_ignored = guest == DiscardedHere && found == RunsHere && Some(event) != failure_of(phase);
                assert!(found == guest || is_ignored, "{phase:?} {event:?}: {found:?}");
            }
            performed = end.map(|event| machine.on(event)).unwrap_or_default();
        }
        assert!(machine.is_over());
    }
}
