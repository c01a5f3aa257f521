//! Reception from the uplink. A tap cannot be peeked at, so each frame is read into memory of this program first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use super::frame::Frame;
use super::frame::body::Body;
use super::port_set::PortSet;
use super::source::{End, Next, Source};
use super::table::{Miss, PortIndex, Route, Table};
use super::tx_batch::FRAME_COST;
use super::uplink::Uplink;
use super::uplink_policy::UplinkRules;
use crate::frames::net_protocol::MAX_READ;
use crate::frames::net_protocol::ethernet::{ETHERNET_HEADER, is_multicast};
use crate::frames::net_protocol::header::{FLAGS, HEADER, MAX_PACKETS, NUM_BUFFERS, packets};
use crate::frames::policy::{self, Head};
use crate::frames::spill::Spill;
use crate::frames::walk;
use crate::net::{BATCH, Counter, Tally};
use crate::queue::ring::BrokenRing;

/// The reader of an uplink.
pub(crate) struct UplinkRx {
    index: PortIndex,
    bounce: Spill,
    /// A frame may be available.
    ready: bool,
    /// A frame in the bounce buffer that some of its receivers have got.
    pending: Option<Pending>,
    tally: Tally,
}

/// A frame that was put back.
#[derive(Debug)]
struct Pending {
    /// The length, with the header.
    len: usize,
    /// The receivers that have got it.
    served: PortSet,
}

impl UplinkRx {
    /// The reader of an uplink that has this number in the table.
    ///
    /// # Errors
    ///
    /// Fails if the host has no memory for it.
    pub(crate) fn new(index: PortIndex) -> io::Result<Self> {
        Ok(Self { index, bounce: Spill::new(MAX_READ)?, ready: false, pending: None, tally: Tally::new() })
    }

    /// Begins to read: drops frames from before drivers started.
    pub(crate) fn begin(&mut self, uplink: &Uplink, watch: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) {
        uplink.counters().add(Counter::RxStale, uplink.discard_stale());
        if watch(uplink.tap().as_fd()).is_err() {
            uplink.counters().add(Counter::RxBackendErrors, 1);
        }
        self.ready = true;
    }

    /// True if a frame may be available.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Records that a frame may be available.
    pub(crate) fn set_ready(&mut self) {
        self.ready = true;
    }

    /// Reads a batch of frames, which `forward` forwards.
    pub(crate) fn batch(
        &mut self,
        uplink: &Uplink,
        end: &AtomicBool,
        forward: impl FnOnce(&mut UplinkBatch<'_>) -> Result<End, BrokenRing>,
    ) {
        let Self { index, bounce, ready, pending, tally } = self;
        let tap = uplink.tap();
        let mut batch = UplinkBatch {
            index: *index,
            fd: tap.as_fd(),
            rules: uplink.rules(),
            end,
            bounce: bounce.bytes(),
            body: 0..0,
            frames: 0,
            spent: 0,
            served: PortSet::default(),
            pending,
            tally,
        };
        *ready = forward(&mut batch) == Ok(End::More);
        tally.flush(&uplink.counters());
    }
}

/// A batch of frames from the uplink.
pub(crate) struct UplinkBatch<'b> {
    index: PortIndex,
    fd: BorrowedFd<'b>,
    /// The host's rules.
    rules: Option<&'b UplinkRules>,
    end: &'b AtomicBool,
    bounce: &'b mut [u8],
    /// The range of the present frame's body.
    body: std::ops::Range<usize>,
    frames: usize,
    /// The cost of the batch, in bytes that are copied in the same time.
    spent: usize,
    /// The receivers that have the present frame.
    served: PortSet,
    pending: &'b mut Option<Pending>,
    tally: &'b mut Tally,
}

