//! Runs a console's queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::sync::Arc;

use super::counters::{ConsoleCounter, ConsoleCounters};
use super::port::{Port, RECEIVE, TRANSMIT};
use crate::device::queue_worker::steps::{QueueSteps, SteppedQueue};
use crate::net::steps::{Step, Stepped};
use crate::os::chardev::CharDevice;
use crate::{GuestMap, SharedQueue};

/// A queue of a console.
pub struct ConsoleSteps {
    steps: QueueSteps<Port>,
    index: u16,
    counters: Arc<ConsoleCounters>,
}

impl ConsoleSteps {
    /// Opens the queue that the driver of a console transmits to, or the one that it receives from. The console is on
    /// `device`, and its driver negotiated `features`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(memory: GuestMap, device: Arc<CharDevice>, transmit: bool, features: u64) -> io::Result<Self> {
        let counters = Arc::new(ConsoleCounters::new());
        let steps = QueueSteps::new(Port::new(device), memory, features, &counters)?;
        Ok(Self { steps, index: if transmit { TRANSMIT } else { RECEIVE }, counters })
    }

    /// The value of a counter.
    pub fn count(&self, counter: ConsoleCounter) -> u64 {
        self.counters.get(counter)
    }
}

impl Stepped for ConsoleSteps {
    type Queue<'q> = SteppedQueue<'q>;

    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<SteppedQueue<'q>> {
        self.steps.queue(self.index, queue)
    }

    fn step(&mut self, queue: &mut SteppedQueue<'_>) -> Step {
        self.steps.step(queue)
    }

    fn take_interrupt(&self) -> bool {
        self.steps.take_interrupt()
    }
}
