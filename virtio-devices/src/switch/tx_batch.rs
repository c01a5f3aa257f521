//! A batch of frames from a transmit queue: the ingress policy of its port, and the routes.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use vm_memory::Permissions;

use super::frame::Frame;
use super::frame::body::Body;
use super::report::Report;
use super::shares::Shares;
use super::source::{End, Next, Source};
use super::table::{Miss, PortIndex, Route, Table};
use super::uplink::Uplink;
use crate::DmaView;
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::ethernet::{ETHERNET_HEADER, is_multicast};
use crate::frames::net_protocol::header::{self, HEADER, MAX_PACKETS};
use crate::frames::policy::{self, Head, NEW_HEAD};
use crate::frames::walk;
use crate::net::{BATCH, Counter, Enforced, Shared, Tally, send_failure};
use crate::os::clock;
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Chain, ParkedRing, Ring, Used};

/// The cost of a frame besides its bytes, in bytes that are copied in the same time.
pub(crate) const FRAME_COST: usize = 512;

/// A worker's scratch memory for taking frames, from one port after the other.
#[derive(Default)]
pub(crate) struct TxScratch {
    storage: Storage,
    used: Vec<Used>,
}

/// The port of transmit queues, for the time of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Sender<'b> {
    /// The port's number.
    pub index: PortIndex,
    /// The parameters of its start.
    pub shared: &'b Shared,
    /// Set when it must stop.
    pub stop: &'b Arc<AtomicBool>,
    /// Set when the switch's threads must end.
    pub end: &'b AtomicBool,
    /// The time per second that frames wait for a receiver's buffers.
    pub patience: Duration,
    /// Doorbells are suppressed: the queues are drained on a timer.
    pub gathers: bool,
    /// The number of the uplink, and the ports' shares of its rate, if that is limited.
    pub uplink: Option<(PortIndex, &'b Mutex<Shares>)>,
}

/// The work that was done for a frame before it was put back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// It was tried before, and copied to its mirror port.
    tried: bool,
    /// The number of receivers that have it.
    receivers: usize,
    /// The packets of it that its storm limit has counted.
    counted: u32,
}

/// A transmit queue whose port is locked.
pub(crate) struct Queue<'b> {
    /// The ring.
    pub parked: &'b ParkedRing,
    /// The number among the port's transmit queues.
    pub number: usize,
    /// The work that was done for its first frame before that was put back.
    pub progress: &'b mut Progress,
    /// The interrupt that its driver has not got yet.
    pub report: &'b mut Report,
    /// The bytes that the port may still send.
    pub credit: &'b mut i64,
    /// The counts.
    pub tally: &'b mut Tally,
}

/// A batch of frames from a transmit queue.
pub(crate) struct TxBatch<'b, 'm> {
    ring: Ring<'b>,
    parked: &'b ParkedRing,
    iovecs: IoVecs<'b, 'm>,
    memory: &'m DmaView,
    policy: arc_swap::Guard<Arc<Enforced>>,
    port: Sender<'b>,
    queue: usize,
    /// The head of the chain that the present frame is in.
    current: u16,
    frames: usize,
    bytes: usize,
    /// The cost of the batch, in bytes that are copied in the same time.
    spent: usize,
    credit: &'b mut i64,
    progress: &'b mut Progress,
    report: &'b mut Report,
    used: &'b mut Vec<Used>,
    tally: &'b mut Tally,
}

