//! Counters of a persistent memory device.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a persistent memory device.
    pub enum PmemCounter;
    /// The counters of one persistent memory device since it was plugged in.
    pub struct PmemCounters;

    /// Flushes that succeeded.
    Flushes = "flushes",
    /// Requests of an unknown type.
    BadRequests = "bad_requests",
    /// Dropped: the chain is not a request.
    BadChains = "bad_chains",
    /// Flushes that failed.
    BackendErrors = "backend_errors",
}

impl PmemCounter {
    /// True for a counter of requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadRequests | Self::BadChains | Self::BackendErrors | Self::BrokenRings)
    }
}
