//! Resources that the machine gives to its devices.

use std::sync::Arc;

use pci::{Placement, Rid};
use virtio_devices::{
    BalloonSize, ChannelEnd, CharDevice, ConsoleWindow, Expiry, Iommu, IommuAttachment, Memory, PassedSockets,
};

use crate::devices::disks::LimitGroups;
use crate::devices::mem_regions::MemRegions;
use crate::pci_layout::{Apertures, RootBus};
use crate::telemetry::events::Events;
use crate::vfio::VfioHost;

/// Resources that the machine gives to devices.
pub(crate) struct HostResources {
    /// The guest's memory.
    pub memory: Memory,
    /// Apertures for BARs, of each segment.
    pub apertures: Vec<Apertures>,
    /// Further root buses of segment 0, until the bus is made.
    pub roots: Vec<RootBus>,
    /// The other end of the virtio console, with its window if that is a terminal; `None` without a console.
    pub console: Option<(Arc<CharDevice>, Option<Arc<ConsoleWindow>>)>,
    /// The host's end of the guest's channel; `None` without one.
    pub channel: Option<Arc<ChannelEnd>>,
    /// The size of the balloon; 0 without a balloon.
    pub balloon: Arc<BalloonSize>,
    /// Resets the guest, for its watchdog.
    pub expiry: Arc<Expiry>,
    /// The memory of memory devices.
    pub mem_regions: MemRegions,
    /// Destination of events about the guest's changes to devices.
    pub events: Events,
    /// The rate limits that disks share.
    pub limit_groups: LimitGroups,
    /// True if another program holds the locks of writable disks until
    /// [`StorageLocks::take`](virtio_devices::StorageLocks::take).
    pub locks_later: bool,
    /// The listening sockets that another program passed, until all devices are open.
    pub sockets: Arc<PassedSockets>,
    /// The virtual IOMMU, if there is one.
    pub iommu: Option<Arc<Iommu>>,
    /// The host devices.
    pub vfio: Arc<VfioHost>,
}

impl HostResources {
    /// The place of the function at `rid` behind the IOMMU.
    pub(super) fn iommu_attachment(&self, placement: Placement, rid: Rid) -> Option<IommuAttachment> {
        self.iommu.as_ref().map(|iommu| iommu.add_endpoint(placement.segment, rid))
    }
}
