//! The worker of all queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{BalloonCounter, BalloonCounters, Tally};
use super::pass::Pass;
use crate::device::worker::own;
use crate::os::eventfd::borrow;
use crate::queue::iovecs::Storage;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{DmaSpace, Interrupts, SharedQueue};

/// The queues, and the worker's resources.
pub(crate) struct QueueWorker {
    /// The queues that the driver enabled, with their indices.
    pub queues: Vec<(u16, SharedQueue)>,
    /// The negotiated features.
    pub features: u64,
    /// The guest's memory.
    pub memory: DmaSpace,
    /// Interrupts of the device.
    pub interrupts: Arc<Interrupts>,
    /// The counters.
    pub counters: Arc<BalloonCounters>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops the worker.
    pub stop: Arc<AtomicBool>,
}

impl QueueWorker {
    /// Runs the queues until stopped. First waits for the predecessor's end.
    pub(crate) fn run(self) {
        let (mut tally, mut storage) = (Tally::new(), Storage::default());
        let mut rings: Vec<_> =
            self.queues.iter().filter_map(|(index, queue)| self.open(*index, queue, &mut tally)).collect();
        while !self.stop.load(Ordering::Acquire) {
            let idle = {
                let memory = &self.memory.pass();
                let (stop, interrupts) = (&self.stop, &self.interrupts);
                let mut pass = Pass { memory, stop, interrupts, storage: &mut storage, tally: &mut tally };
                let mut idle = true;
                rings.retain_mut(|ring| match pass.serve(ring) {
                    Ok(empty) => {
                        idle &= empty;
                        true
                    }
                    Err(BrokenRing) => {
                        self.give_up(pass.tally);
                        false
                    }
                });
                idle
            };
            tally.flush(&self.counters);
            if idle {
                self.wait(&mut tally);
            }
        }
        tally.flush(&self.counters);
    }

    fn open<'q>(&self, index: u16, queue: &'q SharedQueue, tally: &mut Tally) -> Option<Ring<'q>> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let ring = Ring::open(index, own(queue, &self.stop)?, event_idx, &self.memory.pass());
        ring.inspect_err(|BrokenRing| self.give_up(tally)).ok()
    }

    /// Counts an invalid ring, and asks the driver for a reset.
    fn give_up(&self, tally: &mut Tally) {
        tally.count(BalloonCounter::BrokenRings);
        self.interrupts.ask_for_reset();
    }

    /// Waits for a doorbell or a stop.
    fn wait(&self, tally: &mut Tally) {
        let kick = borrow(&self.kick);
        // If this fails (a signal, no memory), the queues are checked and the wait is repeated.
        let _ = poll(&mut [PollFd::from_borrowed_fd(kick, PollFlags::IN)], None);
        if self.kick.read().is_ok() {
            tally.count(BalloonCounter::Kicks);
        }
    }
}
