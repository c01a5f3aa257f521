//! The order of writes to storage whose blocks are larger than the disk's.
//!
//! A write of less than a block reads the block, changes it, and writes it back. Another write to the same block in
//! between would be lost. So such a change is exclusive: no other write of any queue is in flight.
//!
//! A worker that waits here has no write in flight itself. So each write in flight belongs to a worker that does not
//! wait, and completes.

use parking_lot::{Condvar, Mutex};

/// The writes of all queues of an image.
#[derive(Default)]
pub(crate) struct Writes {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The writes in flight.
    in_flight: usize,
    /// True while an exclusive change runs.
    alone: bool,
    /// The number of waiting changes. No further write begins before them.
    waiting: usize,
}

/// An exclusive change, until this is dropped.
pub(crate) struct Alone<'w>(&'w Writes);

impl Writes {
    /// Begins a write, which ends with [`Self::leave`]. Returns false if it may not begin now.
    #[must_use]
    pub(crate) fn try_enter(&self) -> bool {
        let mut state = self.state.lock();
        let may = !state.alone && state.waiting == 0;
        state.in_flight += usize::from(may);
        may
    }

    /// Begins a write as soon as allowed. The caller has none in flight.
    pub(crate) fn enter(&self) {
        let mut state = self.state.lock();
        while state.alone || state.waiting > 0 {
            self.changed.wait(&mut state);
        }
        state.in_flight += 1;
    }

    /// A write has ended.
    pub(crate) fn leave(&self) {
        let mut state = self.state.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        if state.in_flight == 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until no write is in flight, and blocks new ones. The caller has none in flight.
    pub(crate) fn alone(&self) -> Alone<'_> {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.alone || state.in_flight > 0 {
            self.changed.wait(&mut state);
        }
        state.waiting -= 1;
        state.alone = true;
        Alone(self)
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.state.lock().alone = false;
        self.0.changed.notify_all();
    }
}
