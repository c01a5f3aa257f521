//! A run of frames into a receive queue: policy, filter and offloads of its port, and the outcome of a frame that
//! finds no buffers.

mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::Guard;
use parking_lot::Mutex;
use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use super::account::waits::Waits;
use super::frame::Frame;
use super::frame::body::Body;
use super::frame::offload;
use super::port_nic::PortNic;
use super::rings::x550::Whole;
use super::rings::{Room, Supply, VirtqueueScratch};
use super::tx_batch::FRAME_COST;
use crate::DmaView;
use crate::frames::net_protocol::Offloads;
use crate::frames::net_protocol::ethernet::is_multicast;
use crate::frames::net_protocol::header::{FLAGS, HEADER};
use crate::frames::policy::{self, NewHead};
use crate::frames::walk;
use crate::net::{Counter, Enforced, FILTER_HEAD, Filter, Tally};
use crate::os::clock;
use crate::queue::ring::BrokenRing;

/// A sender's scratch memory for receive queues, one after the other.
#[derive(Default)]
pub(crate) struct RxScratch {
    /// Scratch memory of virtqueues.
    pub virtqueue: VirtqueueScratch,
    /// The frame that is written to the buffers of an X550.
    pub whole: Whole,
    copies: Copies,
    /// The number of segments, which are more work than their frames' bytes suggest.
    pub segments: usize,
    /// The price of the descriptors that were read beyond those that their frames' bytes account for.
    pub price: usize,
}

/// A frame that its receiver cannot have unchanged, and the result of the conversion. Empty until there is one.
#[derive(Default)]
struct Copies {
    frame: Vec<u8>,
    segment: Vec<u8>,
}

/// The outcome of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// The driver has it.
    Done,
    /// It was dropped and counted.
    Dropped,
    /// The driver has provided no buffers, or too few: the caller decides, see [`RxRun::wait_for_buffers`] and
    /// [`RxRun::drop_for_lack`].
    NoBuffers,
}

/// The reason for a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeliveryReason {
    /// The frame's sender: the receiver's policy and filter decide.
    Sender,
    /// The host: a copy of a frame that another port sends, to which policy and filter do not apply.
    Mirror,
}

/// The port of a receive queue, for the time of a run.
#[derive(Clone, Copy)]
pub(crate) struct Receiver<'r> {
    /// The NIC of the port.
    pub nic: &'r PortNic,
    /// Set when it must stop.
    pub stop: &'r AtomicBool,
    /// Senders that wait for its buffers: the workers' bits.
    pub waiters: &'r AtomicU64,
    /// The time that they have waited.
    pub waits: &'r Mutex<Waits>,
    /// The port gets no frames before it has paid for the cost of its rings.
    pub owes: bool,
}

impl Receiver<'_> {
    /// True if the port must stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A receive queue that is locked for a run of frames.
pub(crate) struct RxRun<'r, 'm> {
    room: Room<'r, 'm>,
    memory: &'m DmaView,
    copies: &'r mut Copies,
    segments: &'r mut usize,
    price: &'r mut usize,
    /// The cost of this run beyond the bytes of its frames that its source does not know yet.
    unspent: usize,
    supply: &'r mut Supply,
    tally: &'r mut Tally,
    policy: Guard<Arc<Enforced>>,
    filter: Guard<Arc<Filter>>,
    offloads: Offloads,
    port: Receiver<'r>,
    broken: bool,
}

/// The parts of a sender's scratch memory that no ring needs.
pub(crate) struct RunScratch<'r> {
    copies: &'r mut Copies,
    segments: &'r mut usize,
    price: &'r mut usize,
}

impl RxScratch {
    /// The parts of a run: those for a virtqueue, the frame for an X550, and the rest.
    pub(crate) fn parts(&mut self) -> (&mut VirtqueueScratch, &mut Whole, RunScratch<'_>) {
        let Self { virtqueue, whole, copies, segments, price } = self;
        (virtqueue, whole, RunScratch { copies, segments, price })
    }
}

impl<'r, 'm> RxRun<'r, 'm> {
    /// Begins a run over the buffers in `room`.
    pub(crate) fn new(
        room: Room<'r, 'm>,
        (supply, tally): (&'r mut Supply, &'r mut Tally),
        port: Receiver<'r>,
        memory: &'m DmaView,
        scratch: RunScratch<'r>,
    ) -> Self {
        let RunScratch { copies, segments, price } = scratch;
        Self {
            room,
            memory,
            copies,
            segments,
            price,
            unspent: 0,
            supply,
            tally,
            policy: port.nic.policy.load(),
            filter: port.nic.state.filter(),
            offloads: port.nic.state.offloads(),
            port,
            broken: false,
        }
    }

    /// Delivers a frame to the driver, if policy and filter admit it.
    pub(crate) fn deliver(&mut self, frame: &Frame<'_>, body: &Body<'_, '_, '_>, reason: DeliveryReason) -> Delivery {
        if self.broken || self.port.is_stopped() {
            return self.drop_as(Counter::RxStale);
        }
        let (header, new) = match self.admit(frame, body, reason) {
            Ok(admitted) => admitted,
            Err(reason) => return self.drop_as(reason),
        };
        if self.port.owes {
            let lost = if reason == DeliveryReason::Mirror { Counter::MirrorDropped } else { Counter::RxCongested };
            return self.drop_as(lost);
        }
        let made = *self.segments;
        self.room.begin(walk::most(self.memory), false);
        let delivery = match offload::work(&header, self.offloads) {
            None => self.place(header, &new, frame, body),
            Some(work) => self.place_worked(work, header, &new, frame, body),
        };
        let price = walk::price(self.room.take_walked(), frame.len, self.memory);
        *self.price += price;
        self.unspent += price + (*self.segments - made) * FRAME_COST;
        delivery
    }

