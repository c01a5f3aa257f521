//! Counters of a persistent memory device.

use crate::counters::queue_counters;

queue_counters! {
    /// Something that is counted of a persistent memory device.
    pub enum PmemCounter;
    /// The counters of one persistent memory device since it was plugged in.
    pub struct PmemCounters;

    /// Flushes after which everything was on the medium.
    Flushes = "flushes",
    /// Requests of a type that does not exist.
    BadRequests = "bad_requests",
    /// Dropped: the chain is no request.
    BadChains = "bad_chains",
    /// Flushes that failed.
    BackendErrors = "backend_errors",
}

impl PmemCounter {
    /// True if it counts requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadRequests | Self::BadChains | Self::BackendErrors | Self::BrokenRings)
    }
}
