//! Runs a console's queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::{ConsoleCounter, ConsoleCounters, Tally};
use super::worker::{Next, QueueWorker, RECEIVE, Running, TRANSMIT};
use crate::chardev::CharDevice;
use crate::features::has;
use crate::iovecs::Storage;
use crate::net::steps::Step;
use crate::ring::{BrokenRing, Ring};
use crate::{Interrupts, Memory, SharedQueue};

/// A queue that is run step by step.
pub struct ConsoleQueue<'q>(Running<'q>);

/// What the queues of a console have in common.
pub struct ConsoleSteps {
    worker: QueueWorker,
    tally: Tally,
}

impl ConsoleSteps {
    /// A console whose other end is `device`, and whose driver negotiated `features`.
    ///
    /// # Errors
    ///
    /// When the host has no descriptor left.
    pub fn new(memory: GuestMemoryMmap, device: Arc<CharDevice>, features: u64) -> std::io::Result<Self> {
        let worker = QueueWorker {
            receive: None,
            transmit: None,
            device,
            features,
            memory: Memory::new(memory),
            interrupts: Arc::new(Interrupts::new(2, 0)),
            counters: Arc::new(ConsoleCounters::new()),
            kick: Arc::new(EventFd::new(EFD_NONBLOCK)?),
            stop: Arc::new(AtomicBool::new(false)),
        };
        Ok(Self { worker, tally: Tally::new() })
    }

    /// The queue that the driver receives from, or the one that it transmits to. It is locked until it is dropped;
    /// `None` if its rings do not lie in guest memory.
    pub fn queue<'q>(&self, transmit: bool, queue: &'q SharedQueue) -> Option<ConsoleQueue<'q>> {
        let index = if transmit { TRANSMIT } else { RECEIVE };
        let event_idx = has(self.worker.features, VIRTIO_RING_F_EVENT_IDX);
        let ring = Ring::open(index, queue.lock(), event_idx, &self.worker.memory.memory()).ok()?;
        Some(ConsoleQueue(Running { ring, storage: Storage::default() }))
    }

    /// Does what the worker does for this queue in one turn of its loop.
    pub fn step(&mut self, ConsoleQueue(running): &mut ConsoleQueue<'_>) -> Step {
        let memory = self.worker.memory.memory();
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

    /// The counters so far.
    pub fn count(&self, counter: ConsoleCounter) -> u64 {
        self.worker.counters.get(counter)
    }

    /// Whether the driver was interrupted since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.worker.interrupts.take_isr() != 0
    }
}
