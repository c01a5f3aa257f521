//! The driver's pings, which keep the clock from expiring.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::clock::{Clock, Expiry, Times};
use super::counters::{Tally, WatchdogCounter};
use crate::DmaView;
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::queue::ring::Chain;

/// The byte that the device writes for a ping.
const ANSWER: u8 = 1;

/// Handles pings, and runs the clock.
pub(super) struct Pings {
    times: Times,
    expiry: Arc<Expiry>,
    /// True while the clock runs, in this worker and its successors.
    runs: Arc<AtomicBool>,
    /// The clock, if it runs and the worker has begun.
    clock: Option<Clock>,
    /// True if there was a ping since the last check.
    pinged: bool,
    begun: bool,
}

impl Pings {
    /// Creates a clock with these times, which runs if `runs` is set. It calls `expiry` when the pings have ended.
    pub(super) fn new(times: Times, expiry: Arc<Expiry>, runs: Arc<AtomicBool>) -> Self {
        Self { times, expiry, runs, clock: None, pinged: false, begun: false }
    }
}

impl QueueHandler for Pings {
    type Tally = Tally;

    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let is_ping = write_answer(context.memory, chain);
        self.pinged |= is_ping;
        context.tally.count(if is_ping { WatchdogCounter::Pings } else { WatchdogCounter::BadChains });
        ChainResult::Used(is_ping.into())
    }

    /// Checks if the pings have ended. The clock runs on without a valid ring: a guest that breaks its ring should be
    /// reset.
    fn after_look(&mut self, tally: &mut Tally) -> Option<Duration> {
        let now = Instant::now();
        if !std::mem::replace(&mut self.begun, true) && self.runs.load(Ordering::Acquire) {
            self.clock = Some(Clock::start(self.times, now));
        }
        if std::mem::take(&mut self.pinged) {
            match &mut self.clock {
                Some(running) => running.ping(now),
                None => {
                    self.clock = Some(Clock::start(self.times, now));
                    self.runs.store(true, Ordering::Release);
                }
            }
        }
        if self.clock.as_mut().is_some_and(|running| running.look(now)) {
            self.clock = None;
            self.runs.store(false, Ordering::Release);
            tally.count(WatchdogCounter::Expiries);
            (self.expiry)();
        }
        self.clock.map(|clock| clock.until_look(Instant::now()))
    }
}

/// Writes the reply to the first byte of a ping's buffer. Returns false if the buffer is not writable.
fn write_answer(memory: &DmaView, mut chain: Chain<'_>) -> bool {
    let first = chain.next().filter(|first| first.is_write_only() && first.len() > 0);
    first.is_some_and(|first| memory.write_obj(ANSWER, GuestAddress(first.address())).is_ok())
}
