//! virtio-balloon: memory that the guest lends to the host (`virtio 1.4 §5.5`).
//!
//! The host takes back the pages that the driver puts into the balloon, and with free page reporting those that it
//! reports as free. Pages that the driver takes out need no action: the host allocates new ones on access. The driver
//! decides the balloon's size; the host can only request one.

mod counters;
mod pages;
mod pass;
mod size;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use crate::device::RING_FEATURES;
use crate::device::config::{ConfigField, Rule};
use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{DeviceSpecific, Start, StateError, VirtioDevice, Worker};
pub use counters::{BalloonCounter, BalloonCounters};
use pass::Pages;
pub use size::BalloonSize;

/// The device configuration (`virtio 1.4 §5.5.4`), without the fields of features that are not offered.
pub(crate) const FIELDS: &[ConfigField] =
    &[ConfigField::new("num_pages", 0, 4, Rule::Announced), ConfigField::new("actual", 4, 4, Rule::Saved)];
/// The sizes of the inflate, deflate and reporting queues. Without the queues of features that are not offered, Linux
/// uses index 2 for the reporting queue, as other devices do; the standard says 4.
const QUEUE_SIZES: &[u16] = &[128, 128, 32];
/// The driver may take pages out of the balloon when it runs out of memory (`VIRTIO_BALLOON_F_DEFLATE_ON_OOM`).
const F_DEFLATE_ON_OOM: u32 = 2;
/// The driver may report free pages (`VIRTIO_BALLOON_F_PAGE_REPORTING`).
const F_PAGE_REPORTING: u32 = 5;

/// Description of a balloon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalloonSpec {
    /// Id, also the name of its thread.
    pub id: String,
    /// The initial size that the host requests, in bytes.
    pub size: u64,
    /// True if the driver may take pages out of the balloon when the guest runs out of memory.
    pub deflate_on_oom: bool,
    /// True if the driver may report free pages, which are returned to the host.
    pub free_page_reporting: bool,
}

/// A virtio balloon.
pub struct Balloon {
    spec: BalloonSpec,
    size: Arc<BalloonSize>,
    counted: Counted<BalloonCounters>,
}

impl Balloon {
    /// Creates an empty balloon, whose driver reads the requested size from `size`: at first that of `spec`.
    pub fn new(spec: BalloonSpec, size: Arc<BalloonSize>) -> Self {
        size.resize(spec.size);
        Self { counted: Counted::new(&spec.id), spec, size }
    }

    /// Id of the balloon.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Counters of the balloon.
    pub fn counters(&self) -> Arc<BalloonCounters> {
        Arc::clone(self.counted.counters())
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_BALLOON as u16
    }

    fn features(&self) -> u64 {
        RING_FEATURES
            | u64::from(self.spec.deflate_on_oom) << F_DEFLATE_ON_OOM
            | u64::from(self.spec.free_page_reporting) << F_PAGE_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        if self.spec.free_page_reporting { QUEUE_SIZES } else { &QUEUE_SIZES[..2] }
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.size.read(offset, data);
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        self.size.write(offset, data);
    }

    fn config_generation(&self) -> u8 {
        self.size.generation()
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let interrupts = Arc::clone(&start.interrupts);
        let workers = queue_worker::start(Pages, WorkerKind::Balloon, &self.spec.id, start, self.counted.counters())?;
        if !workers.is_empty() {
            self.size.signal_to(Some(interrupts));
        }
        Ok(workers)
    }

    /// After a reset, the balloon is empty.
    fn reset(&mut self) {
        self.counted.was_reset();
        self.size.signal_to(None);
        self.size.set_actual_pages(0);
    }

    fn save(&self) -> DeviceSpecific {
        match self.size.actual_pages() {
            0 => DeviceSpecific::PowerOn,
            actual => DeviceSpecific::Config(actual.to_le_bytes().to_vec()),
        }
    }

    fn restore(&mut self, state: &DeviceSpecific, _started: Option<u64>) -> Result<(), StateError> {
        let actual = match state {
            DeviceSpecific::PowerOn => 0,
            DeviceSpecific::Config(config) => {
                let actual = config.as_slice().try_into().map_err(|_| StateError::Shape("configuration lengths"))?;
                u32::from_le_bytes(actual)
            }
            _ => return Err(StateError::Shape("kinds of device")),
        };
        self.size.set_actual_pages(actual);
        Ok(())
    }
}
