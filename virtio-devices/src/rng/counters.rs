//! Counters of an entropy device: bytes, and causes of unfilled buffers.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of an entropy device.
    pub enum RngCounter;
    /// The counters of one entropy device since it was plugged in.
    pub struct RngCounters;

    /// Bytes that the driver received.
    Bytes = "bytes",
    /// Buffers that were filled.
    Requests = "requests",
    /// Dropped: the chain's descriptors are invalid.
    BadChains = "bad_chains",
    /// The source could not be read, or has ended.
    BackendErrors = "backend_errors",
}

impl RngCounter {
    /// True for a counter of requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BackendErrors | Self::BrokenRings)
    }
}
