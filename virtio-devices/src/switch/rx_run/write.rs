//! Writes frames to a driver's buffers, unchanged or converted.

use vm_memory::Permissions;

use super::super::frame::Frame;
use super::supply::is_enough;
use super::{Copies, Delivery, Lack, RxRun, Shortage};
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::header::{self, HEADER, NUM_BUFFERS};
use crate::frames::policy::{self, NEW_HEAD, NewHead};
use crate::frames::walk;
use crate::net::Counter;
use crate::queue::iovecs::Bounds;
use crate::queue::ring::{BrokenRing, Used};
use crate::switch::frame::body::Body;
use crate::switch::frame::offload::{self, Segments, Work};

/// The most unusable receive buffers that are returned for one frame.
const MAX_BAD: usize = 16;
/// The longest frame that is converted, in bytes.
const WORKED: usize = MAX_FRAME + 2 * NEW_HEAD;

impl RxRun<'_, '_> {
    /// Writes the frame, which begins with `new`, to the driver's buffers.
    pub(super) fn place(
        &mut self,
        header: [u8; HEADER],
        new: &NewHead,
        frame: &Frame<'_>,
        body: &Body<'_, '_, '_>,
    ) -> Delivery {
        let (front, len) = front_of(new, frame);
        self.write(header, front.get(..len).unwrap_or(&front), body, frame.rest())
    }

    /// Performs the offload that the driver lacks, and writes the result.
    pub(super) fn place_worked(
        &mut self,
        work: Work,
        mut header: [u8; HEADER],
        new: &NewHead,
        frame: &Frame<'_>,
        body: &Body<'_, '_, '_>,
    ) -> Delivery {
        let mut copies = std::mem::take(self.copies);
        copies.frame.resize(WORKED, 0);
        copies.segment.resize(WORKED, 0);
        let Copies { frame: copy, segment } = &mut copies;
        let (front, front_len) = front_of(new, frame);
        let len = (front_len + frame.rest()).min(copy.len());
        let (start, rest) = copy.split_at_mut(front_len.min(len));
        start.copy_from_slice(front.get(..start.len()).unwrap_or_default());
        body.read(rest.get_mut(..len - front_len.min(len)).unwrap_or_default());
        let copy = copy.get_mut(..len).unwrap_or_default();
        let delivery = match work {
            Work::Checksum => self.write_checksummed(&mut header, copy),
            Work::Segments => self.write_segments(&header, copy, segment),
        };
        *self.copies = copies;
        delivery
    }

    fn write_checksummed(&mut self, header: &mut [u8; HEADER], frame: &mut [u8]) -> Delivery {
        if offload::complete(header, frame).is_err() {
            return self.drop_as(Counter::RxBadOffloads);
        }
        let delivery = self.write(*header, frame, &Body::Private(&[]), 0);
        if delivery == Delivery::Done {
            self.tally.count(Counter::SwChecksummed);
        }
        delivery
    }

    /// Writes the segments of `frame`, through `buffer`. If buffers run out after the first, the others are lost, as on
    /// a wire; so are those that exceed [the limit of descriptors](walk::most_of_segments).
    fn write_segments(&mut self, header: &[u8; HEADER], frame: &[u8], buffer: &mut [u8]) -> Delivery {
        let Ok(mut segments) = Segments::new(header, frame) else { return self.drop_as(Counter::RxBadOffloads) };
        let mut first = true;
        *self.segments += segments.left();
        let mut rest = walk::most_of_segments(self.memory);
        while let Some(len) = segments.next_into(buffer) {
            let segment = buffer.get(..len).unwrap_or_default();
            let before = self.iovecs.walked();
            (self.left, self.is_last) = (rest.min(walk::most(self.memory)), rest < walk::most(self.memory));
            match self.write([0; HEADER], segment, &Body::Private(&[]), 0) {
                Delivery::Done => {}
                Delivery::NoBuffers if !first => {
                    self.put_back();
                    self.tally.count(Counter::RxNoBuffers);
                    break;
                }
                other => return other,
            }
            rest = rest.saturating_sub(self.iovecs.walked() - before);
            first = false;
        }
        self.tally.count(Counter::SwSegmented);
        Delivery::Done
    }