impl UplinkBatch<'_> {
    /// Inspects the frame of `len` bytes, with its header, that was read: returns its route, or the reason why it is
    /// dropped.
    fn inspect<'t>(&mut self, len: usize, table: &'t Table) -> Result<Frame<'t>, Counter> {
        let bytes = self.bounce.get(..len).unwrap_or_default();
        let (header, frame) = bytes.split_first_chunk::<HEADER>().ok_or(Counter::RxTooShort)?;
        if frame.len() < ETHERNET_HEADER {
            return Err(Counter::RxTooShort);
        }
        let mut header = *header;
        header[FLAGS] &= (VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID) as u8;
        header[NUM_BUFFERS..].fill(0);
        if packets(&header, frame.len()) > MAX_PACKETS {
            return Err(Counter::RxBadOffloads);
        }
        let known = frame.len().min(policy::HEAD);
        let head = Head::of(frame.get(..known).unwrap_or(frame)).map_err(|_| Counter::RxVlanFiltered)?;
        if is_multicast(&head.source()) {
            return Err(Counter::RxBackendErrors);
        }
        let (new, head) = match self.rules {
            None => (head.unchanged(), head),
            Some(rules) => rules.incoming(&head)?,
        };
        let header = policy::changed(header, &new).map_err(|_| Counter::RxBackendErrors)?;
        let route = match table.route(self.index, &head) {
            Ok(route) => route,
            // It is counted at its destination.
            Err(Miss::Closed(port)) => Route::One(port),
            Err(Miss::OwnAddress | Miss::Isolated | Miss::Unknown) => return Err(Counter::RxUnknown),
        };
        let frame_len = new.new_len(frame.len());
        self.body = HEADER + known..len;
        Ok(Frame::new(header, &new, head, frame_len, Ok(route)))
    }
}

impl Source for UplinkBatch<'_> {
    fn next<'t>(&mut self, table: &'t Table) -> Result<Next<'t>, BrokenRing> {
        loop {
            if self.is_stopped() {
                return Ok(Next::End(End::Stopped));
            }
            if self.frames == BATCH || self.is_spent() {
                return Ok(Next::End(End::More));
            }
            self.frames += 1;
            self.served.clear();
            let read = match self.pending.take() {
                Some(Pending { len, served }) => {
                    self.served = served;
                    Ok(len)
                }
                None => rustix::io::read(self.fd, &mut *self.bounce),
            };
            // The frame is copied twice.
            self.spent += FRAME_COST + 2 * read.unwrap_or(0);
            match read {
                Ok(0) | Err(Errno::BADFD | Errno::BADF | Errno::NODEV | Errno::NXIO | Errno::IO) => {
                    // The tap was deleted, and sends no more events.
                    self.tally.count(Counter::RxBackendErrors);
                    return Ok(Next::End(End::Drained));
                }
                Ok(len) => match self.inspect(len, table) {
                    Ok(frame) => return Ok(Next::Frame(frame)),
                    Err(reason) => self.tally.count(reason),
                },
                Err(Errno::AGAIN) => return Ok(Next::End(End::Drained)),
                Err(Errno::INTR | Errno::NOMEM | Errno::NOBUFS) => return Ok(Next::End(End::More)),
                // A frame that the tap cannot describe is lost.
                Err(_) => self.tally.count(Counter::RxBackendErrors),
            }
        }
    }

    fn body(&self) -> Body<'_, '_, '_> {
        Body::Private(self.bounce.get(self.body.clone()).unwrap_or_default())
    }

    /// A flow has one sender, so its address selects the flow.
    fn flow(&self, frame: &Frame<'_>) -> usize {
        frame.head.source().iter().fold(0, |flow, byte| flow.wrapping_mul(31) + usize::from(*byte))
    }

    fn send(&mut self, _: &Frame<'_>, _: &Uplink) -> Result<(), Counter> {
        // No frame returns to its source.
        Err(Counter::TxOwnAddress)
    }

    fn done(&mut self, frame: &Frame<'_>, _: usize) {
        self.tally.count(Counter::RxFrames);
        self.tally.add(Counter::RxBytes, frame.len as u64);
    }

    fn mirrored(&mut self, _: &Frame<'_>) {}

    fn dropped(&mut self, reason: Counter) {
        self.tally.count(reason);
    }

    fn is_patient(&self) -> bool {
        false
    }

    fn patience(&self) -> Duration {
        Duration::ZERO
    }

    fn stop(&self) -> Option<&Arc<AtomicBool>> {
        None
    }

    fn served(&mut self) -> &mut PortSet {
        &mut self.served
    }

    fn put_back(&mut self, _: &Frame<'_>, _: usize) {
        *self.pending = Some(Pending { len: self.body.end, served: std::mem::take(&mut self.served) });
    }

    fn spend(&mut self, cost: usize) {
        self.spent = self.spent.saturating_add(cost);
    }

    fn is_spent(&self) -> bool {
        self.spent >= walk::BATCH_COST
    }

    fn is_stopped(&self) -> bool {
        self.end.load(Ordering::Acquire)
    }
}
