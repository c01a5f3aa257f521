//! virtio-rtc with one clock, the host's UTC (`virtio 1.4`, device type 17).
//!
//! A driver reads the clock with requests in a queue. There are no alarms, and no cross-timestamps with a CPU counter.

mod clock;
mod counters;
mod requests;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_CLOCK;

use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{Start, VirtioDevice, Worker};
use clock::Clock;
pub use counters::{RtcCounter, RtcCounters};

/// The size of the queue of requests.
const QUEUE_SIZES: &[u16] = &[64];

/// Description of a clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RtcSpec {
    /// Id, also the name of its thread.
    pub id: String,
}

/// A virtio real-time clock.
pub struct Rtc {
    counted: Counted<RtcCounters>,
}

impl Rtc {
    /// A clock.
    pub fn new(RtcSpec { id }: RtcSpec) -> Self {
        Self { counted: Counted::new(&id) }
    }

    /// Counters of the clock.
    pub fn counters(&self) -> Arc<RtcCounters> {
        Arc::clone(self.counted.counters())
    }
}

impl VirtioDevice for Rtc {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_CLOCK as u16
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        queue_worker::start(Clock, WorkerKind::Queue, self.counted.id(), start, self.counted.counters())
    }

    fn reset(&mut self) {
        self.counted.was_reset();
    }
}
