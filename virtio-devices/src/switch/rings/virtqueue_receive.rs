//! A virtqueue that receives frames, between runs.

use std::sync::Arc;

use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::virtqueue_room::{VirtqueueRoom, VirtqueueScratch};
use crate::net::Shared;
use crate::queue::ring::{BrokenRing, ParkedRing};
use crate::transport::features::has;
use crate::{DmaView, Interrupts, SharedQueue};

/// A receive virtqueue.
pub(crate) struct VirtqueueReceive {
    ring: ParkedRing,
    mergeable: bool,
    interrupts: Arc<Interrupts>,
}

impl VirtqueueReceive {
    /// The receive queue with this number, of a driver's start.
    pub(crate) fn new((index, queue): &(u16, SharedQueue), shared: &Shared) -> Self {
        let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
        Self {
            ring: ParkedRing::new(*index, queue.clone(), event_idx),
            mergeable: has(shared.features, VIRTIO_NET_F_MRG_RXBUF),
            interrupts: Arc::clone(&shared.interrupts),
        }
    }

    /// Locks the queue for a run.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn room<'r, 'm>(
        &'r self,
        memory: &'m DmaView,
        scratch: &'r mut VirtqueueScratch,
    ) -> Result<VirtqueueRoom<'r, 'm>, BrokenRing> {
        VirtqueueRoom::new(&self.ring, self.mergeable, memory, scratch)
    }

    /// Interrupts the driver if it needs that. Returns true if it did.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn signal(&self, memory: &DmaView) -> Result<bool, BrokenRing> {
        let mut ring = self.ring.ring(memory)?;
        let wanted = ring.wants_interrupt(memory)?;
        self.ring.park(ring);
        if wanted {
            self.interrupts.signal_queue(self.ring.index());
        }
        Ok(wanted)
    }

    /// True if the driver has provided buffers.
    pub(crate) fn has_buffers(&self, memory: &DmaView) -> bool {
        self.ring.has_available(memory)
    }

    /// Asks the driver for a reset.
    pub(crate) fn ask_for_reset(&self) {
        self.interrupts.ask_for_reset();
    }
}
