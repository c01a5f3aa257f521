//! Counters of a disk: operations, and causes of refused requests.

use crate::counters::counters;

counters! {
    /// Something that is counted of a disk.
    pub enum BlockCounter;
    /// The counters of one disk since it was plugged in.
    pub struct BlockCounters;

    /// Bytes that the driver read.
    ReadBytes = "read_bytes",
    /// Reads that were carried out.
    ReadOps = "read_ops",
    /// Bytes that the driver wrote.
    WriteBytes = "write_bytes",
    /// Writes that were carried out.
    WriteOps = "write_ops",
    /// Flushes that were carried out.
    FlushOps = "flush_ops",
    /// Ranges that were discarded.
    DiscardOps = "discard_ops",
    /// Ranges that were zeroed.
    WriteZeroesOps = "write_zeroes_ops",
    /// Requests that went through a buffer, because the driver's are not aligned as `direct` needs it.
    BouncedOps = "bounced_ops",
    /// Waits of a queue with requests in it, because a rate limit was reached.
    RateWaits = "rate_waits",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Dropped: the chain's descriptors are invalid, or have no place for a status.
    BadChains = "bad_chains",
    /// Refused: beyond the end, not of whole blocks, a write to what is read-only, or malformed.
    BadRequests = "bad_requests",
    /// Refused: the disk does not do that.
    Unsupported = "unsupported",
    /// Failed: the host could not read or write the image.
    BackendErrors = "backend_errors",
    /// Queues that were given up because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl BlockCounter {
    /// True if it counts requests that failed or were refused.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BadRequests | Self::BackendErrors | Self::BrokenRings)
    }
}
