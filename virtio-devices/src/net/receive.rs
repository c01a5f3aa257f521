//! Receive queues: frames from the tap to the driver (`virtio 1.4 §5.1.6.3`, §5.1.6.4).
//!
//! A frame is read straight into the driver's buffers, before its length is known. Most frames are short, so buffers
//! are prepared for the recent maximum length; the excess of a longer frame goes to a spill area and is copied into
//! further buffers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_MRG_RXBUF};
use vm_memory::Permissions;

use super::counters::{Counter, Tally};
use super::filter::{ETHERNET_HEADER, Filter, HEAD};
use super::pass::{BATCH, Next, Pass};
use crate::features::has;
use crate::iovecs::{Extent, IoVecs, Storage};
use crate::net_protocol::MAX_READ;
use crate::net_protocol::header::{FLAGS, HEADER, NUM_BUFFERS};
use crate::ring::{BrokenRing, Ring, Used};
use crate::spill::Spill;

/// The fewest bytes that buffers are prepared for: a header and a usual frame.
const MIN_PREPARED: usize = 2048;

/// A receive queue.
pub(crate) struct Receive<'q> {
    ring: Ring<'q>,
    mergeable: bool,
    checksum: bool,
    /// How many bytes of buffers are prepared before a frame is read.
    prepared: usize,
    /// What exceeds the prepared buffers.
    spill: Spill,
    /// A frame that waits for further buffers.
    waiting: Option<Frame>,
    storage: Storage,
    chains: VecDeque<Prepared>,
    /// How much the prepared chains hold.
    capacity: usize,
    used: Vec<Used>,
}

/// A chain that the driver made available and that no frame has been written to yet.
#[derive(Debug, Clone, Copy)]
struct Prepared {
    head: u16,
    extent: Extent,
}

/// A frame, with its header, that has been read.
#[derive(Debug, Clone, Copy)]
struct Frame {
    len: usize,
    /// How much of it is in the buffers. The rest is in the spill.
    placed: usize,
}

/// Why no further chain can be prepared.
enum Shortage {
    /// The driver has to provide more.
    Empty,
    /// What the driver provides next cannot be used, or not together with those before it.
    Unusable,
}

impl<'q> Receive<'q> {
    /// Puts frames into `ring`, by way of `spill` if they exceed its buffers.
    pub(crate) fn new(ring: Ring<'q>, features: u64, spill: Spill) -> Self {
        Self {
            ring,
            mergeable: has(features, VIRTIO_NET_F_MRG_RXBUF),
            checksum: has(features, VIRTIO_NET_F_GUEST_CSUM),
            prepared: MIN_PREPARED,
            spill,
            waiting: None,
            storage: Storage::default(),
            chains: VecDeque::new(),
            capacity: 0,
            used: Vec::new(),
        }
    }

    /// The memory for what exceeds the prepared buffers, when the queue has run for the last time.
    pub(crate) fn into_spill(self) -> Spill {
        self.spill
    }

    /// Whether a frame that was read still waits for buffers.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Gives up the queue, and a frame that still waits for buffers.
    pub(crate) fn give_up(&mut self, tally: &mut Tally) {
        if self.waiting.take().is_some() {
            tally.count(Counter::RxStopped);
        }
    }

    /// Receives up to [`BATCH`] frames.
    pub(crate) fn run(&mut self, pass: &mut Pass<'_>) -> Result<Next, BrokenRing> {
        self.ring.suppress_doorbells(pass.memory)?;
        let mut storage = std::mem::take(&mut self.storage);
        let result = self.batch(&mut IoVecs::new(&mut storage), pass);
        self.storage = storage;
        // Guest memory may be another one in the next batch: the chains that are left are looked up again then.
        self.ring.put_back(self.chains.len() as u16);
        self.chains.clear();
        self.capacity = 0;
        let next = result.inspect_err(|BrokenRing| self.give_up(pass.tally))?;
        pass.interrupt(&mut self.ring)?;
        Ok(next)
    }

