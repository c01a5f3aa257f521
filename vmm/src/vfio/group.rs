//! An IOMMU group of the host: the devices that its IOMMU cannot tell apart, which a VM has together or not at all.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use virtio_devices::GuestMap;

use crate::vfio::error::VfioError;
use crate::vfio::follower::Follower;
use crate::vfio::guest_memory::GuestMemory;
use crate::vfio::ioctl;
use crate::vfio::known_groups::KnownGroups;
use crate::vfio::sysfs::SysfsDevice;

/// What the devices of a group reach.
#[derive(Clone)]
pub(super) enum Space {
    /// All of the guest's memory, as all such groups do.
    All(Arc<GuestMemory>),
    /// What a virtual IOMMU maps for the only device of the group.
    Followed(Arc<Follower>),
}

impl Space {
    /// Lets them reach what there is in `memory`, and nothing else.
    ///
    /// # Errors
    ///
    /// When they cannot. They reach what they reached before then.
    pub(super) fn set_memory(&self, memory: &GuestMap) -> Result<(), VfioError> {
        match self {
            Self::All(all) => all.set(memory),
            Self::Followed(follower) => follower.set_memory(memory),
        }
    }

    /// The guest's memory, as they reach it.
    pub(super) fn memory(&self) -> GuestMap {
        match self {
            Self::All(all) => all.memory(),
            Self::Followed(follower) => follower.memory(),
        }
    }
}

/// A group that this process has open. A group is opened once on a host.
pub(super) struct Group {
    // Drop order: an address space without a group can no longer be changed.
    space: Space,
    file: OwnedFd,
    known: Arc<KnownGroups>,
}

impl Group {
    /// Opens the group of `device`, without an address space. When this fails, no memory has been pinned.
    ///
    /// # Errors
    ///
    /// When VFIO does not have the group, or not all of it.
    pub(super) fn open(device: &SysfsDevice) -> Result<OwnedFd, VfioError> {
        let path = device.group_file();
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(|error| {
            let no_group = error.kind() == std::io::ErrorKind::NotFound;
            device.driver_error().filter(|_| no_group).unwrap_or(VfioError::Open { path, error })
        })?;
        if !ioctl::is_viable(&file).map_err(VfioError::of("look at its group"))? {
            let own = device.driver_error().filter(|error| matches!(error, VfioError::Driver(_)));
            let others = VfioError::NotViable { group: device.group, others: device.others_in_use() };
            return Err(own.unwrap_or(others));
        }
        Ok(file.into())
    }

    /// The group of `file`, whose devices reach `space`, and of which KVM is told by `known`.
    pub(super) fn new(file: OwnedFd, space: Space, known: &Arc<KnownGroups>) -> Self {
        known.add(file.as_fd());
        Self { space, file, known: Arc::clone(known) }
    }

    /// What its devices reach.
    pub(super) fn space(&self) -> &Space {
        &self.space
    }

    /// The file of one of its devices.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub(super) fn device(&self, device: &SysfsDevice) -> Result<OwnedFd, VfioError> {
        ioctl::open_device(&self.file, &device.name).map_err(VfioError::of("open the device"))
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // KVM would keep it open.
        self.known.remove(self.file.as_fd());
    }
}
