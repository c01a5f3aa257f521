//! Counters of a disk: operations, and causes of refused requests.

use crate::device::counters::counters;

counters! {
    /// A counted event of a disk.
    pub enum BlockCounter;
    /// The counters of one disk since it was plugged in.
    pub struct BlockCounters;

    /// Bytes that the driver read.
    ReadBytes = "read_bytes",
    /// Reads that succeeded.
    ReadOps = "read_ops",
    /// Bytes that the driver wrote.
    WriteBytes = "write_bytes",
    /// Writes that succeeded.
    WriteOps = "write_ops",
    /// Flushes that succeeded.
    FlushOps = "flush_ops",
    /// Ranges that were discarded.
    DiscardOps = "discard_ops",
    /// Ranges that were zeroed.
    WriteZeroesOps = "write_zeroes_ops",
    /// Requests that went through a bounce buffer, because the driver's buffers are not aligned as `direct` requires.
    BouncedOps = "bounced_ops",
    /// Times that a rate limit delayed a queue with requests.
    RateWaits = "rate_waits",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Dropped: the chain's descriptors are invalid, or have no room for a status.
    BadChains = "bad_chains",
    /// Refused: beyond the end, not whole sectors, a write to a read-only disk, or malformed.
    BadRequests = "bad_requests",
    /// Refused: not supported by the disk.
    Unsupported = "unsupported",
    /// Failed: the host could not read or write the image.
    BackendErrors = "backend_errors",
    /// Queues stopped because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl BlockCounter {
    /// True for a counter of requests that failed or were refused.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BadRequests | Self::BackendErrors | Self::BrokenRings)
    }
}
