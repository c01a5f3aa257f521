//! A NIC's link as the host wants it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

/// The link, which outlives resets of the NIC. While it is down, no frame passes in either direction, and none that the
/// backend has is put where the guest can see it.
#[derive(Debug)]
pub(crate) struct Link {
    /// What is wanted of it.
    wish: Mutex<Wish>,
    /// What it therefore is.
    up: AtomicBool,
    changes: AtomicU64,
    /// Read while a batch of frames passes.
    batches: RwLock<()>,
}

/// What a link depends on.
#[derive(Debug, Clone, Copy)]
struct Wish {
    /// The host wants it to be up.
    up: bool,
    /// It is down meanwhile, because that of a switch's uplink is.
    held: bool,
    /// It is down until the tap that was deleted is replaced.
    lost: bool,
}

impl Link {
    /// A link that is up or down, and has never changed.
    pub(crate) fn new(up: bool) -> Self {
        let wish = Mutex::new(Wish { up, held: false, lost: false });
        Self { wish, up: AtomicBool::new(up), changes: AtomicU64::new(0), batches: RwLock::new(()) }
    }

    /// Whether it is up.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    /// Whether the host wants it to be up.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wish.lock().up
    }

    /// How often it has changed. Frames that the backend got before the last change are not to be delivered.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Announces a batch of frames, until the answer is dropped. What [`Self::is_up`] says holds for the whole batch,
    /// unless the link goes up meanwhile.
    pub(crate) fn batch(&self) -> RwLockReadGuard<'_, ()> {
        self.batches.read()
    }

    /// Takes it up or down. Returns whether that is a change. Once it is down, all frames that found it up have passed:
    /// this waits for the batches that are on their way, which wait for nothing.
    pub(crate) fn set(&self, up: bool) -> bool {
        self.change(|wish| wish.up = up)
    }

    /// Keeps it down, or no longer, whatever the host wants; else as [`Self::set`].
    pub(crate) fn hold(&self, held: bool) -> bool {
        self.change(|wish| wish.held = held)
    }

    /// Keeps it down while its tap is lost, or no longer; else as [`Self::set`].
    pub(crate) fn set_lost(&self, lost: bool) -> bool {
        self.change(|wish| wish.lost = lost)
    }

    fn change(&self, change: impl FnOnce(&mut Wish)) -> bool {
        let mut wish = self.wish.lock();
        change(&mut wish);
        let up = wish.up && !wish.held && !wish.lost;
        // Locked before the change, so that no batch finds the link up and meets a frame of after this.
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
    fn a_link_is_down_only_when_the_frames_that_found_it_up_have_passed() {
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
