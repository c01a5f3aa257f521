//! Counters of a balloon: pages that were returned to the host, and causes of failures.

use crate::device::counters::{counters, queue_tally};

counters! {
    /// A counted event of a balloon.
    pub enum BalloonCounter;
    /// The counters of one balloon since it was plugged in.
    pub struct BalloonCounters;

    /// Pages of 4 KiB that the driver put into the balloon.
    InflatedPages = "inflated_pages",
    /// Pages of 4 KiB that the driver took out of the balloon.
    DeflatedPages = "deflated_pages",
    /// Bytes of free memory that the driver reported.
    ReportedBytes = "reported_bytes",
    /// Bytes returned to the host: pages in the balloon, and reported pages.
    DiscardedBytes = "discarded_bytes",
    /// Bytes not returned to the host because they are only a part of a huge page of the host.
    KeptBytes = "kept_bytes",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Ignored: the chain's descriptors are invalid.
    BadChains = "bad_chains",
    /// Ranges that are not entirely guest memory.
    BadRanges = "bad_ranges",
    /// Ranges that the host failed to free.
    BackendErrors = "backend_errors",
    /// Queues stopped because their rings are invalid.
    BrokenRings = "broken_rings",
}

queue_tally!(BalloonCounter, BalloonCounters);

impl BalloonCounter {
    /// True for a counter of requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BadRanges | Self::BackendErrors | Self::BrokenRings)
    }
}
