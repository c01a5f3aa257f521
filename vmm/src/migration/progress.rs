//! Progress of a migration for `vm.migration-progress`, metrics and events. Migration threads write it, the control
//! thread reads it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vm_api::migration::{DowntimeParts, MigrationProgress, MigrationRole};

use super::handover::Outcome;
use super::precopy::Precopy;

/// Shared progress of one migration.
#[derive(Debug, Clone)]
pub struct Progress(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    shown: MigrationProgress,
    began: Instant,
    ended: Option<Instant>,
}

/// A part of the downtime, in order of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Stopping vCPUs, devices and backends.
    Stop,
    /// Saving the state.
    Save,
    /// Sending the remaining pages and the state.
    Send,
    /// Loading the state at the target.
    Load,
    /// Handing over the locks and starting the guest.
    Handover,
}

impl Progress {
    /// Starts the progress of a migration.
    pub fn new(role: MigrationRole, phase: &str) -> Self {
        let shown = MigrationProgress {
            role,
            state: "active".to_string(),
            phase: phase.to_string(),
            ..MigrationProgress::default()
        };
        Self(Arc::new(Mutex::new(State { shown, began: Instant::now(), ended: None })))
    }

    /// Current progress.
    pub fn shown(&self) -> MigrationProgress {
        let state = self.0.lock();
        let elapsed = state.ended.unwrap_or_else(Instant::now).saturating_duration_since(state.began);
        MigrationProgress { elapsed_ms: millis(elapsed), ..state.shown.clone() }
    }

    /// True while the migration is active.
    pub fn is_active(&self) -> bool {
        self.0.lock().ended.is_none()
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.0.lock().began.elapsed()
    }

    /// Sets the current phase.
    pub fn set_phase(&self, phase: &str) {
        self.0.lock().shown.phase = phase.to_string();
    }

    /// Sets the size of guest memory.
    pub fn set_memory(&self, bytes: u64) {
        self.0.lock().shown.memory_bytes = bytes;
    }

    /// Adds `bytes` sent or received, for `pages` nonzero pages and `zero_pages`.
    pub fn count(&self, bytes: u64, pages: u64, zero_pages: u64) {
        let shown = &mut self.0.lock().shown;
        shown.transferred_bytes += bytes;
        shown.pages += pages;
        shown.zero_pages += zero_pages;
    }

    /// Records a completed pass, with `rest` bytes dirty.
    pub fn passed(&self, policy: &Precopy, rest: u64) {
        let shown = &mut self.0.lock().shown;
        shown.pass = policy.passes();
        shown.remaining_bytes = rest;
        shown.bandwidth_bytes_per_s = policy.bandwidth();
        shown.dirty_bytes_per_s = policy.dirty_rate();
        shown.throttle_percent = policy.throttle();
        shown.estimated_downtime_ms = Some(millis(policy.estimate(rest)));
    }

    /// Adds `took` to a part of the downtime.
    pub fn add_downtime(&self, part: Part, took: Duration) {
        let shown = &mut self.0.lock().shown;
        let parts = shown.downtime.get_or_insert_with(DowntimeParts::default);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let one = match part {
            Part::Stop => &mut parts.stop_us,
            Part::Save => &mut parts.save_us,
            Part::Send => &mut parts.send_us,
            Part::Load => &mut parts.load_us,
            Part::Handover => &mut parts.handover_us,
        };
        *one = one.saturating_add(micros);
    }

    /// Sets the total downtime.
    pub fn set_downtime(&self, all: Duration) {
        let shown = &mut self.0.lock().shown;
        let parts = shown.downtime.get_or_insert_with(DowntimeParts::default);
        parts.total_us = u64::try_from(all.as_micros()).unwrap_or(u64::MAX);
    }

    /// Records the outcome, and in `line` the reason of a failure.
    pub fn end(&self, outcome: Outcome, line: Option<String>) {
        let mut state = self.0.lock();
        state.shown.state = outcome.name().to_string();
        if line.is_some() {
            state.shown.error = line;
        }
        state.ended = Some(Instant::now());
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::precopy::{Goal, Pass, TimeoutStrategy};

    #[test]
    fn progress_has_what_its_threads_saw() {
        let progress = Progress::new(MigrationRole::Sender, "connecting");
        let other = progress.clone();
        other.set_memory(1 << 30);
        other.count(4096, 1, 2);
        other.count(8192, 2, 0);
        let goal = Goal {
            downtime: Duration::from_millis(300),
            timeout: Duration::from_secs(1),
            strategy: TimeoutStrategy::Cancel,
        };
        let mut policy = Precopy::new(goal, Duration::ZERO);
        let took = Duration::from_secs(1);
        policy.after(Pass { sent: 100 << 20, took, rest: 50 << 20, elapsed: took });
        other.passed(&policy, 50 << 20);
        let shown = progress.shown();
        assert_eq!((shown.transferred_bytes, shown.pages, shown.zero_pages, shown.pass), (12288, 3, 2, 1));
        assert_eq!((shown.bandwidth_bytes_per_s, shown.dirty_bytes_per_s), (100 << 20, 50 << 20));
        assert_eq!(shown.estimated_downtime_ms, Some(510));
        assert_eq!((shown.state.as_str(), shown.downtime), ("active", None));
    }

    #[test]
    fn its_parts_add_up_and_the_clock_stops_at_the_end() {
        let progress = Progress::new(MigrationRole::Sender, "connecting");
        progress.add_downtime(Part::Send, Duration::from_millis(3));
        progress.add_downtime(Part::Send, Duration::from_millis(4));
        progress.set_downtime(Duration::from_millis(8));
        progress.end(Outcome::Finished, None);
        let (shown, parts) = (progress.shown(), progress.shown().downtime.unwrap());
        assert_eq!((parts.send_us, parts.total_us, shown.state.as_str()), (7000, 8000, "finished"));
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(progress.shown().elapsed_ms, shown.elapsed_ms);
        assert!(!progress.is_active());
    }
}
