//! Code that both migration threads share: the loop from events to actions, and the deadline of a phase.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::progress::Progress;

/// Interval of checks for deadlines.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// A thread that performs the actions of a state machine.
pub(super) trait EventLoop {
    /// Event of the state machine.
    type Event;
    /// Action of the state machine.
    type Action;

    /// Returns the actions for `event`.
    fn decide(&mut self, event: Self::Event) -> Vec<Self::Action>;

    /// Performs an action. Returns its event if the result is immediate.
    fn perform(&mut self, action: Self::Action) -> Option<Self::Event>;

    /// Handles `event` and all immediate results of its actions.
    fn on(&mut self, event: Self::Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.decide(event) {
                events.extend(self.perform(action));
            }
        }
    }
}

/// Deadline of the current phase.
pub(super) struct PhaseTimer {
    progress: Progress,
    deadline: Option<Instant>,
}

impl PhaseTimer {
    /// Starts with a phase of `time`.
    pub(super) fn new(progress: &Progress, time: Option<Duration>) -> Self {
        Self { progress: progress.clone(), deadline: time.map(|time| Instant::now() + time) }
    }

    /// Enters another phase with the limit `time`.
    pub(super) fn enter(&mut self, phase: &'static str, time: Option<Duration>) {
        self.deadline = time.map(|time| Instant::now() + time);
        self.progress.set_phase(phase);
    }

    /// Gives the current phase `time` from now on.
    pub(super) fn extend(&mut self, time: Duration) {
        self.deadline = Some(Instant::now() + time);
    }

    /// True once the phase's deadline has passed. True only once per phase.
    pub(super) fn has_expired(&mut self) -> bool {
        let has_expired = self.is_past();
        if has_expired {
            self.deadline = None;
        }
        has_expired
    }

    /// True if the phase's deadline has passed, for code that checks it and fails on its own.
    pub(super) fn is_past(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }
}
