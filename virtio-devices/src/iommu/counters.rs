//! Counters of an IOMMU.

use crate::counters::counters;

counters! {
    /// Something that is counted of an IOMMU.
    pub enum IommuCounter;
    /// The counters of an IOMMU since the VM was booted.
    pub struct IommuCounters;

    /// Endpoints that were put into a domain.
    Attaches = "attaches",
    /// Endpoints that were taken out of one.
    Detaches = "detaches",
    /// Ranges that were mapped.
    Maps = "maps",
    /// Requests to remove mappings.
    Unmaps = "unmaps",
    /// Endpoints that were asked about.
    Probes = "probes",
    /// Requests that were refused.
    Refused = "refused",
    /// Accesses of functions that their domains do not allow.
    Faults = "faults",
    /// Events about them.
    Events = "events",
    /// Faults that the driver was not told: too many, or it had no buffer for them.
    EventsDropped = "events_dropped",
    /// Chains in which no request or no room for its answer was found.
    BadChains = "bad_chains",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Queues that were given up because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl IommuCounter {
    /// True if it counts accesses or requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::Refused | Self::Faults | Self::EventsDropped | Self::BadChains | Self::BrokenRings)
    }
}
