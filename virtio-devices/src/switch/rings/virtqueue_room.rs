//! The buffers of a virtqueue, which a run of frames fills.

use vm_memory::Permissions;

use super::supply::{Lack, Shortage, Supply, is_enough};
use crate::DmaView;
use crate::frames::net_protocol::header::{HEADER, NUM_BUFFERS};
use crate::net::{Counter, Tally};
use crate::queue::iovecs::{Bounds, IoVecs, Storage};
use crate::queue::ring::{BrokenRing, ParkedRing, Ring, Used};
use crate::switch::frame::body::Body;

/// The most unusable receive buffers that are returned for one frame.
const MAX_BAD: usize = 16;

/// A sender's scratch memory for virtqueues, one after the other.
#[derive(Default)]
pub(crate) struct VirtqueueScratch {
    storage: Storage,
    used: Vec<Used>,
    /// The chains that are taken for the present frame, and the capacity of each.
    chains: Vec<(u16, usize)>,
}

/// The buffers of a virtqueue that is locked for a run of frames.
pub(crate) struct VirtqueueRoom<'r, 'm> {
    ring: Ring<'r>,
    parked: &'r ParkedRing,
    /// True if a frame may span several buffers.
    mergeable: bool,
    memory: &'m DmaView,
    iovecs: IoVecs<'r, 'm>,
    chains: &'r mut Vec<(u16, usize)>,
    capacity: usize,
    used: &'r mut Vec<Used>,
    /// The descriptors that may still be read for the present frame, or the present segment of one.
    left: usize,
    /// It is a segment whose limit is lower because of those before it.
    is_last: bool,
}

impl<'r, 'm> VirtqueueRoom<'r, 'm> {
    /// Locks a queue for a run.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn new(
        parked: &'r ParkedRing,
        mergeable: bool,
        memory: &'m DmaView,
        scratch: &'r mut VirtqueueScratch,
    ) -> Result<Self, BrokenRing> {
        let mut ring = parked.ring(memory)?;
        ring.suppress_doorbells(memory)?;
        let VirtqueueScratch { storage, used, chains } = scratch;
        // A run of another queue may have ended with a broken ring, in the middle of a frame.
        chains.clear();
        used.clear();
        let iovecs = IoVecs::new(storage);
        Ok(Self { ring, parked, mergeable, memory, iovecs, chains, capacity: 0, used, left: 0, is_last: false })
    }

    /// Begins a frame, or a segment of one, for which `left` descriptors may be read. `is_last` is true if that is
    /// fewer than usual because of the segments before it.
    pub(crate) fn begin(&mut self, left: usize, is_last: bool) {
        (self.left, self.is_last) = (left, is_last);
    }

    /// The number of descriptors that were read since the last [`Self::take_walked`].
    pub(crate) fn walked(&self) -> usize {
        self.iovecs.walked()
    }

    /// Returns the number of descriptors that were read since the last call.
    pub(crate) fn take_walked(&mut self) -> usize {
        self.iovecs.take_walked()
    }

    /// Writes a frame that has this header and begins with `front`; `rest` bytes of `body` follow. Returns what it
    /// lacks if it has no room: the caller [puts back](Self::put_back) what was taken.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn fill(
        &mut self,
        mut header: [u8; HEADER],
        front: &[u8],
        (body, rest): (&Body<'_, '_, '_>, usize),
        supply: &mut Supply,
        tally: &mut Tally,
    ) -> Result<Option<Lack>, BrokenRing> {
        let len = HEADER + front.len() + rest;
        if let Some(lack) = self.prepare(len, supply, tally)? {
            return Ok(Some(lack));
        }
        if supply.congested.is_some() {
            let available = self.ring.available(self.memory).unwrap_or(0).saturating_add(self.chains.len() as u16);
            if is_enough(available, self.ring.size()) {
                supply.congested = None;
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
        Ok(None)
    }

    /// Takes chains until they hold `bytes`, or returns the lack: at once if nothing has changed since a frame that was
    /// not longer lacked it.
    fn prepare(&mut self, bytes: usize, supply: &mut Supply, tally: &mut Tally) -> Result<Option<Lack>, BrokenRing> {
        if let Some(shortage) = supply.shortage {
            if let Some(lack) = shortage.of_another(bytes, &self.ring, self.memory) {
                return Ok(Some(lack));
            }
            supply.shortage = None;
        }
        let lack = self.take_chains(bytes, tally)?;
        // Buffers beyond those that were read are unknown.
        if let Some(lack @ (Lack::Buffers | Lack::Length)) = lack {
            let taken = self.chains.len() as u16;
            supply.shortage = Shortage::of(lack, bytes, taken, &self.ring, self.memory);
        }
        Ok(lack)
    }

    /// Takes chains until they hold `bytes`. A ring is invalid if a frame, or a segment of one, needs more descriptors
    /// than [may be read](crate::frames::walk::most). A ring that has too many for all segments of a frame is valid:
    /// their sender decides into how many the frame is cut.
    fn take_chains(&mut self, bytes: usize, tally: &mut Tally) -> Result<Option<Lack>, BrokenRing> {
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
                    tally.count(Counter::RxBadChains);
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
    pub(crate) fn put_back(&mut self) {
        self.ring.put_back(self.chains.len() as u16);
        self.chains.clear();
        self.iovecs.clear();
        self.capacity = 0;
    }

    /// Makes the driver ring when it provides buffers. Returns true if it has provided some since the shortage.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn expect_doorbell(&mut self, supply: &Supply) -> Result<bool, BrokenRing> {
        // The buffers that are available are not enough.
        let known = supply.shortage.map_or(self.ring.next_index(), Shortage::available);
        self.ring.expect_doorbell_beyond(known, self.memory)
    }

    /// Ends the run: publishes the used buffers, unless the ring was found `broken`.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn finish(mut self, broken: bool) -> Result<(), BrokenRing> {
        let given = if broken {
            Err(BrokenRing)
        } else if self.used.is_empty() {
            Ok(())
        } else {
            self.ring.give_back(self.memory, self.used)
        };
        self.used.clear();
        self.parked.park(self.ring);
        given
    }
}
