//! The worker of the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{MemCounter, MemCounters, Tally};
use super::pass::Pass;
use super::region::MemRegion;
use crate::eventfd::borrow;
use crate::features::has;
use crate::ring::{BrokenRing, Ring};
use crate::worker::own;
use crate::{Interrupts, Memory, SharedQueue};

/// The queue and what its worker works with.
pub(crate) struct QueueWorker {
    /// The queue's index.
    pub index: u16,
    /// The queue.
    pub queue: SharedQueue,
    /// The negotiated features.
    pub features: u64,
    /// The guest's memory.
    pub memory: Memory,
    /// The memory of the device.
    pub region: Arc<MemRegion>,
    /// Where the driver is interrupted.
    pub interrupts: Arc<Interrupts>,
    /// The counters.
    pub counters: Arc<MemCounters>,
    /// Wakes it.
    pub kick: Arc<EventFd>,
    /// Stops it.
    pub stop: Arc<AtomicBool>,
}

impl QueueWorker {
    /// Runs the queue until told to stop. Waits for a predecessor's end first.
    pub(crate) fn run(self) {
        let mut tally = Tally::new();
        if let Err(BrokenRing) = self.serve(&mut tally) {
            // The driver has to reset the device.
            tally.count(MemCounter::BrokenRings);
            self.interrupts.ask_for_reset();
        }
        tally.flush(&self.counters);
    }

    fn serve(&self, tally: &mut Tally) -> Result<(), BrokenRing> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let Some(queue) = own(&self.queue, &self.stop) else { return Ok(()) };
        let mut ring = Ring::open(self.index, queue, event_idx, &self.memory.memory())?;
        let mut storage = Default::default();
        while !self.stop.load(Ordering::Acquire) {
            let idle = {
                let (memory, region) = (&self.memory.memory(), &self.region);
                let (stop, interrupts) = (&self.stop, &self.interrupts);
                Pass { memory, region, stop, interrupts, storage: &mut storage, tally }.serve(&mut ring)?
            };
            tally.flush(&self.counters);
            if idle {
                self.wait(tally);
            }
        }
        Ok(())
    }

    /// Waits for a doorbell or a stop.
    fn wait(&self, tally: &mut Tally) {
        let kick = borrow(&self.kick);
        // If this fails (a signal, no memory), the queue is checked and the wait is repeated.
        let _ = poll(&mut [PollFd::from_borrowed_fd(kick, PollFlags::IN)], None);
        if self.kick.read().is_ok() {
            tally.count(MemCounter::Kicks);
        }
    }
}
