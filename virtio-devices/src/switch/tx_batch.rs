//! A batch of frames from a transmit queue: the ingress policy of its port, and the routes.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::frame::body::Body;
use super::frame::{Frame, MAX_FRONT};
use super::port_nic::PortNic;
use super::port_set::PortSet;
use super::rings::{Ended, Packet, SendRing};
use super::shares::Shares;
use super::source::{End, Next, Source};
use super::table::{Miss, PortIndex, Route, Table};
use super::uplink::Uplink;
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::ethernet::is_multicast;
use crate::frames::net_protocol::header::{self, HEADER, MAX_PACKETS};
use crate::frames::policy::{self, Head};
use crate::frames::walk;
use crate::net::{BATCH, Counter, Enforced, Tally, send_failure};
use crate::queue::ring::BrokenRing;

/// The cost of a frame besides its bytes, in bytes that are copied in the same time.
pub(crate) const FRAME_COST: usize = 512;

/// The port of transmit queues, for the time of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Sender<'b> {
    /// The port's number.
    pub index: PortIndex,
    /// The NIC of the port.
    pub nic: &'b PortNic,
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
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// It was tried before, and copied to its mirror port.
    tried: bool,
    /// The receivers that have it.
    served: PortSet,
    /// The packets of it that its storm limit has counted.
    counted: u32,
}

impl Progress {
    /// True if some of several receivers have the frame.
    pub(crate) const fn has_begun(&self) -> bool {
        !self.served.is_empty()
    }

    /// Begins with the next frame.
    pub(crate) fn reset(&mut self) {
        let Self { tried, served, counted } = self;
        (*tried, *counted) = (false, 0);
        served.clear();
    }
}

/// A transmit queue whose port is locked.
pub(crate) struct Queue<'b> {
    /// The number among the port's transmit queues.
    pub number: usize,
    /// The work that was done for its first frame before that was put back.
    pub progress: &'b mut Progress,
    /// The bytes that the port may still send.
    pub credit: &'b mut i64,
    /// The counts.
    pub tally: &'b mut Tally,
}

/// A batch of frames from a transmit queue whose ring is an `R`.
pub(crate) struct TxBatch<'b, R> {
    ring: R,
    policy: arc_swap::Guard<Arc<Enforced>>,
    port: Sender<'b>,
    queue: usize,
    frames: usize,
    bytes: usize,
    /// The cost of the batch, in bytes that are copied in the same time.
    spent: usize,
    credit: &'b mut i64,
    progress: &'b mut Progress,
    tally: &'b mut Tally,
}

impl<'b, R: SendRing> TxBatch<'b, R> {
    /// Begins a batch.
    pub(crate) fn new(ring: R, queue: Queue<'b>, port: Sender<'b>) -> Self {
        let Queue { number, progress, credit, tally } = queue;
        let policy = port.nic.policy.load();
        Self { ring, policy, port, queue: number, frames: 0, bytes: 0, spent: 0, credit, progress, tally }
    }

    /// Returns used buffers, and interrupts the driver if it needs that now. Returns the reason for the end of the
    /// batch, which is not [`End::Drained`] if the driver has made more available in the meantime.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid, or was found to be: the caller [gives it up](super::sender::PortTx::give_up).
    pub(crate) fn finish(self, end: Result<End, BrokenRing>) -> Result<End, BrokenRing> {
        let ended = end.map(|end| Ended { end, gathers: self.port.gathers, bytes: self.bytes });
        self.ring.finish(ended, self.tally)
    }

    /// Inspects a frame of `len` bytes: returns its route, or the reason why it is dropped.
    fn inspect<'t>(&self, packet: &Packet, len: usize, table: &'t Table) -> Result<Frame<'t>, Counter> {
        let (state, policy) = (&self.port.nic.state, &self.policy);
        // Its receiver pays for its packets, and cannot limit their number.
        if header::packets(&packet.header, len) > MAX_PACKETS {
            return Err(Counter::TxBadHeaders);
        }
        if !state.link_up() {
            return Err(Counter::TxLinkDown);
        }
        let head = Head::of(packet.front.get(..packet.front_len).unwrap_or(&packet.front))?;
        let is_further = |mac: &_| state.filter().unicast.addresses().contains(mac);
        // What comes back to its sender needs no policy: the frames of a driver's test have no valid source.
        let new = match table.loops_back() {
            true => head.unchanged(),
            false => policy.policy.ingress(&head, state.mac(), is_further)?,
        };
        let header = policy::changed(packet.header, &new).map_err(|_| Counter::TxBadHeaders)?;
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
        if is_flooded && !self.progress.has_begun() {
            self.tally.count(Counter::TxFlooded);
        }
        frame.mirror = table.mirror(self.port.index, &frame.head).filter(|_| !self.progress.tried);
        Ok(frame)
    }

    /// The number of frames that were returned; see [`SendRing::completed`].
    pub(crate) fn completed(&self) -> usize {
        self.ring.completed()
    }

    fn complete(&mut self, dropped: Option<Counter>) {
        self.ring.complete(dropped);
        self.progress.reset();
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

impl<R: SendRing> Source for TxBatch<'_, R> {
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
            let Some(taken) = self.ring.take()? else { return Ok(Next::End(End::Drained)) };
            self.frames += 1;
            self.spent += FRAME_COST;
            self.pay(taken.price);
            self.bytes += taken.len;
            self.spent += taken.len;
            let frame = match taken.packet.and_then(|packet| self.inspect(&packet, taken.len, table)) {
                Ok(frame) => frame,
                Err(reason) => {
                    self.dropped(reason);
                    continue;
                }
            };
            if let Some(wait) = self.uplink_wait(&frame) {
                self.ring.put_back();
                return Ok(Next::End(End::Limited(wait)));
            }
            match self.admit(frame, table) {
                Ok(frame) => return Ok(Next::Frame(frame)),
                Err(reason) => self.dropped(reason),
            }
        }
    }

    fn body(&self) -> Body<'_, '_, '_> {
        self.ring.body()
    }

    fn flow(&self, _: &Frame<'_>) -> usize {
        usize::from(self.port.index) + self.queue
    }

    fn send(&mut self, frame: &Frame<'_>, uplink: &Uplink) -> Result<(), Counter> {
        let mut bytes = [0; HEADER + MAX_FRONT];
        let len = HEADER + frame.front().len();
        bytes[..HEADER].copy_from_slice(&frame.header);
        bytes[HEADER..len].copy_from_slice(frame.front());
        let sent = self.ring.send(uplink.tap().as_fd(), &bytes[..len]);
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
        self.complete(None);
    }

    fn mirrored(&mut self, frame: &Frame<'_>) {
        self.charge(frame.len, 1);
    }

    fn dropped(&mut self, reason: Counter) {
        self.charge(0, 1);
        // A dropped frame took time as well.
        self.policy.transmit.take(0, 1);
        self.port.nic.policy.note(reason);
        self.tally.count(reason);
        self.complete(Some(reason));
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

    fn served(&mut self) -> &mut PortSet {
        &mut self.progress.served
    }

    fn put_back(&mut self, frame: &Frame<'_>, receivers: usize) {
        if receivers != 0 {
            self.charge(frame.len, receivers);
        }
        self.progress.tried = true;
        self.ring.put_back();
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
