//! Guest memory that host devices reach.

use std::sync::Arc;

use virtio_devices::GuestMap;

use crate::vfio::error::VfioError;
use crate::vfio::memory::follower::Follower;
use crate::vfio::memory::guest_memory::GuestMemory;

/// Memory that devices reach.
#[derive(Clone)]
pub(crate) enum Space {
    /// All of the guest's memory; shared by all such devices.
    All(Arc<GuestMemory>),
    /// Mappings of a virtual IOMMU for a device.
    Followed {
        // Drop order: copies are unmapped before their source.
        /// Follower of the virtual IOMMU.
        follower: Arc<Follower>,
        /// All of the guest's memory, if mappings are copies of its mapping.
        all: Option<Arc<GuestMemory>>,
    },
}

impl Space {
    /// Maps for the devices their part of `memory`, and nothing else.
    ///
    /// # Errors
    ///
    /// Fails if the devices cannot reach it. The former memory stays mapped then.
    pub(crate) fn set_memory(&self, memory: &GuestMap) -> Result<(), VfioError> {
        match self {
            Self::All(all) => all.set(memory),
            Self::Followed { follower, .. } => follower.set_memory(memory),
        }
    }

    /// The guest's memory that the devices reach.
    pub(crate) fn memory(&self) -> GuestMap {
        match self {
            Self::All(all) => all.memory(),
            Self::Followed { follower, .. } => follower.memory(),
        }
    }

    /// All of the guest's memory, if it is mapped as a whole: for these devices, or as a source of copies.
    pub(crate) fn all(&self) -> Option<&Arc<GuestMemory>> {
        match self {
            Self::All(all) => Some(all),
            Self::Followed { all, .. } => all.as_ref(),
        }
    }
}
