//! The gate before each entry of the guest, where vCPU threads continue, pause or exit.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use parking_lot::{Condvar, Mutex};

const HOLD: u8 = 1;
const QUIT: u8 = 2;
const SLOW: u8 = 4;

/// Result of passing the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    /// Without a pause.
    Straight,
    /// After a pause.
    AfterPause,
}

/// The gate that each vCPU thread passes before it runs the guest.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    orders: AtomicU8,
    /// Number of threads that wait at the gate or have ended.
    held: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    /// True if a thread can pass the gate without waiting.
    pub(crate) fn is_open(&self, dismissed: &AtomicBool) -> bool {
        self.orders.load(Ordering::SeqCst) == 0 && !dismissed.load(Ordering::SeqCst)
    }

    /// Closes the gate for threads that arrive later.
    pub(crate) fn close(&self) {
        self.orders.fetch_or(HOLD, Ordering::SeqCst);
    }

    /// Waits until the guest may run. Returns `None` if the thread must exit, with all others or because `dismissed` is
    /// set.
    pub(crate) fn pass(&self, dismissed: &AtomicBool) -> Option<Passage> {
        let mut passage = Passage::Straight;
        loop {
            match self.orders.load(Ordering::SeqCst) {
                _ if dismissed.load(Ordering::SeqCst) => return None,
                0 => return Some(passage),
                orders if orders & QUIT != 0 => return None,
                _ => {
                    self.stand(dismissed);
                    passage = Passage::AfterPause;
                }
            }
        }
    }

    fn stand(&self, dismissed: &AtomicBool) {
        let mut held = self.held.lock();
        *held += 1;
        self.changed.notify_all();
        let stands = |orders| orders & QUIT == 0 && orders & (HOLD | SLOW) != 0;
        while stands(self.orders.load(Ordering::SeqCst)) && !dismissed.load(Ordering::SeqCst) {
            self.changed.wait(&mut held);
        }
        *held -= 1;
    }

    /// Counts the calling thread, which ends, as held from now on.
    pub(crate) fn leave(&self) {
        *self.held.lock() += 1;
        self.changed.notify_all();
    }

    /// Closes the gate, and returns once `threads` threads wait at it or have ended. `kick` forces vCPUs out of the
    /// guest.
    pub(crate) fn hold(&self, threads: usize, kick: impl FnOnce()) {
        self.close();
        kick();
        let mut held = self.held.lock();
        while *held < threads {
            self.changed.wait(&mut held);
        }
    }

    /// Opens the gate.
    pub(crate) fn release(&self) {
        let _held = self.held.lock();
        self.orders.fetch_and(!HOLD, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Turns throttling on or off: threads wait at the gate, independently of a pause. `kick` forces vCPUs out of the
    /// guest.
    pub(crate) fn slow(&self, is_slow: bool, kick: impl FnOnce()) {
        if is_slow {
            self.orders.fetch_or(SLOW, Ordering::SeqCst);
            return kick();
        }
        let _held = self.held.lock();
        self.orders.fetch_and(!SLOW, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Sets `dismissed`, and wakes its thread, which exits even if it waits at the gate.
    pub(crate) fn dismiss(&self, dismissed: &AtomicBool) {
        let _held = self.held.lock();
        dismissed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Ends all threads, including those at the gate.
    pub(crate) fn quit(&self) {
        let _held = self.held.lock();
        self.orders.fetch_or(QUIT, Ordering::SeqCst);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn throttling_gate_stays_closed_while_threads_are_paused() {
        let (gate, steps) = (Arc::new(Gate::default()), Arc::new(AtomicU64::new(0)));
        let thread = {
            let (gate, steps) = (Arc::clone(&gate), Arc::clone(&steps));
            std::thread::spawn(move || {
                while gate.pass(&AtomicBool::new(false)).is_some() {
                    steps.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        let wait_for = |is_there: &dyn Fn() -> bool| {
            let start = std::time::Instant::now();
            while !is_there() {
                assert!(start.elapsed() < std::time::Duration::from_secs(60), "the thread does not move");
                std::thread::yield_now();
            }
        };
        let goes_on = || {
            let before = steps.load(Ordering::SeqCst);
            wait_for(&|| steps.load(Ordering::SeqCst) != before);
        };
        let stands = || {
            // A thread past the gate takes a step before it is held.
            wait_for(&|| *gate.held.lock() > 0);
            let before = steps.load(Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(20));
            steps.load(Ordering::SeqCst) == before
        };
        goes_on();
        gate.slow(true, || {});
        assert!(stands());
        gate.hold(1, || {});
        gate.slow(false, || {});
        assert!(stands());
        gate.slow(true, || {});
        gate.release();
        assert!(stands());
        gate.slow(false, || {});
        goes_on();
        gate.slow(true, || {});
        gate.quit();
        thread.join().unwrap();
    }

    #[test]
    fn closed_gate_holds_threads_until_release_or_quit() {
        let (gate, steps) = (Arc::new(Gate::default()), Arc::new(AtomicU64::new(0)));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (gate, steps) = (Arc::clone(&gate), Arc::clone(&steps));
                std::thread::spawn(move || {
                    while gate.pass(&AtomicBool::new(false)).is_some() {
                        steps.fetch_add(1, Ordering::SeqCst);
                        std::thread::yield_now();
                    }
                    gate.leave();
                })
            })
            .collect();
        for _ in 0..20 {
            gate.hold(3, || {});
            let before = steps.load(Ordering::SeqCst);
            std::thread::yield_now();
            assert_eq!(steps.load(Ordering::SeqCst), before);
            gate.release();
            while steps.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
        }
        gate.hold(3, || {});
        gate.quit();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // Ended threads are not waited for.
        gate.hold(3, || {});
    }

    #[test]
    fn a_thread_held_at_the_gate_gets_that_answer_once() {
        let gate = Arc::new(Gate::default());
        gate.orders.fetch_or(HOLD, Ordering::SeqCst);
        let thread = {
            let gate = Arc::clone(&gate);
            let pass = move || gate.pass(&AtomicBool::new(false));
            std::thread::spawn(move || [pass(), pass()])
        };
        gate.hold(1, || {});
        gate.release();
        assert_eq!(thread.join().unwrap(), [Some(Passage::AfterPause), Some(Passage::Straight)]);
    }

    #[test]
    fn one_thread_is_dismissed_whether_the_gate_is_open_or_closed() {
        for closed in [false, true] {
            let (gate, dismissed) = (Arc::new(Gate::default()), Arc::new(AtomicBool::new(false)));
            let thread = {
                let (gate, dismissed) = (Arc::clone(&gate), Arc::clone(&dismissed));
                std::thread::spawn(move || {
                    while gate.pass(&dismissed).is_some() {
                        std::thread::yield_now();
                    }
                    gate.leave();
                })
            };
            if closed {
                gate.hold(1, || {});
            }
            gate.dismiss(&dismissed);
            thread.join().unwrap();
            let other = || gate.pass(&AtomicBool::new(false));
            assert!(closed || other() == Some(Passage::Straight), "others are not");
            // A dismissed thread is not waited for.
            gate.hold(1, || {});
        }
    }
}
