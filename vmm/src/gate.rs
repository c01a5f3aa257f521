//! What vCPU threads do between two runs of the guest: go on, stand still, or end.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use parking_lot::{Condvar, Mutex};

const HOLD: u8 = 1;
const QUIT: u8 = 2;

/// How a thread came through the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// At once.
    Straight,
    /// It stood still for a while.
    AfterPause,
}

/// The gate that each vCPU thread passes before it runs the guest.
#[derive(Debug, Default)]
pub struct Gate {
    orders: AtomicU8,
    /// How many threads stand at the gate, or have ended.
    held: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    /// Returns when the guest may run, which may be after a long time; `None` when the thread should end: with all others, or
    /// because `dismissed` is set.
    pub fn pass(&self, dismissed: &AtomicBool) -> Option<Passage> {
        let mut passage = Passage::Straight;
        loop {
            match self.orders.load(Ordering::SeqCst) {
                _ if dismissed.load(Ordering::SeqCst) => return None,
                0 => return Some(passage),
                HOLD => {
                    self.stand(dismissed);
                    passage = Passage::AfterPause;
                }
                _ => return None,
            }
        }
    }

    fn stand(&self, dismissed: &AtomicBool) {
        let mut held = self.held.lock();
        *held += 1;
        self.changed.notify_all();
        while self.orders.load(Ordering::SeqCst) == HOLD && !dismissed.load(Ordering::SeqCst) {
            self.changed.wait(&mut held);
        }
        *held -= 1;
    }

    /// A thread ends, and stands in nobody's way any more.
    pub fn leave(&self) {
        *self.held.lock() += 1;
        self.changed.notify_all();
    }

    /// Closes the gate, and returns when `threads` threads stand at it, those that have ended among them. `kick` makes those that run the guest come.
    pub fn hold(&self, threads: usize, kick: impl FnOnce()) {
        self.orders.fetch_or(HOLD, Ordering::SeqCst);
        kick();
        let mut held = self.held.lock();
        while *held < threads {
            self.changed.wait(&mut held);
        }
    }

    /// Opens the gate.
    pub fn release(&self) {
        let _held = self.held.lock();
        self.orders.fetch_and(!HOLD, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Sets `dismissed`, which makes the thread that passes with it end, also if it stands at the gate.
    pub fn dismiss(&self, dismissed: &AtomicBool) {
        let _held = self.held.lock();
        dismissed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Makes all threads end, those at the gate, too.
    pub fn quit(&self) {
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
    fn threads_stand_still_while_the_gate_is_closed_and_end_on_demand() {
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
        // Threads that have ended are not waited for.
        gate.hold(3, || {});
    }

    #[test]
    fn who_stood_at_the_gate_is_told_so_once() {
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
            // It is not waited for.
            gate.hold(1, || {});
        }
    }
}
