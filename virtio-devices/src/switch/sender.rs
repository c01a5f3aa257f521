//! A port's transmit queues, from which its worker takes frames.

use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::account::debt::Debt;
use super::polling::Polling;
use super::port_nic::PortNic;
use super::rings::x550::{Whole, X550Send, X550Tx};
use super::rings::{Ended, SendRing, SendScratch, VirtqueueSend, VirtqueueTx};
use super::source::End;
use super::tx_batch::{FRAME_COST, Progress, Queue, Sender, TxBatch};
use crate::frames::net_protocol::header;
use crate::net::{Counter, Shared, Tally};
use crate::queue::ring::{BrokenRing, ParkedRing};
use crate::transport::features::has;
use crate::{DmaView, SharedQueue};

/// The part of its time that a port may spend on its receive rings: a quarter.
const SHARE_OF_DEBT: i64 = 4;

/// The queues that a port sends from.
pub(crate) struct PortTx {
    queues: Vec<TxQueue>,
    /// The control queue. `None` without one, and once it was closed or given up.
    pub control: Option<ControlQueue>,
    /// The queue that is next.
    turn: usize,
    /// The bytes that the port may still send in this round; negative if it has sent too many.
    credit: i64,
    /// The schedule of its queues.
    pub polling: Polling,
    pub tally: Tally,
}

/// The control queue of a virtio port.
pub(crate) struct ControlQueue {
    /// The queue.
    pub ring: ParkedRing,
    /// The parameters of its driver's start.
    pub shared: Arc<Shared>,
}

/// The ring of a transmit queue.
pub(crate) enum SendQueue {
    /// A virtqueue.
    Virtqueue(VirtqueueSend),
    /// A ring of an X550.
    X550(X550Send),
}

