//! Objects that are attached to an address space: a group, with all devices that are opened by it, or a device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::vfio::error::VfioError;
use crate::vfio::ioctl;
use crate::vfio::known_files::KnownFiles;
use crate::vfio::space::Space;
use crate::vfio::sysfs::SysfsDevice;

/// A file that is attached, until this is dropped.
pub(super) struct Attached {
    // Drop order: the address space of a group can no longer be changed when the group is closed.
    space: Space,
    file: AttachedFile,
    group: u32,
    known: Arc<KnownFiles>,
}

/// Object that is attached.
pub(super) enum AttachedFile {
    /// A group, which is open once.
    Group(OwnedFd),
    /// A device, which iommufd attaches by itself.
    Device(OwnedFd),
}

impl AttachedFile {
    /// The file.
    pub(super) const fn file(&self) -> &OwnedFd {
        match self {
            Self::Group(file) | Self::Device(file) => file,
        }
    }

    /// Ends what the device does, if it is one, and takes its address space from it. A group is detached when it is
    /// closed.
    pub(super) fn detach(&self) {
        let Self::Device(device) = self else { return };
        // Whoever gave this process the file has it open, so closing it here ends none of this.
        ioctl::clear_all_irqs(device);
        if let Err(error) = ioctl::detach(device) {
            log::warn!("a device of the host may still reach the guest's memory: {error}");
        }
    }
}

impl Attached {
    /// Object that is attached to `space` and has devices of the group number `group`. KVM is given it by `known`.
    pub(super) fn new(file: AttachedFile, space: Space, group: u32, known: &Arc<KnownFiles>) -> Self {
        known.add(file.file().as_fd());
        Self { space, file, group, known: Arc::clone(known) }
    }

    /// Memory that its devices reach.
    pub(super) const fn space(&self) -> &Space {
        &self.space
    }

    /// The number of its IOMMU group.
    pub(super) const fn group(&self) -> u32 {
        self.group
    }

    /// True if further devices of the group are opened by this.
    pub(super) const fn is_group(&self) -> bool {
        matches!(self.file, AttachedFile::Group(_))
    }

    /// The file of `device`, which is one of its own.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(super) fn device(&self, device: &SysfsDevice) -> Result<OwnedFd, VfioError> {
        let file = match &self.file {
            AttachedFile::Group(group) => ioctl::open_device(group, &device.name),
            AttachedFile::Device(file) => file.try_clone(),
        };
        file.map_err(VfioError::of("open the device"))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // KVM would keep it open.
        self.known.remove(self.file.file().as_fd());
        self.file.detach();
    }
}
