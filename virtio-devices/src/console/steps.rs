//! Runs a console's queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::{ConsoleCounter, ConsoleCounters, Tally};
use super::worker::{Next, QueueWorker, RECEIVE, Running, TRANSMIT};
use crate::net::steps::{Step, Stepped};
use crate::os::chardev::CharDevice;
use crate::queue::iovecs::Storage;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{GuestMap, Interrupts, SharedQueue};

/// A queue that is run step by step.
pub struct ConsoleQueue<'q>(Running<'q>);

/// A queue of a console.
pub struct ConsoleSteps {
    worker: QueueWorker,
    index: u16,
    tally: Tally,
}

impl ConsoleSteps {
    /// Opens the queue that the driver of a console transmits to, or the one that it receives from. The console is on
    /// `device`, and its driver negotiated `features`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new(memory: GuestMap, device: Arc<CharDevice>, transmit: bool, features: u64) -> std::io::Result<Self> {
        let worker = QueueWorker {
            receive: None,
            transmit: None,
            device,
            features,
            memory: memory.into(),
            interrupts: Arc::new(Interrupts::new(2, 0)),
            counters: Arc::new(ConsoleCounters::new()),
            kick: Arc::new(EventFd::new(EFD_NONBLOCK)?),
            stop: Arc::new(AtomicBool::new(false)),
        };
        Ok(Self { worker, index: if transmit { TRANSMIT } else { RECEIVE }, tally: Tally::new() })
    }

    /// The value of a counter.
    pub fn count(&self, counter: ConsoleCounter) -> u64 {
        self.worker.counters.get(counter)
    }
}

impl Stepped for ConsoleSteps {
    type Queue<'q> = ConsoleQueue<'q>;

    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<ConsoleQueue<'q>> {
        let event_idx = has(self.worker.features, VIRTIO_RING_F_EVENT_IDX);
        let ring = Ring::open(self.index, queue.lock(), event_idx, &self.worker.memory.pass()).ok()?;
        Some(ConsoleQueue(Running { ring, storage: Storage::default() }))
    }

    fn step(&mut self, ConsoleQueue(running): &mut ConsoleQueue<'_>) -> Step {
        let memory = self.worker.memory.pass();
        let next = match running.ring.index() {
            TRANSMIT => self.worker.send(running, &memory, &mut self.tally),
            _ => self.worker.fill(running, &memory, &mut self.tally),
        };
        self.tally.flush(&self.worker.counters);
        match next {
            Ok(Next::More) => Step::More,
            Ok(Next::Input) => Step::Frame,
            Ok(Next::Doorbell) => Step::Doorbell,
            Err(BrokenRing) => Step::Broken,
        }
    }

    fn take_interrupt(&self) -> bool {
        self.worker.interrupts.take_isr() != 0
    }
}
