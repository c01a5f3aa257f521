//! Runs the queue of an entropy device step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::counters::{RngCounter, RngCounters};
use super::filler::Filler;
use crate::device::queue_worker::steps::{QueueSteps, SteppedQueue};
use crate::net::steps::{Step, Stepped};
use crate::{GuestMap, SharedQueue};

/// An entropy device.
pub struct RngSteps {
    steps: QueueSteps<Filler>,
    counters: Arc<RngCounters>,
}

impl RngSteps {
    /// Creates a device that reads `source`, whose driver negotiated `features`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(memory: GuestMap, source: OwnedFd, features: u64) -> io::Result<Self> {
        let (filler, counters) = (Filler(Arc::new(Mutex::new(source))), Arc::new(RngCounters::new()));
        Ok(Self { steps: QueueSteps::new(filler, memory, features, &counters)?, counters })
    }

    /// The value of a counter.
    pub fn count(&self, counter: RngCounter) -> u64 {
        self.counters.get(counter)
    }
}

impl Stepped for RngSteps {
    type Queue<'q> = SteppedQueue<'q>;

    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<SteppedQueue<'q>> {
        self.steps.queue(0, queue)
    }

    /// Returns [`Step::Frame`] if the source has no data.
    fn step(&mut self, queue: &mut SteppedQueue<'_>) -> Step {
        self.steps.step(queue)
    }

    fn take_interrupt(&self) -> bool {
        self.steps.take_interrupt()
    }
}
