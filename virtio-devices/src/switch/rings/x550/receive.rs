//! A receive ring of an X550.

use std::cell::Cell;
use std::sync::Arc;

use x550::descriptor::{Received, receive_buffer};
use x550::{Counter as Statistic, Direction, Place, ReceiveQueue, VfCounter};

use super::{DESCRIPTOR, Whole, address, publish, read, write};
use crate::DmaView;
use crate::frames::net_protocol::ethernet::is_multicast;
use crate::frames::net_protocol::header::{FLAGS, HEADER};
use crate::net::{Counter, Tally};
use crate::queue::ring::BrokenRing;
use crate::switch::frame::body::Body;
use crate::switch::rings::supply::is_enough;
use crate::switch::rings::{Lack, Supply};
use crate::switch::steering::Steering;
use crate::x550_sriov::X550Handle;

/// The two addresses of a frame, after which a VLAN tag may follow.
const ADDRESSES: usize = 12;
/// The Ethernet type of a VLAN tag that the NIC removes.
const VLAN_TAG: [u8; 2] = [0x81, 0];
/// The length of a tag.
const TAG: usize = 4;
/// RXE of a descriptor's errors: the frame is not usable (`Extended Error`).
const RECEIVE_ERROR: u64 = 1 << 29;
/// `VIRTIO_NET_HDR_F_DATA_VALID`: the checksum was checked.
const DATA_VALID: u8 = virtio_bindings::virtio_net::VIRTIO_NET_HDR_F_DATA_VALID as u8;

/// A receive queue of an X550.
pub(crate) struct X550Receive {
    registers: X550Handle,
    /// The queue of the NIC, 0 to 127.
    queue: u16,
    steering: Arc<Steering>,
    /// True if the driver must be notified of frames.
    has_news: Cell<bool>,
}

/// The buffers of a receive queue that is locked for a run.
pub(crate) struct X550Room<'r, 'm> {
    receive: &'r X550Receive,
    memory: &'m DmaView,
    /// The frame that is written.
    whole: &'r mut Whole,
    /// The registers at the start of the run.
    queue: ReceiveQueue,
    /// The number of descriptors in the ring.
    count: u32,
    /// The next descriptor to use, and how many the driver has provided from there.
    head: u32,
    available: u32,
    frames: u64,
    bytes: u64,
    groups: u64,
    broadcasts: u64,
}

impl X550Receive {
    /// The receive queue with this number of the NIC.
    pub(crate) fn new(registers: X550Handle, queue: u16, steering: Arc<Steering>) -> Self {
        Self { registers, queue, steering, has_news: Cell::new(false) }
    }

    /// Begins a run; `None` if the queue is disabled.
    pub(crate) fn room<'r, 'm>(&'r self, memory: &'m DmaView, whole: &'r mut Whole) -> Option<X550Room<'r, 'm>> {
        let queue = self.registers.lock().receive_queue(self.queue);
        let count = queue.len / DESCRIPTOR as u32;
        let (head, available) = (queue.head, queue.available());
        let [frames, bytes, groups, broadcasts] = [0; 4];
        let room =
            X550Room { receive: self, memory, whole, queue, count, head, available, frames, bytes, groups, broadcasts };
        queue.enabled.then_some(room)
    }

    /// Sends the interrupt for the frames since the last call. Returns true if it was sent.
    pub(crate) fn signal(&self) -> bool {
        self.has_news.take() && self.registers.queue_event(Direction::Receive, self.queue)
    }

    /// True if the driver has provided buffers.
    pub(crate) fn has_buffers(&self) -> bool {
        self.registers.lock().receive_queue(self.queue).available() != 0
    }
}

