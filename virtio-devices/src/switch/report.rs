//! When a driver is told by an interrupt that its frames were sent.
//!
//! A driver that sends one frame at a time asks for an interrupt at each, and needs none: it looks for itself when it
//! sends the next frame, and when it receives the answer. So the interrupt is put off for a moment, after which most
//! drivers no longer ask for it. The buffers are given back at once.
//!
//! A driver that does not say at which frame it wants to be interrupted (`VIRTIO_F_EVENT_IDX`) cannot say that it no
//! longer does, and is told at once.

use std::time::{Duration, Instant};

use crate::DmaView;

use crate::ring::{BrokenRing, Ring};

/// How long an interrupt is put off: longer than most answers take, and as long as NICs moderate interrupts.
const PUT_OFF: Duration = Duration::from_micros(250);
/// What a driver may have sent, in bytes, without being told: two of the longest segments. Linux holds TCP back that
/// has more on its way.
const MOST_BYTES: usize = 128 << 10;

/// What a driver has not been told about a transmit queue.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// By when it is told; `None` if it need not be.
    due: Option<Instant>,
    bytes: usize,
    frames: usize,
}

impl Report {
    /// By when the driver has to be told.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Finds out whether the driver has seen for itself what it was not told.
    ///
    /// # Errors
    ///
    /// When the ring is invalid.
    pub(crate) fn review(&mut self, ring: &mut Ring<'_>, memory: &DmaView) -> Result<(), BrokenRing> {
        if self.due.is_some() && !ring.interrupt_is_due(memory)? {
            *self = Self::default();
            ring.considered();
        }
        Ok(())
    }

    /// So many frames of so many bytes were given back. Returns whether the driver is to be interrupted now.
    ///
    /// # Errors
    ///
    /// When the ring is invalid.
    pub(crate) fn add(
        &mut self,
        frames: usize,
        bytes: usize,
        now: Instant,
        ring: &mut Ring<'_>,
        memory: &DmaView,
    ) -> Result<bool, BrokenRing> {
        if !ring.interrupt_is_due(memory)? {
            *self = Self::default();
            ring.considered();
            return Ok(false);
        }
        if !ring.has_event_idx() {
            return self.take(ring, memory);
        }
        let due = *self.due.get_or_insert(now + PUT_OFF);
        self.frames += frames;
        self.bytes = self.bytes.saturating_add(bytes);
        let much = self.bytes > MOST_BYTES || self.frames >= usize::from(ring.size() / 4);
        if much || now >= due { self.take(ring, memory) } else { Ok(false) }
    }

    /// Returns whether the driver is to be interrupted for what it was not told.
    ///
    /// # Errors
    ///
    /// When the ring is invalid.
    pub(crate) fn take(&mut self, ring: &mut Ring<'_>, memory: &DmaView) -> Result<bool, BrokenRing> {
        *self = Self::default();
        ring.wants_interrupt(memory)
    }
}