/// A batch from a transmit queue of either kind.
pub(crate) enum Started<'b, 'm> {
    /// From a virtqueue.
    Virtqueue(TxBatch<'b, VirtqueueTx<'b, 'm>>),
    /// From a ring of an X550.
    X550(TxBatch<'b, X550Tx<'b, 'm>>),
}

/// A worker's scratch memory for taking frames, from one port after the other.
#[derive(Default)]
pub(crate) struct TxScratch {
    virtqueue: SendScratch,
    /// The frame that was taken from a ring of an X550.
    whole: Whole,
}

struct TxQueue {
    /// `None` once it was closed or given up.
    ring: Option<SendQueue>,
    /// The work that was done for its first frame.
    progress: Progress,
}

impl ControlQueue {
    /// The control queue of a driver's start.
    pub(crate) fn new((index, queue): &(u16, SharedQueue), shared: &Arc<Shared>) -> Self {
        let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
        Self { ring: ParkedRing::new(*index, queue.clone(), event_idx), shared: Arc::clone(shared) }
    }
}

impl PortTx {
    /// Queues that have not run yet.
    pub(crate) fn new(rings: impl Iterator<Item = SendQueue>, control: Option<ControlQueue>) -> Self {
        Self {
            queues: rings.map(|ring| TxQueue { ring: Some(ring), progress: Progress::default() }).collect(),
            control,
            turn: 0,
            credit: 0,
            polling: Polling::new(),
            tally: Tally::new(),
        }
    }

    /// The number of transmit queues.
    pub(crate) fn len(&self) -> usize {
        self.queues.len()
    }

    /// The next queue in turn.
    pub(crate) fn next_queue(&mut self) -> usize {
        let turn = self.turn;
        self.turn = (turn + 1) % self.queues.len().max(1);
        turn
    }

    /// Makes `queue` the next in turn again.
    pub(crate) fn repeat(&mut self, queue: usize) {
        self.turn = queue;
    }

    /// Starts a further round: the port may send this many bytes more. Unused credit expires, or the port could later
    /// delay others.
    pub(crate) fn grant(&mut self, bytes: i64) {
        self.credit = self.credit.min(0) + bytes;
    }

    /// Pays off the port's debt, with a share of the credit of a round.
    pub(crate) fn pay(&mut self, debt: &Debt, granted: i64) {
        let most = usize::try_from(granted / SHARE_OF_DEBT).unwrap_or(0);
        self.credit = self.credit.saturating_sub(i64::try_from(debt.pay(most)).unwrap_or(i64::MAX));
    }

    /// Charges work on its frames besides copying them, in frames.
    pub(crate) fn charge_frames(&mut self, frames: usize) {
        self.credit = self.credit.saturating_sub(i64::try_from(frames * FRAME_COST).unwrap_or(i64::MAX));
    }

    /// Charges time spent on commands, which other ports could have used.
    pub(crate) fn charge_time(&mut self, time: Duration) {
        // A nanosecond is about as long as the copy of a byte that is in no cache.
        self.credit = self.credit.saturating_sub(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX));
    }

    /// True if the driver may have made a command available that was not taken: always so until the queue was first
    /// run.
    pub(crate) fn has_command(&self, memory: &DmaView) -> bool {
        self.control.as_ref().is_some_and(|control| control.ring.has_available(memory))
    }

    /// True if the port may send more in this round.
    pub(crate) fn has_credit(&self) -> bool {
        self.credit > 0
    }

    /// Takes a batch of frames from a queue, until the returned batch is [finished](TxBatch::finish). `None` if it is
    /// closed.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid: the caller [gives it up](Self::give_up).
    pub(crate) fn start<'b, 'm>(
        &'b mut self,
        queue: usize,
        port: Sender<'b>,
        memory: &'m DmaView,
        scratch: &'b mut TxScratch,
    ) -> Result<Option<Started<'b, 'm>>, BrokenRing> {
        let Some(TxQueue { ring: Some(ring), progress }) = self.queues.get_mut(queue) else { return Ok(None) };
        let queue = Queue { number: queue, progress, credit: &mut self.credit, tally: &mut self.tally };
        let TxScratch { virtqueue, whole } = scratch;
        match ring {
            SendQueue::Virtqueue(ring) => {
                let ring = ring.batch(memory, virtqueue)?;
                Ok(Some(Started::Virtqueue(TxBatch::new(ring, queue, port))))
            }
            SendQueue::X550(ring) => {
                let Some(ring) = ring.batch(memory, whole) else { return Ok(None) };
                Ok(Some(Started::X550(TxBatch::new(ring, queue, port))))
            }
        }
    }

    /// Gives up a queue whose ring is invalid.
    pub(crate) fn give_up(&mut self, queue: usize) {
        self.tally.count(Counter::BrokenRings);
        let ring = self.queues.get_mut(queue).and_then(|queue| queue.ring.take());
        if let Some(SendQueue::Virtqueue(ring)) = ring {
            ring.ask_for_reset();
        }
    }

    /// The deadline of the next transmit interrupt, if there is one.
    pub(crate) fn report_due(&self) -> Option<Instant> {
        let due = |queue: &TxQueue| match &queue.ring {
            Some(SendQueue::Virtqueue(ring)) => ring.report_due(),
            Some(SendQueue::X550(_)) | None => None,
        };
        self.queues.iter().filter_map(due).min()
    }

    /// Sends the transmit interrupts that are due at the time `now`, or all, if the driver still needs them.
    pub(crate) fn report(&mut self, now: Option<Instant>, memory: &DmaView) {
        for queue in 0..self.queues.len() {
            let Some(TxQueue { ring: Some(SendQueue::Virtqueue(ring)), .. }) = self.queues.get_mut(queue) else {
                continue;
            };
            let Some(due) = ring.report_due() else { continue };
            if now.is_some_and(|now| due > now) {
                continue;
            }
            match ring.report(memory) {
                Ok(true) => self.tally.count(Counter::Interrupts),
                Ok(false) => {}
                Err(BrokenRing) => self.give_up(queue),
            }
        }
    }

    /// Ends a frame that only some of its receivers have got, as a stop in the middle does: they would get it once more
    /// if the queue ran again.
    fn end_flood(&mut self, queue: usize, nic: &PortNic, memory: &DmaView) -> Result<(), BrokenRing> {
        let Some(TxQueue { ring: Some(ring), progress }) = self.queues.get_mut(queue) else { return Ok(()) };
        if !progress.has_begun() {
            return Ok(());
        }
        progress.reset();
        let TxScratch { mut virtqueue, mut whole } = TxScratch::default();
        match ring {
            SendQueue::Virtqueue(ring) => end_first(ring.batch(memory, &mut virtqueue)?, nic, &mut self.tally),
            SendQueue::X550(ring) => match ring.batch(memory, &mut whole) {
                Some(ring) => end_first(ring, nic, &mut self.tally),
                None => Ok(()),
            },
        }
    }

    /// Closes all queues: no thread touches them afterwards. Sends pending transmit interrupts now.
    pub(crate) fn close(&mut self, nic: &PortNic) {
        let memory = nic.memory.pass();
        for queue in 0..self.queues.len() {
            if self.end_flood(queue, nic, &memory).is_err() {
                self.give_up(queue);
            }
        }
        self.report(None, &memory);
        self.queues.clear();
        self.control = None;
        self.tally.flush(&nic.counters);
    }
}

/// Returns the first frame of a ring as one that was sent.
fn end_first<R: SendRing>(mut ring: R, nic: &PortNic, tally: &mut Tally) -> Result<(), BrokenRing> {
    let taken = ring.take();
    let bytes = taken.as_ref().ok().and_then(Option::as_ref).map_or(0, |taken| taken.len);
    match taken.as_ref().ok().and_then(Option::as_ref).map(|taken| &taken.packet) {
        Some(Ok(packet)) => {
            ring.complete(None);
            nic.policy.load().transmit.take(bytes, header::packets(&packet.header, bytes));
            tally.count(Counter::TxFrames);
            tally.add(Counter::TxBytes, bytes as u64);
        }
        // The guest has rewritten it.
        Some(Err(reason)) => {
            ring.complete(Some(*reason));
            tally.count(*reason);
        }
        None => {}
    }
    let ended = taken.map(|_| Ended { end: End::Stopped, gathers: false, bytes });
    ring.finish(ended, tally).map(drop)
}
