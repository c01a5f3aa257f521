//! Counters of a balloon: pages that were returned to the host, and causes of failures.

use crate::counters::counters;

counters! {
    /// Something that is counted of a balloon.
    pub enum BalloonCounter;
    /// The counters of one balloon since it was plugged in.
    pub struct BalloonCounters;

    /// Pages of 4 KiB that the driver put into the balloon.
    InflatedPages = "inflated_pages",
    /// Pages of 4 KiB that the driver took out of the balloon.
    DeflatedPages = "deflated_pages",
    /// Bytes of free memory that the driver reported.
    ReportedBytes = "reported_bytes",
    /// Bytes that the host got back, of the balloon's pages and of those reported.
    DiscardedBytes = "discarded_bytes",
    /// Bytes that the host did not get back because they are only a part of one of its huge pages.
    KeptBytes = "kept_bytes",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Ignored: the chain's descriptors are invalid.
    BadChains = "bad_chains",
    /// Ranges that are not, or not only, guest memory.
    BadRanges = "bad_ranges",
    /// Ranges that the host refused to take back.
    BackendErrors = "backend_errors",
    /// Queues that were given up because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl BalloonCounter {
    /// True if it counts requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BadRanges | Self::BackendErrors | Self::BrokenRings)
    }
}
