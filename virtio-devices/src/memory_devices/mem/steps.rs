//! Runs the queue of a memory device step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::counters::{MemCounter, MemCounters};
use super::region::MemRegion;
use super::requests::Requests;
use crate::device::queue_worker::steps::{QueueSteps, SteppedQueue};
use crate::net::steps::{Step, Stepped};
use crate::{GuestMap, SharedQueue};

/// A memory device.
pub struct MemSteps {
    steps: QueueSteps<Requests>,
    region: Arc<MemRegion>,
    counters: Arc<MemCounters>,
}

impl MemSteps {
    /// Creates a device with the memory at `region` in blocks of `block` bytes, whose driver negotiated
    /// `features`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(memory: GuestMap, (region, block): (&Range<u64>, u64), features: u64) -> io::Result<Self> {
        let (region, counters) = (Arc::new(MemRegion::new(region, block, 1)), Arc::new(MemCounters::new()));
        let requests = Requests(Arc::clone(&region));
        Ok(Self { steps: QueueSteps::new(requests, memory, features, &counters)?, region, counters })
    }

    /// The memory of the device.
    pub fn region(&self) -> &MemRegion {
        &self.region
    }

    /// The value of a counter.
    pub fn count(&self, counter: MemCounter) -> u64 {
        self.counters.get(counter)
    }
}

impl Stepped for MemSteps {
    type Queue<'q> = SteppedQueue<'q>;

    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<SteppedQueue<'q>> {
        self.steps.queue(0, queue)
    }

    fn step(&mut self, queue: &mut SteppedQueue<'_>) -> Step {
        self.steps.step(queue)
    }

    fn take_interrupt(&self) -> bool {
        self.steps.take_interrupt()
    }
}
