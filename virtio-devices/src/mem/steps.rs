//! Runs the queue of a memory device step by step on the caller's thread, without waiting. For fuzz targets.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::GuestMemoryMmap;

use super::counters::{MemCounter, MemCounters, Tally};
use super::pass::Pass;
use super::region::MemRegion;
use crate::features::has;
use crate::iovecs::Storage;
use crate::net::steps::Step;
use crate::ring::Ring;
use crate::{Interrupts, SharedQueue};

/// The queue, which is run step by step.
pub struct MemQueue<'q>(Ring<'q>);

/// A memory device.
pub struct MemSteps {
    memory: GuestMemoryMmap,
    region: MemRegion,
    storage: [Storage; 2],
    tally: Tally,
    counters: MemCounters,
    interrupts: Interrupts,
    features: u64,
}

impl MemSteps {
    /// A device with the memory at `region` in blocks of `block` bytes, whose driver negotiated `features`.
    pub fn new(memory: GuestMemoryMmap, region: &Range<u64>, block: u64, features: u64) -> Self {
        Self {
            memory,
            region: MemRegion::new(region, block),
            storage: Default::default(),
            tally: Tally::new(),
            counters: MemCounters::new(),
            interrupts: Interrupts::new(1, 0),
            features,
        }
    }

    /// The memory of the device.
    pub fn region(&self) -> &MemRegion {
        &self.region
    }

    /// The queue, which is locked until it is dropped; `None` if its rings do not lie in guest memory.
    pub fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<MemQueue<'q>> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        Ring::open(0, queue.lock(), event_idx, &self.memory).ok().map(MemQueue)
    }

    /// Does what a worker does in one turn of its loop.
    pub fn step(&mut self, MemQueue(ring): &mut MemQueue<'_>) -> Step {
        let Self { memory, region, storage, tally, counters, interrupts, features: _ } = self;
        let stop = &AtomicBool::new(false);
        let step = match (Pass { memory, region, stop, interrupts, storage, tally }).serve(ring) {
            Ok(true) => Step::Doorbell,
            Ok(false) => Step::More,
            Err(_) => Step::Broken,
        };
        tally.flush(counters);
        step
    }

    /// The counters so far.
    pub fn count(&self, counter: MemCounter) -> u64 {
        self.counters.get(counter)
    }

    /// Whether the driver was interrupted since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.interrupts.take_isr() != 0
    }
}