impl X550Room<'_, '_> {
    /// Writes a frame; see [`Room::fill`](crate::switch::rings::Room::fill). `header` says if its checksums are
    /// known to be correct.
    pub(crate) fn fill(
        &mut self,
        header: &[u8; HEADER],
        front: &[u8],
        (body, rest): (&Body<'_, '_, '_>, usize),
        supply: &mut Supply,
        tally: &mut Tally,
    ) -> Result<Option<Lack>, BrokenRing> {
        let is_valid = header[FLAGS] & DATA_VALID != 0;
        if rest == 0 && !(self.queue.strips_vlan && has_tag(front)) {
            return self.fill_whole(is_valid, front, None, supply, tally);
        }
        let mut whole = std::mem::take(self.whole);
        whole.clear();
        whole.append(front);
        body.read(whole.extend(rest));
        let vlan = if self.queue.strips_vlan { strip(&mut whole) } else { None };
        let filled = self.fill_whole(is_valid, &whole, vlan, supply, tally);
        *self.whole = whole;
        filled
    }

    fn fill_whole(
        &mut self,
        is_valid: bool,
        frame: &[u8],
        vlan: Option<u16>,
        supply: &mut Supply,
        tally: &mut Tally,
    ) -> Result<Option<Lack>, BrokenRing> {
        let is_broadcast = frame.starts_with(&[0xff; 6]);
        let is_group = frame.first_chunk().is_some_and(is_multicast) && !is_broadcast;
        let len = frame.len() + if vlan.is_some() { TAG } else { 0 };
        let size = usize::try_from(self.queue.buffer).unwrap_or(0);
        let too_long = self.queue.longest.is_some_and(|longest| len > usize::from(longest));
        let Some(needed) = frame.len().max(1).div_ceil(size.max(1)).try_into().ok().filter(|_| size != 0 && !too_long)
        else {
            return Ok(Some(Lack::Length));
        };
        // One descriptor always stays with the driver.
        if needed >= self.count {
            return Ok(Some(Lack::Length));
        }
        if needed > self.available {
            return Ok(Some(Lack::Buffers));
        }
        let size_of_ring = u16::try_from(self.count).unwrap_or(u16::MAX);
        if supply.congested.is_some() && is_enough(u16::try_from(self.available).unwrap_or(u16::MAX), size_of_ring) {
            supply.congested = None;
        }
        let checked = is_valid.then_some(true);
        let (rss_hash, rss_type) = self.receive.steering.hash_of(frame);
        for (n, part) in (1..=needed).zip(frame.chunks(size)) {
            let part_len = u16::try_from(part.len()).unwrap_or(u16::MAX);
            let ends = n == needed;
            let result = Received {
                len: part_len,
                ends,
                rss_hash,
                rss_type,
                vlan: vlan.filter(|_| ends),
                ..Received::default()
            };
            let result = if ends { Received { l4_checked: checked, ip_checked: checked, ..result } } else { result };
            if !self.write(part, result)? {
                tally.count(Counter::RxBadChains);
            }
        }
        self.frames += 1;
        self.bytes += len as u64;
        self.groups += u64::from(is_group);
        self.broadcasts += u64::from(is_broadcast);
        Ok(None)
    }

    /// Writes a part of a frame to the next buffer, and its result over the descriptor. Returns false if there is no
    /// memory for the buffer: the driver drops a frame with an error.
    fn write(&mut self, part: &[u8], result: Received) -> Result<bool, BrokenRing> {
        let at = address(self.queue.base, self.head);
        let mut descriptor = [0; DESCRIPTOR];
        if !read(self.memory, at, &mut descriptor) {
            return Err(BrokenRing);
        }
        let written = write(self.memory, receive_buffer(&descriptor), part);
        let bits = u128::from_le_bytes(result.to_bytes());
        let error = if written { 0 } else { RECEIVE_ERROR };
        let (low, high) = (bits as u64, (bits >> 64) as u64 | error);
        publish(self.memory, at, low.to_le())?;
        // The driver looks at the upper half.
        publish(self.memory, at.wrapping_add(8), high.to_le())?;
        self.head = (self.head + 1) % self.count.max(1);
        self.available -= 1;
        Ok(written)
    }

    /// True if the driver has provided buffers since the last look. They are used from now on.
    pub(crate) fn look_for_more(&mut self) -> bool {
        let now = self.receive.registers.lock().receive_queue(self.receive.queue);
        // A queue that was disabled or moved in the meantime is not read again.
        if !now.enabled || now.tail == self.queue.tail || now.tail >= self.count || now.head != self.queue.head {
            return false;
        }
        self.queue.tail = now.tail;
        self.available = (now.tail + self.count - self.head) % self.count;
        true
    }

    /// Ends the run: moves the head, and counts.
    ///
    /// # Errors
    ///
    /// Fails if the ring was found to be invalid.
    pub(crate) fn finish(self, broken: bool) -> Result<(), BrokenRing> {
        if self.head != self.queue.head {
            let number = self.receive.queue;
            let mut nic = self.receive.registers.lock();
            nic.advance_head(Direction::Receive, number, self.queue.head, self.head);
            nic.count(Statistic::FramesReceived, self.frames);
            nic.count(Statistic::BytesReceived, self.bytes);
            nic.count(Statistic::GroupsReceived, self.groups);
            nic.count(Statistic::BroadcastsReceived, self.broadcasts);
            nic.count_queue(Direction::Receive, number, self.frames, self.bytes);
            if let (Place::Vf(index), _) = nic.owner(number) {
                nic.count_vf(index, VfCounter::FramesReceived, self.frames);
                nic.count_vf(index, VfCounter::BytesReceived, self.bytes);
                nic.count_vf(index, VfCounter::GroupsReceived, self.groups);
            }
            self.receive.has_news.set(true);
        }
        if broken { Err(BrokenRing) } else { Ok(()) }
    }
}

/// True if a frame has a VLAN tag.
fn has_tag(frame: &[u8]) -> bool {
    frame.get(ADDRESSES..).is_some_and(|rest| rest.starts_with(&VLAN_TAG))
}

/// Removes the VLAN tag of a frame that has one, and returns it.
fn strip(frame: &mut Whole) -> Option<u16> {
    let [.., high, low] = *frame.get(ADDRESSES..)?.first_chunk::<TAG>()?;
    if !has_tag(frame) {
        return None;
    }
    frame.copy_within(ADDRESSES + TAG.., ADDRESSES);
    frame.truncate(frame.len() - TAG);
    Some(u16::from_be_bytes([high, low]))
}
