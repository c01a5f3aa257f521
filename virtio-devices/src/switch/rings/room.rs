//! The buffers of a receive queue of any kind, for a run of frames.

use super::supply::{Lack, Supply};
use super::virtqueue_room::VirtqueueRoom;
use super::x550::X550Room;
use crate::frames::net_protocol::header::HEADER;
use crate::net::Tally;
use crate::queue::ring::BrokenRing;
use crate::switch::frame::body::Body;

/// The buffers of a receive queue that is locked for a run of frames.
pub(crate) enum Room<'r, 'm> {
    /// Buffers of a virtqueue.
    Virtqueue(VirtqueueRoom<'r, 'm>),
    /// Buffers of an X550's ring.
    X550(X550Room<'r, 'm>),
}

impl Room<'_, '_> {
    /// Begins a frame, or a segment of one, for which `left` descriptors may be read. `is_last` is true if that is
    /// fewer than usual because of the segments before it.
    pub(crate) fn begin(&mut self, left: usize, is_last: bool) {
        match self {
            Self::Virtqueue(room) => room.begin(left, is_last),
            // Each of its descriptors has at least 1 KiB.
            Self::X550(_) => {}
        }
    }

    /// The number of descriptors that were read since the last [`Self::take_walked`].
    pub(crate) fn walked(&self) -> usize {
        match self {
            Self::Virtqueue(room) => room.walked(),
            Self::X550(_) => 0,
        }
    }

    /// Returns the number of descriptors that were read since the last call.
    pub(crate) fn take_walked(&mut self) -> usize {
        match self {
            Self::Virtqueue(room) => room.take_walked(),
            Self::X550(_) => 0,
        }
    }

    /// Writes a frame that has this virtio header and begins with `front`, and whose other bytes are the given number
    /// of bytes of the body. Returns what it lacks if it has no room: the caller [puts back](Self::put_back) what was
    /// taken.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn fill(
        &mut self,
        header: [u8; HEADER],
        front: &[u8],
        rest: (&Body<'_, '_, '_>, usize),
        supply: &mut Supply,
        tally: &mut Tally,
    ) -> Result<Option<Lack>, BrokenRing> {
        match self {
            Self::Virtqueue(room) => room.fill(header, front, rest, supply, tally),
            Self::X550(room) => room.fill(&header, front, rest, supply, tally),
        }
    }

    /// Puts back the buffers that were taken for a frame that is not written.
    pub(crate) fn put_back(&mut self) {
        if let Self::Virtqueue(room) = self {
            room.put_back();
        }
    }

    /// Makes the driver ring when it provides buffers. Returns true if it has provided some since the shortage.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn expect_doorbell(&mut self, supply: &Supply) -> Result<bool, BrokenRing> {
        match self {
            Self::Virtqueue(room) => room.expect_doorbell(supply),
            Self::X550(room) => Ok(room.look_for_more()),
        }
    }

    /// Ends the run: publishes the used buffers, unless the ring was found `broken`.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn finish(self, broken: bool) -> Result<(), BrokenRing> {
        match self {
            Self::Virtqueue(room) => room.finish(broken),
            Self::X550(room) => room.finish(broken),
        }
    }
}
