//! The interface of a transmit ring to a batch of frames.

use std::io;
use std::os::fd::BorrowedFd;

use crate::frames::net_protocol::header::HEADER;
use crate::frames::policy;
use crate::net::{Counter, Tally};
use crate::queue::ring::BrokenRing;
use crate::switch::frame::body::Body;
use crate::switch::source::End;

/// A frame that was taken from a ring.
pub(crate) struct Taken {
    /// The cost of its descriptors, beyond that of any frame of its length.
    pub price: usize,
    /// The length from the destination address on, 0 if it is unknown or out of range.
    pub len: usize,
    /// The frame, or the reason why it is dropped.
    pub packet: Result<Packet, Counter>,
}

/// The beginning of a frame as it was copied from its sender: later writes of the guest change nothing.
pub(crate) struct Packet {
    /// The virtio header, which is valid for the frame.
    pub header: [u8; HEADER],
    /// The first bytes, as many as [`Self::front_len`].
    pub front: [u8; policy::HEAD],
    /// The number of bytes that were copied. The others are the ring's [body](SendRing::body).
    pub front_len: usize,
}

/// The end of a batch, as a ring finishes it.
pub(crate) struct Ended {
    /// The reason for it.
    pub end: End,
    /// Doorbells are suppressed: the ring is drained on a timer.
    pub gathers: bool,
    /// The bytes of all frames of the batch.
    pub bytes: usize,
}

/// A transmit ring that is locked for a batch of frames.
pub(crate) trait SendRing {
    /// Takes the next frame; `None` if there is none.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    fn take(&mut self) -> Result<Option<Taken>, BrokenRing>;

    /// The part of the taken frame after its first bytes.
    fn body(&self) -> Body<'_, '_, '_>;

    /// Writes `front`, a header and a frame's first bytes, and the body to `fd`.
    ///
    /// # Errors
    ///
    /// The host's error.
    fn send(&mut self, fd: BorrowedFd<'_>, front: &[u8]) -> io::Result<()>;

    /// Puts back the taken frame, which is the next again.
    fn put_back(&mut self);

    /// Records that the taken frame is done: sent, or dropped for the reason `dropped`.
    fn complete(&mut self, dropped: Option<Counter>);

    /// The number of frames that are done, or more if they have used up much of the ring: the measure by which frames
    /// are gathered.
    fn completed(&self) -> usize;

    /// Returns the buffers of the frames that are done, and interrupts the driver if it needs that now. Returns the
    /// reason for the end of the batch, which is not [`End::Drained`] if the driver has made more available in the
    /// meantime.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid, or was found to be.
    fn finish(self, ended: Result<Ended, BrokenRing>, tally: &mut Tally) -> Result<End, BrokenRing>;
}