    fn batch<'m>(&mut self, iovecs: &mut IoVecs<'_, 'm>, pass: &mut Pass<'m>) -> Result<Next, BrokenRing> {
        let filter = pass.state.filter();
        let (mut longest, mut failures) = (0, 0);
        for _ in 0..BATCH {
            let frame = match self.waiting {
                Some(frame) => frame,
                None => {
                    if let Some(wait) = pass.limits.receive.limited_for() {
                        pass.tally.count(Counter::RxRateWaits);
                        return Ok(Next::Limited(wait));
                    }
                    let shortage = self.prepare(self.prepared, iovecs, pass)?;
                    if self.chains.is_empty() {
                        match shortage {
                            Some(Shortage::Empty) if !self.ring.expect_doorbell(pass.memory)? => {
                                return Ok(Next::Doorbell);
                            }
                            _ => continue,
                        }
                    }
                    match self.read(iovecs, pass) {
                        Ok(frame) => frame,
                        Err(Failure::NoFrame) => {
                            self.adapt(longest);
                            return Ok(Next::Frame);
                        }
                        Err(failure) => {
                            pass.tally.count(Counter::RxBackendErrors);
                            failures += 1;
                            if failure == Failure::Frame && failures < BATCH {
                                continue;
                            }
                            // A backend that keeps failing stays readable, so waiting for a frame would return at once.
                            self.ring.expect_doorbell(pass.memory)?;
                            return Ok(Next::Doorbell);
                        }
                    }
                }
            };
            longest = longest.max(frame.len);
            // It waits until it has been dealt with: what cannot be finished must not be forgotten.
            self.waiting = Some(frame);
            match self.place(frame, iovecs, pass)? {
                Placed::Whole => self.deliver(frame.len, &filter, iovecs, pass)?,
                Placed::No => pass.tally.count(Counter::RxTooLong),
                Placed::Waits if self.ring.expect_doorbell(pass.memory)? => continue,
                Placed::Waits => return Ok(Next::Doorbell),
            }
            self.waiting = None;
        }
        self.adapt(longest);
        Ok(Next::More)
    }

    /// Prepares for frames as long as those of this batch.
    fn adapt(&mut self, longest: usize) {
        if longest != 0 {
            self.prepared = longest.max(MIN_PREPARED);
        }
    }

    /// Looks up chains until they hold `bytes`, or as many as one frame may use.
    fn prepare<'m>(
        &mut self,
        bytes: usize,
        iovecs: &mut IoVecs<'_, 'm>,
        pass: &mut Pass<'m>,
    ) -> Result<Option<Shortage>, BrokenRing> {
        while self.capacity < bytes && (self.mergeable || self.chains.is_empty()) {
            let Some(chain) = self.ring.next(pass.memory)? else { return Ok(Some(Shortage::Empty)) };
            let head = chain.head_index();
            match iovecs.append(pass.memory, chain, Permissions::Write) {
                // The header is never divided (`virtio 1.4 §5.1.6.3.1`).
                Ok(extent) if extent.bytes >= HEADER => {
                    self.capacity += extent.bytes;
                    self.chains.push_back(Prepared { head, extent });
                }
                refused => {
                    iovecs.remove_back(refused.map_or(0, |extent| extent.segments));
                    if self.chains.is_empty() {
                        pass.tally.count(Counter::RxBadChains);
                        self.ring.give_back(pass.memory, &[Used { head, len: 0 }])?;
                    } else {
                        // Chains are put back from the end: it has to wait until it is the first.
                        self.ring.put_back(1);
                    }
                    return Ok(Some(Shortage::Unusable));
                }
            }
        }
        Ok(None)
    }

    fn read(&mut self, iovecs: &mut IoVecs<'_, '_>, pass: &Pass<'_>) -> Result<Frame, Failure> {
        match iovecs.receive(pass.backend.as_fd(), self.spill.bytes()) {
            Ok(0) => Err(Failure::Backend),
            Ok(len) => Ok(Frame { len, placed: self.capacity.min(len) }),
            Err(error) => Err(failure(&error)),
        }
    }

    /// Moves what exceeded the prepared chains into further ones.
    fn place<'m>(
        &mut self,
        frame: Frame,
        iovecs: &mut IoVecs<'_, 'm>,
        pass: &mut Pass<'m>,
    ) -> Result<Placed, BrokenRing> {
        if frame.placed == frame.len && frame.len <= self.capacity {
            return Ok(Placed::Whole);
        }
        // Long frames come in rows.
        self.prepared = MAX_READ;
        let shortage = self.prepare(frame.len, iovecs, pass)?;
        if frame.len <= self.capacity {
            iovecs.write_at(frame.placed, &self.spill.bytes()[..frame.len - frame.placed]);
            return Ok(Placed::Whole);
        }
        let more_may_come = self.mergeable && self.chains.len() < usize::from(self.ring.size());
        Ok(if more_may_come && matches!(shortage, Some(Shortage::Empty)) { Placed::Waits } else { Placed::No })
    }

    /// Gives the driver the frame of `len` bytes, with its header, that is in the first chains.
    fn deliver(
        &mut self,
        len: usize,
        filter: &Filter,
        iovecs: &mut IoVecs<'_, '_>,
        pass: &mut Pass<'_>,
    ) -> Result<(), BrokenRing> {
        if let Err(reason) = check(len, filter, iovecs, pass) {
            pass.tally.count(reason);
            return Ok(());
        }
        let (mut rest, mut segments) = (len, 0);
        self.used.clear();
        while rest > 0
            && let Some(Prepared { head, extent }) = self.chains.pop_front()
        {
            let part = rest.min(extent.bytes);
            rest -= part;
            segments += extent.segments;
            self.capacity -= extent.bytes;
            self.used.push(Used { head, len: part as u32 });
        }
        if !self.checksum {
            // The tap may say that it has verified a checksum; a driver that did not ask must not see that.
            iovecs.write_at(FLAGS, &[0]);
        }
        iovecs.write_at(NUM_BUFFERS, &(self.used.len() as u16).to_le_bytes());
        iovecs.consume(segments);
        self.ring.give_back(pass.memory, &self.used)?;
        pass.limits.receive.take(len - HEADER);
        pass.tally.count(Counter::RxFrames);
        pass.tally.add(Counter::RxBytes, (len - HEADER) as u64);
        Ok(())
    }
}

