//! Counters of a balloon: pages that were returned to the host, and causes of failures.

use crate::device::counters::{counters, queue_tally};

counters! {
    /// A counted event of a balloon.
    pub enum BalloonCounter;
    /// The counters of one balloon since it was plugged in.
    pub struct BalloonCounters;

    /// Pages of 4 KiB that the driver put into the balloon.
    InflatedPages: pages = "inflated_pages",
    /// Pages of 4 KiB that the driver took out of the balloon.
    DeflatedPages: pages = "deflated_pages",
    /// Bytes of free memory that the driver reported.
    ReportedBytes: bytes = "reported_bytes",
    /// Bytes returned to the host: pages in the balloon, and reported pages.
    DiscardedBytes: bytes = "discarded_bytes",
    /// Bytes not returned to the host because they are only a part of a huge page of the host.
    KeptBytes: bytes = "kept_bytes",
    /// Wake-ups of a worker by a doorbell of the driver.
    Kicks: doorbells = "kicks",
    /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
    Interrupts: interrupts = "interrupts",
    /// Buffers ignored because the descriptors of the chain are invalid.
    BadChains: buffers = "bad_chains",
    /// Ranges of the driver that are not entirely guest memory.
    BadRanges: ranges = "bad_ranges",
    /// Ranges that the host failed to free.
    BackendErrors: ranges = "backend_errors",
    /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
    BrokenRings: queues = "broken_rings",
}

queue_tally!(BalloonCounter, BalloonCounters);

impl BalloonCounter {
    /// True for a counter of requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BadRanges | Self::BackendErrors | Self::BrokenRings)
    }
}
