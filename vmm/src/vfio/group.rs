//! An IOMMU group of the host: the devices that its IOMMU cannot tell apart, which a VM has together or not at all.
//! Without iommufd, it has a file, by which its devices are opened.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

use crate::vfio::error::VfioError;
use crate::vfio::ioctl;
use crate::vfio::sysfs::SysfsDevice;

/// Opens the group of `device`, which the host allows once. When this fails, no memory has been pinned.
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
        return Err(not_viable(device));
    }
    Ok(file.into())
}

/// Why not all devices of the group of `device` are VFIO's, or nobody's.
pub(super) fn not_viable(device: &SysfsDevice) -> VfioError {
    let own = device.driver_error().filter(|error| matches!(error, VfioError::Driver(_)));
    let others = VfioError::NotViable { group: device.group, others: device.others_in_use() };
    own.unwrap_or(others)
}
