//! The sources of frames: the queues of a port, or the uplink.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::frame::Frame;
use super::frame::body::Body;
use super::port_set::PortSet;
use super::table::Table;
use super::uplink::Uplink;
use crate::net::Counter;
use crate::queue::ring::BrokenRing;

/// The reason why a batch has no further frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// There is none now; an event signals the next one.
    Drained,
    /// There may be more, but it is the turn of others.
    More,
    /// A rate limit: wait for this time.
    Limited(Duration),
    /// The receiver has no buffers: the frame waits for this time.
    Blocked(Duration),
    /// The source must stop.
    Stopped,
}

/// The next frame, or the reason why there is none.
#[expect(clippy::large_enum_variant, reason = "it is matched at once, and a frame needs no allocation")]
pub(crate) enum Next<'t> {
    /// A frame and its route.
    Frame(Frame<'t>),
    /// None.
    End(End),
}

/// A batch of frames. They are taken and handled one at a time.
pub(crate) trait Source {
    /// Takes the next frame that its policy passes and that has a route; others are dropped and counted.
    ///
    /// # Errors
    ///
    /// Fails if its ring is invalid.
    fn next<'t>(&mut self, table: &'t Table) -> Result<Next<'t>, BrokenRing>;

    /// The part after the frame's first bytes.
    fn body(&self) -> Body<'_, '_, '_>;

    /// A number that is the same for frames that must not overtake each other.
    fn flow(&self, frame: &Frame<'_>) -> usize;

    /// Sends the frame to the uplink.
    ///
    /// # Errors
    ///
    /// The reason why it was not sent.
    fn send(&mut self, frame: &Frame<'_>, uplink: &Uplink) -> Result<(), Counter>;

    /// Records that the frame was sent to `receivers`.
    fn done(&mut self, frame: &Frame<'_>, receivers: usize);

    /// Records a copy of the frame for the port that it is mirrored to.
    fn mirrored(&mut self, frame: &Frame<'_>);

    /// Records that the frame was dropped for a reason of its sender.
    fn dropped(&mut self, reason: Counter);

    /// True if its frames may wait for receivers.
    fn is_patient(&self) -> bool;

    /// The time per second that all frames for a receiver may wait for its buffers.
    fn patience(&self) -> Duration;

    /// The flag that is set when its port is stopped, if it is a port's.
    fn stop(&self) -> Option<&Arc<AtomicBool>>;

    /// The receivers that have the frame already, if there are several. It is kept while the frame is put back, because
    /// the table may change in the meantime.
    fn served(&mut self) -> &mut PortSet;

    /// Puts back the frame, which waits and is the next again, after `receivers` more have got it, and its mirror port.
    fn put_back(&mut self, frame: &Frame<'_>, receivers: usize);

    /// Charges the batch for a cost besides the bytes of its frames, in bytes that are copied in the same time.
    fn spend(&mut self, cost: usize);

    /// True if the batch has reached its cost limit.
    fn is_spent(&self) -> bool;

    /// True if the source must stop.
    fn is_stopped(&self) -> bool;
}