impl<'b, 'm> TxBatch<'b, 'm> {
    /// Begins a batch.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn new(
        queue: Queue<'b>,
        port: Sender<'b>,
        memory: &'m DmaView,
        scratch: &'b mut TxScratch,
    ) -> Result<Self, BrokenRing> {
        let Queue { parked, number, progress, report, credit, tally } = queue;
        let mut ring = parked.ring(memory)?;
        ring.suppress_doorbells(memory)?;
        report.review(&mut ring, memory)?;
        Ok(Self {
            ring,
            parked,
            iovecs: IoVecs::new(&mut scratch.storage),
            memory,
            policy: port.shared.policy.load(),
            port,
            queue: number,
            current: 0,
            frames: 0,
            bytes: 0,
            spent: 0,
            credit,
            progress,
            report,
            used: &mut scratch.used,
            tally,
        })
    }

    /// Returns used buffers, and interrupts the driver if it needs that now. Returns the reason for the end of the
    /// batch, which is not [`End::Drained`] if the driver has made more available in the meantime.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid, or was found to be: the caller [gives it up](super::sender::PortTx::give_up).
    pub(crate) fn finish(mut self, end: Result<End, BrokenRing>) -> Result<End, BrokenRing> {
        let end = end.and_then(|end| self.give_back(end));
        self.used.clear();
        self.parked.park(self.ring);
        end
    }

    fn give_back(&mut self, end: End) -> Result<End, BrokenRing> {
        if !self.used.is_empty() {
            self.ring.give_back(self.memory, self.used)?;
            let (frames, bytes) = (self.used.len(), self.bytes);
            if self.report.add(frames, bytes, clock::now(), &mut self.ring, self.memory)? {
                self.port.shared.interrupts.signal_queue(self.ring.index());
                self.tally.count(Counter::Interrupts);
            }
        }
        match end {
            End::Drained if self.port.gathers => Ok(end),
            End::Drained if self.ring.expect_doorbell(self.memory)? => Ok(End::More),
            End::Limited(_) if self.ring.expect_doorbell(self.memory)? => {
                // The driver need not ring before the time is over.
                self.ring.suppress_doorbells(self.memory)?;
                self.tally.count(Counter::TxRateWaits);
                Ok(end)
            }
            End::Limited(_) => Ok(End::Drained),
            end => Ok(end),
        }
    }

    /// Inspects the frame in `chain`: returns its route, or the reason why it is dropped.
    fn inspect<'t>(&mut self, chain: Chain<'m>, table: &'t Table) -> Result<Frame<'t>, Counter> {
        self.iovecs.clear();
        let bounds = walk::bounds(self.memory);
        let appended = self.iovecs.append_within(self.memory, chain, Permissions::Read, bounds);
        // The frame may have no bytes.
        let bytes = appended.map_or(0, |extent| extent.bytes.min(MAX_FRAME));
        let price = walk::price(self.iovecs.take_walked(), bytes, self.memory);
        self.pay(price);
        let extent = appended.map_err(|_| Counter::TxBadChains)?;
        // The checked copy is forwarded: later writes of the guest change nothing.
        let mut header = [0; HEADER];
        if !self.iovecs.take_front(&mut header) {
            return Err(Counter::TxTooShort);
        }
        let len = extent.bytes - HEADER;
        if len < ETHERNET_HEADER {
            return Err(Counter::TxTooShort);
        }
        if len > MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        self.bytes += len;
        self.spent += len;
        let (state, policy) = (&self.port.shared.state, &self.policy);
        let header = header::check(header, len, self.port.shared.features).map_err(|_| Counter::TxBadHeaders)?;
        // Its receiver pays for its packets, and cannot limit their number.
        if header::packets(&header, len) > MAX_PACKETS {
            return Err(Counter::TxBadHeaders);
        }
        if !state.link_up() {
            return Err(Counter::TxLinkDown);
        }
        let mut copy = [0; policy::HEAD];
        let copy = &mut copy[..len.min(policy::HEAD)];
        if !self.iovecs.take_front(copy) {
            return Err(Counter::TxTooShort);
        }
        let head = Head::of(copy)?;
        let is_further = |mac: &_| state.filter().unicast.addresses().contains(mac);
        let new = policy.policy.ingress(&head, state.mac(), is_further)?;
        let header = policy::changed(header, &new).map_err(|_| Counter::TxBadHeaders)?;
        let len = new.new_len(len);
        if len > MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        let head = new.head();
        let route = table.route(self.port.index, &head).or_else(|miss| match miss {
            // It is counted at its destination.
            Miss::Closed(port) => Ok(Route::One(port)),
            Miss::OwnAddress => Err(Counter::TxOwnAddress),
            Miss::Isolated => Err(Counter::TxIsolated),
            Miss::Unknown => Err(Counter::TxUnknown),
        });
        Ok(Frame::new(header, &new, head, len, route))
    }

    /// The time that a frame for the uplink must wait, because of the port's share of the uplink's rate.
    fn uplink_wait(&self, frame: &Frame<'_>) -> Option<Duration> {
        let (uplink, shares) = self.port.uplink?;
        let is_for_uplink = match frame.route.ok()? {
            Route::One(port) => port == uplink,
            Route::Many(ports) => ports.includes(uplink),
        };
        if is_for_uplink { shares.lock().limited_for(self.port.index) } else { None }
    }

    /// Applies the storm limit and the mirror port, once for each frame.
    fn admit<'t>(&mut self, mut frame: Frame<'t>, table: &'t Table) -> Result<Frame<'t>, Counter> {
        let is_group = is_multicast(&frame.head.destination());
        // Every address that is not local is behind the uplink, if there is one.
        let is_flooded = !is_group && matches!(&frame.route, Ok(Route::Many(ports)) if !ports.has_uplink());
        if (is_group || is_flooded) && self.policy.policy.storm.is_some() {
            // Its guest may have enlarged it since a part of it was sent.
            let packets = frame.packets().saturating_sub(self.progress.counted);
            if packets != 0 && !self.policy.storm.allows(packets) {
                return Err(Counter::StormDropped);
            }
            if packets != 0 {
                self.policy.storm.take(0, packets);
                self.progress.counted += packets;
            }
        }
        if is_flooded && self.progress.receivers == 0 {
            self.tally.count(Counter::TxFlooded);
        }
        frame.mirror = table.mirror(self.port.index, &frame.head).filter(|_| !self.progress.tried);
        Ok(frame)
    }

    /// The number of frames that were returned.
    pub(crate) fn completed(&self) -> usize {
        self.used.len()
    }

    fn complete(&mut self) {
        self.used.push(Used { head: self.current, len: 0 });
        *self.progress = Progress::default();
    }

    /// Charges the port and the batch.
    fn pay(&mut self, cost: usize) {
        self.spent = self.spent.saturating_add(cost);
        *self.credit = self.credit.saturating_sub(i64::try_from(cost).unwrap_or(i64::MAX));
    }

    fn charge(&mut self, bytes: usize, receivers: usize) {
        let cost = (bytes + FRAME_COST).saturating_mul(receivers.max(1));
        *self.credit = self.credit.saturating_sub(i64::try_from(cost).unwrap_or(i64::MAX));
    }
}

