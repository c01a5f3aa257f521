//! The worker of the queue, which also keeps the clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes, GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::clock::{Clock, Expiry, Times};
use super::counters::{Tally, WatchdogCounter, WatchdogCounters};
use crate::eventfd::borrow;
use crate::features::has;
use crate::ring::{BrokenRing, Chain, Ring, Used};
use crate::worker::own;
use crate::{Interrupts, Memory, SharedQueue};

/// The most buffers that are answered before a stop is looked at.
const BATCH: usize = 16;
/// The byte that a ping is answered with.
const ANSWER: u8 = 1;

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
    /// The times of the clock.
    pub times: Times,
    /// Called when the pings have ended.
    pub expiry: Arc<Expiry>,
    /// Whether the clock runs, now and for a successor.
    pub runs: Arc<AtomicBool>,
    /// The counters.
    pub counters: Arc<WatchdogCounters>,
    /// Wakes it.
    pub kick: Arc<EventFd>,
    /// Stops it.
    pub stop: Arc<AtomicBool>,
}

/// What a look at the queue found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// There was a ping.
    ping: bool,
    /// There may be more buffers.
    more: bool,
}

impl QueueWorker {
    /// Runs the queue until told to stop. Waits for a predecessor's end first.
    pub(super) fn run(self) {
        let mut tally = Tally::new();
        let Some(queue) = own(&self.queue, &self.stop) else { return };
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let mut ring = Ring::open(self.index, queue, event_idx, &self.memory.memory()).ok();
        if ring.is_none() {
            self.give_up(&mut tally);
        }
        let mut clock = self.runs.load(Ordering::Acquire).then(|| Clock::start(self.times, Instant::now()));
        while !self.stop.load(Ordering::Acquire) {
            let mut found = Found { ping: false, more: false };
            if let Some(usable) = &mut ring {
                match self.answer(usable, &self.memory.memory(), &mut tally) {
                    Ok(answered) => found = answered,
                    // The clock goes on: a guest that breaks its ring is one to reset.
                    Err(BrokenRing) => {
                        self.give_up(&mut tally);
                        ring = None;
                    }
                }
            }
            self.keep_time(&mut clock, found.ping, &mut tally);
            tally.flush(&self.counters);
            if !found.more {
                self.wait(clock.map(|clock| clock.until_look(Instant::now())), &mut tally);
            }
        }
        tally.flush(&self.counters);
    }

    /// Notes a ping, and looks whether the pings have ended.
    fn keep_time(&self, clock: &mut Option<Clock>, ping: bool, tally: &mut Tally) {
        let now = Instant::now();
        match clock {
            Some(running) if ping => running.ping(now),
            None if ping => {
                *clock = Some(Clock::start(self.times, now));
                self.runs.store(true, Ordering::Release);
            }
            _ => {}
        }
        if clock.as_mut().is_some_and(|running| running.look(now)) {
            *clock = None;
            self.runs.store(false, Ordering::Release);
            tally.count(WatchdogCounter::Expiries);
            (self.expiry)();
        }
    }

    /// Answers up to [`BATCH`] buffers.
    fn answer(&self, ring: &mut Ring<'_>, memory: &GuestMemoryMmap, tally: &mut Tally) -> Result<Found, BrokenRing> {
        ring.suppress_doorbells(memory)?;
        let mut found = Found { ping: false, more: true };
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else {
                found.more = ring.expect_doorbell(memory)?;
                break;
            };
            let head = chain.head_index();
            let is_ping = write_answer(memory, chain);
            found.ping |= is_ping;
            tally.count(if is_ping { WatchdogCounter::Pings } else { WatchdogCounter::BadChains });
            ring.give_back(memory, &[Used { head, len: is_ping.into() }])?;
        }
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(WatchdogCounter::Interrupts);
        }
        Ok(found)
    }

    /// The driver has to reset the device.
    fn give_up(&self, tally: &mut Tally) {
        tally.count(WatchdogCounter::BrokenRings);
        self.interrupts.ask_for_reset();
    }

    /// Waits for a doorbell or a stop, or for so long.
    fn wait(&self, timeout: Option<Duration>, tally: &mut Tally) {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let kick = borrow(&self.kick);
        // If this fails (a signal, no memory), the queue is checked and the wait is repeated.
        let _ = poll(&mut [PollFd::from_borrowed_fd(kick, PollFlags::IN)], timeout.as_ref());
        if self.kick.read().is_ok() {
            tally.count(WatchdogCounter::Kicks);
        }
    }
}

/// Answers a ping: writes to the first byte of its buffer. Returns whether the buffer is one that can be written to.
fn write_answer(memory: &GuestMemoryMmap, mut chain: Chain<'_>) -> bool {
    let first = chain.next().filter(|first| first.is_write_only() && first.len() > 0);
    first.is_some_and(|first| memory.write_obj(ANSWER, first.addr()).is_ok())
}