    /// Takes the cost of frames beyond their bytes since the last call.
    pub(crate) fn take_unspent(&mut self) -> usize {
        std::mem::take(&mut self.unspent)
    }

    fn drop_as(&mut self, reason: Counter) -> Delivery {
        self.tally.count(reason);
        Delivery::Dropped
    }

    /// The header and the beginning of the frame as the driver may see it, or the reason why policy or filter refuse
    /// it.
    fn admit(
        &self,
        frame: &Frame<'_>,
        body: &Body<'_, '_, '_>,
        reason: DeliveryReason,
    ) -> Result<([u8; HEADER], NewHead), Counter> {
        if !self.port.nic.state.link_up() {
            return Err(Counter::RxLinkDown);
        }
        let policy = &self.policy.policy;
        let new = match reason {
            DeliveryReason::Sender => policy.egress(&frame.head)?,
            DeliveryReason::Mirror => frame.head.unchanged(),
        };
        // A rule of the PF's driver moves frames also to functions that do not have their address.
        if reason == DeliveryReason::Sender && frame.queue.is_none() {
            let mut head = [0; FILTER_HEAD];
            let known = new.bytes().len().min(FILTER_HEAD);
            head[..known].copy_from_slice(&new.bytes()[..known]);
            if known < FILTER_HEAD {
                body.read(&mut head[known..]);
            }
            let wanted =
                if policy.trusted { self.filter.wants(&head) } else { self.filter.wants_untrusted(&head, policy) };
            let [a, b, c, d, e, f, ..] = head;
            let destination = [a, b, c, d, e, f];
            let is_exact = !is_multicast(&destination) || destination == [0xff; 6];
            let exact = self.port.nic.wants_address.as_ref().filter(|_| !is_exact);
            if !wanted || exact.is_some_and(|wants| !wants(destination)) {
                return Err(Counter::RxFiltered);
            }
        }
        if self.policy.receive.limited_for().is_some() {
            return Err(Counter::RxRateDropped);
        }
        let mut header = policy::changed(frame.header, &new).map_err(|_| Counter::RxBadOffloads)?;
        let known = if self.offloads.contains(Offloads::CHECKSUM) {
            VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID
        } else {
            VIRTIO_NET_HDR_F_NEEDS_CSUM
        };
        header[FLAGS] &= known as u8;
        Ok((header, new))
    }

    /// After [`Delivery::NoBuffers`]: returns the time that the frame may wait for buffers, if all waits for this
    /// receiver may take `budget` in a second; `None` if it must be dropped. `stop` is set when its sender is stopped.
    pub(crate) fn patience(&mut self, budget: Duration, stop: Option<&Arc<AtomicBool>>) -> Option<Duration> {
        if self.broken || budget.is_zero() {
            return None;
        }
        let (now, mut waits) = (clock::now(), self.port.waits.lock());
        // Its driver may never provide so many at once that it counts as recovered.
        let period = waits.period(now);
        if self.supply.congested == Some(period) {
            return None;
        }
        self.supply.congested = None;
        // A wait may have ended unnoticed, with its sender.
        let is_gone = self.supply.waiter.as_ref().is_some_and(|stop| stop.load(Ordering::Acquire));
        if is_gone || self.supply.awaited.is_none_or(|since| since < period) {
            (self.supply.awaited, self.supply.waiter) = (None, stop.cloned());
        }
        waits.left(&mut self.supply.awaited, budget, now)
    }

    /// After [`Delivery::NoBuffers`]: makes the driver ring when it provides buffers, for the worker `waiter`. Returns
    /// true if it has provided some in the meantime.
    pub(crate) fn wait_for_buffers(&mut self, waiter: usize) -> bool {
        self.port.waiters.fetch_or(1 << waiter, Ordering::SeqCst);
        self.room.put_back();
        let more = self.room.expect_doorbell(self.supply);
        self.broken |= more.is_err();
        more.unwrap_or(true)
    }

    /// After [`Delivery::NoBuffers`]: drops the frame. If it has `waited`, no frame waits again in this period.
    pub(crate) fn drop_for_lack(&mut self, waited: bool) {
        self.room.put_back();
        let reason = if self.supply.congested.is_some() { Counter::RxCongested } else { Counter::RxNoBuffers };
        self.tally.count(reason);
        if waited {
            self.supply.congested = Some(self.port.waits.lock().period(clock::now()));
        }
        self.end_wait();
    }

    /// Ends a wait for its buffers, if there was one.
    fn end_wait(&mut self) {
        self.supply.waiter = None;
        if let Some(since) = self.supply.awaited.take() {
            self.port.waits.lock().end(since, clock::now());
        }
    }

    /// Counts the loss of a mirrored copy.
    pub(crate) fn lose_mirrored(&mut self) {
        self.room.put_back();
        self.tally.count(Counter::MirrorDropped);
    }

    /// Publishes the used buffers.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid: the caller [gives it up](super::receiver::PortRx::give_up).
    pub(crate) fn finish(self) -> Result<(), BrokenRing> {
        self.room.finish(self.broken)
    }
}
