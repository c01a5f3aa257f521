//! Parts that the threads of both sides share: they carry out the decisions of their state machines, keep a stage's
//! deadline, and remember why a migration fails.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::progress::Progress;

/// A thread that carries out what a state machine decides.
pub(super) trait Conducts {
    /// Event of the state machine.
    type Event;
    /// Action of the state machine.
    type Action;

    /// Actions that follow from `event`.
    fn decide(&mut self, event: Self::Event) -> Vec<Self::Action>;

    /// Carries out an action. Returns what comes of it at once.
    fn perform(&mut self, action: Self::Action) -> Option<Self::Event>;

    /// Carries out what follows from `event`.
    fn on(&mut self, event: Self::Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.decide(event) {
                events.extend(self.perform(action));
            }
        }
    }
}

/// Stage of a side, its deadline, and the first failure.
pub(super) struct Course {
    progress: Progress,
    deadline: Option<Instant>,
    why: Option<String>,
    /// Last problem that was noted, used if no other reason is known.
    doubt: Option<String>,
}

impl Course {
    /// A side that has begun, and so much time for that.
    pub(super) fn new(progress: &Progress, time: Option<Duration>) -> Self {
        let deadline = time.map(|time| Instant::now() + time);
        Self { progress: progress.clone(), deadline, why: None, doubt: None }
    }

    /// Another stage begins, which may take so long.
    pub(super) fn enter(&mut self, stage: &'static str, time: Option<Duration>) {
        self.deadline = time.map(|time| Instant::now() + time);
        self.progress.set_phase(stage);
    }

    /// True once the stage's deadline has passed. Reports it only once.
    pub(super) fn is_late(&mut self) -> bool {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        if is_late {
            self.deadline = None;
        }
        is_late
    }

    /// True if the stage's deadline has passed, for code that works in it and ends it.
    pub(super) fn is_past(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Something fails: `why` is what is told of it, if nothing has failed before.
    pub(super) fn blame(&mut self, why: String) {
        self.why.get_or_insert(why);
    }

    /// Reports this reason, whatever has failed before.
    pub(super) fn blame_only(&mut self, why: String) {
        self.why = Some(why);
    }

    /// Something was heard that may be wrong.
    pub(super) fn doubt(&mut self, what: String) {
        self.doubt = Some(what);
    }

    /// Reason of the failure, in one line, if there is one.
    pub(super) fn why(&self) -> Option<String> {
        self.why.clone().or_else(|| self.doubt.clone())
    }
}
