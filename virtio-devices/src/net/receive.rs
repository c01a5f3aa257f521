//! Receive queues: frames from the tap to the driver (`virtio 1.4 §5.1.6.3`, §5.1.6.4).
//!
//! A frame is read straight into the driver's buffers, before its length is known. Most frames are short, so buffers
//! are prepared for the recent maximum length; the excess of a longer frame goes to a spill area and is copied into
//! further buffers.
//!
//! The guest sees its buffers at all times, so a frame that the host may refuse is read into the spill area alone
//! ([`Destination::Apart`]), and copied from there once it is accepted. A frame that only the driver's own filter
//! refuses is no secret from that driver: it can switch the filter off. Such a frame is read straight, and wiped out.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_MRG_RXBUF};
use vm_memory::Permissions;

use super::counters::{Counter, Tally};
use super::enforced::Enforced;
use super::filter::{ETHERNET_HEADER, Filter, HEAD};
use super::pass::{BATCH, Next, Pass};
use crate::frames::net_protocol::MAX_READ;
use crate::frames::net_protocol::header::{self, FLAGS, HEADER, NUM_BUFFERS};
use crate::frames::policy::{self, Head, Policy};
use crate::frames::spill::Spill;
use crate::frames::walk;
use crate::queue::iovecs::{Bounds, Extent, IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Ring, Used};
use crate::transport::features::has;

/// The fewest bytes that buffers are prepared for: a header and a usual frame.
const MIN_PREPARED: usize = 2048;

/// A receive queue.
pub(crate) struct Receive<'q> {
    ring: Ring<'q>,
    mergeable: bool,
    checksum: bool,
    /// The bytes of buffers that are prepared before a frame is read.
    prepared: usize,
    /// The area for bytes beyond the prepared buffers.
    spill: Spill,
    /// A frame that waits for further buffers.
    waiting: Option<Frame>,
    storage: Storage,
    chains: VecDeque<Prepared>,
    /// The bytes of the prepared chains.
    capacity: usize,
    used: Vec<Used>,
    /// The descriptors that were read for the present frame.
    walked: usize,
    /// The cost of the batch, in bytes that are copied in the same time.
    spent: usize,
}

/// A chain that the driver made available and that no frame has been written to yet.
#[derive(Debug, Clone, Copy)]
struct Prepared {
    head: u16,
    extent: Extent,
}

/// The destination of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Destination {
    /// The driver's buffers: only the driver's own filter can refuse the frame.
    Straight,
    /// The spill area: the guest may never see it.
    Apart,
}

/// A frame, with its header, that has been read.
#[derive(Debug, Clone, Copy)]
struct Frame {
    len: usize,
    /// The bytes that are in the buffers. The rest is in the spill area.
    placed: usize,
    /// The offset of the rest in the spill area.
    start: usize,
    /// The packets that the frame becomes, if that matters to a limit.
    packets: u32,
    /// The number of the policy that has accepted it.
    policy: u64,
}

/// The reason why no further chain can be prepared.
enum Shortage {
    /// The driver must provide more.
    Empty,
    /// The driver's next buffers cannot be used, or not together with those before.
    Unusable,
}

