//! A run of frames into a receive queue.

mod supply;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::Guard;
use parking_lot::Mutex;
use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use super::body::Body;
use super::frame::Frame;
use super::offload;
use super::tx_batch::FRAME_COST;
use super::waits::Waits;
use crate::iovecs::{IoVecs, Storage};
use crate::net::{Counter, Enforced, FILTER_HEAD, Filter, Shared, Tally};
use crate::net_protocol::Offloads;
use crate::net_protocol::header::{FLAGS, HEADER};
use crate::policy::{self, NewHead};
use crate::ring::{BrokenRing, ParkedRing, Ring, Used};
use crate::{DmaView, clock, walk};
pub(crate) use supply::Supply;
use supply::{Lack, Shortage};

/// What a sender puts frames into receive queues with, one after the other.
#[derive(Default)]
pub(crate) struct RxScratch {
    storage: Storage,
    used: Vec<Used>,
    /// The chains that are taken for the present frame, and how much each holds.
    chains: Vec<(u16, usize)>,
    copies: Copies,
    /// How many segments were made, which are more work than their frames' bytes say.
    pub segments: usize,
    /// The price of the descriptors that were read beyond what their frames' bytes say.
    pub price: usize,
}

/// A frame that its receiver cannot have as it is, and what is made of it. Empty until there is one.
#[derive(Default)]
struct Copies {
    frame: Vec<u8>,
    segment: Vec<u8>,
}

/// What became of a frame.
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

/// Whose wish a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Its sender's: the receiver's policy and filter decide.
    Sender,
    /// The host's: a copy of what another port sends, for which they do not count.
    Mirror,
}

/// The port that a receive queue is of, for the time of a run.
#[derive(Clone, Copy)]
pub(crate) struct Receiver<'r> {
    /// What its start was with.
    pub shared: &'r Shared,
    /// Set when it is stopped.
    pub stop: &'r AtomicBool,
    /// Senders that wait for its buffers: the workers' bits.
    pub waiters: &'r AtomicU64,
    /// How long they have.
    pub waits: &'r Mutex<Waits>,
    /// It gets no frames before it has paid for what its rings have cost.
    pub owes: bool,
}

impl Receiver<'_> {
    /// Whether it has been told to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A receive queue whose port is locked.
pub(crate) struct Queue<'r> {
    /// The ring.
    pub parked: &'r ParkedRing,
    /// Whether a frame may have several buffers.
    pub mergeable: bool,
    /// What is known of its driver's buffers.
    pub supply: &'r mut Supply,
    /// Its counts.
    pub tally: &'r mut Tally,
}

/// A receive queue that is locked for a run of frames.
pub(crate) struct RxRun<'r, 'm> {
    ring: Ring<'r>,
    parked: &'r ParkedRing,
    iovecs: IoVecs<'r, 'm>,
    memory: &'m DmaView,
    chains: &'r mut Vec<(u16, usize)>,
    capacity: usize,
    mergeable: bool,
    used: &'r mut Vec<Used>,
    copies: &'r mut Copies,
    segments: &'r mut usize,
    price: &'r mut usize,
    /// What this run has cost beyond the bytes of its frames, and its source does not know yet.
    unspent: usize,
    /// The descriptors that may still be read for the present frame, or the present segment of one.
    left: usize,
    /// It is a segment for which no more may be read because of those before it.
    is_last: bool,
    supply: &'r mut Supply,
    tally: &'r mut Tally,
    policy: Guard<Arc<Enforced>>,
    filter: Guard<Arc<Filter>>,
    offloads: Offloads,
    port: Receiver<'r>,
    broken: bool,
}

impl<'r, 'm> RxRun<'r, 'm> {
    /// Begins a run.
    ///
    /// # Errors
    ///
    /// When the ring is invalid.
    pub(crate) fn new(
        queue: Queue<'r>,
        port: Receiver<'r>,
        memory: &'m DmaView,
        scratch: &'r mut RxScratch,
    ) -> Result<Self, BrokenRing> {
        let Queue { parked, mergeable, supply, tally } = queue;
        let mut ring = parked.ring(memory)?;
        ring.suppress_doorbells(memory)?;
        let RxScratch { storage, used, chains, copies, segments, price } = scratch;
        // A run of another queue may have ended with a broken ring, in the middle of a frame.
        chains.clear();
        used.clear();
        Ok(Self {
            ring,
            parked,
            iovecs: IoVecs::new(storage),
            memory,
            chains,
            capacity: 0,
            mergeable,
            used,
            copies,
            segments,
            price,
            unspent: 0,
            left: 0,
            is_last: false,
            supply,
            tally,
            policy: port.shared.policy.load(),
            filter: port.shared.state.filter(),
            offloads: port.shared.state.offloads(),
            port,
            broken: false,
        })
    }

