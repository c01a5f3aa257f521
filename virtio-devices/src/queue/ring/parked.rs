//! A queue between the runs of workers that do not own it.

use std::cell::Cell;
use std::num::Wrapping;

use super::{BrokenRing, Ring};
use crate::{DmaView, SharedQueue};

/// A queue locked for one run at a time by the thread that runs it: a receive queue that several senders fill. Keeps
/// the state of a [`Ring`] that the queue lacks.
pub(crate) struct ParkedRing {
    index: u16,
    queue: SharedQueue,
    event_idx: bool,
    /// The used index when an interrupt was last considered; `None` before the first run.
    considered: Cell<Option<Wrapping<u16>>>,
}

impl ParkedRing {
    /// Creates a queue that has not run yet.
    pub(crate) fn new(index: u16, queue: SharedQueue, event_idx: bool) -> Self {
        Self { index, queue, event_idx, considered: Cell::new(None) }
    }

    /// The queue's index.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// Locks it for a run, which ends with [`Self::park`].
    pub(crate) fn ring(&self, memory: &DmaView) -> Result<Ring<'_>, BrokenRing> {
        let queue = self.queue.lock();
        match self.considered.get() {
            Some(considered) => Ok(Ring::resume(self.index, queue, considered)),
            None => Ring::open(self.index, queue, self.event_idx, memory),
        }
    }

    /// True if there may be a chain to take: also before the first run, and if the ring cannot be read.
    pub(crate) fn has_available(&self, memory: &DmaView) -> bool {
        let Some(considered) = self.considered.get() else { return true };
        Ring::resume(self.index, self.queue.lock(), considered).available(memory) != Ok(0)
    }

    /// Ends a run.
    pub(crate) fn park(&self, ring: Ring<'_>) {
        self.considered.set(Some(ring.considered));
    }
}
