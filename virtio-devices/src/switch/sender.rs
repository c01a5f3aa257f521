//! A port's transmit queues, from which its worker takes frames.

use std::time::{Duration, Instant};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::account::debt::Debt;
use super::polling::Polling;
use super::report::Report;
use super::tx_batch::{FRAME_COST, Progress, Queue, Sender, TxBatch, TxScratch};
use crate::net::{Counter, Shared, Tally, give_up};
use crate::queue::ring::{BrokenRing, ParkedRing};
use crate::transport::features::has;
use crate::{DmaView, SharedQueue};

/// The part of its time that a port may spend on its receive rings: a quarter.
const SHARE_OF_DEBT: i64 = 4;

/// The queues that a port sends from.
pub(crate) struct PortTx {
    queues: Vec<TxQueue>,
    /// The control queue. `None` without one, and once it was closed or given up.
    pub control: Option<ParkedRing>,
    /// The queue that is next.
    turn: usize,
    /// The bytes that the port may still send in this round; negative if it has sent too many.
    credit: i64,
    /// The schedule of its queues.
    pub polling: Polling,
    pub tally: Tally,
}

struct TxQueue {
    /// `None` once it was closed or given up.
    ring: Option<ParkedRing>,
    /// The work that was done for its first frame.
    progress: Progress,
    /// The interrupt that its driver has not got yet.
    report: Report,
}

impl PortTx {
    /// Queues that have not run yet.
    pub(crate) fn new<'q>(
        transmit: impl Iterator<Item = &'q (u16, SharedQueue)>,
        control: Option<&(u16, SharedQueue)>,
        features: u64,
    ) -> Self {
        let event_idx = has(features, VIRTIO_RING_F_EVENT_IDX);
        let parked = |(index, queue): &(u16, SharedQueue)| ParkedRing::new(*index, queue.clone(), event_idx);
        Self {
            queues: transmit
                .map(|queue| TxQueue {
                    ring: Some(parked(queue)),
                    progress: Progress::default(),
                    report: Report::default(),
                })
                .collect(),
            control: control.map(parked),
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
        self.control.as_ref().is_some_and(|parked| parked.has_available(memory))
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
    ) -> Result<Option<TxBatch<'b, 'm>>, BrokenRing> {
        let Some(TxQueue { ring: Some(parked), progress, report }) = self.queues.get_mut(queue) else {
            return Ok(None);
        };
        let queue = Queue { parked, number: queue, progress, report, credit: &mut self.credit, tally: &mut self.tally };
        TxBatch::new(queue, port, memory, scratch).map(Some)
    }

    /// Gives up a queue whose ring is invalid.
    pub(crate) fn give_up(&mut self, queue: usize, shared: &Shared) {
        if let Some(tx) = self.queues.get_mut(queue) {
            tx.ring = None;
        }
        give_up(&mut self.tally, &shared.interrupts);
    }

    /// The deadline of the next transmit interrupt, if there is one.
    pub(crate) fn report_due(&self) -> Option<Instant> {
        self.queues.iter().filter_map(|queue| queue.report.due()).min()
    }

    /// Sends the transmit interrupts that are due at the time `now`, or all, if the driver still needs them.
    pub(crate) fn report(&mut self, now: Option<Instant>, shared: &Shared, memory: &DmaView) {
        for queue in 0..self.queues.len() {
            let Some(TxQueue { ring: Some(parked), report, .. }) = self.queues.get_mut(queue) else { continue };
            let Some(due) = report.due() else { continue };
            if now.is_some_and(|now| due > now) {
                continue;
            }
            let wanted = parked.ring(memory).and_then(|mut ring| {
                let wanted = report.take(&mut ring, memory);
                parked.park(ring);
                wanted
            });
            match wanted {
                Ok(true) => {
                    shared.interrupts.signal_queue(parked.index());
                    self.tally.count(Counter::Interrupts);
                }
                Ok(false) => {}
                Err(BrokenRing) => self.give_up(queue, shared),
            }
        }
    }

    /// Closes all queues: no thread touches them afterwards. Sends pending transmit interrupts now.
    pub(crate) fn close(&mut self, shared: &Shared) {
        self.report(None, shared, &shared.memory.pass());
        self.queues.clear();
        self.control = None;
        self.tally.flush(&shared.counters);
    }
}
