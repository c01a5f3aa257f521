//! The worker of the queue, which waits for the medium.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::counters::{PmemCounter, PmemCounters, Tally};
use crate::eventfd::borrow;
use crate::features::has;
use crate::iovecs::{IoVecs, Storage, divide};
use crate::ring::{BrokenRing, Chain, Ring, Used};
use crate::worker::own;
use crate::{Interrupts, Memory, SharedQueue};

/// The type of a flush, `VIRTIO_PMEM_REQ_TYPE_FLUSH`.
const FLUSH: u32 = 0;
/// `VIRTIO_PMEM_RESP_TYPE_OK`.
const OK: u32 = 0;
/// `VIRTIO_PMEM_RESP_TYPE_EIO`.
const EIO: u32 = 1;
/// The length of an answer, in bytes.
const ANSWER: usize = 4;

/// The queue and what its worker works with.
pub(super) struct QueueWorker {
    /// The queue's index.
    pub index: u16,
    /// The queue.
    pub queue: SharedQueue,
    /// The negotiated features.
    pub features: u64,
    /// The guest's memory.
    pub memory: Memory,
    /// Where the driver is interrupted.
    pub interrupts: Arc<Interrupts>,
    /// What a flush writes to the medium, if anything.
    pub file: Option<Arc<OwnedFd>>,
    /// The counters.
    pub counters: Arc<PmemCounters>,
    /// Wakes it.
    pub kick: Arc<EventFd>,
    /// Stops it.
    pub stop: Arc<AtomicBool>,
}

impl QueueWorker {
    /// Runs the queue until told to stop. Waits for a predecessor's end first.
    pub(super) fn run(self) {
        let mut tally = Tally::new();
        if let Err(BrokenRing) = self.serve(&mut tally) {
            // The driver has to reset the device.
            tally.count(PmemCounter::BrokenRings);
            self.interrupts.ask_for_reset();
        }
        tally.flush(&self.counters);
    }

    fn serve(&self, tally: &mut Tally) -> Result<(), BrokenRing> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let Some(queue) = own(&self.queue, &self.stop) else { return Ok(()) };
        let mut ring = Ring::open(self.index, queue, event_idx, &self.memory.memory())?;
        let mut storage = <[Storage; 2]>::default();
        while !self.stop.load(Ordering::Acquire) {
            let is_idle = self.serve_one(&mut ring, &self.memory.memory(), &mut storage, tally)?;
            tally.flush(&self.counters);
            if is_idle {
                self.wait(tally);
            }
        }
        Ok(())
    }

    /// Serves a request, if there is one. Returns whether a doorbell has to be waited for. A flush takes as long as the
    /// medium does, so a stop is looked at after each.
    fn serve_one(
        &self,
        ring: &mut Ring<'_>,
        memory: &GuestMemoryMmap,
        storage: &mut [Storage; 2],
        tally: &mut Tally,
    ) -> Result<bool, BrokenRing> {
        ring.suppress_doorbells(memory)?;
        let Some(chain) = ring.next(memory)? else { return Ok(!ring.expect_doorbell(memory)?) };
        let head = chain.head_index();
        let len = self.answer(memory, chain, storage, tally);
        ring.give_back(memory, &[Used { head, len }])?;
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(PmemCounter::Interrupts);
        }
        Ok(false)
    }

    /// Does what a request asks for and answers it (`virtio 1.4 §5.19.6`). Returns how many bytes were written.
    fn answer(
        &self,
        memory: &GuestMemoryMmap,
        chain: Chain<'_>,
        [readable, writable]: &mut [Storage; 2],
        tally: &mut Tally,
    ) -> u32 {
        let (mut readable, mut writable) = (IoVecs::new(readable), IoVecs::new(writable));
        let divided = divide(memory, chain, &mut readable, &mut writable);
        let mut request = [0; 4];
        if divided.is_err() || !readable.take_front(&mut request) || writable.bytes() < ANSWER {
            tally.count(PmemCounter::BadChains);
            return 0;
        }
        let answer = match u32::from_le_bytes(request) {
            FLUSH if self.flush() => {
                tally.count(PmemCounter::Flushes);
                OK
            }
            FLUSH => {
                tally.count(PmemCounter::BackendErrors);
                EIO
            }
            _ => {
                tally.count(PmemCounter::BadRequests);
                EIO
            }
        };
        // At most the answer's length.
        writable.write_at(0, &answer.to_le_bytes()) as u32
    }

    /// Has everything that the guest wrote on the medium. Returns whether it is.
    fn flush(&self) -> bool {
        self.file.as_ref().is_none_or(|file| rustix::fs::fsync(file).is_ok())
    }

    /// Waits for a doorbell or a stop.
    fn wait(&self, tally: &mut Tally) {
        let kick = borrow(&self.kick);
        // If this fails (a signal, no memory), the queue is checked and the wait is repeated.
        let _ = poll(&mut [PollFd::from_borrowed_fd(kick, PollFlags::IN)], None);
        if self.kick.read().is_ok() {
            tally.count(PmemCounter::Kicks);
        }
    }
}
