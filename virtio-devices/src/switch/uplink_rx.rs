//! What comes from the uplink. A tap shows no frame without giving it away, so each is read into memory of this program
//! first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use super::body::Body;
use super::frame::Frame;
use super::source::{End, Next, Source};
use super::table::{Miss, PortIndex, Route, Table};
use super::tx_batch::FRAME_COST;
use super::uplink::Uplink;
use crate::net::{BATCH, Counter, Tally};
use crate::net_protocol::MAX_READ;
use crate::net_protocol::ethernet::{ETHERNET_HEADER, is_multicast};
use crate::net_protocol::header::{FLAGS, HEADER, NUM_BUFFERS};
use crate::policy::{self, Head};
use crate::ring::BrokenRing;
use crate::spill::Spill;

/// The reader of an uplink.
pub(crate) struct UplinkRx {
    index: PortIndex,
    bounce: Spill,
    /// There may be a frame.
    ready: bool,
    /// The bytes that it may still have carried in this turn; below zero, its debt.
    credit: i64,
    tally: Tally,
}

impl UplinkRx {
    /// The reader of an uplink that has this number in the table.
    ///
    /// # Errors
    ///
    /// When the host has no memory for it.
    pub(crate) fn new(index: PortIndex) -> io::Result<Self> {
        Ok(Self { index, bounce: Spill::new(MAX_READ)?, ready: false, credit: 0, tally: Tally::new() })
    }

    /// Begins to read: what is from before there were drivers is dropped.
    pub(crate) fn begin(&mut self, uplink: &Uplink, watch: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) {
        uplink.counters().add(Counter::RxStale, uplink.discard_stale());
        if watch(uplink.as_fd()).is_err() {
            uplink.counters().add(Counter::RxBackendErrors, 1);
        }
        self.ready = true;
    }

    /// Whether there may be a frame.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// There may be a frame.
    pub(crate) fn set_ready(&mut self) {
        self.ready = true;
    }

    /// Begins a further turn, in which `bytes` more may be carried. Credit that was not used is lost, as that of ports.
    pub(crate) fn grant(&mut self, bytes: i64) {
        self.credit = self.credit.min(0) + bytes;
    }

    /// Charges work on its frames besides copying them, in frames.
    pub(crate) fn charge_frames(&mut self, frames: usize) {
        self.credit = self.credit.saturating_sub(i64::try_from(frames * FRAME_COST).unwrap_or(i64::MAX));
    }

