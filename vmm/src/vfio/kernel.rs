//! The host kernel's interface to its devices: system calls, descriptions, and sysfs.

pub(super) mod info;
pub(super) mod ioctl;
pub(super) mod iommufd_ioctl;
pub(super) mod sysfs;
