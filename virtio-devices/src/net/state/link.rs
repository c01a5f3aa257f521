//! The link of a NIC, as the host sets it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

/// The link, which outlives resets of the NIC. While it is down, no frame passes in either direction, and frames from
/// the backend are never put where the guest can see them.
#[derive(Debug)]
pub(crate) struct Link {
    /// The conditions for the link.
    state: Mutex<LinkState>,
    /// The resulting state.
    up: AtomicBool,
    changes: AtomicU64,
    /// Read while a batch of frames passes.
    batches: RwLock<()>,
}

/// The conditions that a link depends on.
#[derive(Debug, Clone, Copy)]
struct LinkState {
    /// The host has set it up.
    up: bool,
    /// It is down in the meantime, because that of a switch's uplink is.
    held: bool,
    /// It is down until the deleted tap is replaced.
    lost: bool,
}

impl Link {
    /// A link that is up or down, and has never changed.
    pub(crate) fn new(up: bool) -> Self {
        let state = Mutex::new(LinkState { up, held: false, lost: false });
        Self { state, up: AtomicBool::new(up), changes: AtomicU64::new(0), batches: RwLock::new(()) }
    }

    /// True if the link is up.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    /// True if the host has set the link up.
    pub(crate) fn is_wanted(&self) -> bool {
        self.state.lock().up
    }

    /// The number of changes. Frames that the backend got before the last change are not delivered.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Marks the start of a batch of frames, until the returned guard is dropped. [`Self::is_up`] does not change for
    /// the whole batch, unless the link goes up in the meantime.
    pub(crate) fn batch(&self) -> RwLockReadGuard<'_, ()> {
        self.batches.read()
    }

    /// Sets the link up or down. Returns true if that is a change. Once it is down, all frames that found it up have
    /// passed: this waits for batches in progress, which wait for nothing.
    pub(crate) fn set(&self, up: bool) -> bool {
        self.change(|state| state.up = up)
    }

    /// Keeps the link down, or no longer, independently of the host's setting; otherwise as [`Self::set`].
    pub(crate) fn hold(&self, held: bool) -> bool {
        self.change(|state| state.held = held)
    }

    /// Keeps the link down while its tap is lost, or no longer; otherwise as [`Self::set`].
    pub(crate) fn set_lost(&self, lost: bool) -> bool {
        self.change(|state| state.lost = lost)
    }

    fn change(&self, change: impl FnOnce(&mut LinkState)) -> bool {
        let mut state = self.state.lock();
        change(&mut state);
        let up = state.up && !state.held && !state.lost;
        // Locked before the change, so that no batch finds the link up and reads a later frame.
        let batches = (!up).then(|| self.batches.write());
        let changed = self.up.swap(up, Ordering::AcqRel) != up;
        if changed {
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        drop(batches);
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_change_counts_and_nothing_else_does() {
        let link = Link::new(true);
        assert!(!link.set(true) && link.set(false) && !link.set(false) && !link.is_up());
        assert_eq!(link.changes(), 1);
        assert!(link.set(true) && link.is_up());
        assert_eq!(link.changes(), 2);
    }

    #[test]
    fn a_link_is_up_when_the_host_wants_it_and_nothing_holds_it() {
        let link = Link::new(true);
        assert!(link.hold(true) && !link.is_up() && link.is_wanted());
        assert!(!link.set(false) && !link.is_wanted() && !link.hold(false) && !link.is_up());
        assert!(!link.hold(true) && !link.set(true) && link.hold(false) && link.is_up());
        assert_eq!(link.changes(), 2);
        assert!(link.set_lost(true) && !link.is_up() && link.is_wanted());
        assert!(!link.hold(true) && !link.set_lost(false) && link.hold(false) && link.is_up());
    }

    #[test]
    fn link_goes_down_only_after_the_running_batch_ends() {
        let link = Link::new(true);
        thread::scope(|scope| {
            let batch = link.batch();
            let host = scope.spawn(|| link.set(false));
            thread::sleep(Duration::from_millis(20));
            assert!(!host.is_finished() && link.is_up(), "for the whole batch");
            drop(batch);
            assert!(host.join().unwrap());
        });
        assert!(!link.is_up());
    }
}