    /// Reads a batch of frames, which `forward` forwards.
    pub(crate) fn batch(
        &mut self,
        uplink: &Uplink,
        end: &AtomicBool,
        forward: impl FnOnce(&mut UplinkBatch<'_>) -> Result<End, BrokenRing>,
    ) {
        let Self { index, bounce, ready, credit, tally } = self;
        let mut batch = UplinkBatch {
            index: *index,
            fd: uplink.as_fd(),
            end,
            bounce: bounce.bytes(),
            body: 0..0,
            frames: 0,
            credit,
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
    end: &'b AtomicBool,
    bounce: &'b mut [u8],
    /// Where the present frame's body is.
    body: std::ops::Range<usize>,
    frames: usize,
    credit: &'b mut i64,
    tally: &'b mut Tally,
}

impl UplinkBatch<'_> {
    /// Looks at the frame of `len` bytes, with its header, that was read: its route, or the reason why it is dropped.
    fn inspect<'t>(&mut self, len: usize, table: &'t Table) -> Result<Frame<'t>, Counter> {
        let bytes = self.bounce.get(..len).unwrap_or_default();
        let (header, frame) = bytes.split_first_chunk::<HEADER>().ok_or(Counter::RxTooShort)?;
        if frame.len() < ETHERNET_HEADER {
            return Err(Counter::RxTooShort);
        }
        let mut header = *header;
        header[FLAGS] &= (VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID) as u8;
        header[NUM_BUFFERS..].fill(0);
        let known = frame.len().min(policy::HEAD);
        let head = Head::of(frame.get(..known).unwrap_or(frame)).map_err(|_| Counter::RxVlanFiltered)?;
        if is_multicast(&head.source()) {
            return Err(Counter::RxBackendErrors);
        }
        let new = head.unchanged();
        let header = policy::changed(header, &new).map_err(|_| Counter::RxBackendErrors)?;
        let route = match table.route(self.index, &head) {
            Ok(route) => route,
            // It is counted where it goes.
            Err(Miss::Closed(port)) => Route::One(port),
            Err(Miss::OwnAddress | Miss::Isolated | Miss::Unknown) => return Err(Counter::RxUnknown),
        };
        let frame_len = frame.len();
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
            if self.frames == BATCH || *self.credit <= 0 {
                return Ok(Next::End(End::More));
            }
            self.frames += 1;
            *self.credit = self.credit.saturating_sub(FRAME_COST as i64);
            match rustix::io::read(self.fd, &mut *self.bounce) {
                Ok(0) | Err(Errno::BADFD | Errno::BADF | Errno::NODEV | Errno::NXIO | Errno::IO) => {
                    // It is gone, and signals nothing any more.
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

    /// The sender, which a flow has one of.
    fn flow(&self, frame: &Frame<'_>) -> usize {
        frame.head.source().iter().fold(0, |flow, byte| flow.wrapping_mul(31) + usize::from(*byte))
    }

    fn send(&mut self, _: &Frame<'_>, _: &Uplink) -> Result<(), Counter> {
        // Nothing goes back where it came from.
        Err(Counter::TxOwnAddress)
    }

    fn done(&mut self, frame: &Frame<'_>, receivers: usize) {
        let cost = (frame.len + FRAME_COST).saturating_mul(receivers);
        *self.credit = self.credit.saturating_sub(i64::try_from(cost).unwrap_or(i64::MAX));
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

    fn patience(&mut self) -> Option<Duration> {
        None
    }

    fn put_back(&mut self) {}

    fn is_stopped(&self) -> bool {
        self.end.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Tap;
    use crate::net::testing::{send, sockets};
    use crate::switch::SwitchMode;
    use crate::switch::table::PortSpec;

    /// A broadcast to a thousand ports is a thousand copies.
    #[test]
    fn copies_of_what_comes_from_the_uplink_use_up_its_turn() {
        let (near, far) = sockets();
        let uplink = Uplink::new(Tap::over_sockets(vec![near])).unwrap();
        let table = Table::new(SwitchMode::Veb, &[PortSpec::uplink(true)], None);
        let (mut rx, end) = (UplinkRx::new(0).unwrap(), AtomicBool::new(false));
        let frame = [&[0; 12][..], &[0xff; 6], &[2; 6], &[8, 0], &[0; 986]].concat();
        let turn = |rx: &mut UplinkRx, receivers| {
            (0..BATCH + 2).for_each(|_| send(&far, &frame));
            rx.grant(1 << 20);
            let mut frames = 0;
            rx.batch(&uplink, &end, |batch| {
                loop {
                    match batch.next(&table)? {
                        Next::Frame(frame) => batch.done(&frame, receivers),
                        Next::End(end) => return Ok(end),
                    }
                    frames += 1;
                }
            });
            while rustix::io::read(uplink.as_fd(), &mut [0; 2048]).is_ok() {}
            frames
        };
        assert_eq!(turn(&mut rx, 1), BATCH);
        assert_eq!(turn(&mut rx, 1000), 1);
        assert!(rx.is_ready(), "there may be more");
        assert_eq!(turn(&mut rx, 1), BATCH, "what is left of a turn");
        assert_eq!(turn(&mut rx, 4000), 1);
        let turns = (0..).take_while(|_| turn(&mut rx, 1) == 0).count();
        assert_eq!(turns, 4, "a debt of 6 MB is paid first");
    }
}
