//! Failures of the host to execute drivers' requests: one report when they begin, one when they have ended.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::warn;
use parking_lot::Mutex;

use crate::os::clock;

/// Time without a failure after which failures count as ended: alternating failures and successes cause one report.
const QUIET: Duration = Duration::from_secs(2);

/// A change in the host's service for a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailureChange {
    /// Requests fail, with this error.
    Failing(String),
    /// Requests succeed again.
    Recovered,
}

/// Called at each change, on a worker's thread. A guest can cause some changes, so observers must limit their work.
pub type FailureObserver = Box<dyn Fn(FailureChange) + Send>;

/// Kind of a request to the host. A success ends only failures of its own kind: a full disk can still be read and
/// flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// Frames to send, or contents to change.
    Write,
    /// Contents to read.
    Read,
    /// Contents to make stable.
    Flush,
}

/// The failures of a device, which its workers share.
pub(crate) struct Failures {
    id: String,
    /// The subject of log lines, to follow "its".
    subject: &'static str,
    failing: AtomicBool,
    record: Mutex<Record>,
    observer: Mutex<Option<FailureObserver>>,
}

/// The present failures.
#[derive(Default)]
struct Record {
    /// Runs of failures by kind of request.
    runs: [Option<Run>; 3],
    /// Number of runs of failures so far.
    count: u64,
}

/// A run of failures of one kind.
struct Run {
    last: Instant,
    /// True if a request of the same kind has succeeded since the last failure.
    worked: bool,
}

impl Record {
    fn run(&mut self, asked: RequestKind) -> &mut Option<Run> {
        let [write, read, flush] = &mut self.runs;
        match asked {
            RequestKind::Write => write,
            RequestKind::Read => read,
            RequestKind::Flush => flush,
        }
    }

    /// Time until all runs have ended, if nothing else fails; `None` while a kind has not succeeded since its last
    /// failure.
    fn ends_in(&self) -> Option<Duration> {
        let now = clock::now();
        let mut longest = Duration::ZERO;
        for run in self.runs.iter().flatten() {
            if !run.worked {
                return None;
            }
            longest = longest.max(QUIET.saturating_sub(now.saturating_duration_since(run.last)));
        }
        Some(longest)
    }
}

impl Failures {
    /// Creates the record of the device `id`, without failures. `subject` names the failing part in log lines.
    pub(crate) fn new(id: &str, subject: &'static str) -> Self {
        Self {
            id: id.to_owned(),
            subject,
            failing: AtomicBool::new(false),
            record: Mutex::default(),
            observer: Mutex::new(None),
        }
    }

    /// Calls `observer` at each change from now on.
    pub(crate) fn observe(&self, observer: FailureObserver) {
        *self.observer.lock() = Some(observer);
    }

    /// Records a failure of the host.
    pub(crate) fn failed(&self, asked: RequestKind, error: &io::Error) {
        let mut record = self.record.lock();
        *record.run(asked) = Some(Run { last: clock::now(), worked: false });
        if self.failing.swap(true, Ordering::AcqRel) {
            return;
        }
        record.count += 1;
        // Logged at powers of two, so that a guest cannot fill the log.
        if record.count.is_power_of_two() {
            let Self { id, subject, .. } = self;
            warn!("{id}: its {subject} fails ({} so far): {error}; look at it on the host", record.count);
        }
        self.notify(FailureChange::Failing(error.to_string()));
    }

    /// Records a success. Costs next to nothing while nothing fails.
    pub(crate) fn worked(&self, asked: RequestKind) {
        if !self.failing.load(Ordering::Relaxed) {
            return;
        }
        let mut record = self.record.lock();
        if let Some(run) = record.run(asked) {
            run.worked = true;
        }
        self.settle_record(&mut record);
    }

    /// Reports the end of failures, once they have ended.
    pub(crate) fn settle(&self) {
        if self.failing.load(Ordering::Relaxed) {
            self.settle_record(&mut self.record.lock());
        }
    }

    /// Time until [`Self::settle`] may have something to report.
    pub(crate) fn settles_in(&self) -> Option<Duration> {
        if !self.failing.load(Ordering::Relaxed) {
            return None;
        }
        self.record.lock().ends_in()
    }

    fn settle_record(&self, record: &mut Record) {
        let is_over = record.ends_in().is_some_and(|rest| rest.is_zero());
        if is_over && self.failing.swap(false, Ordering::AcqRel) {
            record.runs = Default::default();
            if record.count.is_power_of_two() {
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
    use crate::os::clock::testing::StoppedClock;

    fn full() -> io::Error {
        io::Error::from_raw_os_error(libc::ENOSPC)
    }

    #[test]
    fn failures_are_reported_once_at_their_begin_and_end() {
        let clock = StoppedClock::new();
        let (failures, told) = (Failures::new("_disk0", "image"), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&told);
        failures.observe(Box::new(move |change| seen.lock().push(change)));
        failures.worked(RequestKind::Write);
        assert_eq!(failures.settles_in(), None);
        for _ in 0..1000 {
            // Alternating, and faster than failures count as ended.
            failures.failed(RequestKind::Write, &full());
            clock.advance(QUIET / 2);
            failures.worked(RequestKind::Write);
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
        failures.failed(RequestKind::Write, &full());
        clock.advance(QUIET);
        failures.worked(RequestKind::Read);
        failures.settle();
        assert_eq!((*told.lock(), failures.settles_in()), (1, None), "a full disk that is read");
        failures.worked(RequestKind::Write);
        assert_eq!(*told.lock(), 2);
    }

    #[test]
    fn kinds_of_failures_end_one_by_one_and_are_one_report() {
        let clock = StoppedClock::new();
        let (failures, told) = (Failures::new("_disk0", "image"), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&told);
        failures.observe(Box::new(move |change| seen.lock().push(change)));
        failures.failed(RequestKind::Write, &full());
        failures.failed(RequestKind::Read, &io::Error::other("unreadable"));
        failures.failed(RequestKind::Flush, &io::Error::other("unstable"));
        clock.advance(QUIET);
        for asked in [RequestKind::Read, RequestKind::Flush] {
            failures.worked(asked);
            assert_eq!(failures.settles_in(), None, "what was written last has failed");
        }
        failures.failed(RequestKind::Read, &io::Error::other("unreadable"));
        clock.advance(QUIET / 4);
        failures.worked(RequestKind::Write);
        failures.worked(RequestKind::Read);
        assert_eq!(failures.settles_in(), Some(QUIET * 3 / 4));
        assert_eq!(*told.lock(), [FailureChange::Failing(full().to_string())]);
        clock.advance(QUIET * 3 / 4);
        failures.settle();
        assert_eq!(*told.lock(), [FailureChange::Failing(full().to_string()), FailureChange::Recovered]);
        // Ended runs do not count for the next one.
        failures.failed(RequestKind::Flush, &full());
        clock.advance(QUIET);
        failures.worked(RequestKind::Flush);
        assert_eq!(told.lock().len(), 4);
    }
}
