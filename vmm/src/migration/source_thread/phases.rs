//! Order of a migration at the source: [`PHASES`] if nothing fails, and the step for each action in
//! [`MigrationSource::perform`]. A test compares the table with the state machine, and fails each phase.

use super::MigrationSource;
use crate::migration::event_loop::EventLoop;
use crate::migration::handover::Outcome;
use crate::migration::handover::source::{Action, Event, Phase};
use crate::migration::precopy::Decision;
use crate::migration::wire::Kind;
use AfterFailure::{KeepsRunning, Moved, Resumes, ResumesWithLocks, StaysPaused};

/// Phase, the actions that start it, the event that ends it, and the guest after a failure in it.
type Row = (Phase, &'static [Action], Option<Event>, AfterFailure);

#[rustfmt::skip]
const PHASES: [Row; 10] = [
    // The address is resolved, and the control connection made.
    (Phase::Connecting, &[], Some(Event::Connected), KeepsRunning),
    // The target replies. Then all connections for pages are made, or descriptors are passed.
    (Phase::Greeting, &[Action::SendGreeting], Some(Event::Greeted), KeepsRunning),
    // The target creates its VM, and opens and checks every backend.
    (Phase::Preparing, &[Action::SendOffer], Some(Event::Frame(Kind::Prepared)), KeepsRunning),
    // Passes over the memory while the guest runs. Its disks are flushed before the last of them.
    (Phase::Copying, &[Action::StartLogs, Action::CopyPass], Some(Event::Copied(Decision::StopGuest)), KeepsRunning),
    // The downtime starts: vCPUs, devices and backends stop, and their state is saved.
    (Phase::Stopping, &[Action::StopGuest], Some(Event::Stopped), Resumes),
    // The remaining pages are sent, then the state.
    (Phase::Finishing, &[Action::SendFinalPass], Some(Event::Sent), Resumes),
    // The target loads the state.
    (Phase::Loading, &[], Some(Event::Frame(Kind::Ready)), Resumes),
    // The disks are flushed again, and their locks released.
    (Phase::Releasing, &[Action::ReleaseLocks], Some(Event::Released), ResumesWithLocks),
    // The target takes the locks and starts the guest, which ends the downtime.
    (Phase::Gone, &[Action::SendGo], Some(Event::Frame(Kind::Running)), StaysPaused),
    // The VM is closed, and the program exits.
    (Phase::Finished, &[Action::Close, Action::ReleaseGuest, Action::Report(Outcome::Finished)], None, Moved),
];

/// The guest after a failure in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterFailure {
    KeepsRunning,
    Resumes,
    ResumesWithLocks,
    StaysPaused,
    Moved,
}

impl AfterFailure {
    const fn text(self) -> &'static str {
        match self {
            KeepsRunning => "keeps running at the source",
            Resumes => "resumes at the source, which still has its locks",
            ResumesWithLocks => "resumes at the source, once its locks are taken back",
            StaysPaused => "stays paused at the source, unless the target replies that it does not run it",
            Moved => "is the target's",
        }
    }
}

impl EventLoop for MigrationSource {
    type Event = Event;
    type Action = Action;

    fn decide(&mut self, event: Event) -> Vec<Action> {
        let before = self.machine.phase();
        let actions = self.machine.on(event);
        let phase = self.machine.phase();
        if phase != before {
            let is_rest = self.config.local || self.copy.passes.count() > 0;
            self.timer.enter(phase.name(), self.limits.of(phase, is_rest));
            log_phase(phase);
        }
        actions
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            // In the order of `PHASES`.
            Action::SendGreeting => self.send_greeting(),
            Action::SendOffer => self.send_offer(),
            Action::StartLogs => self.start_logs(),
            Action::CopyPass => self.copy_pass(),
            Action::StopGuest => self.stop_guest(),
            Action::SendFinalPass => self.send_final_pass(),
            Action::ReleaseLocks => self.release_locks(),
            Action::SendGo => self.send_go(),
            Action::Close => self.close(),
            Action::ReleaseGuest => self.release_guest(),
            Action::Report(outcome) => self.report(outcome),
            // After a failure.
            Action::Send(kind) => self.send_failure(kind),
            Action::StopLogs => self.stop_logs(),
            Action::TakeLocks => self.take_locks(),
            Action::ResumeGuest => self.resume_guest(),
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
    use crate::migration::handover::source::SourceMachine;

    /// Fails `machine` by `event`, and has its locks taken back. Returns all actions.
    fn failed(mut machine: SourceMachine, event: Event) -> Vec<Action> {
        let mut actions = machine.on(event);
        for event in [Event::NotReleased, Event::Locked] {
            actions.extend(machine.on(event));
        }
        actions
    }

    #[test]
    fn source_phases_and_failures_are_those_of_the_table() {
        let mut machine = SourceMachine::new();
        let mut performed = Vec::new();
        for (phase, actions, end, guest) in PHASES {
            assert_eq!((machine.phase(), performed.as_slice()), (phase, actions));
            for event in [Event::Failed, Event::Disconnected, Event::TimedOut, Event::Frame(Kind::Failed)] {
                let actions = failed(machine.clone(), event);
                let has = |action| actions.contains(&action);
                let found = match (has(Action::ResumeGuest), has(Action::TakeLocks)) {
                    (true, true) => ResumesWithLocks,
                    (true, false) => Resumes,
                    _ if has(Action::Report(Outcome::Unknown)) => StaysPaused,
                    _ if has(Action::Report(Outcome::Failed)) => KeepsRunning,
                    _ => Moved,
                };
                // Only the reply shows that the target does not run the guest.
                let has_reply = guest == StaysPaused && event == Event::Frame(Kind::Failed);
                assert_eq!(found, if has_reply { ResumesWithLocks } else { guest }, "{phase:?} {event:?}");
            }
            performed = end.map(|event| machine.on(event)).unwrap_or_default();
        }
        assert!(machine.is_over());
    }
}
