//! Passes of workers, and waiting for those that have begun.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

/// A gate with two sides. Passes use the open side, and a thread that waits for passes first opens the other side:
/// passes that begin during the wait neither wait for it nor prolong it.
#[derive(Debug, Default)]
pub(super) struct Gate {
    sides: [RwLock<()>; 2],
    open: AtomicUsize,
    /// Held by the one thread that waits.
    waiting: Mutex<()>,
}

impl Gate {
    /// Begins a pass, which sees all changes made before any wait that does not include it.
    pub(super) fn begin(&self) -> RwLockReadGuard<'_, ()> {
        let [first, second] = &self.sides;
        let side = if self.open.load(Ordering::SeqCst) == 0 { first } else { second };
        // A worker may be in several passes. One of them must not queue behind a thread that waits for another.
        side.read_recursive()
    }

    /// Waits for the end of all passes that have begun. Several threads wait one after the other.
    pub(super) fn await_passes(&self) {
        let _waiting = self.waiting.lock();
        let [first, second] = &self.sides;
        let open = self.open.load(Ordering::SeqCst);
        let (open_side, other) = if open == 0 { (first, second) } else { (second, first) };
        // A pass may have read the open side long ago, and enter it after it was closed.
        drop(other.write());
        self.open.store(1 - open, Ordering::SeqCst);
        drop(open_side.write());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn passes_that_overlap_without_end_block_no_waiter() {
        let (gate, stop) = (Gate::default(), AtomicBool::new(false));
        thread::scope(|scope| {
            let mut passes = Vec::new();
            for _ in 0..3 {
                passes.push(scope.spawn(|| {
                    let mut pass = gate.begin();
                    while !stop.load(Ordering::Acquire) {
                        thread::sleep(Duration::from_micros(200));
                        // At least one pass is always active.
                        let next = gate.begin();
                        drop(std::mem::replace(&mut pass, next));
                    }
                }));
            }
            for _ in 0..100 {
                gate.await_passes();
            }
            stop.store(true, Ordering::Release);
        });
    }

    #[test]
    fn a_pass_on_either_side_is_waited_for() {
        let gate = Gate::default();
        for _ in 0..4 {
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                let pass = gate.begin();
                scope.spawn(|| {
                    gate.await_passes();
                    done.store(true, Ordering::Release);
                });
                thread::sleep(Duration::from_millis(10));
                assert!(!done.load(Ordering::Acquire));
                drop(pass);
            });
            assert!(done.load(Ordering::Acquire));
        }
    }
}
