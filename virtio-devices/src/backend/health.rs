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
    /// The host has set the interface of the tap down.
    tap_down: AtomicBool,
    /// The number of times it has.
    tap_downs: AtomicU64,
    /// The link stays up while the tap is down.
    ignores_tap: AtomicBool,
    losses: AtomicU64,
    refusals: AtomicU64,
    /// The loss after which a search for another backend was last reported to fail.
    searched: AtomicU64,
    observer: Mutex<Option<BackendObserver>>,
}

impl Health {
    /// True if the backend reports the link as up, and its tap is up if the link follows it.
    pub(crate) fn link_up(&self) -> bool {
        self.reports_link() && !(self.is_tap_down() && self.follows_tap())
    }

    /// True if the backend reports the link as up, whatever the state of its tap.
    pub(crate) fn reports_link(&self) -> bool {
        !self.is_lost() && !self.link_down.load(Ordering::Acquire)
    }

    /// True if the host has set the tap down.
    pub(crate) fn is_tap_down(&self) -> bool {
        self.tap_down.load(Ordering::Acquire)
    }

    /// Records that the tap is down, or up. Returns true if that is a change.
    pub(crate) fn set_tap_down(&self, down: bool) -> bool {
        let changed = self.tap_down.swap(down, Ordering::AcqRel) != down;
        if changed && down {
            self.tap_downs.fetch_add(1, Ordering::Relaxed);
        }
        changed
    }

    /// The number of times that the tap was set down.
    pub(crate) fn tap_downs(&self) -> u64 {
        self.tap_downs.load(Ordering::Relaxed)
    }

    /// True if the link is down while the tap is.
    pub(crate) fn follows_tap(&self) -> bool {
        !self.ignores_tap.load(Ordering::Acquire)
    }

    /// Makes the link follow the tap, or stay up.
    pub(crate) fn follow_tap(&self, follows: bool) {
        self.ignores_tap.store(!follows, Ordering::Release);
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
        assert!(health.set_tap_down(true) && !health.set_tap_down(true) && !health.link_up());
        health.follow_tap(false);
        assert!(health.link_up() && health.is_tap_down());
        health.follow_tap(true);
        assert!(health.set_tap_down(false) && health.link_up() && health.tap_downs() == 1);
        assert_eq!((&*told.lock(), health.losses()), (&vec![BackendChange::Lost, BackendChange::Restored], 1));
    }
}
