//! The worker of a queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{BlockCounter, BlockCounters, Tally};
use super::engine::Engine;
use super::image::Image;
use super::latency::BlockLatencies;
use super::requests::{Disk, Next, Requests, Room};
use crate::device::failures::Failures;
use crate::device::rate_limiter::RateLimitGroup;
use crate::device::worker::own;
use crate::os::eventfd::borrow;
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{DmaSpace, Interrupts, SharedQueue};

/// The most requests of a queue that are in flight at a time.
pub(crate) const MAX_DEPTH: u16 = 128;
/// Delay before resubmitting calls for which the kernel had no memory.
const PAUSE: Duration = Duration::from_millis(10);

/// State that the workers of a start share.
pub(crate) struct Shared {
    /// The image.
    pub image: Arc<Image>,
    /// Serial number, as the driver reads it.
    pub serial: [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// True if a write completes only once it is on the medium.
    pub stable: Arc<AtomicBool>,
    /// The guest's memory.
    pub memory: DmaSpace,
    /// The negotiated features.
    pub features: u64,
    /// The counters.
    pub counters: Arc<BlockCounters>,
    /// Interrupts of the device.
    pub interrupts: Arc<Interrupts>,
    /// Latencies of requests.
    pub latencies: Arc<BlockLatencies>,
    /// Failures of the host.
    pub failures: Arc<Failures>,
    /// Rate limits of all queues together.
    pub limiter: Option<RateLimitGroup>,
    /// True once all workers have been spawned. Locked until then, so that no worker starts before.
    pub complete: Mutex<bool>,
}

/// A queue, and the events that wake and stop its worker.
pub(crate) struct QueueWorker {
    /// The queue's index.
    pub index: u16,
    /// The queue.
    pub queue: SharedQueue,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops the worker.
    pub stop: Arc<AtomicBool>,
}

impl QueueWorker {
    /// Runs the queue until stopped. First waits for the other workers and for the predecessor's end; at the end,
    /// completes the requests in flight.
    pub(crate) fn run(self, engine: Engine, shared: &Shared) {
        if !*shared.complete.lock() {
            return;
        }
        let mut tally = Tally::new();
        if let Err(BrokenRing) = self.serve(engine, shared, &mut tally) {
            // The driver must reset the device.
            tally.count(BlockCounter::BrokenRings);
            shared.interrupts.ask_for_reset();
        }
        tally.flush(&shared.counters);
    }

    fn serve(&self, engine: Engine, shared: &Shared, tally: &mut Tally) -> Result<(), BrokenRing> {
        let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
        let Some(queue) = own(&self.queue, &self.stop) else { return Ok(()) };
        let mut ring = Ring::open(self.index, queue, event_idx, &shared.memory.pass())?;
        let depth = ring.size().clamp(1, MAX_DEPTH);
        // Dropped before the queue is released to a successor, after its calls have ended.
        let mut engine = engine;
        let mut room: Vec<_> = (0..depth).map(|_| Room::default()).collect();
        // Reopened for each map of guest memory: a request ends in the map in which it began. Behind an IOMMU it is
        // reopened in each turn, because no pass may last while this waits, and requests in flight belong to their
        // pass.
        let lasts = !shared.memory.has_iommu();
        while !self.stop.load(Ordering::Acquire) {
            let memory = shared.memory.pass();
            let disk = Disk {
                image: &shared.image,
                serial: &shared.serial,
                stable: &shared.stable,
                counters: &shared.counters,
                interrupts: &shared.interrupts,
                latencies: &shared.latencies,
                failures: &shared.failures,
                limiter: shared.limiter.as_ref(),
                stop: &self.stop,
            };
            let mut requests = Requests::new(disk, &mut engine, &memory, &mut room);
            if !lasts {
                let next = requests.turn(&mut ring, tally)?;
                let is_idle = requests.is_idle();
                requests.finish(&mut ring, tally)?;
                tally.flush(&shared.counters);
                drop(memory);
                match next {
                    // The requests in flight may have used all entries.
                    Next::Wait if is_idle => self.wait(&mut engine, None, (shared, tally)),
                    Next::More | Next::Wait => {}
                    Next::Limited(wait) => self.wait(&mut engine, Some(wait), (shared, tally)),
                }
                continue;
            }
            while !self.stop.load(Ordering::Acquire) && requests.is_in(&shared.memory.pass()) {
                let next = requests.turn(&mut ring, tally)?;
                tally.flush(&shared.counters);
                match next {
                    Next::More => {}
                    Next::Wait => self.wait(requests.engine(), None, (shared, tally)),
                    Next::Limited(wait) => self.wait(requests.engine(), Some(wait), (shared, tally)),
                }
            }
            requests.finish(&mut ring, tally)?;
        }
        Ok(())
    }

    /// Waits for a doorbell, a stop or a completion, at most for `limit`.
    fn wait(&self, engine: &mut Engine, limit: Option<Duration>, (shared, tally): (&Shared, &mut Tally)) {
        shared.failures.settle();
        let pause = engine.has_backlog().then_some(PAUSE);
        let timeout = [pause, limit, shared.failures.settles_in()].into_iter().flatten().min();
        // A time that is too long for the kernel counts as infinite.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let kick = borrow(&self.kick);
        let watched = [Some(kick), engine.completions()].into_iter().flatten();
        let mut fds: Vec<_> = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // If this fails (a signal, no memory), the queue is checked and the wait is repeated.
        let _ = poll(&mut fds, timeout.as_ref());
        if fds.first().is_some_and(|kick| !kick.revents().is_empty()) && self.kick.read().is_ok() {
            tally.count(BlockCounter::Kicks);
        }
    }
}
