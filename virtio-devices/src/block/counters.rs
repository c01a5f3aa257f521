//! Counters of a disk: operations, and causes of refused requests.

use crate::device::counters::counters;

counters! {
    /// A counted event of a disk.
    pub enum BlockCounter;
    /// The counters of one disk since it was plugged in.
    pub struct BlockCounters;

    /// Bytes that the driver read.
    ReadBytes: bytes = "read_bytes",
    /// Read requests that succeeded.
    ReadOps: requests = "read_ops",
    /// Bytes that the driver wrote.
    WriteBytes: bytes = "write_bytes",
    /// Write requests that succeeded.
    WriteOps: requests = "write_ops",
    /// Flush requests that succeeded.
    FlushOps: requests = "flush_ops",
    /// Ranges that the driver discarded.
    DiscardOps: ranges = "discard_ops",
    /// Ranges that the driver set to zero.
    WriteZeroesOps: ranges = "write_zeroes_ops",
    /// Requests that went through a bounce buffer, because the driver's buffers are not aligned as `direct` requires.
    BouncedOps: requests = "bounced_ops",
    /// Times that a rate limit delayed a queue with requests.
    RateWaits: times = "rate_waits",
    /// Wake-ups of a worker by a doorbell of the driver.
    Kicks: doorbells = "kicks",
    /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
    Interrupts: interrupts = "interrupts",
    /// Requests dropped because the descriptors of the chain are invalid, or have no room for a status.
    BadChains: requests = "bad_chains",
    /// Requests refused: beyond the end of the disk, not whole sectors, a write to a read-only disk, or malformed.
    BadRequests: requests = "bad_requests",
    /// Requests refused because the disk does not support their type.
    Unsupported: requests = "unsupported",
    /// Requests that failed because the host could not read or write the image.
    BackendErrors: requests = "backend_errors",
    /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
    BrokenRings: queues = "broken_rings",
}

impl BlockCounter {
    /// True for a counter of requests that failed or were refused.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BadRequests | Self::BackendErrors | Self::BrokenRings)
    }
}
