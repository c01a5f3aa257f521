//! Runs a balloon's queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::counters::{BalloonCounter, BalloonCounters, Tally};
use super::pass::Pass;
use crate::net::steps::Step;
use crate::queue::iovecs::Storage;
use crate::queue::ring::Ring;
use crate::transport::features::has;
use crate::{DmaView, GuestMap, Interrupts, SharedQueue};

/// A queue that is run step by step.
pub struct BalloonQueue<'q>(Ring<'q>);

/// State that the queues of a balloon share.
pub struct BalloonSteps {
    memory: DmaView,
    storage: Storage,
    tally: Tally,
    counters: BalloonCounters,
    interrupts: Interrupts,
    features: u64,
}

impl BalloonSteps {
    /// A balloon whose driver negotiated `features`.
    pub fn new(memory: GuestMap, features: u64) -> Self {
        Self {
            memory: DmaView::identity(&memory),
            storage: Storage::default(),
            tally: Tally::new(),
            counters: BalloonCounters::new(),
            interrupts: Interrupts::new(3, 0),
            features,
        }
    }

    /// Opens the queue `index`: 0 inflates, 1 deflates, 2 reports. It stays locked until dropped; `None` if its rings
    /// do not lie in guest memory.
    pub fn queue<'q>(&self, index: u16, queue: &'q SharedQueue) -> Option<BalloonQueue<'q>> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        Ring::open(index, queue.lock(), event_idx, &self.memory).ok().map(BalloonQueue)
    }

    /// Runs one turn of a worker's loop.
    pub fn step(&mut self, BalloonQueue(ring): &mut BalloonQueue<'_>) -> Step {
        let Self { memory, storage, tally, counters, interrupts, features: _ } = self;
        let step = match (Pass { memory, stop: &AtomicBool::new(false), interrupts, storage, tally }).serve(ring) {
            Ok(true) => Step::Doorbell,
            Ok(false) => Step::More,
            Err(_) => Step::Broken,
        };
        tally.flush(counters);
        step
    }

    /// The value of a counter.
    pub fn count(&self, counter: BalloonCounter) -> u64 {
        self.counters.get(counter)
    }

    /// True if the driver was interrupted since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.interrupts.take_isr() != 0
    }
}
