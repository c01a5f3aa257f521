//! Files of devices, attached to an address space: an IOMMU group, or a device's character device.

pub(super) mod attached;
pub(crate) mod cdev;
pub(super) mod group;
pub(super) mod known_files;
pub(super) mod rebound;
