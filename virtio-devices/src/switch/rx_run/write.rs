//! Writes frames to a driver's buffers, unchanged or converted.

use super::super::frame::Frame;
use super::{Copies, Delivery, RxRun};
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::header::{self, HEADER};
use crate::frames::policy::{self, NEW_HEAD, NewHead};
use crate::frames::walk;
use crate::net::Counter;
use crate::queue::ring::BrokenRing;
use crate::switch::frame::body::Body;
use crate::switch::frame::offload::{self, Segments, Work};
use crate::switch::rings::Lack;

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
            let before = self.room.walked();
            self.room.begin(rest.min(walk::most(self.memory)), rest < walk::most(self.memory));
            match self.write([0; HEADER], segment, &Body::Private(&[]), 0) {
                Delivery::Done => {}
                Delivery::NoBuffers if !first => {
                    self.room.put_back();
                    self.tally.count(Counter::RxNoBuffers);
                    break;
                }
                other => return other,
            }
            rest = rest.saturating_sub(self.room.walked() - before);
            first = false;
        }
        self.tally.count(Counter::SwSegmented);
        Delivery::Done
    }

    /// Writes a frame of these parts.
    fn write(&mut self, header: [u8; HEADER], front: &[u8], body: &Body<'_, '_, '_>, rest: usize) -> Delivery {
        let len = front.len() + rest;
        match self.room.fill(header, front, (body, rest), self.supply, self.tally) {
            Ok(None) => {}
            Ok(Some(Lack::Buffers | Lack::Effort)) => return Delivery::NoBuffers,
            Ok(Some(Lack::Length | Lack::Valid)) => {
                self.room.put_back();
                return self.drop_as(Counter::RxTooLong);
            }
            Err(BrokenRing) => {
                self.broken = true;
                return self.drop_as(Counter::RxStale);
            }
        }
        self.tally.count(Counter::RxFrames);
        self.tally.add(Counter::RxBytes, len as u64);
        self.policy.receive.take(len, header::packets(&header, len));
        if self.supply.awaited.is_some() {
            self.end_wait();
        }
        Delivery::Done
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
