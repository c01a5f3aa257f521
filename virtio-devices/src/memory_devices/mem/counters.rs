//! Counters of a memory device: blocks that were plugged and unplugged, and requests that were refused.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a memory device.
    pub enum MemCounter;
    /// The counters of one memory device since it was plugged in.
    pub struct MemCounters;

    /// Blocks of memory that the driver plugged.
    PluggedBlocks: blocks = "plugged_blocks",
    /// Blocks of memory that the driver unplugged.
    UnpluggedBlocks: blocks = "unplugged_blocks",
    /// Requests of any kind that the device answered.
    Requests: requests = "requests",
    /// Requests to plug more than the requested size.
    RefusedRequests: requests = "refused_requests",
    /// Requests of an unknown kind, or for blocks that do not exist or are in another state.
    BadRequests: requests = "bad_requests",
    /// Requests dropped because the descriptors of the chain are invalid or too short.
    BadChains: requests = "bad_chains",
}

impl MemCounter {
    /// True for a counter of requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadRequests | Self::BadChains | Self::BrokenRings)
    }
}
