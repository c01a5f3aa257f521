//! Host devices for a VM, and their options.

use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;

use crate::passed_fd;
use crate::vfio::attachment::cdev;
use crate::vfio::error::VfioError;
use crate::vfio::kernel::sysfs::SysfsDevice;

/// A host device to pass through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfioSpec {
    /// Name in the VM.
    pub id: String,
    /// Source of the device.
    pub source: VfioSource,
    /// The kernel interface, which is the same for all devices of a VM.
    pub interface: VfioInterface,
    /// True if it is behind the guest's virtual IOMMU.
    pub iommu: bool,
    /// The BARs that are not mapped into the guest, 0 to 5.
    pub unmapped_bars: Vec<u8>,
}

/// Way in which a host device is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VfioSource {
    /// By its folder in sysfs.
    Path(PathBuf),
    /// By its own file, which this process has as this descriptor.
    Fd(RawFd),
}

/// Kernel interface through which devices are opened, and their memory mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VfioInterface {
    /// Groups, in containers.
    Groups,
    /// Single devices, through an iommufd, which this process may have been given as a descriptor.
    Iommufd(Option<RawFd>),
}

impl VfioSource {
    /// Finds the host device, and duplicates its file, if this process was given it.
    ///
    /// # Errors
    ///
    /// Fails if it is not a VFIO PCI device, or the host has no IOMMU for it.
    pub(crate) fn find(&self) -> Result<(SysfsDevice, Option<OwnedFd>), VfioError> {
        match self {
            Self::Path(path) => Ok((SysfsDevice::at(path)?, None)),
            Self::Fd(fd) => {
                let file = passed_fd::duplicate(*fd).ok_or(VfioError::NotCdev)?;
                Ok((SysfsDevice::at(&cdev::folder(&file)?)?, Some(file)))
            }
        }
    }
}
