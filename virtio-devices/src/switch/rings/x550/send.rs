//! A transmit ring of an X550.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use x550::descriptor::{Context, Data, TRANSMIT_DONE, TRANSMIT_STATUS, Transmit};
use x550::{Counter as Statistic, Direction, Place, TransmitQueue, VfCounter};

use super::packet::{self, Parts};
use super::{DESCRIPTOR, Whole, address, publish, read};
use crate::DmaView;
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::ethernet::ETHERNET_HEADER;
use crate::frames::policy;
use crate::frames::walk;
use crate::net::{Counter, Tally};
use crate::queue::ring::BrokenRing;
use crate::switch::frame::body::Body;
use crate::switch::polling::ENOUGH;
use crate::switch::rings::{Ended, Packet, SendRing, Taken};
use crate::switch::source::End;
use crate::x550_sriov::X550Handle;

/// A transmit queue of an X550.
pub(crate) struct X550Send {
    registers: X550Handle,
    /// The queue of the NIC, 0 to 127.
    queue: u16,
    /// True while the rest of a frame that was dropped is skipped, up to its last descriptor.
    skips: bool,
    /// Head and tail at which the driver has provided a part of a frame. It is not read again before the tail moves.
    incomplete: Option<(u32, u32)>,
    /// The descriptors that are done and for which the driver wants a report.
    done: Vec<u32>,
}

/// A transmit queue that is locked for a batch.
pub(crate) struct X550Tx<'b, 'm> {
    registers: &'b X550Handle,
    number: u16,
    skips: &'b mut bool,
    incomplete: &'b mut Option<(u32, u32)>,
    done: &'b mut Vec<u32>,
    /// The number of [`Self::done`] before the present frame.
    done_before: usize,
    memory: &'m DmaView,
    /// The frame that was taken.
    whole: &'b mut Whole,
    /// The number of its first bytes that were inspected.
    inspected: usize,
    /// The registers at the start of the batch.
    queue: TransmitQueue,
    /// The number of descriptors in the ring.
    count: u32,
    /// The next descriptor to read, and how many there are from there.
    next: u32,
    left: u32,
    /// The same at the beginning of the taken frame.
    first: (u32, u32),
    /// Frames that are done, sent or not.
    done_frames: usize,
    frames: u64,
    bytes: u64,
    spoofed: u64,
}

/// The descriptors of a frame.
enum Walked {
    /// The ring ends before the frame does.
    Incomplete,
    /// A frame, which is in the buffer.
    Frame(Data),
    /// A frame that must be dropped.
    Bad(Counter),
}

impl X550Send {
    /// The transmit queue with this number of the NIC.
    pub(crate) fn new(registers: X550Handle, queue: u16) -> Self {
        Self { registers, queue, skips: false, incomplete: None, done: Vec::new() }
    }

    /// Locks the queue for a batch; `None` if it is disabled.
    pub(crate) fn batch<'b, 'm>(&'b mut self, memory: &'m DmaView, whole: &'b mut Whole) -> Option<X550Tx<'b, 'm>> {
        let Self { registers, queue: number, skips, incomplete, done } = self;
        let queue = registers.lock().transmit_queue(*number);
        if !queue.enabled {
            (*skips, *incomplete) = (false, None);
            return None;
        }
        if *incomplete == Some((queue.head, queue.tail)) {
            return None;
        }
        *incomplete = None;
        done.clear();
        let (next, left, count) = (queue.head, queue.available(), queue.len / DESCRIPTOR as u32);
        Some(X550Tx {
            registers,
            number: *number,
            skips,
            incomplete,
            done,
            done_before: 0,
            memory,
            whole,
            inspected: 0,
            queue,
            count,
            next,
            left,
            first: (next, left),
            done_frames: 0,
            frames: 0,
            bytes: 0,
            spoofed: 0,
        })
    }
}

impl X550Tx<'_, '_> {
    /// Reads the descriptors of the next frame, and its bytes. Returns the number of descriptors, too.
    fn walk(&mut self) -> Result<(Walked, usize), BrokenRing> {
        self.whole.clear();
        let most = walk::most(self.memory);
        let (mut first, mut bad, mut walked) = (None, None, 0);
        loop {
            if self.left == 0 {
                // A frame that fills the ring never ends.
                let is_endless = walked != 0 && walked + 1 >= self.count as usize;
                let outcome = if is_endless { Walked::Bad(Counter::TxBadChains) } else { Walked::Incomplete };
                return Ok((outcome, walked));
            }
            if walked == most {
                *self.skips = true;
                return Ok((Walked::Bad(Counter::TxBadChains), walked));
            }
            walked += 1;
            let (index, mut bytes) = (self.next, [0; DESCRIPTOR]);
            if !read(self.memory, address(self.queue.base, index), &mut bytes) {
                return Err(BrokenRing);
            }
            self.next = (index + 1) % self.count.max(1);
            self.left -= 1;
            let data = match Transmit::parse(&bytes) {
                Transmit::Data(data) => data,
                Transmit::Context(context) => {
                    self.set_context(context);
                    continue;
                }
                Transmit::Other => continue,
            };
            if data.reports {
                self.done.push(index);
            }
            bad = bad.or_else(|| self.append(&data));
            let first = *first.get_or_insert(data);
            if data.ends {
                let skipped = std::mem::take(self.skips);
                let bad = bad.or(skipped.then_some(Counter::TxBadChains));
                return Ok((bad.map_or(Walked::Frame(first), Walked::Bad), walked));
            }
        }
    }

