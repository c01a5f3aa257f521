//! Counters of a watchdog.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a watchdog.
    pub enum WatchdogCounter;
    /// The counters of one watchdog since it was plugged in.
    pub struct WatchdogCounters;

    /// Pings that the driver sent in time.
    Pings: requests = "pings",
    /// Times that the pings ended, and the machine was reset.
    Expiries: times = "expiries",
    /// Buffers that do not count as pings because the device cannot write to them.
    BadChains: requests = "bad_chains",
}

impl WatchdogCounter {
    /// True for a counter of requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BrokenRings)
    }
}
