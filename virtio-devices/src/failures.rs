//! Failures of the host to do what drivers ask of a device: one report when they begin, one when they have ended.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::warn;
use parking_lot::Mutex;

use crate::clock;

/// How long nothing may fail before failures count as ended: a guest whose requests fail and succeed in turn causes one
/// report.
const QUIET: Duration = Duration::from_secs(2);

/// A change of what the host does for a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailureChange {
    /// It fails, with this error.
    Failing(String),
    /// It works again.
    Recovered,
}

/// Called at each change, on a worker's thread. A guest can cause some changes, so what this does has to be limited.
pub type FailureObserver = Box<dyn Fn(FailureChange) + Send>;

/// What is asked of the host. A success ends only failures of its own kind: a full disk can still be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Frames to send, or contents to change.
    Write,
    /// Contents to read.
    Read,
}

/// The failures of a device, which its workers share.
pub(crate) struct Failures {
    id: String,
    /// The subject of log lines, to follow "its".
    subject: &'static str,
    failing: AtomicBool,
    run: Mutex<Run>,
    observer: Mutex<Option<FailureObserver>>,
}

/// The last run of failures.
struct Run {
    asked: Asked,
    last: Instant,
    /// Something of the same kind has succeeded since the last failure.
    worked: bool,
    /// The number of runs so far.
    count: u64,
}

impl Failures {
    /// None yet, of the device `id`. Log lines call what fails its `subject`.
    pub(crate) fn new(id: &str, subject: &'static str) -> Self {
        let run = Run { asked: Asked::Write, last: clock::now(), worked: false, count: 0 };
        Self {
            id: id.to_owned(),
            subject,
            failing: AtomicBool::new(false),
            run: Mutex::new(run),
            observer: Mutex::new(None),
        }
    }

    /// Calls `observer` at each change from now on.
    pub(crate) fn observe(&self, observer: FailureObserver) {
        *self.observer.lock() = Some(observer);
    }

    /// Records that the host has failed.
    pub(crate) fn failed(&self, asked: Asked, error: &io::Error) {
        let mut run = self.run.lock();
        (run.asked, run.last, run.worked) = (asked, clock::now(), false);
        if self.failing.swap(true, Ordering::AcqRel) {
            return;
        }
        run.count += 1;
        // Logged at powers of two, so that a guest cannot fill the log.
        if run.count.is_power_of_two() {
            let Self { id, subject, .. } = self;
            warn!("{id}: its {subject} fails ({} times so far): {error}; see to it on the host", run.count);
        }
        self.notify(FailureChange::Failing(error.to_string()));
    }

    /// Records that the host has done what was asked. Costs next to nothing while nothing fails.
    pub(crate) fn worked(&self, asked: Asked) {
        if !self.failing.load(Ordering::Relaxed) {
            return;
        }
        let mut run = self.run.lock();
        run.worked |= run.asked == asked;
        self.settle_run(&run);
    }

    /// Reports that failures have ended, if they have.
    pub(crate) fn settle(&self) {
        if self.failing.load(Ordering::Relaxed) {
            self.settle_run(&self.run.lock());
        }
    }

    /// How long until [`Self::settle`] may have something to report.
    pub(crate) fn settles_in(&self) -> Option<Duration> {
        if !self.failing.load(Ordering::Relaxed) {
            return None;
        }
        let run = self.run.lock();
        run.worked.then(|| QUIET.saturating_sub(clock::now().saturating_duration_since(run.last)))
    }

    fn settle_run(&self, run: &Run) {
        let is_quiet = run.worked && clock::now().saturating_duration_since(run.last) >= QUIET;
        if is_quiet && self.failing.swap(false, Ordering::AcqRel) {
            if run.count.is_power_of_two() {
                warn!("{}: its {} works again", self.id, self.subject);
            }
            self.notify(FailureChange::Recovered);
        }
    }

    fn notify(&self, change: FailureChange) {
        if let Some(observer) = &*self.observer.lock() {
            observer(change);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::testing::StoppedClock;

    fn full() -> io::Error {
        io::Error::from_raw_os_error(libc::ENOSPC)
    }

    #[test]
    fn failures_are_reported_once_at_their_begin_and_end() {
        let clock = StoppedClock::new();
        let (failures, told) = (Failures::new("_disk0", "image"), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&told);
        failures.observe(Box::new(move |change| seen.lock().push(change)));
        failures.worked(Asked::Write);
        assert_eq!(failures.settles_in(), None);
        for _ in 0..1000 {
            // In turn, and faster than failures count as ended.
            failures.failed(Asked::Write, &full());
            clock.advance(QUIET / 2);
            failures.worked(Asked::Write);
        }
        assert_eq!(*told.lock(), [FailureChange::Failing(full().to_string())]);
        assert_eq!(failures.settles_in(), Some(QUIET / 2));
        clock.advance(QUIET / 2);
        failures.settle();
        failures.settle();
        assert_eq!(*told.lock(), [FailureChange::Failing(full().to_string()), FailureChange::Recovered]);
        assert_eq!(failures.settles_in(), None);
    }

    #[test]
    fn failures_end_by_a_success_of_their_own_kind_alone() {
        let clock = StoppedClock::new();
        let (failures, told) = (Failures::new("_disk0", "image"), Arc::new(Mutex::new(0)));
        let seen = Arc::clone(&told);
        failures.observe(Box::new(move |_| *seen.lock() += 1));
        failures.failed(Asked::Write, &full());
        clock.advance(QUIET);
        failures.worked(Asked::Read);
        failures.settle();
        assert_eq!((*told.lock(), failures.settles_in()), (1, None), "a full disk that is read");
        failures.worked(Asked::Write);
        assert_eq!(*told.lock(), 2);
    }
}
