//! Counters of a watchdog.

use crate::counters::queue_counters;

queue_counters! {
    /// Something that is counted of a watchdog.
    pub enum WatchdogCounter;
    /// The counters of one watchdog since it was plugged in.
    pub struct WatchdogCounters;

    /// Pings of the driver.
    Pings = "pings",
    /// Number of times that the pings ended, and the machine was reset.
    Expiries = "expiries",
    /// Buffers that were no pings: the device cannot write to them.
    BadChains = "bad_chains",
}

impl WatchdogCounter {
    /// True if it counts requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BrokenRings)
    }
}
