//! The state of a NIC's backend.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

/// A change of a backend's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendChange {
    /// It is lost, and its queues are stopped.
    Lost,
    /// It is back.
    Restored,
}

/// Called when a backend is lost or restored, on the thread of a NIC's worker.
pub type BackendObserver = Box<dyn Fn(BackendChange) + Send>;

/// The state of a backend, as seen by a NIC's worker.
#[derive(Default)]
pub(crate) struct Health {
    lost: AtomicBool,
    link_down: AtomicBool,
    losses: AtomicU64,
    refusals: AtomicU64,
    /// The loss after which a search for another backend was last reported to fail.
    searched: AtomicU64,
    observer: Mutex<Option<BackendObserver>>,
}

impl Health {
    /// True if the backend reports the link as up.
    pub(crate) fn link_up(&self) -> bool {
        !self.is_lost() && !self.link_down.load(Ordering::Acquire)
    }

    /// True if the backend is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The number of losses.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// Counts a refusal of what a driver has set up. Returns the number of refusals.
    pub(crate) fn count_refusal(&self) -> u64 {
        self.refusals.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Notes that a search for another backend has failed. Returns true for the first time since the last loss.
    pub(crate) fn note_search(&self) -> bool {
        let losses = self.losses();
        self.searched.swap(losses, Ordering::Relaxed) != losses
    }

    /// Calls `observer` on each change from now on.
    pub(crate) fn observe(&self, observer: BackendObserver) {
        *self.observer.lock() = Some(observer);
    }

    /// Records the link that the backend reports. Returns true if it changed.
    pub(crate) fn set_link(&self, up: bool) -> bool {
        self.link_down.swap(!up, Ordering::AcqRel) == up
    }

    /// Records that the backend is lost or back, and calls the observer. Returns true if that is a change.
    pub(crate) fn set_lost(&self, lost: bool) -> bool {
        if self.lost.swap(lost, Ordering::AcqRel) == lost {
            return false;
        }
        if lost {
            self.losses.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(observer) = &*self.observer.lock() {
            observer(if lost { BackendChange::Lost } else { BackendChange::Restored });
        }
        true
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("lost", &self.is_lost()).field("losses", &self.losses()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn each_change_is_reported_once_and_a_lost_backend_is_link_down() {
        let (health, told) = (Health::default(), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&told);
        health.observe(Box::new(move |change| seen.lock().push(change)));
        assert!(health.link_up());
        assert!(!health.note_search(), "there was no loss");
        assert!(health.set_lost(true) && !health.set_lost(true));
        assert!(!health.link_up());
        assert!(health.note_search() && !health.note_search());
        assert!(health.set_link(false) && !health.set_link(false));
        assert!(health.set_lost(false) && !health.link_up());
        assert!(health.set_link(true) && health.link_up());
        assert_eq!((&*told.lock(), health.losses()), (&vec![BackendChange::Lost, BackendChange::Restored], 1));
    }
}
