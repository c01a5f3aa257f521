//! The delay of transmit interrupts.
//!
//! A driver that sends one frame at a time requests an interrupt for each, and needs none: it finds completed frames
//! when it sends the next one, and when it receives the answer. So the interrupt is delayed for a moment, after which
//! most drivers no longer request it. The buffers are returned at once.
//!
//! A driver without `VIRTIO_F_EVENT_IDX` cannot withdraw its request, and is interrupted at once.

use std::time::{Duration, Instant};

use crate::DmaView;

use crate::queue::ring::{BrokenRing, Ring};

/// The delay of an interrupt: longer than most answers take, and as long as NICs moderate interrupts.
const PUT_OFF: Duration = Duration::from_micros(250);
/// The most bytes that may be sent without an interrupt: two of the longest segments. Linux holds back TCP that has
/// more in flight.
const MOST_BYTES: usize = 128 << 10;

/// The transmitted frames of a queue that no interrupt has reported.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// The deadline of the interrupt; `None` if there is none to send.
    due: Option<Instant>,
    bytes: usize,
    frames: usize,
}

impl Report {
    /// The deadline of the interrupt.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Cancels the interrupt if the driver has seen the used buffers by itself.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn review(&mut self, ring: &mut Ring<'_>, memory: &DmaView) -> Result<(), BrokenRing> {
        if self.due.is_some() && !ring.interrupt_is_due(memory)? {
            *self = Self::default();
            ring.considered();
        }
        Ok(())
    }

    /// Counts frames and bytes that were returned. Returns true if the driver needs an interrupt now.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
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

    /// Returns true if the driver needs an interrupt for the frames that none has reported.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid.
    pub(crate) fn take(&mut self, ring: &mut Ring<'_>, memory: &DmaView) -> Result<bool, BrokenRing> {
        *self = Self::default();
        ring.wants_interrupt(memory)
    }
}
