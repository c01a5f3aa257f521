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

use virtio_bindings::virtio_ids::VIRTIO_ID_WATCHDOG;

use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{DeviceSpecific, Start, StateError, VirtioDevice, Worker};
pub use clock::Expiry;
use clock::Times;
pub use counters::{WatchdogCounter, WatchdogCounters};
use pings::Pings;

/// The size of the only queue.
const QUEUE_SIZES: &[u16] = &[8];
/// The saved state of a watchdog with a running clock.
const RUNS: [u8; 1] = [1];

/// A virtio watchdog.
pub struct Watchdog {
    times: Times,
    expiry: Arc<Expiry>,
    /// True while its clock runs. Workers that were stopped before a reset have an older flag.
    runs: Arc<AtomicBool>,
    counted: Counted<WatchdogCounters>,
}

impl Watchdog {
    /// Creates a watchdog whose clock is stopped. It calls `expiry` when pings have begun and ended, and then waits for
    /// a first ping again. Its thread is named after `id`.
    pub fn new(id: &str, expiry: Arc<Expiry>) -> Self {
        Self::with_times(id, expiry, Times::default())
    }

    fn with_times(id: &str, expiry: Arc<Expiry>, times: Times) -> Self {
        Self { times, expiry, runs: Arc::default(), counted: Counted::new(id) }
    }

    /// Id of the watchdog.
    pub fn id(&self) -> &str {
        self.counted.id()
    }

    /// Counters of the watchdog.
    pub fn counters(&self) -> Arc<WatchdogCounters> {
        Arc::clone(self.counted.counters())
    }
}

impl VirtioDevice for Watchdog {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_WATCHDOG as u16
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }
    /// A running clock restarts from 0: the time for which the queue was stopped, as during a pause of the VM, does not
    /// count.
    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let pings = Pings::new(self.times, Arc::clone(&self.expiry), Arc::clone(&self.runs));
        queue_worker::start(pings, WorkerKind::Queue, self.counted.id(), start, self.counted.counters())
    }

    fn reset(&mut self) {
        self.counted.was_reset();
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
            _ => Err(StateError::Shape("kinds of device")),
        }
    }
}
