//! The search for a new tap to replace a deleted one.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::backend::{Tap, TapError, TapSearch};
use crate::device::worker::{WorkerKind, spawn};

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
    /// cancelled before. It calls `refused` with the first reason why an existing tap cannot be opened.
    ///
    /// # Errors
    ///
    /// Fails if the host has no thread left.
    pub(crate) fn start(
        name: String,
        search: TapSearch,
        refused: impl FnOnce(&TapError) + Send + 'static,
        found: impl FnOnce(Tap) + Send + 'static,
    ) -> io::Result<Self> {
        let cancel = Arc::new(Cancel::default());
        let own = Arc::clone(&cancel);
        spawn(WorkerKind::TapFinder, name, move || {
            if let Some(tap) = own.until_found(&search, refused) {
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
    fn until_found(&self, search: &TapSearch, refused: impl FnOnce(&TapError)) -> Option<Tap> {
        let mut refused = Some(refused);
        let mut cancelled = self.cancelled.lock();
        while !*cancelled {
            drop(cancelled);
            match search.open() {
                Ok(tap) => return Some(tap),
                // There is none, or one that was deleted in the meantime.
                Err(TapError::Gone(_) | TapError::NoRightToCreate(_)) => {}
                Err(error) => refused.take().into_iter().for_each(|refused| refused(&error)),
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::backend::TapSpec;

    #[test]
    fn unopenable_tap_is_reported_and_a_missing_one_is_not() {
        crate::net::testing::namespace::enter();
        // An interface that exists everywhere, and is not a tap.
        for (name, is_there) in [("lo", true), ("missing0", false)] {
            let spec =
                TapSpec { name: Some(name.into()), ip: None, mask: None, host_mac: None, mtu: None, queue_pairs: 1 };
            let search = TapSearch { name: name.into(), spec: Some(spec) };
            let (refused, found) = (channel(), channel());
            let told = move |error: &TapError| refused.0.send(error.to_string()).unwrap();
            let finder = TapFinder::start("finder".into(), search, told, move |_| found.0.send(()).unwrap()).unwrap();
            if is_there {
                assert!(refused.1.recv().unwrap().starts_with("lo exists and is not a tap"));
            }
            drop(finder);
            // The thread ends, and has called neither a second time.
            assert!(found.1.recv().is_err() && refused.1.recv().is_err(), "{name}");
        }
    }
}
