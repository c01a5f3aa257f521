//! The worker of the queue.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap, Permissions};
use vmm_sys_util::eventfd::EventFd;

use super::counters::{RngCounter, RngCounters, Tally};
use crate::eventfd::borrow;
use crate::features::has;
use crate::iovecs::{IoVecs, Storage};
use crate::ring::{BrokenRing, Ring, Used};
use crate::worker::own;
use crate::{Interrupts, Memory, SharedQueue};

/// The most bytes that one buffer gets, so that none takes long. A driver takes what it gets (`virtio 1.4 §5.4.6.1`).
const MAX_READ: usize = 64 << 10;
/// The most buffers that are filled before a stop is looked at.
const BATCH: usize = 16;
/// How long to wait for a source that has nothing at the moment: not every one can be waited for.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// How long to wait after the source failed. It may keep failing, and the driver, whose buffer waits, need not ring
/// again.
const RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

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
    /// Where the driver is interrupted.
    pub interrupts: Arc<Interrupts>,
    /// Where the bytes come from.
    pub source: Arc<Mutex<OwnedFd>>,
    /// The counters.
    pub counters: Arc<RngCounters>,
    /// Wakes it.
    pub kick: Arc<EventFd>,
    /// Stops it.
    pub stop: Arc<AtomicBool>,
}

/// What the queue waits for.
pub(crate) enum Next {
    /// Nothing: there may be more buffers.
    More,
    /// A doorbell.
    Doorbell,
    /// The source, for so long, or a doorbell.
    Source(Timespec),
}

impl QueueWorker {
    /// Runs the queue until told to stop. Waits for a predecessor's end first.
    pub(crate) fn run(self) {
        let mut tally = Tally::new();
        if let Err(BrokenRing) = self.serve(&mut tally) {
            // The driver has to reset the device.
            tally.count(RngCounter::BrokenRings);
            self.interrupts.ask_for_reset();
        }
        tally.flush(&self.counters);
    }

    fn serve(&self, tally: &mut Tally) -> Result<(), BrokenRing> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let Some(queue) = own(&self.queue, &self.stop) else { return Ok(()) };
        let mut ring = Ring::open(self.index, queue, event_idx, &self.memory.memory())?;
        let mut storage = Storage::default();
        while !self.stop.load(Ordering::Acquire) {
            let next = self.fill(&mut ring, &self.memory.memory(), &mut storage, tally)?;
            tally.flush(&self.counters);
            match next {
                Next::More => {}
                Next::Doorbell => self.wait(None, tally),
                Next::Source(pause) => self.wait(Some(pause), tally),
            }
        }
        Ok(())
    }

    /// Fills up to [`BATCH`] buffers.
    pub(crate) fn fill(
        &self,
        ring: &mut Ring<'_>,
        memory: &GuestMemoryMmap,
        storage: &mut Storage,
        tally: &mut Tally,
    ) -> Result<Next, BrokenRing> {
        ring.suppress_doorbells(memory)?;
        let source = self.source.lock();
        let mut next = Next::More;
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else {
                next = if ring.expect_doorbell(memory)? { Next::More } else { Next::Doorbell };
                break;
            };
            let head = chain.head_index();
            let mut iovecs = IoVecs::new(storage);
            let extent = iovecs.append(memory, chain, Permissions::Write);
            if !extent.is_ok_and(|extent| extent.bytes > 0) {
                tally.count(RngCounter::BadChains);
                ring.give_back(memory, &[Used { head, len: 0 }])?;
                continue;
            }
            iovecs.truncate(MAX_READ);
            match iovecs.receive(source.as_fd(), &mut []) {
                Ok(len @ 1..) => {
                    tally.count(RngCounter::Requests);
                    tally.add(RngCounter::Bytes, len as u64);
                    // At most MAX_READ.
                    ring.give_back(memory, &[Used { head, len: len as u32 }])?;
                }
                result => {
                    // A buffer is never given back empty (`virtio 1.4 §5.4.6.2`): it waits.
                    ring.put_back(1);
                    let waits =
                        result.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)));
                    tally.add(RngCounter::BackendErrors, (!waits).into());
                    ring.expect_doorbell(memory)?;
                    next = Next::Source(if waits { PAUSE } else { RETRY });
                    break;
                }
            }
        }
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(RngCounter::Interrupts);
        }
        Ok(next)
    }

    /// Waits for a doorbell or a stop.
    fn wait(&self, timeout: Option<Timespec>, tally: &mut Tally) {
        let kick = borrow(&self.kick);
        let mut fds = [PollFd::from_borrowed_fd(kick, PollFlags::IN)];
        // If this fails (a signal, no memory), the queue is checked and the wait is repeated.
        let _ = poll(&mut fds, timeout.as_ref());
        if self.kick.read().is_ok() {
            tally.count(RngCounter::Kicks);
        }
    }
}
