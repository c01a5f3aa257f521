//! A port's receive queue, which senders fill. Each locks it for a run of frames, and leaves when it is stopped.

use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::rx_run::{Queue, Receiver, RxRun, RxScratch, Supply};
use crate::net::{Counter, Shared, Tally, give_up};
use crate::queue::ring::{BrokenRing, ParkedRing};
use crate::transport::features::has;
use crate::{DmaView, SharedQueue};

/// A receive queue of a port.
pub(crate) struct PortRx {
    /// `None` once it was closed or given up.
    ring: Option<ParkedRing>,
    mergeable: bool,
    /// The state of the driver's supply of buffers.
    supply: Supply,
    /// A sender will decide at the end of its batch if the driver needs an interrupt.
    touched: bool,
    tally: Tally,
}

impl PortRx {
    /// A queue that has received no frame yet.
    pub(crate) fn new(queue: Option<&(u16, SharedQueue)>, features: u64) -> Self {
        let event_idx = has(features, VIRTIO_RING_F_EVENT_IDX);
        Self {
            ring: queue.map(|(index, queue)| ParkedRing::new(*index, queue.clone(), event_idx)),
            mergeable: has(features, VIRTIO_NET_F_MRG_RXBUF),
            supply: Supply::default(),
            touched: false,
            tally: Tally::new(),
        }
    }

    /// Records that the caller will return to the queue. Returns true if no other sender has done so before.
    pub(crate) fn touch(&mut self) -> bool {
        !std::mem::replace(&mut self.touched, true)
    }

    /// Puts frames into the queue, until the returned run is [finished](RxRun::finish). `None` if the queue is closed.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid: the caller [gives it up](Self::give_up).
    pub(crate) fn start<'r, 'm>(
        &'r mut self,
        port: Receiver<'r>,
        memory: &'m DmaView,
        scratch: &'r mut RxScratch,
    ) -> Result<Option<RxRun<'r, 'm>>, BrokenRing> {
        let Self { ring, mergeable, supply, tally, touched: _ } = self;
        let Some(parked) = ring.as_ref().filter(|_| !port.is_stopped()) else { return Ok(None) };
        let queue = Queue { parked, mergeable: *mergeable, supply, tally };
        RxRun::new(queue, port, memory, scratch).map(Some)
    }

    /// Ends a batch: interrupts the driver if it needs that, and publishes the counts.
    pub(crate) fn signal(&mut self, shared: &Shared, memory: &DmaView) {
        self.touched = false;
        let wanted = self.ring.as_ref().map(|parked| {
            let mut ring = parked.ring(memory)?;
            let wanted = ring.wants_interrupt(memory)?;
            parked.park(ring);
            Ok((parked.index(), wanted))
        });
        match wanted {
            Some(Ok((index, true))) => {
                shared.interrupts.signal_queue(index);
                self.tally.count(Counter::Interrupts);
            }
            Some(Err(BrokenRing)) => self.give_up(shared),
            Some(Ok(_)) | None => {}
        }
        self.tally.flush(&shared.counters);
    }

    /// True if the driver has provided buffers.
    pub(crate) fn has_buffers(&self, memory: &DmaView) -> bool {
        self.ring.as_ref().is_none_or(|parked| parked.has_available(memory))
    }

    /// Closes the queue: no thread writes to it afterwards.
    pub(crate) fn close(&mut self, shared: &Shared) {
        self.ring = None;
        self.tally.flush(&shared.counters);
    }

    /// Gives up the queue, whose ring is invalid.
    pub(crate) fn give_up(&mut self, shared: &Shared) {
        if self.ring.take().is_some() {
            give_up(&mut self.tally, &shared.interrupts);
        }
    }
}
