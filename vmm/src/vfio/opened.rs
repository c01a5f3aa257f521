//! A host device that is open and reaches the guest's memory, but is not a function of the guest yet.

use std::sync::Arc;

use pci::Rid;
use virtio_devices::{IommuAttachment, MemoryPeers};

use crate::vfio::error::VfioError;
use crate::vfio::function::watch::Watched;
use crate::vfio::function::{Guards, VfioFunction};
use crate::vfio::host_device::KernelDevice;
use crate::vfio::kernel::info::DeviceInfo;
use crate::vfio::memory::follower::Follower;

/// An open host device. Dropping it closes the device.
pub(crate) struct OpenDevice {
    /// The BARs that are not mapped into the guest, 0 to 5.
    pub(super) unmapped_bars: Vec<u8>,
    // Drop order: the device is closed last.
    pub(super) watched: Watched,
    pub(super) mark: Arc<()>,
    pub(super) host: KernelDevice,
    pub(super) info: DeviceInfo,
    /// Follower of its address space, if the device will be behind the guest's virtual IOMMU.
    pub(super) follower: Option<Arc<Follower>>,
    /// Peers that will reach its BARs.
    pub(super) peers: Option<Arc<dyn MemoryPeers>>,
}

impl OpenDevice {
    /// Makes the device the function at `rid`, and resets it. `attachment` is its place behind the guest's virtual
    /// IOMMU, if any, whose mappings it reaches from now on.
    ///
    /// # Errors
    ///
    /// Fails if the shape of the function is impossible, or the device cannot reach what the virtual IOMMU maps.
    pub(crate) fn into_function(
        self,
        rid: Rid,
        attachment: Option<IommuAttachment>,
    ) -> Result<VfioFunction, VfioError> {
        let Self { unmapped_bars, watched, mark, host, info, follower, peers } = self;
        if let (Some(attachment), Some(follower)) = (&attachment, &follower) {
            attachment.follow(Arc::clone(follower) as _).map_err(|_| VfioError::NotFollowed)?;
        }
        let function = VfioFunction::new(rid, Box::new(host), &info, &unmapped_bars, peers.as_ref())?;
        Ok(function.keeping(Guards { follower, _attachment: attachment, _watched: watched, _mark: mark }))
    }
}
