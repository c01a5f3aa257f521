//! Counters of an IOMMU.

use crate::device::counters::counters;

counters! {
    /// A counted event of an IOMMU.
    pub enum IommuCounter;
    /// The counters of an IOMMU since the VM was booted.
    pub struct IommuCounters;

    /// Requests that attached an endpoint to a domain.
    Attaches: requests = "attaches",
    /// Requests that detached an endpoint from a domain.
    Detaches: requests = "detaches",
    /// Requests that mapped a range.
    Maps: requests = "maps",
    /// Requests that removed mappings.
    Unmaps: requests = "unmaps",
    /// Requests for the properties of an endpoint.
    Probes: requests = "probes",
    /// Requests of the driver that were invalid or not allowed.
    Refused: requests = "refused",
    /// Accesses of a device that its domain does not allow.
    Faults: accesses = "faults",
    /// Events about such accesses that the driver received.
    Events: events = "events",
    /// Events that the driver did not receive: too many, or it had no buffer for them.
    EventsDropped: events = "events_dropped",
    /// Chains without a complete request, or without room for its reply.
    BadChains: requests = "bad_chains",
    /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
    Interrupts: interrupts = "interrupts",
    /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
    BrokenRings: queues = "broken_rings",
}

impl IommuCounter {
    /// True for a counter of accesses or requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::Refused | Self::Faults | Self::EventsDropped | Self::BadChains | Self::BrokenRings)
    }
}
