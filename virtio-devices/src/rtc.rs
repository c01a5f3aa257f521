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

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_CLOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::device::config::ConfigField;
use crate::device::counters::{Losses, log_losses};
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{Start, VirtioDevice, Worker};
use clock::Clock;
pub use counters::{RtcCounter, RtcCounters};

/// Unassigned class.
const CLASS: [u8; 3] = [0xff, 0x00, 0x00];
/// The size of the queue of requests.
const QUEUE_SIZES: &[u16] = &[64];
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// Description of a clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RtcSpec {
    /// Id, also the name of its thread.
    pub id: String,
}

/// A virtio real-time clock.
pub struct Rtc {
    spec: RtcSpec,
    counters: Arc<RtcCounters>,
    losses: Losses,
}

impl Rtc {
    /// A clock.
    pub fn new(spec: RtcSpec) -> Self {
        Self { spec, counters: Arc::new(RtcCounters::new()), losses: Losses::default() }
    }

    /// Counters of the clock.
    pub fn counters(&self) -> Arc<RtcCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for Rtc {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_CLOCK as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }
    fn config_fields(&self) -> &'static [ConfigField] {
        &[]
    }

    /// There is no configuration: a driver uses requests.
    fn config_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn config_generation(&self) -> u8 {
        0
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        queue_worker::start(Clock, WorkerKind::Rtc, &self.spec.id, start, &self.counters)
    }

    fn reset(&mut self) {
        log_losses(&self.spec.id, self.losses.doubled(&self.counters.losses()));
    }
}

impl Drop for Rtc {
    fn drop(&mut self) {
        log_losses(&self.spec.id, self.losses.untold(&self.counters.losses()));
    }
}