    /// Gives the driver a frame, if it may and wants to see it.
    pub(crate) fn deliver(&mut self, frame: &Frame<'_>, body: &Body<'_, '_, '_>, wish: Wish) -> Delivery {
        if self.broken || self.port.is_stopped() {
            return self.drop_as(Counter::RxStale);
        }
        let (header, new) = match self.admit(frame, body, wish) {
            Ok(admitted) => admitted,
            Err(reason) => return self.drop_as(reason),
        };
        if self.port.owes {
            let lost = if wish == Wish::Mirror { Counter::MirrorDropped } else { Counter::RxCongested };
            return self.drop_as(lost);
        }
        let made = *self.segments;
        (self.left, self.is_last) = (walk::most(self.memory), false);
        let delivery = match offload::work(&header, self.offloads) {
            None => self.place(header, &new, frame, body),
            Some(work) => self.place_worked(work, header, &new, frame, body),
        };
        let price = walk::price(self.iovecs.take_walked(), frame.len, self.memory);
        *self.price += price;
        self.unspent += price + (*self.segments - made) * FRAME_COST;
        delivery
    }

    /// Returns what frames have cost beyond their bytes since the last call.
    pub(crate) fn take_unspent(&mut self) -> usize {
        std::mem::take(&mut self.unspent)
    }

    fn drop_as(&mut self, reason: Counter) -> Delivery {
        self.tally.count(reason);
        Delivery::Dropped
    }

    /// The header and the beginning of the frame as the driver may see it, or the reason why it may or does not want
    /// to.
    fn admit(
        &self,
        frame: &Frame<'_>,
        body: &Body<'_, '_, '_>,
        wish: Wish,
    ) -> Result<([u8; HEADER], NewHead), Counter> {
        if !self.port.shared.state.link_up() {
            return Err(Counter::RxLinkDown);
        }
        let policy = &self.policy.policy;
        let new = match wish {
            Wish::Sender => policy.egress(&frame.head)?,
            Wish::Mirror => frame.head.unchanged(),
        };
        if wish == Wish::Sender {
            let mut head = [0; FILTER_HEAD];
            let known = new.bytes().len().min(FILTER_HEAD);
            head[..known].copy_from_slice(&new.bytes()[..known]);
            if known < FILTER_HEAD {
                body.read(&mut head[known..]);
            }
            let wanted =
                if policy.trusted { self.filter.wants(&head) } else { self.filter.wants_untrusted(&head, policy) };
            if !wanted {
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

    /// After [`Delivery::NoBuffers`]: returns how long the frame may wait for buffers, if all waits for this receiver
    /// may take `budget` in a second; `None` if it has to be dropped. `stop` is set when its sender is stopped.
    pub(crate) fn patience(&mut self, budget: Duration, stop: Option<&Arc<AtomicBool>>) -> Option<Duration> {
        if self.broken || budget.is_zero() {
            return None;
        }
        let (now, mut waits) = (clock::now(), self.port.waits.lock());
        // Its driver may never provide so many at once that it is known to have recovered.
        let period = waits.period(now);
        if self.supply.congested == Some(period) {
            return None;
        }
        self.supply.congested = None;
        // A wait may have ended unseen, with its sender.
        let is_gone = self.supply.waiter.as_ref().is_some_and(|stop| stop.load(Ordering::Acquire));
        if is_gone || self.supply.awaited.is_none_or(|since| since < period) {
            (self.supply.awaited, self.supply.waiter) = (None, stop.cloned());
        }
        waits.left(&mut self.supply.awaited, budget, now)
    }

    /// After [`Delivery::NoBuffers`]: has the driver ring when it provides buffers, for the worker `waiter`. Returns
    /// whether it has provided some meanwhile.
    pub(crate) fn wait_for_buffers(&mut self, waiter: usize) -> bool {
        self.port.waiters.fetch_or(1 << waiter, Ordering::SeqCst);
        self.put_back();
        // Those that are available are not enough.
        let known = self.supply.shortage.map_or(self.ring.next_index(), Shortage::available);
        let more = self.ring.expect_doorbell_beyond(known, self.memory);
        self.broken |= more.is_err();
        more.unwrap_or(true)
    }

    /// After [`Delivery::NoBuffers`]: the frame is dropped. If it has `waited`, no frame waits again in this period.
    pub(crate) fn drop_for_lack(&mut self, waited: bool) {
        self.put_back();
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

    /// A copy for the host's eyes was lost.
    pub(crate) fn lose_mirrored(&mut self) {
        self.put_back();
        self.tally.count(Counter::MirrorDropped);
    }

    /// Publishes what was written.
    ///
    /// # Errors
    ///
    /// When the ring is invalid: the caller [gives it up](super::receiver::PortRx::give_up).
    pub(crate) fn finish(mut self) -> Result<(), BrokenRing> {
        let given = if self.broken { Err(BrokenRing) } else { self.give_back() };
        self.used.clear();
        self.parked.park(self.ring);
        given
    }

    fn give_back(&mut self) -> Result<(), BrokenRing> {
        if self.used.is_empty() { Ok(()) } else { self.ring.give_back(self.memory, self.used) }
    }
}