/// Why no frame was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// There is none now.
    NoFrame,
    /// There was one, and it is lost: a tap takes it from its queue before it finds that it cannot be described by a
    /// header (`EINVAL`). The next may be better.
    Frame,
    /// The backend is gone.
    Backend,
}

fn failure(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::ENOBUFS) => Failure::NoFrame,
        Some(libc::EBADFD | libc::EBADF | libc::ENODEV | libc::ENXIO | libc::EIO) => Failure::Backend,
        _ => Failure::Frame,
    }
}

/// Whether a frame has found its place.
enum Placed {
    Whole,
    Waits,
    No,
}

/// Whether the driver may and wants to see a frame, or the reason why not.
fn check(len: usize, filter: &Filter, iovecs: &IoVecs<'_, '_>, pass: &Pass<'_>) -> Result<(), Counter> {
    let frame_len = len.saturating_sub(HEADER);
    if frame_len < ETHERNET_HEADER {
        return Err(Counter::RxTooShort);
    }
    if !pass.state.link_up() {
        return Err(Counter::RxLinkDown);
    }
    if !filter.wants_all() {
        let mut head = [0; HEAD];
        iovecs.read_at(HEADER, &mut head[..HEAD.min(frame_len)]);
        if !filter.wants(&head) {
            return Err(Counter::RxFiltered);
        }
    }
    Ok(())
}
