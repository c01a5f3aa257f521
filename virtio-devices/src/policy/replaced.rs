//! The end of a policy.

use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether batches are over.
const LOOK: Duration = Duration::from_micros(50);
/// How long batches are waited for: a batch waits for nothing, so they take as long only on a host that hardly runs.
const PATIENCE: Duration = Duration::from_secs(5);

/// A policy that was replaced, and that a batch of frames may still be handled by.
#[derive(Debug, Default)]
#[must_use = "the new policy holds for all frames only after a wait"]
pub struct Replaced(Vec<Arc<dyn Any + Send + Sync>>);

impl Replaced {
    /// Of a snapshot that workers hold for a batch at a time, and that no worker can get any more.
    pub(crate) fn new(snapshot: Arc<impl Any + Send + Sync>) -> Self {
        Self(vec![snapshot])
    }

    /// With what `other` waits for.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Waits until all batches are over that began before the policy was replaced.
    pub fn wait(self) {
        let began = Instant::now();
        // Workers hold it for a batch. When nobody else does, nobody can have it again.
        while self.0.iter().any(|snapshot| Arc::strong_count(snapshot) > 1) {
            if began.elapsed() > PATIENCE {
                log::warn!("a batch of frames takes longer than {PATIENCE:?}; some may pass by the policy of before");
                return;
            }
            thread::sleep(LOOK);
        }
    }
}
