//! A virtqueue that sends frames: between batches, and locked for one.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::Permissions;

use super::send_ring::{Ended, Packet, SendRing, Taken};
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::ethernet::ETHERNET_HEADER;
use crate::frames::net_protocol::header::{self, HEADER};
use crate::frames::policy;
use crate::frames::walk;
use crate::net::{Counter, Shared, Tally};
use crate::os::clock;
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Chain, ParkedRing, Ring, Used};
use crate::switch::frame::body::Body;
use crate::switch::report::Report;
use crate::switch::source::End;
use crate::transport::features::has;
use crate::{DmaView, Interrupts, SharedQueue};

/// A worker's scratch memory for taking frames from virtqueues, one after the other.
#[derive(Default)]
pub(crate) struct SendScratch {
    storage: Storage,
    used: Vec<Used>,
}

/// A transmit virtqueue.
pub(crate) struct VirtqueueSend {
    ring: ParkedRing,
    /// The interrupt that its driver has not got yet.
    report: Report,
    features: u64,
    interrupts: Arc<Interrupts>,
}

impl VirtqueueSend {
    /// The transmit queue with this number, of a driver's start.
    pub(crate) fn new((index, queue): &(u16, SharedQueue), shared: &Shared) -> Self {
        let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
        Self {
            ring: ParkedRing::new(*index, queue.clone(), event_idx),
            report: Report::default(),
            features: shared.features,
            interrupts: Arc::clone(&shared.interrupts),
        }
    }

    /// Locks the queue for a batch.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn batch<'b, 'm>(
        &'b mut self,
        memory: &'m DmaView,
        scratch: &'b mut SendScratch,
    ) -> Result<VirtqueueTx<'b, 'm>, BrokenRing> {
        let Self { ring: parked, report, features, interrupts } = self;
        let mut ring = parked.ring(memory)?;
        ring.suppress_doorbells(memory)?;
        report.review(&mut ring, memory)?;
        Ok(VirtqueueTx {
            ring,
            parked,
            report,
            features: *features,
            interrupts,
            memory,
            iovecs: IoVecs::new(&mut scratch.storage),
            current: 0,
            used: &mut scratch.used,
        })
    }

    /// The deadline of the next transmit interrupt, if there is one.
    pub(crate) fn report_due(&self) -> Option<Instant> {
        self.report.due()
    }

    /// Sends the transmit interrupt, if the driver still needs it. Returns true if it does.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn report(&mut self, memory: &DmaView) -> Result<bool, BrokenRing> {
        let mut ring = self.ring.ring(memory)?;
        let wanted = self.report.take(&mut ring, memory);
        self.ring.park(ring);
        if wanted? {
            self.interrupts.signal_queue(self.ring.index());
            return Ok(true);
        }
        Ok(false)
    }

    /// Asks the driver for a reset.
    pub(crate) fn ask_for_reset(&self) {
        self.interrupts.ask_for_reset();
    }
}

/// A transmit virtqueue that is locked for a batch.
pub(crate) struct VirtqueueTx<'b, 'm> {
    ring: Ring<'b>,
    parked: &'b ParkedRing,
    report: &'b mut Report,
    features: u64,
    interrupts: &'b Interrupts,
    memory: &'m DmaView,
    iovecs: IoVecs<'b, 'm>,
    /// The head of the chain that the present frame is in.
    current: u16,
    used: &'b mut Vec<Used>,
}

impl<'m> VirtqueueTx<'_, 'm> {
    fn inspect(&mut self, chain: Chain<'m>) -> Taken {
        self.iovecs.clear();
        let bounds = walk::bounds(self.memory);
        let appended = self.iovecs.append_within(self.memory, chain, Permissions::Read, bounds);
        // The frame may have no bytes.
        let bytes = appended.map_or(0, |extent| extent.bytes.min(MAX_FRAME));
        let price = walk::price(self.iovecs.take_walked(), bytes, self.memory);
        let dropped = |reason| Taken { price, len: 0, packet: Err(reason) };
        let Ok(extent) = appended else { return dropped(Counter::TxBadChains) };
        // The checked copy is forwarded: later writes of the guest change nothing.
        let mut header = [0; HEADER];
        if !self.iovecs.take_front(&mut header) {
            return dropped(Counter::TxTooShort);
        }
        let len = extent.bytes - HEADER;
        if len < ETHERNET_HEADER {
            return dropped(Counter::TxTooShort);
        }
        if len > MAX_FRAME {
            return dropped(Counter::TxTooLong);
        }
        let Ok(header) = header::check(header, len, self.features) else {
            return Taken { price, len, packet: Err(Counter::TxBadHeaders) };
        };
        let (mut front, front_len) = ([0; policy::HEAD], len.min(policy::HEAD));
        let packet = if self.iovecs.take_front(front.get_mut(..front_len).unwrap_or_default()) {
            Ok(Packet { header, front, front_len })
        } else {
            Err(Counter::TxTooShort)
        };
        Taken { price, len, packet }
    }

    fn give_back(&mut self, ended: &Ended, tally: &mut Tally) -> Result<End, BrokenRing> {
        let Ended { end, gathers, bytes } = *ended;
        if !self.used.is_empty() {
            self.ring.give_back(self.memory, self.used)?;
            if self.report.add(self.used.len(), bytes, clock::now(), &mut self.ring, self.memory)? {
                self.interrupts.signal_queue(self.ring.index());
                tally.count(Counter::Interrupts);
            }
        }
        match end {
            End::Drained if gathers => Ok(end),
            End::Drained if self.ring.expect_doorbell(self.memory)? => Ok(End::More),
            End::Limited(_) if self.ring.expect_doorbell(self.memory)? => {
                // The driver need not ring before the time is over.
                self.ring.suppress_doorbells(self.memory)?;
                tally.count(Counter::TxRateWaits);
                Ok(end)
            }
            End::Limited(_) => Ok(End::Drained),
            end => Ok(end),
        }
    }
}

impl SendRing for VirtqueueTx<'_, '_> {
    fn take(&mut self) -> Result<Option<Taken>, BrokenRing> {
        let Some(chain) = self.ring.next(self.memory)? else { return Ok(None) };
        self.current = chain.head_index();
        Ok(Some(self.inspect(chain)))
    }

    fn body(&self) -> Body<'_, '_, '_> {
        Body::Guest(&self.iovecs)
    }

    fn send(&mut self, fd: BorrowedFd<'_>, front: &[u8]) -> io::Result<()> {
        self.iovecs.send(fd, front).map(drop)
    }

    fn put_back(&mut self) {
        self.ring.put_back(1);
    }

    fn complete(&mut self) {
        self.used.push(Used { head: self.current, len: 0 });
    }

    fn completed(&self) -> usize {
        self.used.len()
    }

    fn finish(mut self, ended: Result<Ended, BrokenRing>, tally: &mut Tally) -> Result<End, BrokenRing> {
        let end = ended.and_then(|ended| self.give_back(&ended, tally));
        self.used.clear();
        self.parked.park(self.ring);
        end
    }
}
