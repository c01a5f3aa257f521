//! A watchdog that a driver pings, and that resets the machine when the pings end.
//!
//! The standard reserves the device type and does not describe the device (`virtio 1.4 §5`). The interface is Cloud
//! Hypervisor's: a driver pings by making a buffer available, the device writes a 1 into it and returns it. The first
//! ping starts the clock; from then on the device checks every 15 s if the last ping is more than 20 s old.

mod clock;
mod counters;
mod pings;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_WATCHDOG;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::device::config::ConfigField;
use crate::device::counters::{Losses, log_losses};
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{DeviceSpecific, Start, StateError, VirtioDevice, Worker};
pub use clock::Expiry;
use clock::Times;
pub use counters::{WatchdogCounter, WatchdogCounters};
use pings::Pings;

/// Unassigned class.
const CLASS: [u8; 3] = [0xff, 0x00, 0x00];
/// The size of the only queue.
const QUEUE_SIZES: &[u16] = &[8];
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
/// The saved state of a watchdog with a running clock.
const RUNS: [u8; 1] = [1];

/// A virtio watchdog.
pub struct Watchdog {
    id: String,
    times: Times,
    expiry: Arc<Expiry>,
    /// True while its clock runs. Workers that were stopped before a reset have an older flag.
    runs: Arc<AtomicBool>,
    counters: Arc<WatchdogCounters>,
    losses: Losses,
}

impl Watchdog {
    /// Creates a watchdog whose clock is stopped. It calls `expiry` when pings have begun and ended, and then waits for
    /// a first ping again. Its thread is named after `id`.
    pub fn new(id: &str, expiry: Arc<Expiry>) -> Self {
        Self::with_times(id, expiry, Times::default())
    }

    fn with_times(id: &str, expiry: Arc<Expiry>, times: Times) -> Self {
        let counters = Arc::new(WatchdogCounters::new());
        Self { id: id.to_string(), times, expiry, runs: Arc::default(), counters, losses: Losses::default() }
    }

    /// Id of the watchdog.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Counters of the watchdog.
    pub fn counters(&self) -> Arc<WatchdogCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for Watchdog {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_WATCHDOG as u16
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

    /// There is no configuration.
    fn config_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {}

    fn config_generation(&self) -> u8 {
        0
    }

    /// A running clock restarts from 0: the time for which the queue was stopped, as during a pause of the VM, does not
    /// count.
    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let pings = Pings::new(self.times, Arc::clone(&self.expiry), Arc::clone(&self.runs));
        queue_worker::start(pings, WorkerKind::Watchdog, &self.id, start, &self.counters)
    }

    fn reset(&mut self) {
        log_losses(&self.id, self.losses.doubled(&self.counters.losses()));
        self.runs = Arc::default();
    }

    fn save(&self) -> DeviceSpecific {
        if self.runs.load(Ordering::Acquire) { DeviceSpecific::Config(RUNS.to_vec()) } else { DeviceSpecific::PowerOn }
    }

    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        match state {
            DeviceSpecific::PowerOn => Ok(()),
            // A watchdog whose queue never ran cannot have been pinged.
            DeviceSpecific::Config(config) if started.is_some() && *config == RUNS => {
                self.runs.store(true, Ordering::Release);
                Ok(())
            }
            DeviceSpecific::Config(_) => Err(StateError::Shape("configuration lengths")),
            DeviceSpecific::Net(_) | DeviceSpecific::Iommu(_) | DeviceSpecific::Block(_) => {
                Err(StateError::Shape("kinds of device"))
            }
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        log_losses(&self.id, self.losses.untold(&self.counters.losses()));
    }
}
