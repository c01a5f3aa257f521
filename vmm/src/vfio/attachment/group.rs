//! An IOMMU group of the host: devices that its IOMMU cannot tell apart, so a VM has all of them or none. Without
//! iommufd, its devices are opened through the group's file.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

use crate::vfio::error::VfioError;
use crate::vfio::kernel::ioctl;
use crate::vfio::kernel::sysfs::SysfsDevice;

/// Opens the group of `device`, which the kernel allows only once. If this fails, no memory has been pinned.
///
/// # Errors
///
/// Fails if VFIO does not have all of the group.
pub(crate) fn open(device: &SysfsDevice) -> Result<OwnedFd, VfioError> {
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

/// Reason why not all devices of the group of `device` are bound to VFIO or without a driver.
pub(crate) fn not_viable(device: &SysfsDevice) -> VfioError {
    let own = device.driver_error().filter(|error| matches!(error, VfioError::Driver(_)));
    let others = VfioError::NotViable { group: device.group, others: device.others_in_use() };
    own.unwrap_or(others)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::error_kind::ErrorKind;

    #[test]
    fn partly_bound_group_is_refused_naming_devices_and_drivers() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for (name, driver) in [("0000:01:00.0", "vfio-pci"), ("0000:01:00.1", "igb"), ("0000:01:00.2", "nvme")] {
            fs::create_dir_all(at(name)).unwrap();
            fs::create_dir_all(at("group/devices")).unwrap();
            symlink(at("group"), at(&format!("{name}/iommu_group"))).unwrap();
            symlink(at(&format!("drivers/{driver}")), at(&format!("{name}/driver"))).unwrap();
            symlink(at(name), at(&format!("group/devices/{name}"))).unwrap();
        }
        let of = |name: &str| not_viable(&SysfsDevice { folder: at(name), name: CString::default(), group: 7 });
        let error = of("0000:01:00.0");
        assert_eq!(
            error.to_string(),
            "its IOMMU group 7 also has 0000:01:00.1 (igb), 0000:01:00.2 (nvme); bind these to vfio-pci or to no \
             driver, or give a device with a group of its own"
        );
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(of("0000:01:00.1").to_string().starts_with("the device has the driver igb; bind it to vfio-pci"));
    }
}
