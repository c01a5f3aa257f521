//! Counters of a memory device: blocks that were plugged and unplugged, and requests that were refused.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a memory device.
    pub enum MemCounter;
    /// The counters of one memory device since it was plugged in.
    pub struct MemCounters;

    /// Blocks that the driver plugged.
    PluggedBlocks = "plugged_blocks",
    /// Blocks that the driver unplugged.
    UnpluggedBlocks = "unplugged_blocks",
    /// Answered requests of any kind.
    Requests = "requests",
    /// Requests to plug more than the requested size.
    RefusedRequests = "refused_requests",
    /// Invalid requests: of an unknown kind, or for blocks that do not exist or are in another state.
    BadRequests = "bad_requests",
    /// Dropped: the chain's descriptors are invalid or too short.
    BadChains = "bad_chains",
}

impl MemCounter {
    /// True for a counter of requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadRequests | Self::BadChains | Self::BrokenRings)
    }
}
