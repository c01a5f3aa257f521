//! The end of a replaced policy.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The interval at which the end of batches is checked.
const LOOK: Duration = Duration::from_micros(50);
/// The time limit for batches: a batch waits for nothing, so it takes this long only on a host that hardly runs.
const PATIENCE: Duration = Duration::from_secs(5);

/// The workers that a policy was replaced for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The NIC's own workers.
    Nic,
    /// The workers of its switch.
    Switch,
}

/// A policy that was replaced, and that a batch of frames may still use.
#[derive(Debug, Default)]
#[must_use = "the new policy holds for all frames only after a wait"]
pub struct Replaced(Vec<(Snapshot, Holder)>);

/// A snapshot that workers hold for a batch at a time.
type Snapshot = Weak<dyn Any + Send + Sync>;

/// The snapshots that were replaced and that a batch still holds. Each replacement waits for all of them: a batch may
/// outlast several.
#[derive(Debug)]
pub(crate) struct Retired {
    holder: Holder,
    snapshots: Mutex<Vec<Snapshot>>,
}

impl Retired {
    /// An empty list, for snapshots that `holder` uses.
    pub(crate) const fn new(holder: Holder) -> Self {
        Self { holder, snapshots: Mutex::new(Vec::new()) }
    }

    /// Retires a snapshot that no worker can get after this.
    pub(crate) fn retire(&self, snapshot: Arc<impl Any + Send + Sync>) -> Replaced {
        let last: Snapshot = Arc::downgrade(&snapshot) as Snapshot;
        drop(snapshot);
        let mut snapshots = self.snapshots.lock();
        snapshots.push(last);
        snapshots.retain(|snapshot| snapshot.strong_count() > 0);
        Replaced(snapshots.iter().map(|snapshot| (Weak::clone(snapshot), self.holder)).collect())
    }
}

/// The new policy is stored and applies to all batches that begin, but an earlier batch has not ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the change is stored, but a worker of {} has been busy with packets for {} s and may let some pass as before; \
     repeat the request to learn when it is done",
    match holder { Holder::Nic => "this function", Holder::Switch => "its switch" },
    waited.as_secs()
)]
pub struct NotYetReplaced {
    holder: Holder,
    waited: Duration,
}

impl Replaced {
    /// Adds the batches that `other` waits for.
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Waits until all batches have ended that began before the policy was replaced.
    ///
    /// # Errors
    ///
    /// [`NotYetReplaced`] if one of them takes longer than 5 s.
    pub fn wait(self) -> Result<(), NotYetReplaced> {
        self.wait_for(PATIENCE)
    }

    /// As [`Self::wait`], at most for `patience`.
    ///
    /// # Errors
    ///
    /// [`NotYetReplaced`] if one of them takes longer.
    pub fn wait_for(mut self, patience: Duration) -> Result<(), NotYetReplaced> {
        let began = Instant::now();
        loop {
            self.0.retain(|(snapshot, _)| snapshot.strong_count() > 0);
            let Some((_, holder)) = self.0.first() else { return Ok(()) };
            if began.elapsed() > patience {
                return Err(NotYetReplaced { holder: *holder, waited: patience });
            }
            thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use arc_swap::ArcSwap;

    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    #[test]
    fn a_batch_that_outlasts_two_changes_is_waited_for_at_each() {
        let (current, retired) = (ArcSwap::from_pointee(0), Retired::new(Holder::Switch));
        let replace = |value: i32| retired.retire(current.swap(Arc::new(value)));
        replace(1).wait_for(SHORT).unwrap();
        let batch = current.load();
        for value in 2..5 {
            let error = replace(value).wait_for(SHORT).unwrap_err();
            assert_eq!(error, NotYetReplaced { holder: Holder::Switch, waited: SHORT });
        }
        assert_eq!(**batch, 1);
        let (one, other) = (replace(5), replace(6));
        drop(batch);
        // Two waits for the same batch do not wait for each other.
        other.wait().unwrap();
        one.wait().unwrap();
        assert_eq!(retired.snapshots.lock().len(), 1, "at most the last, which no batch has");
    }

    #[test]
    fn a_change_not_yet_in_force_is_reported_in_one_line() {
        for (holder, who) in [(Holder::Nic, "this function"), (Holder::Switch, "its switch")] {
            let said = NotYetReplaced { holder, waited: PATIENCE }.to_string();
            let expected = format!(
                "the change is stored, but a worker of {who} has been busy with packets for 5 s and may let some pass \
                 as before; repeat the request to learn when it is done"
            );
            assert_eq!(said, expected);
        }
    }
}