impl Source for TxBatch<'_, '_> {
    fn next<'t>(&mut self, table: &'t Table) -> Result<Next<'t>, BrokenRing> {
        loop {
            if self.is_stopped() {
                return Ok(Next::End(End::Stopped));
            }
            if self.frames == BATCH || self.is_spent() || *self.credit <= 0 {
                return Ok(Next::End(End::More));
            }
            if let Some(wait) = self.policy.transmit.limited_for() {
                return Ok(Next::End(End::Limited(wait)));
            }
            let Some(chain) = self.ring.next(self.memory)? else { return Ok(Next::End(End::Drained)) };
            self.frames += 1;
            self.spent += FRAME_COST;
            self.current = chain.head_index();
            let frame = match self.inspect(chain, table) {
                Ok(frame) => frame,
                Err(reason) => {
                    self.dropped(reason);
                    continue;
                }
            };
            if let Some(wait) = self.uplink_wait(&frame) {
                self.ring.put_back(1);
                return Ok(Next::End(End::Limited(wait)));
            }
            match self.admit(frame, table) {
                Ok(frame) => return Ok(Next::Frame(frame)),
                Err(reason) => self.dropped(reason),
            }
        }
    }

    fn body(&self) -> Body<'_, '_, '_> {
        Body::Guest(&self.iovecs)
    }

    fn flow(&self, _: &Frame<'_>) -> usize {
        usize::from(self.port.index) + self.queue
    }

    fn send(&mut self, frame: &Frame<'_>, uplink: &Uplink) -> Result<(), Counter> {
        let mut bytes = [0; HEADER + NEW_HEAD];
        let len = HEADER + frame.front().len();
        bytes[..HEADER].copy_from_slice(&frame.header);
        bytes[HEADER..len].copy_from_slice(frame.front());
        let sent = self.iovecs.send(uplink.tap().as_fd(), &bytes[..len]);
        sent.map_err(|error| send_failure(&error, uplink.failures()))?;
        if let Some((_, shares)) = self.port.uplink {
            shares.lock().take(self.port.index, frame.len);
        }
        Ok(())
    }

    fn done(&mut self, frame: &Frame<'_>, receivers: usize) {
        self.charge(frame.len, receivers);
        self.policy.transmit.take(frame.len, frame.packets());
        self.tally.count(Counter::TxFrames);
        self.tally.add(Counter::TxBytes, frame.len as u64);
        self.complete();
    }

    fn mirrored(&mut self, frame: &Frame<'_>) {
        self.charge(frame.len, 1);
    }

    fn dropped(&mut self, reason: Counter) {
        self.charge(0, 1);
        // A dropped frame took time as well.
        self.policy.transmit.take(0, 1);
        self.port.shared.policy.note(reason);
        self.tally.count(reason);
        self.complete();
    }

    fn is_patient(&self) -> bool {
        true
    }

    fn patience(&self) -> Duration {
        self.port.patience
    }

    fn stop(&self) -> Option<&Arc<AtomicBool>> {
        Some(self.port.stop)
    }

    fn served(&self) -> usize {
        self.progress.receivers
    }

    fn put_back(&mut self, frame: &Frame<'_>, receivers: usize) {
        if receivers != 0 {
            self.charge(frame.len, receivers);
        }
        self.progress.tried = true;
        self.progress.receivers += receivers;
        self.ring.put_back(1);
    }

    fn spend(&mut self, cost: usize) {
        self.spent = self.spent.saturating_add(cost);
    }

    fn is_spent(&self) -> bool {
        self.spent >= walk::BATCH_COST
    }

    fn is_stopped(&self) -> bool {
        self.port.stop.load(Ordering::Acquire) || self.port.end.load(Ordering::Acquire)
    }
}
