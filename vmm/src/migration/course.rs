//! What the threads of both sides do alike: they carry out what their state machines decide, keep a stage's deadline,
//! and remember why a migration fails.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::progress::Progress;

/// A thread that carries out what a state machine decides.
pub(super) trait Conducts {
    /// What happens.
    type Event;
    /// What is done.
    type Action;

    /// What is to be done now that `event` has happened.
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

/// How far a side is, and what went wrong.
pub(super) struct Course {
    progress: Progress,
    deadline: Option<Instant>,
    why: Option<String>,
    /// What was heard last, for the case that nothing else says why.
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

    /// Whether the stage has taken too long. Tells once.
    pub(super) fn is_late(&mut self) -> bool {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        if is_late {
            self.deadline = None;
        }
        is_late
    }

    /// Whether the stage has taken too long, for who is at work in it and sees to its end.
    pub(super) fn is_past(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Something fails: `why` is what is told of it, if nothing has failed before.
    pub(super) fn blame(&mut self, why: String) {
        self.why.get_or_insert(why);
    }

    /// What is told, whatever has failed before.
    pub(super) fn blame_only(&mut self, why: String) {
        self.why = Some(why);
    }

    /// Something was heard that may be wrong.
    pub(super) fn doubt(&mut self, what: String) {
        self.doubt = Some(what);
    }

    /// Why it fails, in one line, if it does.
    pub(super) fn why(&self) -> Option<String> {
        self.why.clone().or_else(|| self.doubt.clone())
    }
}
