//! Where frames come from: the queues of a port, or the uplink.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::body::Body;
use super::frame::Frame;
use super::table::Table;
use super::uplink::Uplink;
use crate::net::Counter;
use crate::ring::BrokenRing;

/// Why there is no further frame in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// There is none now; something signals when there is one.
    Drained,
    /// There may be more, and it is the turn of others.
    More,
    /// A rate limit: wait this long.
    Limited(Duration),
    /// The receiver has no buffers: the frame waits, this long.
    Blocked(Duration),
    /// The source has been told to stop.
    Stopped,
}

/// The next frame, or why there is none.
pub(crate) enum Next<'t> {
    /// One whose route is known.
    Frame(Frame<'t>),
    /// None.
    End(End),
}

/// A batch of frames. One frame at a time is taken, and dealt with.
pub(crate) trait Source {
    /// Takes the next frame that its policy lets through and that goes anywhere; others are dropped and counted.
    ///
    /// # Errors
    ///
    /// When its ring is invalid.
    fn next<'t>(&mut self, table: &'t Table) -> Result<Next<'t>, BrokenRing>;

    /// What follows the frame's first bytes.
    fn body(&self) -> Body<'_, '_, '_>;

    /// A number that is the same for frames that must not overtake each other.
    fn flow(&self, frame: &Frame<'_>) -> usize;

    /// Sends the frame to the uplink.
    ///
    /// # Errors
    ///
    /// Why it did not go there.
    fn send(&mut self, frame: &Frame<'_>, uplink: &Uplink) -> Result<(), Counter>;

    /// The frame has gone to so many receivers.
    fn done(&mut self, frame: &Frame<'_>, receivers: usize);

    /// A copy of the frame was made for the port that it is mirrored to.
    fn mirrored(&mut self, frame: &Frame<'_>);

    /// The frame was dropped for a reason of its sender.
    fn dropped(&mut self, reason: Counter);

    /// Whether its frames wait for receivers at all.
    fn is_patient(&self) -> bool;

    /// How long all frames for a receiver may wait for its buffers in a second.
    fn patience(&self) -> Duration;

    /// The flag that is set when its port is stopped, if it is a port's.
    fn stop(&self) -> Option<&Arc<AtomicBool>>;

    /// The number of receivers that have the frame already, from when it was put back.
    fn served(&self) -> usize;

    /// The frame waits, and is the next again: it is put back, when `receivers` more have got it, and its mirror.
    fn put_back(&mut self, frame: &Frame<'_>, receivers: usize);

    /// The batch has cost so much beside the bytes of its frames, in bytes that are copied in the same time.
    fn spend(&mut self, cost: usize);

    /// True if the batch has cost what it may.
    fn is_spent(&self) -> bool;

    /// Whether it has been told to stop.
    fn is_stopped(&self) -> bool;
}
