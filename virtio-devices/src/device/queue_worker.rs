//! The worker of all queues of a device, run chain by chain. A [`QueueHandler`] handles the chains.

#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::counters::QueueTally;
use crate::device::worker::{WorkerKind, own, spawn, thread_name};
use crate::os::eventfd::borrow;
use crate::queue::iovecs::Storage;
use crate::queue::ring::{BrokenRing, Chain, Ring, Used};
use crate::transport::features::has;
use crate::{DmaSpace, DmaView, Interrupts, SharedQueue, Start, Worker};

/// Handler of the chains of a device's queues.
pub(crate) trait QueueHandler: Send + 'static {
    /// Counters of the worker.
    type Tally: QueueTally;
    /// The most chains of one queue that are handled before the other queues, and before checking for a stop.
    const BATCH: usize = 16;

    /// Answers a chain.
    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Self::Tally>) -> ChainResult;

    /// Called after each check of the queues, and also after queues were stopped for invalid rings. Returns the time
    /// after which to call it again, if not at a doorbell.
    fn after_look(&mut self, _tally: &mut Self::Tally) -> Option<Duration> {
        None
    }

    /// Waits until `kick` is readable, or for `timeout`. A handler whose chains wait for a source of its own
    /// ([`ChainResult::Waits`]) also returns when that source may be ready. Spurious returns are possible.
    fn wait(&mut self, kick: BorrowedFd<'_>, timeout: Option<Duration>) {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // If this fails (a signal, no memory), the queues are checked and the wait is repeated.
        let _ = poll(&mut [PollFd::from_borrowed_fd(kick, PollFlags::IN)], timeout.as_ref());
    }
}

/// Context in which a chain is handled.
pub(crate) struct ChainContext<'t, 'm, T> {
    /// Index of the queue.
    pub queue: u16,
    /// The guest's memory.
    pub memory: &'m DmaView,
    /// True if the worker should stop.
    pub stop: &'t AtomicBool,
    /// For the segments of a chain, by direction or as needed.
    pub storage: &'t mut [Storage; 2],
    /// The counts.
    pub tally: &'t mut T,
}

/// Result of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChainResult {
    /// The chain is returned to the driver, with this number of bytes written.
    Used(u32),
    /// The chain and all behind it wait, and are retried after this time, or at a doorbell.
    Later(Duration),
    /// The chain and all behind it wait for the handler's own source, and are retried after [`QueueHandler::wait`].
    Waits,
    /// The chain and all behind it are retried after a check of the other queues, without a wait.
    AfterOthers,
    /// The worker must stop: the chain is left for the next worker.
    Stopped,
}

/// Result of a check of a queue, by urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    /// There may be more chains.
    More,
    /// A chain waits for this time, or for a doorbell.
    Later(Duration),
    /// A chain waits for the handler's source.
    Source,
    /// A doorbell will announce the next chain.
    Doorbell,
}

/// Starts the worker of the device `id` for the queues that its driver enabled, if any. It adds its counts to
/// `counters`.
///
/// # Errors
///
/// Fails if the host has no eventfd or thread left.
pub(crate) fn start<A: QueueHandler>(
    answerer: A,
    kind: WorkerKind,
    id: &str,
    start: Start,
    counters: &Arc<<A::Tally as QueueTally>::Counters>,
) -> io::Result<Vec<Worker>> {
    let indices: Vec<_> = start.queues.iter().map(|(index, _)| *index).collect();
    let Some(first) = indices.first() else { return Ok(Vec::new()) };
    let name = thread_name(id, "q", *first);
    let kick = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
    let stop = Arc::new(AtomicBool::new(false));
    let worker = QueueWorker {
        queues: start.queues,
        features: start.features,
        memory: start.memory,
        interrupts: start.interrupts,
        answerer,
        tally: A::Tally::new(),
        counters: Arc::clone(counters),
        kick: Arc::clone(&kick),
        stop: Arc::clone(&stop),
    };
    let thread = spawn(kind, name, move || worker.run())?;
    Ok(vec![Worker::new(indices, kick, stop, thread)])
}

