//! The character device of a host device, for iommufd (`Documentation/driver-api/vfio.rst`, "VFIO Device cdev").

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::vfio::attachment::group;
use crate::vfio::error::VfioError;
use crate::vfio::kernel::ioctl;
use crate::vfio::kernel::sysfs::SysfsDevice;
use crate::vfio::memory::iommufd::Iommufd;

/// Folder of these files.
const FOLDER: &str = "/dev/vfio/devices";

/// The path of the file of `device`, which may not exist. `None` if VFIO has none for the device.
pub(crate) fn path(device: &SysfsDevice) -> Option<PathBuf> {
    let entries = fs::read_dir(device.folder.join("vfio-dev")).ok()?;
    let name = entries.flatten().map(|entry| entry.file_name()).next()?;
    Some(Path::new(FOLDER).join(name))
}

/// Opens the file of `device`.
///
/// # Errors
///
/// Fails if VFIO has none for the device, or it cannot be opened.
pub(crate) fn open(device: &SysfsDevice) -> Result<OwnedFd, VfioError> {
    let path = path(device).ok_or_else(|| device.driver_error().unwrap_or(VfioError::NoCdev))?;
    let file = OpenOptions::new().read(true).write(true).open(&path);
    Ok(file.map_err(|error| VfioError::Open { path, error })?.into())
}

/// Binds `device`, whose file is `file`, to `iommufd`. `is_passed` is true if another program opened the file. Returns
/// true if the file was bound to an iommufd before, this one or another.
///
/// # Errors
///
/// Fails if another program has bound the device, or a device of its group has another driver.
pub(crate) fn bind(
    device: &SysfsDevice,
    file: &OwnedFd,
    iommufd: &Iommufd,
    is_passed: bool,
) -> Result<bool, VfioError> {
    let Err(error) = iommufd.bind(file) else { return Ok(false) };
    Err(match error.raw_os_error() {
        // The kernel describes a bound device, and does not bind it again.
        Some(libc::EINVAL) if is_passed && ioctl::device_info(file).is_ok() => {
            return Ok(true);
        }
        Some(libc::EINVAL | libc::EBUSY) => match group::not_viable(device) {
            VfioError::NotViable { others, .. } if others.is_empty() => VfioError::InUse,
            not_viable => not_viable,
        },
        Some(libc::EPERM) => VfioError::NoRemapping("iommufd"),
        // The descriptor is open, but not an iommufd.
        Some(libc::EBADFD) => VfioError::NotIommufd,
        _ => VfioError::of("give the device to iommufd")(error),
    })
}

/// The folder in sysfs of the device with this file.
///
/// # Errors
///
/// Fails if it is not such a file.
pub(crate) fn folder(file: &OwnedFd) -> Result<PathBuf, VfioError> {
    let found = rustix::fs::fstat(file).map_err(|_| VfioError::NotCdev)?;
    if rustix::fs::FileType::from_raw_mode(found.st_mode) != rustix::fs::FileType::CharacterDevice {
        return Err(VfioError::NotCdev);
    }
    let (major, minor) = (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
    parent(&Path::new("/sys/dev/char").join(format!("{major}:{minor}"))).ok_or(VfioError::NotCdev)
}

/// The device above `entry`, which is its `vfio-dev/vfio0`.
fn parent(entry: &Path) -> Option<PathBuf> {
    let entry: io::Result<_> = fs::canonicalize(entry);
    let entry = entry.ok()?;
    let class = entry.parent()?;
    (class.file_name()? == "vfio-dev").then(|| class.parent().map(Path::to_path_buf)).flatten()
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use super::{folder as own_folder, *};

    #[test]
    fn a_device_is_found_by_its_file_and_the_file_by_its_device() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().canonicalize().unwrap().join("0000:01:00.1");
        fs::create_dir_all(folder.join("vfio-dev/vfio7")).unwrap();
        let device = SysfsDevice { folder: folder.clone(), name: CString::default(), group: 3 };
        assert_eq!(path(&device).as_deref(), Some(Path::new("/dev/vfio/devices/vfio7")));
        let entry = root.path().join("511:7");
        symlink(folder.join("vfio-dev/vfio7"), &entry).unwrap();
        assert_eq!(parent(&entry), Some(folder.clone()));
        assert_eq!(parent(&folder), None, "no file of a device");
        let without = SysfsDevice { folder: folder.join("vfio-dev"), ..device };
        assert_eq!(path(&without), None);
        let error = open(&without).unwrap_err().to_string();
        assert!(error.starts_with("the device has no driver; bind it to vfio-pci"), "{error}");
    }

    #[test]
    fn a_descriptor_of_something_else_is_refused() {
        for path in ["/dev/null", "/proc/self/status"] {
            let error = own_folder(&File::open(path).unwrap().into()).unwrap_err().to_string();
            assert_eq!(error, "not a VFIO device descriptor; open one of /dev/vfio/devices and pass that");
        }
    }
}