impl<'q> Receive<'q> {
    /// Puts frames into `ring`, through `spill` if they exceed its buffers.
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
            walked: 0,
            spent: 0,
        }
    }

    /// The spill area, after the last run of the queue.
    pub(crate) fn into_spill(self) -> Spill {
        self.spill
    }

    /// True if a frame that was read still waits for buffers.
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
        // Guest memory may change before the next batch: the remaining chains are looked up again then.
        self.ring.put_back(self.chains.len() as u16);
        self.chains.clear();
        self.capacity = 0;
        let next = result.inspect_err(|BrokenRing| self.give_up(pass.tally))?;
        pass.interrupt(&mut self.ring)?;
        Ok(next)
    }

    fn batch<'m>(&mut self, iovecs: &mut IoVecs<'_, 'm>, pass: &mut Pass<'m>) -> Result<Next, BrokenRing> {
        let (filter, policy) = (pass.state.filter(), pass.policy.load());
        let (mut longest, mut failures) = (0, 0);
        self.spent = 0;
        for _ in 0..BATCH {
            if self.spent >= walk::TAP_BATCH_COST {
                break;
            }
            self.walked = 0;
            if !pass.state.link_up() && self.waiting.take().is_some() {
                pass.tally.count(Counter::RxLinkDown);
            }
            // The previous policy had accepted it.
            if self.waiting.take_if(|frame| frame.policy != policy.number).is_some() {
                pass.tally.count(Counter::RxStopped);
            }
            let frame = match self.waiting {
                Some(frame) => frame,
                None => match self.fetch(&filter, &policy, &mut failures, iovecs, pass)? {
                    Fetched::Frame(frame) => frame,
                    Fetched::Nothing => continue,
                    Fetched::Wait(Next::Frame) => {
                        self.adapt(longest);
                        return Ok(Next::Frame);
                    }
                    Fetched::Wait(next) => return Ok(next),
                },
            };
            longest = longest.max(frame.len);
            self.spent += frame.len;
            // It waits until it has been handled: a frame that cannot be finished must not be lost.
            self.waiting = Some(frame);
            match self.place(frame, iovecs, pass)? {
                Placed::Whole => {
                    self.deliver(frame.len, iovecs, pass)?;
                    policy.receive.take(frame.len - HEADER, frame.packets);
                }
                Placed::No => pass.tally.count(Counter::RxTooLong),
                Placed::Waits if self.ring.expect_doorbell(pass.memory)? => continue,
                Placed::Waits => return Ok(Next::Doorbell),
            }
            self.waiting = None;
        }
        self.adapt(longest);
        Ok(Next::More)
    }

    /// Reads a frame that policy and filter accept. `failures` counts the failed reads of this batch.
    fn fetch<'m>(
        &mut self,
        filter: &Filter,
        policy: &Enforced,
        failures: &mut usize,
        iovecs: &mut IoVecs<'_, 'm>,
        pass: &mut Pass<'m>,
    ) -> Result<Fetched, BrokenRing> {
        let link_up = pass.state.link_up();
        // Bytes that the guest could change in its memory decide about what it may see, or about costs.
        let apart = policy.may_hide || policy.receive.counts_packets();
        let way = if link_up && !apart { Destination::Straight } else { Destination::Apart };
        // While the link is down, no buffer is needed, and no limit applies.
        if link_up {
            if let Some(wait) = policy.receive.limited_for() {
                pass.tally.count(Counter::RxRateWaits);
                return Ok(Fetched::Wait(Next::Limited(wait)));
            }
            let shortage = self.prepare(self.prepared, iovecs, pass)?;
            if self.chains.is_empty() {
                return Ok(match shortage {
                    Some(Shortage::Empty) if !self.ring.expect_doorbell(pass.memory)? => Fetched::Wait(Next::Doorbell),
                    _ => Fetched::Nothing,
                });
            }
        }
        match self.read(way, iovecs, pass) {
            Ok(frame) => match self.check(frame, filter, policy, iovecs, pass) {
                Ok(frame) => Ok(Fetched::Frame(frame)),
                Err(reason) => {
                    pass.tally.count(reason);
                    iovecs.zero_front(frame.placed);
                    Ok(Fetched::Nothing)
                }
            },
            Err(Failure::NoFrame) => Ok(Fetched::Wait(Next::Frame)),
            Err(failure) => {
                pass.tally.count(Counter::RxBackendErrors);
                *failures += 1;
                if failure == Failure::Frame && *failures < BATCH {
                    return Ok(Fetched::Nothing);
                }
                // A backend that keeps failing stays readable, so waiting for a frame would return at once.
                self.ring.expect_doorbell(pass.memory)?;
                Ok(Fetched::Wait(Next::Doorbell))
            }
        }
    }

    /// Prepares for frames as long as those of this batch.
    fn adapt(&mut self, longest: usize) {
        if longest != 0 {
            self.prepared = longest.max(MIN_PREPARED);
        }
    }

    /// Looks up chains until they hold `bytes`, or as many as one frame may use. A ring is invalid if a frame needs
    /// more descriptors than [may be read](walk::most).
    fn prepare<'m>(
        &mut self,
        bytes: usize,
        iovecs: &mut IoVecs<'_, 'm>,
        pass: &mut Pass<'m>,
    ) -> Result<Option<Shortage>, BrokenRing> {
        while self.capacity < bytes && (self.mergeable || self.chains.is_empty()) {
            let Some(chain) = self.ring.next(pass.memory)? else { return Ok(Some(Shortage::Empty)) };
            let head = chain.head_index();
            let left = walk::most(pass.memory).saturating_sub(self.walked);
            let bounds = Bounds { pieces: left, ..walk::bounds(pass.memory) };
            let appended = iovecs.append_within(pass.memory, chain, Permissions::Write, bounds);
            let walked = iovecs.take_walked();
            self.walked += walked;
            self.spent += walk::price(walked, 0, pass.memory);
            if walked > left {
                return Err(BrokenRing);
            }
            match appended {
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
                        // Chains are put back from the end: this one must wait until it is the first.
                        self.ring.put_back(1);
                    }
                    return Ok(Some(Shortage::Unusable));
                }
            }
        }
        Ok(None)
    }

    fn read(&mut self, way: Destination, iovecs: &mut IoVecs<'_, '_>, pass: &Pass<'_>) -> Result<Frame, Failure> {
        let (fd, spill) = (pass.backend.as_fd(), self.spill.bytes());
        let (read, room) = match way {
            Destination::Straight => (iovecs.receive(fd, spill), self.capacity),
            Destination::Apart => (rustix::io::read(fd, spill).map_err(io::Error::from), 0),
        };
        match read {
            Ok(0) => Err(Failure::Backend),
            Ok(len) => Ok(Frame { len, placed: room.min(len), start: 0, packets: 1, policy: 0 }),
            Err(error) => Err(failure(&error)),
        }
    }

    /// Checks the frame that has just been read, and returns it as the driver may see it, or the reason why it is
    /// dropped.
    fn check(
        &mut self,
        frame: Frame,
        filter: &Filter,
        policy: &Enforced,
        iovecs: &IoVecs<'_, '_>,
        pass: &Pass<'_>,
    ) -> Result<Frame, Counter> {
        if frame.len < HEADER + ETHERNET_HEADER {
            return Err(Counter::RxTooShort);
        }
        if !pass.state.link_up() {
            return Err(Counter::RxLinkDown);
        }
        let start = if policy.checks_received { self.police(frame.len, &policy.policy)? } else { 0 };
        let len = frame.len - start;
        let trusted = policy.policy.trusted;
        if !(trusted && filter.wants_all()) {
            let mut bytes = [0; HEADER + HEAD];
            let placed = frame.placed.min(bytes.len());
            iovecs.read_at(0, &mut bytes[..placed]);
            let rest = bytes.len().min(len) - placed;
            bytes[placed..placed + rest].copy_from_slice(&self.spill.bytes()[start..start + rest]);
            let mut head = [0; HEAD];
            head.copy_from_slice(&bytes[HEADER..]);
            let wanted = if trusted { filter.wants(&head) } else { filter.wants_untrusted(&head, &policy.policy) };
            if !wanted {
                return Err(Counter::RxFiltered);
            }
        }
        let packets = if frame.placed == 0 { self.packets(start, len - HEADER) } else { 1 };
        Ok(Frame { len, start, packets, policy: policy.number, ..frame })
    }

    /// The number of packets of a frame of `len` bytes whose header begins at `start` of the spill area.
    fn packets(&mut self, start: usize, len: usize) -> u32 {
        let header = self.spill.bytes().get(start..).and_then(<[u8]>::first_chunk);
        header.map_or(1, |header| header::packets(header, len))
    }

    /// Applies `policy` to the frame of `len` bytes, with its header, in the spill area. Returns the frame's new
    /// offset, as it may lose a tag, or the reason why it is dropped.
    fn police(&mut self, len: usize, policy: &Policy) -> Result<usize, Counter> {
        let bytes = &mut self.spill.bytes()[..len];
        let (header, frame) = bytes.split_at_mut(HEADER);
        let copied = frame.len().min(policy::HEAD);
        let new = Head::of(&frame[..copied]).and_then(|head| policy.egress(&head));
        let new = new.map_err(|_| Counter::RxVlanFiltered)?;
        let mut copy = [0; HEADER];
        copy.copy_from_slice(header);
        let header = policy::changed(copy, &new).map_err(|_| Counter::RxBackendErrors)?;
        // The part after the head stays in place: it may be long.
        let head = new.bytes();
        let start = copied.checked_sub(head.len()).ok_or(Counter::RxTooLong)?;
        frame[start..copied].copy_from_slice(head);
        bytes[start..start + HEADER].copy_from_slice(&header);
        Ok(start)
    }

    /// Moves the rest of the frame into the prepared chains, and into further ones.
    fn place<'m>(
        &mut self,
        frame: Frame,
        iovecs: &mut IoVecs<'_, 'm>,
        pass: &mut Pass<'m>,
    ) -> Result<Placed, BrokenRing> {
        if frame.placed == frame.len && frame.len <= self.capacity {
            return Ok(Placed::Whole);
        }
        if frame.len > self.prepared {
            // Long frames come in sequences.
            self.prepared = MAX_READ;
        }
        let shortage = self.prepare(frame.len, iovecs, pass)?;
        if frame.len <= self.capacity {
            let rest = frame.len - frame.placed;
            iovecs.write_at(frame.placed, &self.spill.bytes()[frame.start..frame.start + rest]);
            return Ok(Placed::Whole);
        }
        let more_may_come = self.mergeable && self.chains.len() < usize::from(self.ring.size());
        Ok(if more_may_come && matches!(shortage, Some(Shortage::Empty)) { Placed::Waits } else { Placed::No })
    }

    /// Delivers the frame of `len` bytes, with its header, that is in the first chains.
    fn deliver(&mut self, len: usize, iovecs: &mut IoVecs<'_, '_>, pass: &mut Pass<'_>) -> Result<(), BrokenRing> {
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
            // The tap may report a verified checksum; a driver without that offload must not see it.
            iovecs.write_at(FLAGS, &[0]);
        }
        iovecs.write_at(NUM_BUFFERS, &(self.used.len() as u16).to_le_bytes());
        iovecs.consume(segments);
        self.ring.give_back(pass.memory, &self.used)?;
        pass.tally.count(Counter::RxFrames);
        pass.tally.add(Counter::RxBytes, (len - HEADER) as u64);
        Ok(())
    }
}

/// The result of an attempt to read a frame.
enum Fetched {
    /// A frame that the driver may see.
    Frame(Frame),
    /// Nothing, but the next attempt may succeed.
    Nothing,
    /// Nothing, and an event to wait for.
    Wait(Next),
}

/// The reason why no frame was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// There is none now.
    NoFrame,
    /// There was one, and it is lost: a tap takes it from its queue before it finds that it cannot be described by a
    /// header (`EINVAL`). The next may be better.
    Frame,
    /// The backend is lost.
    Backend,
}

fn failure(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::ENOBUFS) => Failure::NoFrame,
        Some(libc::EBADFD | libc::EBADF | libc::ENODEV | libc::ENXIO | libc::EIO) => Failure::Backend,
        _ => Failure::Frame,
    }
}

/// The result of placing a frame.
enum Placed {
    Whole,
    Waits,
    No,
}
