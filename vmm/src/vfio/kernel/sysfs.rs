//! Description of a host PCI device in sysfs.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::vfio::error::VfioError;

/// Drivers that do not prevent VFIO from using other devices of a group, or that do no DMA (`drivers/vfio/vfio_main.c`,
/// `driver_managed_dma`).
const HARMLESS: [&str; 2] = ["pcieport", "pci-stub"];

/// A PCI device of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SysfsDevice {
    /// Folder in sysfs, without links.
    pub folder: PathBuf,
    /// Address, such as `0000:01:00.1`, which is the device's name for VFIO.
    pub name: CString,
    /// IOMMU group.
    pub group: u32,
}

/// The file name of the target of the link `link` in `folder`.
fn target(folder: &Path, link: &str) -> Option<String> {
    Some(fs::read_link(folder.join(link)).ok()?.file_name()?.to_str()?.to_string())
}

impl SysfsDevice {
    /// The device whose folder is at `path`.
    ///
    /// # Errors
    ///
    /// Fails if there is none, it is not a PCI device, or the host has no IOMMU for it.
    pub(crate) fn at(path: &Path) -> Result<Self, VfioError> {
        let folder = fs::canonicalize(path).map_err(VfioError::NoDevice)?;
        if target(&folder, "subsystem").as_deref() != Some("pci") {
            return Err(VfioError::NotPci);
        }
        let name = folder.file_name().and_then(|name| CString::new(name.as_bytes()).ok()).ok_or(VfioError::NotPci)?;
        let group = target(&folder, "iommu_group").and_then(|group| group.parse().ok()).ok_or(VfioError::NoGroup)?;
        Ok(Self { folder, name, group })
    }

    /// The file of its group.
    pub(crate) fn group_file(&self) -> PathBuf {
        Path::new("/dev/vfio").join(self.group.to_string())
    }

    /// Reason why VFIO has no file for its group: the driver that has the device.
    pub(crate) fn driver_error(&self) -> Option<VfioError> {
        match target(&self.folder, "driver") {
            None => Some(VfioError::NoDriver),
            Some(driver) if driver.contains("vfio") => None,
            Some(driver) => Some(VfioError::Driver(driver)),
        }
    }

    /// The devices of its group with a driver other than VFIO's: addresses with drivers.
    pub(crate) fn others_in_use(&self) -> Vec<String> {
        let devices = fs::read_dir(self.folder.join("iommu_group/devices"));
        let in_use = |folder: PathBuf| {
            let driver = target(&folder, "driver")?;
            let name = folder.file_name()?.to_str()?.to_string();
            (!driver.contains("vfio") && !HARMLESS.contains(&driver.as_str())).then(|| format!("{name} ({driver})"))
        };
        let mut others: Vec<_> = devices.into_iter().flatten().flatten().filter_map(|e| in_use(e.path())).collect();
        others.sort();
        others
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder like sysfs, with devices and their drivers, all in group 7.
    fn sysfs(devices: &[(&str, Option<&str>)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let folder = |path: &str| fs::create_dir_all(at(path)).unwrap();
        folder("bus/pci");
        folder("groups/7/devices");
        for (name, driver) in devices {
            folder(name);
            symlink(at("bus/pci"), at(&format!("{name}/subsystem"))).unwrap();
            symlink(at("groups/7"), at(&format!("{name}/iommu_group"))).unwrap();
            symlink(at(name), at(&format!("groups/7/devices/{name}"))).unwrap();
            if let Some(driver) = driver {
                folder(&format!("bus/pci/{driver}"));
                symlink(at(&format!("bus/pci/{driver}")), at(&format!("{name}/driver"))).unwrap();
            }
        }
        root
    }

    #[test]
    fn a_device_has_a_name_a_group_and_neighbours() {
        let root = sysfs(&[
            ("0000:01:00.0", Some("vfio-pci")),
            ("0000:01:00.1", Some("igb")),
            ("0000:01:00.2", None),
            ("0000:00:01.0", Some("pcieport")),
        ]);
        let device = SysfsDevice::at(&root.path().join("0000:01:00.0")).unwrap();
        assert_eq!((device.name.to_str().unwrap(), device.group), ("0000:01:00.0", 7));
        assert_eq!(device.group_file(), Path::new("/dev/vfio/7"));
        assert_eq!(device.others_in_use(), ["0000:01:00.1 (igb)"]);
        assert!(device.driver_error().is_none());
        let other = |name: &str| SysfsDevice::at(&root.path().join(name)).unwrap().driver_error().unwrap().to_string();
        assert!(other("0000:01:00.1").starts_with("the device has the driver igb; bind it to vfio-pci"));
        assert!(other("0000:01:00.2").starts_with("the device has no driver; bind it to vfio-pci"));
    }

    #[test]
    fn a_folder_of_no_device_or_of_no_group_is_refused() {
        let root = sysfs(&[("0000:01:00.0", None)]);
        let error = |path: &Path| SysfsDevice::at(path).unwrap_err().to_string();
        assert!(error(root.path()).starts_with("this is not the folder of a PCI device"));
        assert!(error(&root.path().join("0000:02:00.0")).starts_with("there is no such device (No such file"));
        fs::remove_file(root.path().join("0000:01:00.0/iommu_group")).unwrap();
        assert!(error(&root.path().join("0000:01:00.0")).starts_with("the device is in no IOMMU group; turn the host"));
    }
}