    /// The descriptors of the frames that are done.
    fn descriptors_done(&self) -> u32 {
        let count = self.count.max(1);
        (self.first.0 % count + count - self.queue.head % count) % count
    }

    fn set_context(&self, context: Context) {
        self.registers.lock().set_context(self.number, context);
    }

    /// Appends the buffer of a descriptor, or returns the reason why its frame is dropped.
    fn append(&mut self, data: &Data) -> Option<Counter> {
        let len = usize::from(data.len);
        if self.whole.len() + len > MAX_FRAME {
            return Some(Counter::TxTooLong);
        }
        let read = read(self.memory, data.address, self.whole.extend(len));
        (!read).then_some(Counter::TxBadChains)
    }

    fn inspect(&mut self, data: &Data) -> Result<Packet, Counter> {
        if self.whole.len() < ETHERNET_HEADER {
            return Err(Counter::TxTooShort);
        }
        let context = self.registers.lock().context(self.number, data.context.unwrap_or(0));
        let header = packet::finish(self.whole, &Parts { data, context })?;
        let (mut front, front_len) = ([0; policy::HEAD], self.whole.len().min(policy::HEAD));
        front.iter_mut().zip(self.whole.iter()).for_each(|(to, from)| *to = *from);
        self.inspected = front_len;
        Ok(Packet { header, front, front_len })
    }
}

impl SendRing for X550Tx<'_, '_> {
    fn take(&mut self) -> Result<Option<Taken>, BrokenRing> {
        (self.first, self.done_before) = ((self.next, self.left), self.done.len());
        let (walked, descriptors) = self.walk()?;
        let price = walk::price(descriptors, self.whole.len(), self.memory);
        self.inspected = 0;
        let packet = match walked {
            Walked::Incomplete => {
                self.put_back();
                if descriptors != 0 {
                    *self.incomplete = Some((self.first.0, self.queue.tail));
                }
                return Ok(None);
            }
            Walked::Bad(reason) => Err(reason),
            Walked::Frame(data) => self.inspect(&data),
        };
        Ok(Some(Taken { price, len: self.whole.len(), packet }))
    }

    fn body(&self) -> Body<'_, '_, '_> {
        Body::Private(self.whole.get(self.inspected..).unwrap_or_default())
    }

    fn send(&mut self, fd: BorrowedFd<'_>, front: &[u8]) -> io::Result<()> {
        let rest = self.whole.get(self.inspected..).unwrap_or_default();
        rustix::io::writev(fd, &[IoSlice::new(front), IoSlice::new(rest)])?;
        Ok(())
    }

    fn put_back(&mut self) {
        (self.next, self.left) = self.first;
        self.done.truncate(self.done_before);
    }

    fn complete(&mut self, dropped: Option<Counter>) {
        self.done_frames += 1;
        match dropped {
            None => {
                self.frames += 1;
                self.bytes += self.whole.len() as u64;
            }
            Some(Counter::TxSpoofedMac | Counter::TxBadVlan) => self.spoofed += 1,
            Some(_) => {}
        }
        // A frame that is put back later begins here.
        (self.first, self.done_before) = ((self.next, self.left), self.done.len());
    }

    fn completed(&self) -> usize {
        // Frames are gathered until there are enough of them. In a small ring, or with many descriptors for each, so
        // many would not fit: a quarter of the ring counts as enough.
        let share = 4 * ENOUGH.saturating_mul(self.descriptors_done()) / self.count.max(1);
        if self.done_frames > 1 { self.done_frames.max(share as usize) } else { self.done_frames }
    }

    fn finish(self, ended: Result<Ended, BrokenRing>, tally: &mut Tally) -> Result<End, BrokenRing> {
        let head = self.first.0;
        if head != self.queue.head {
            let mut written = Ok(());
            for index in self.done.iter() {
                let at = address(self.queue.base, *index).wrapping_add(TRANSMIT_STATUS);
                written = written.and_then(|()| publish(self.memory, at, TRANSMIT_DONE.to_le()));
            }
            if let Some(at) = self.queue.head_write_back {
                written = written.and_then(|()| publish(self.memory, at, head.to_le()));
            }
            let mut nic = self.registers.lock();
            nic.advance_head(Direction::Transmit, self.number, self.queue.head, head);
            nic.count(Statistic::FramesSent, self.frames);
            nic.count(Statistic::BytesSent, self.bytes);
            nic.count(Statistic::Spoofed, self.spoofed);
            nic.count_queue(Direction::Transmit, self.number, self.frames, self.bytes);
            if let (Place::Vf(index), _) = nic.owner(self.number) {
                nic.count_vf(index, VfCounter::FramesSent, self.frames);
                nic.count_vf(index, VfCounter::BytesSent, self.bytes);
            }
            drop(nic);
            let descriptors = self.descriptors_done();
            if (!self.done.is_empty() || self.queue.head_write_back.is_some())
                && self.registers.frames_sent(self.number, descriptors, self.bytes)
            {
                tally.count(Counter::Interrupts);
            }
            written?;
        }
        let Ended { end, .. } = ended?;
        if matches!(end, End::Limited(_)) {
            tally.count(Counter::TxRateWaits);
        }
        Ok(end)
    }
}
