//! Runs the queue of an entropy device step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::{RngCounter, RngCounters, Tally};
use super::worker::{Next, QueueWorker};
use crate::features::has;
use crate::iovecs::Storage;
use crate::net::steps::Step;
use crate::ring::{BrokenRing, Ring};
use crate::{Interrupts, Memory, SharedQueue};

/// The queue, which is run step by step.
pub struct RngQueue<'q>(Ring<'q>);

/// An entropy device.
pub struct RngSteps {
    worker: QueueWorker,
    storage: Storage,
    tally: Tally,
}

impl RngSteps {
    /// A device that reads `source`, with this queue, whose driver negotiated `features`.
    ///
    /// # Errors
    ///
    /// When the host has no descriptor left.
    pub fn new(memory: GuestMemoryMmap, source: OwnedFd, queue: &SharedQueue, features: u64) -> io::Result<Self> {
        let worker = QueueWorker {
            index: 0,
            queue: Arc::clone(queue),
            features,
            memory: Memory::new(memory),
            interrupts: Arc::new(Interrupts::new(1, 0)),
            source: Arc::new(Mutex::new(source)),
            counters: Arc::new(RngCounters::new()),
            kick: Arc::new(EventFd::new(EFD_NONBLOCK)?),
            stop: Arc::new(AtomicBool::new(false)),
        };
        Ok(Self { worker, storage: Storage::default(), tally: Tally::new() })
    }

    /// The queue, which is locked until it is dropped; `None` if its rings do not lie in guest memory.
    pub fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<RngQueue<'q>> {
        let event_idx = has(self.worker.features, VIRTIO_RING_F_EVENT_IDX);
        Ring::open(0, queue.lock(), event_idx, &self.worker.memory.memory()).ok().map(RngQueue)
    }

    /// Does what the worker does in one turn of its loop. [`Step::Frame`] stands for a source that has nothing.
    pub fn step(&mut self, RngQueue(ring): &mut RngQueue<'_>) -> Step {
        let Self { worker, storage, tally } = self;
        let next = worker.fill(ring, &worker.memory.memory(), storage, tally);
        tally.flush(&worker.counters);
        match next {
            Ok(Next::More) => Step::More,
            Ok(Next::Doorbell) => Step::Doorbell,
            Ok(Next::Source(_)) => Step::Frame,
            Err(BrokenRing) => Step::Broken,
        }
    }

    /// The counters so far.
    pub fn count(&self, counter: RngCounter) -> u64 {
        self.worker.counters.get(counter)
    }

    /// Whether the driver was interrupted since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.worker.interrupts.take_isr() != 0
    }
}
