//! Counters of a watchdog.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a watchdog.
    pub enum WatchdogCounter;
    /// The counters of one watchdog since it was plugged in.
    pub struct WatchdogCounters;

    /// Pings of the driver.
    Pings = "pings",
    /// Number of times that the pings ended, and the machine was reset.
    Expiries = "expiries",
    /// Buffers that are not pings: not writable by the device.
    BadChains = "bad_chains",
}

impl WatchdogCounter {
    /// True for a counter of requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BrokenRings)
    }
}
