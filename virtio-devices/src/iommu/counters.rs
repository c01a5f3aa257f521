//! Counters of an IOMMU.

use crate::device::counters::counters;

counters! {
    /// A counted event of an IOMMU.
    pub enum IommuCounter;
    /// The counters of an IOMMU since the VM was booted.
    pub struct IommuCounters;

    /// Endpoints attached to a domain.
    Attaches = "attaches",
    /// Endpoints detached from a domain.
    Detaches = "detaches",
    /// Mapped ranges.
    Maps = "maps",
    /// Requests to remove mappings.
    Unmaps = "unmaps",
    /// Probed endpoints.
    Probes = "probes",
    /// Refused requests.
    Refused = "refused",
    /// Accesses that a domain does not allow.
    Faults = "faults",
    /// Events about them.
    Events = "events",
    /// Faults that were not reported to the driver: too many, or it had no buffer for them.
    EventsDropped = "events_dropped",
    /// Chains without a complete request, or without room for its reply.
    BadChains = "bad_chains",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Queues stopped because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl IommuCounter {
    /// True for a counter of accesses or requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::Refused | Self::Faults | Self::EventsDropped | Self::BadChains | Self::BrokenRings)
    }
}
