//! State shared by the queues.

use std::time::Instant;

use super::counters::{Tally, VsockCounter};
use super::muxer::Muxer;
use crate::queue::ring::{BrokenRing, Ring};
use crate::{DmaView, Interrupts};

/// The event that a queue waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// None: there may be more to do.
    More,
    /// Buffers of the driver for pending output.
    Room,
    /// A doorbell, or an event of the host.
    Doorbell,
}

/// State shared by the queues in a turn of the worker's loop.
pub(crate) struct Pass<'p> {
    pub memory: &'p DmaView,
    pub muxer: &'p mut Muxer,
    pub tally: &'p mut Tally,
    pub now: Instant,
    pub interrupts: &'p Interrupts,
}

impl Pass<'_> {
    /// Interrupts the driver if it wants an interrupt for the buffers returned to `ring`.
    pub(crate) fn interrupt(&mut self, ring: &mut Ring<'_>) -> Result<(), BrokenRing> {
        if ring.wants_interrupt(self.memory)? {
            self.interrupts.signal_queue(ring.index());
            self.tally.count(VsockCounter::Interrupts);
        }
        Ok(())
    }
}
