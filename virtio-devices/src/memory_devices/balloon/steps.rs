//! Runs a balloon's queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::sync::Arc;

use super::counters::{BalloonCounter, BalloonCounters};
use super::pass::Pages;
use crate::device::queue_worker::steps::{QueueSteps, SteppedQueue};
use crate::net::steps::Step;
use crate::{GuestMap, SharedQueue};

/// State that the queues of a balloon share.
pub struct BalloonSteps {
    steps: QueueSteps<Pages>,
    counters: Arc<BalloonCounters>,
}

impl BalloonSteps {
    /// Creates a balloon whose driver negotiated `features`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(memory: GuestMap, features: u64) -> io::Result<Self> {
        let counters = Arc::new(BalloonCounters::new());
        Ok(Self { steps: QueueSteps::new(Pages, memory, features, &counters)?, counters })
    }

    /// Opens the queue `index`: 0 inflates, 1 deflates, 2 reports. It stays locked until dropped; `None` if its rings
    /// do not lie in guest memory.
    pub fn queue<'q>(&self, index: u16, queue: &'q SharedQueue) -> Option<SteppedQueue<'q>> {
        self.steps.queue(index, queue)
    }

    /// Runs one turn of a worker's loop.
    pub fn step(&mut self, queue: &mut SteppedQueue<'_>) -> Step {
        self.steps.step(queue)
    }

    /// The value of a counter.
    pub fn count(&self, counter: BalloonCounter) -> u64 {
        self.counters.get(counter)
    }

    /// True if the driver was interrupted since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.steps.take_interrupt()
    }
}
