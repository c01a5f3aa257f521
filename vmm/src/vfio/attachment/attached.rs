//! Files attached to an address space: a group, with all devices opened through it, or a device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::vfio::attachment::known_files::KnownFiles;
use crate::vfio::error::VfioError;
use crate::vfio::kernel::ioctl;
use crate::vfio::kernel::sysfs::SysfsDevice;
use crate::vfio::memory::space::Space;

/// A file that is attached until this is dropped.
pub(crate) struct Attached {
    // Drop order: the address space of a group cannot be changed once the group is closed.
    space: Space,
    file: AttachedFile,
    group: u32,
    known: Arc<KnownFiles>,
}

/// File that is attached.
pub(crate) enum AttachedFile {
    /// A group, which is open once.
    Group(OwnedFd),
    /// A device that is attached on its own, through iommufd.
    Device(OwnedFd),
}

impl AttachedFile {
    /// The file.
    pub(crate) const fn file(&self) -> &OwnedFd {
        match self {
            Self::Group(file) | Self::Device(file) => file,
        }
    }

    /// Stops a device's interrupts and detaches it from its address space. A group is detached when it is closed.
    pub(crate) fn detach(&self) {
        let Self::Device(device) = self else { return };
        // The sender of the file still has it open, so closing it here ends neither.
        ioctl::clear_all_irqs(device);
        if let Err(error) = ioctl::detach(device) {
            log::warn!("a device of the host may still reach the guest's memory: {error}");
        }
    }
}

impl Attached {
    /// Object that is attached to `space` and has devices of the group number `group`. KVM gets it through `known`.
    pub(crate) fn new(file: AttachedFile, space: Space, group: u32, known: &Arc<KnownFiles>) -> Self {
        known.add(file.file().as_fd());
        Self { space, file, group, known: Arc::clone(known) }
    }

    /// Memory that its devices reach.
    pub(crate) const fn space(&self) -> &Space {
        &self.space
    }

    /// The number of its IOMMU group.
    pub(crate) const fn group(&self) -> u32 {
        self.group
    }

    /// True if further devices of the group are opened through this.
    pub(crate) const fn is_group(&self) -> bool {
        matches!(self.file, AttachedFile::Group(_))
    }

    /// The file of `device`, which belongs to this object.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn device(&self, device: &SysfsDevice) -> Result<OwnedFd, VfioError> {
        let file = match &self.file {
            AttachedFile::Group(group) => ioctl::open_device(group, &device.name),
            AttachedFile::Device(file) => file.try_clone(),
        };
        file.map_err(VfioError::of("open the device"))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // KVM would keep the file open.
        self.known.remove(self.file.file().as_fd());
        self.file.detach();
    }
}
