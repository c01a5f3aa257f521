//! Counters of a persistent memory device.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a persistent memory device.
    pub enum PmemCounter;
    /// The counters of one persistent memory device since it was plugged in.
    pub struct PmemCounters;

    /// Flush requests that succeeded.
    Flushes: requests = "flushes",
    /// Messages of the driver whose type the device does not know.
    BadRequests: requests = "bad_requests",
    /// Buffers dropped because their chain is not a request.
    BadChains: requests = "bad_chains",
    /// Flush requests that failed on the host.
    BackendErrors: requests = "backend_errors",
}

impl PmemCounter {
    /// True for a counter of requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadRequests | Self::BadChains | Self::BackendErrors | Self::BrokenRings)
    }
}
