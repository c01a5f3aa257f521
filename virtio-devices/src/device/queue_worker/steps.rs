//! Runs queues step by step on the caller's thread, without waiting. For fuzz targets.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Next, QueueHandler, QueueWorker};
use crate::device::counters::QueueTally;
use crate::net::steps::Step;
use crate::queue::iovecs::Storage;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{GuestMap, Interrupts, SharedQueue};

/// A queue that is run step by step.
pub struct SteppedQueue<'q>(Ring<'q>);

/// The most queues of a device with such a worker.
const QUEUES: u16 = 6;

/// A worker that is not a thread.
pub(crate) struct QueueSteps<A: QueueHandler> {
    worker: QueueWorker<A>,
    storage: [Storage; 2],
}

impl<A: QueueHandler> QueueSteps<A> {
    /// Creates a worker of queues, whose driver negotiated `features`. It adds its counts to `counters`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub(crate) fn new(
        answerer: A,
        memory: GuestMap,
        features: u64,
        counters: &Arc<<A::Tally as QueueTally>::Counters>,
    ) -> io::Result<Self> {
        let worker = QueueWorker {
            queues: Vec::new(),
            features,
            memory: memory.into(),
            interrupts: Arc::new(Interrupts::new(QUEUES, 0)),
            answerer,
            tally: A::Tally::new(),
            counters: Arc::clone(counters),
            kick: Arc::new(EventFd::new(EFD_NONBLOCK)?),
            stop: Arc::new(AtomicBool::new(false)),
        };
        Ok(Self { worker, storage: Default::default() })
    }

    /// Opens the queue `index`, which stays locked until dropped; `None` if its rings do not lie in guest memory.
    pub(crate) fn queue<'q>(&self, index: u16, queue: &'q SharedQueue) -> Option<SteppedQueue<'q>> {
        let event_idx = has(self.worker.features, VIRTIO_RING_F_EVENT_IDX);
        Ring::open(index, queue.lock(), event_idx, &self.worker.memory.pass()).ok().map(SteppedQueue)
    }

    /// Runs one turn of the worker's loop. Returns [`Step::Frame`] for a waiting chain.
    pub(crate) fn step(&mut self, SteppedQueue(ring): &mut SteppedQueue<'_>) -> Step {
        let next = self.worker.look(ring, &mut self.storage);
        self.worker.tally.flush(&self.worker.counters);
        match next {
            Ok(Next::More) => Step::More,
            Ok(Next::Doorbell) => Step::Doorbell,
            Ok(Next::Later(_) | Next::Source) => Step::Frame,
            Err(BrokenRing) => Step::Broken,
        }
    }

    /// Ends a check of all queues.
    pub(crate) fn after_look(&mut self) {
        self.worker.answerer.after_look(&mut self.worker.tally);
        self.worker.tally.flush(&self.worker.counters);
    }

    /// True if the driver was interrupted since the last call.
    pub(crate) fn take_interrupt(&self) -> bool {
        self.worker.interrupts.take_isr() != 0
    }
}
