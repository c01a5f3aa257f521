//! The search for a new tap in the place of one that was deleted.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::backend::{Tap, TapSearch};
use crate::worker::{WorkerKind, spawn};

/// The time between two attempts.
const PATIENCE: Duration = Duration::from_secs(1);

/// A thread that opens a new tap as soon as there is one. It ends then, or soon after this is dropped.
///
/// The workers that move frames do not search, so that their system call filter has no call that opens anything.
#[derive(Debug)]
pub(crate) struct TapFinder(Arc<Cancel>);

#[derive(Debug, Default)]
struct Cancel {
    cancelled: Mutex<bool>,
    changed: Condvar,
}

impl TapFinder {
    /// Starts the thread `name`, which tries at once and then each second, and calls `found` once, unless it is
    /// cancelled before.
    ///
    /// # Errors
    ///
    /// When the host has no thread left.
    pub(crate) fn start(name: String, search: TapSearch, found: impl FnOnce(Tap) + Send + 'static) -> io::Result<Self> {
        let cancel = Arc::new(Cancel::default());
        let own = Arc::clone(&cancel);
        spawn(WorkerKind::TapFinder, name, move || {
            if let Some(tap) = own.until_found(&search) {
                let cancelled = own.cancelled.lock();
                if !*cancelled {
                    found(tap);
                }
            }
        })?;
        Ok(Self(cancel))
    }
}

impl Cancel {
    /// The new tap; `None` once cancelled.
    fn until_found(&self, search: &TapSearch) -> Option<Tap> {
        let mut cancelled = self.cancelled.lock();
        while !*cancelled {
            drop(cancelled);
            if let Ok(tap) = search.open() {
                return Some(tap);
            }
            cancelled = self.cancelled.lock();
            if !*cancelled {
                self.changed.wait_for(&mut cancelled, PATIENCE);
            }
        }
        None
    }
}

impl Drop for TapFinder {
    fn drop(&mut self) {
        *self.0.cancelled.lock() = true;
        self.0.changed.notify_all();
    }
}