/// The queues, and the worker's resources.
struct QueueWorker<A: QueueHandler> {
    queues: Vec<(u16, SharedQueue)>,
    features: u64,
    memory: DmaSpace,
    interrupts: Arc<Interrupts>,
    answerer: A,
    tally: A::Tally,
    counters: Arc<<A::Tally as QueueTally>::Counters>,
    kick: Arc<EventFd>,
    stop: Arc<AtomicBool>,
}

impl<A: QueueHandler> QueueWorker<A> {
    /// Runs the queues until stopped. First waits for the predecessor's end.
    fn run(mut self) {
        let queues = std::mem::take(&mut self.queues);
        let mut rings: Vec<_> = queues.iter().filter_map(|(index, queue)| self.open(*index, queue)).collect();
        let mut storage = Default::default();
        while !self.stop.load(Ordering::Acquire) {
            let (mut next, mut broken) = (Next::Doorbell, 0);
            rings.retain_mut(|ring| match self.look(ring, &mut storage) {
                Ok(found) => {
                    next = next.min(found);
                    true
                }
                Err(BrokenRing) => {
                    broken += 1;
                    false
                }
            });
            // After the release of the rings: the log names the fault of a ring that no worker runs.
            (0..broken).for_each(|_| self.give_up());
            let timeout = self.answerer.after_look(&mut self.tally);
            self.tally.flush(&self.counters);
            match next {
                Next::More => {}
                Next::Source | Next::Doorbell => self.wait(timeout),
                Next::Later(pause) => self.wait(Some(timeout.map_or(pause, |timeout| timeout.min(pause)))),
            }
        }
        self.tally.flush(&self.counters);
    }

    /// Opens a queue. Counts an invalid ring. `None` also if the worker must stop before the predecessor's end.
    fn open<'q>(&mut self, index: u16, queue: &'q SharedQueue) -> Option<Ring<'q>> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let ring = Ring::open(index, own(queue, &self.stop)?, event_idx, &self.memory.pass());
        ring.inspect_err(|BrokenRing| self.give_up()).ok()
    }

    /// Handles up to [`QueueHandler::BATCH`] chains of a queue.
    fn look(&mut self, ring: &mut Ring<'_>, storage: &mut [Storage; 2]) -> Result<Next, BrokenRing> {
        let memory = &*self.memory.pass();
        ring.suppress_doorbells(memory)?;
        for _ in 0..A::BATCH {
            let Some(chain) = ring.next(memory)? else {
                return Ok(if ring.expect_doorbell(memory)? { Next::More } else { Next::Doorbell });
            };
            let head = chain.head_index();
            let context =
                ChainContext { queue: ring.index(), memory, stop: &self.stop, storage, tally: &mut self.tally };
            match self.answerer.answer(chain, context) {
                ChainResult::Used(len) => ring.give_back(memory, &[Used { head, len }])?,
                ChainResult::Later(pause) => {
                    ring.put_back(1);
                    ring.expect_doorbell(memory)?;
                    return Ok(Next::Later(pause));
                }
                // Further chains of this queue change nothing.
                ChainResult::Waits => {
                    ring.put_back(1);
                    return Ok(Next::Source);
                }
                ChainResult::AfterOthers | ChainResult::Stopped => {
                    ring.put_back(1);
                    return Ok(Next::More);
                }
            }
            // The driver may wait for each.
            if ring.wants_interrupt(memory)? {
                self.interrupts.signal_queue(ring.index());
                self.tally.count_interrupt();
            }
        }
        Ok(Next::More)
    }

    /// Counts an invalid ring, and asks the driver for a reset.
    fn give_up(&mut self) {
        self.tally.count_broken_ring();
        self.interrupts.ask_for_reset();
    }

    /// Waits for a doorbell, a stop, the handler's source, or the timeout.
    fn wait(&mut self, timeout: Option<Duration>) {
        self.answerer.wait(borrow(&self.kick), timeout);
        if self.kick.read().is_ok() {
            self.tally.count_kick();
        }
    }
}
