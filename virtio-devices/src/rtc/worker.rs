//! The worker of the queue of requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::counters::{RtcCounter, RtcCounters, Tally};
use super::requests::{HEAD, LONGEST_REQUEST, answer};
use crate::eventfd::borrow;
use crate::features::has;
use crate::iovecs::{IoVecs, Storage, divide};
use crate::ring::{BrokenRing, Chain, Ring, Used};
use crate::worker::own;
use crate::{Interrupts, Memory, SharedQueue};

/// The most requests that are answered before a stop is looked at.
const BATCH: usize = 16;

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
    /// The counters.
    pub counters: Arc<RtcCounters>,
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
            tally.count(RtcCounter::BrokenRings);
            self.interrupts.ask_for_reset();
        }
        tally.flush(&self.counters);
    }

    fn serve(&self, tally: &mut Tally) -> Result<(), BrokenRing> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let Some(queue) = own(&self.queue, &self.stop) else { return Ok(()) };
        let mut ring = Ring::open(self.index, queue, event_idx, &self.memory.memory())?;
        let mut storage = [Storage::default(), Storage::default()];
        while !self.stop.load(Ordering::Acquire) {
            let may_have_more = self.answer_some(&mut ring, &self.memory.memory(), &mut storage, tally)?;
            tally.flush(&self.counters);
            if !may_have_more {
                self.wait(tally);
            }
        }
        Ok(())
    }

    /// Answers up to [`BATCH`] requests. Returns whether there may be more; if not, a doorbell comes for the next.
    fn answer_some(
        &self,
        ring: &mut Ring<'_>,
        memory: &GuestMemoryMmap,
        storage: &mut [Storage; 2],
        tally: &mut Tally,
    ) -> Result<bool, BrokenRing> {
        ring.suppress_doorbells(memory)?;
        let mut may_have_more = true;
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else {
                may_have_more = ring.expect_doorbell(memory)?;
                break;
            };
            let head = chain.head_index();
            let len = answer_one(memory, chain, storage, tally);
            ring.give_back(memory, &[Used { head, len }])?;
        }
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(RtcCounter::Interrupts);
        }
        Ok(may_have_more)
    }

    /// Waits for a doorbell or a stop.
    fn wait(&self, tally: &mut Tally) {
        let mut fds = [PollFd::from_borrowed_fd(borrow(&self.kick), PollFlags::IN)];
        // If this fails (a signal, no memory), the queue is checked and the wait is repeated.
        let _ = poll(&mut fds, None);
        if self.kick.read().is_ok() {
            tally.count(RtcCounter::Kicks);
        }
    }
}

/// Answers one request, and returns the bytes written.
fn answer_one<'m>(memory: &'m GuestMemoryMmap, chain: Chain<'m>, storage: &mut [Storage; 2], tally: &mut Tally) -> u32 {
    let [readable, writable] = storage;
    let (mut asked, mut reply) = (IoVecs::new(readable), IoVecs::new(writable));
    let room = divide(memory, chain, &mut asked, &mut reply).map_or(0, |()| reply.bytes());
    if room < HEAD {
        tally.count(RtcCounter::BadChains);
        return 0;
    }
    let mut request = [0; LONGEST_REQUEST];
    let len = asked.read_at(0, &mut request);
    let answer = answer(&request[..len], room, now());
    tally.count(answer.counter);
    // At most an answer's length.
    reply.write_at(0, answer.bytes()) as u32
}

/// The host's UTC, in nanoseconds since 1970. A clock before that is at 0.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