    /// Writes a frame of these parts.
    fn write(&mut self, mut header: [u8; HEADER], front: &[u8], body: &Body<'_, '_, '_>, rest: usize) -> Delivery {
        let len = HEADER + front.len() + rest;
        match self.prepare(len) {
            Ok(None) => {}
            Ok(Some(Lack::Buffers | Lack::Effort)) => return Delivery::NoBuffers,
            Ok(Some(Lack::Length | Lack::Valid)) => {
                self.put_back();
                return self.drop_as(Counter::RxTooLong);
            }
            Err(BrokenRing) => {
                self.broken = true;
                return self.drop_as(Counter::RxStale);
            }
        }
        if self.supply.congested.is_some() {
            let available = self.ring.available(self.memory).unwrap_or(0).saturating_add(self.chains.len() as u16);
            if is_enough(available, self.ring.size()) {
                self.supply.congested = None;
            }
        }
        header[NUM_BUFFERS..].copy_from_slice(&(self.chains.len() as u16).to_le_bytes());
        self.iovecs.write_at(0, &header);
        self.iovecs.write_at(HEADER, front);
        body.copy_to(rest, &self.iovecs, HEADER + front.len());
        let mut left = len;
        for (head, capacity) in self.chains.drain(..) {
            let part = left.min(capacity);
            left -= part;
            self.used.push(Used { head, len: part as u32 });
        }
        self.iovecs.clear();
        self.capacity = 0;
        self.tally.count(Counter::RxFrames);
        self.tally.add(Counter::RxBytes, (len - HEADER) as u64);
        self.policy.receive.take(len - HEADER, header::packets(&header, len - HEADER));
        if self.supply.awaited.is_some() {
            self.end_wait();
        }
        Delivery::Done
    }

    /// Takes chains until they hold `bytes`, or returns the lack: at once if nothing has changed since a frame that was
    /// not longer lacked it.
    fn prepare(&mut self, bytes: usize) -> Result<Option<Lack>, BrokenRing> {
        if let Some(shortage) = self.supply.shortage {
            if let Some(lack) = shortage.of_another(bytes, &self.ring, self.memory) {
                return Ok(Some(lack));
            }
            self.supply.shortage = None;
        }
        let lack = self.take_chains(bytes)?;
        // Buffers beyond those that were read are unknown.
        if let Some(lack @ (Lack::Buffers | Lack::Length)) = lack {
            let taken = self.chains.len() as u16;
            self.supply.shortage = Shortage::of(lack, bytes, taken, &self.ring, self.memory);
        }
        Ok(lack)
    }

    /// Takes chains until they hold `bytes`. A ring is invalid if a frame, or a segment of one, needs more descriptors
    /// than [may be read](walk::most). A ring that has too many for all segments of a frame is valid: their sender
    /// decides into how many the frame is cut.
    fn take_chains(&mut self, bytes: usize) -> Result<Option<Lack>, BrokenRing> {
        let mut bad = 0;
        while self.capacity < bytes {
            if !self.chains.is_empty() && !self.mergeable || self.chains.len() >= usize::from(self.ring.size()) {
                return Ok(Some(Lack::Length));
            }
            let Some(chain) = self.ring.next(self.memory)? else { return Ok(Some(Lack::Buffers)) };
            let (head, before) = (chain.head_index(), self.iovecs.walked());
            let enough = (bytes - self.capacity).max(HEADER);
            let bounds = Bounds { pieces: self.left, enough };
            let appended = self.iovecs.append_within(self.memory, chain, Permissions::Write, bounds);
            match self.left.checked_sub(self.iovecs.walked() - before) {
                Some(left) => self.left = left,
                None if self.is_last => {
                    self.ring.put_back(1);
                    return Ok(Some(Lack::Effort));
                }
                None => return Err(BrokenRing),
            }
            match appended {
                // The header is never divided (`virtio 1.4 §5.1.6.3.1`).
                Ok(extent) if extent.bytes >= HEADER => {
                    self.capacity += extent.bytes;
                    self.chains.push((head, extent.bytes));
                }
                refused => {
                    self.iovecs.remove_back(refused.map_or(0, |extent| extent.segments));
                    if !self.chains.is_empty() {
                        // It must wait until it is the first, and the frame cannot be finished before it.
                        self.ring.put_back(1);
                        return Ok(Some(Lack::Length));
                    }
                    self.tally.count(Counter::RxBadChains);
                    self.used.push(Used { head, len: 0 });
                    bad += 1;
                    if bad == MAX_BAD {
                        return Ok(Some(Lack::Valid));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Puts back the chains that were taken for a frame that is not written.
    pub(super) fn put_back(&mut self) {
        self.ring.put_back(self.chains.len() as u16);
        self.chains.clear();
        self.iovecs.clear();
        self.capacity = 0;
    }
}

/// The first bytes of the frame as its receiver may see it, and their number: those that a policy has inspected, and
/// the copied bytes beyond.
fn front_of(new: &NewHead, frame: &Frame<'_>) -> ([u8; 2 * NEW_HEAD], usize) {
    let beyond = frame.front().get(policy::HEAD..).unwrap_or_default();
    let (mut front, bytes) = ([0; 2 * NEW_HEAD], new.bytes());
    let len = bytes.len() + beyond.len();
    front[..bytes.len()].copy_from_slice(bytes);
    front[bytes.len()..len].copy_from_slice(beyond);
    (front, len)
}
