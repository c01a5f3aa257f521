//! Code that both migration threads share: performing the actions of a state machine, the deadline of a stage, and the
//! reason of a failure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::progress::Progress;

/// A thread that performs the actions of a state machine.
pub(super) trait Conducts {
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

/// Deadline of the current stage, and the reason of a failure.
pub(super) struct Course {
    progress: Progress,
    deadline: Option<Instant>,
    why: Option<String>,
    /// Last suspicious message, used if no other reason is known.
    doubt: Option<String>,
}

impl Course {
    /// Starts with a stage of `time`.
    pub(super) fn new(progress: &Progress, time: Option<Duration>) -> Self {
        let deadline = time.map(|time| Instant::now() + time);
        Self { progress: progress.clone(), deadline, why: None, doubt: None }
    }

    /// Enters another stage with the limit `time`.
    pub(super) fn enter(&mut self, stage: &'static str, time: Option<Duration>) {
        self.deadline = time.map(|time| Instant::now() + time);
        self.progress.set_phase(stage);
    }

    /// True once the stage's deadline has passed. True only once per stage.
    pub(super) fn is_late(&mut self) -> bool {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        if is_late {
            self.deadline = None;
        }
        is_late
    }

    /// True if the stage's deadline has passed, for code that checks it and fails on its own.
    pub(super) fn is_past(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Sets the reason of a failure, unless there is one.
    pub(super) fn blame(&mut self, why: String) {
        self.why.get_or_insert(why);
    }

    /// Replaces the reason of a failure.
    pub(super) fn blame_only(&mut self, why: String) {
        self.why = Some(why);
    }

    /// Notes a suspicious message of the peer.
    pub(super) fn doubt(&mut self, what: String) {
        self.doubt = Some(what);
    }

    /// Returns the reason of the failure in one line, if any.
    pub(super) fn why(&self) -> Option<String> {
        self.why.clone().or_else(|| self.doubt.clone())
    }
}
