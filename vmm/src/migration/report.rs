//! Report of a migration: progress, downtime, and the reason of a failure.

use std::time::{Duration, Instant};

use super::handover::Outcome;
use super::progress::{Part, Progress};

/// Report of a migration.
pub(super) struct Report {
    /// Progress for clients.
    pub progress: Progress,
    /// Reason of a failure.
    error: Option<String>,
    /// Last unexpected frame of the peer, reported if no other reason is known.
    note: Option<String>,
    /// Reason why the locks could not be taken back.
    lock_error: Option<String>,
    /// Time at which the guest was stopped, and end of the last part of the downtime.
    downtime: Option<(Instant, Instant)>,
    /// Outcome to report once the background threads have ended.
    last: Option<(Outcome, Option<String>)>,
}

impl Report {
    /// Starts the report of a migration.
    pub(super) const fn new(progress: Progress) -> Self {
        Self { progress, error: None, note: None, lock_error: None, downtime: None, last: None }
    }

    /// Sets the reason of a failure, unless there is one.
    pub(super) fn fail_with(&mut self, error: String) {
        self.error.get_or_insert(error);
    }

    /// Replaces the reason of a failure.
    pub(super) fn override_error(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Notes an unexpected frame of the peer.
    pub(super) fn note_error(&mut self, error: String) {
        self.note = Some(error);
    }

    /// Sets or clears the reason why the locks could not be taken back.
    pub(super) fn set_lock_error(&mut self, error: Option<String>) {
        self.lock_error = error;
    }

    /// Returns the reason of the failure in one line, if any.
    pub(super) fn error(&self) -> Option<String> {
        let error = self.error.clone().or_else(|| self.note.clone());
        [error, self.lock_error.clone()].into_iter().flatten().reduce(|error, more| format!("{error}; {more}"))
    }

    /// Returns what to report for `outcome`: the reason of a failure with it.
    pub(super) fn with_error(&self, outcome: Outcome) -> (Outcome, Option<String>) {
        (outcome, if outcome == Outcome::Finished { None } else { self.error() })
    }

    /// Keeps the outcome until [`Self::take_last`].
    pub(super) fn keep(&mut self, outcome: Outcome) {
        self.last = Some(self.with_error(outcome));
    }

    /// Takes the kept outcome.
    pub(super) const fn take_last(&mut self) -> Option<(Outcome, Option<String>)> {
        self.last.take()
    }

    /// Starts the downtime.
    pub(super) fn start_downtime(&mut self) {
        let now = Instant::now();
        self.downtime = Some((now, now));
    }

    /// Records a part of the downtime, which took `took`, or the time since the previous part.
    pub(super) fn end_part(&mut self, part: Part, took: Option<Duration>) {
        if let Some((_, last)) = &mut self.downtime {
            let took = took.unwrap_or_else(|| last.elapsed());
            *last += took;
            self.progress.add_downtime(part, took);
        }
    }

    /// Time since the guest was stopped, in microseconds.
    pub(super) fn stopped_us(&self) -> Option<u64> {
        let (start, _) = self.downtime?;
        u64::try_from(start.elapsed().as_micros()).ok()
    }

    /// Records the last part of the downtime, and its total.
    pub(super) fn end_downtime(&mut self) {
        self.end_part(Part::Handover, None);
        if let Some((start, last)) = self.downtime {
            self.progress.set_downtime(last.saturating_duration_since(start));
        }
    }
}
