//! Counters of an entropy device: bytes, and causes of unfilled buffers.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of an entropy device.
    pub enum RngCounter;
    /// The counters of one entropy device since it was plugged in.
    pub struct RngCounters;

    /// Random bytes that the driver received.
    Bytes: bytes = "bytes",
    /// Buffers of the driver that were filled.
    Requests: requests = "requests",
    /// Buffers dropped because the descriptors of the chain are invalid.
    BadChains: requests = "bad_chains",
    /// Times that the source could not be read, or had ended.
    BackendErrors: times = "backend_errors",
}

impl RngCounter {
    /// True for a counter of requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BackendErrors | Self::BrokenRings)
    }
}
