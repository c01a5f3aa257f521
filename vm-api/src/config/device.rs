//! Devices of the host: `--device`.

use std::os::fd::RawFd;
use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// A PCI device of the host that is passed through to the guest (VFIO).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--device")]
#[schema(unsupported = Device)]
pub struct DeviceConfig {
    /// Folder of the device in sysfs, such as /sys/bus/pci/devices/0000:01:00.1. It must be bound to the driver
    /// vfio-pci.
    #[option("path=<folder>", bare)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1)]
    pub path: Option<PathBuf>,
    /// Instead of path, descriptor of the device's own file, one of /dev/vfio/devices. Needs --platform iommufd_fd.
    #[option("fd=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "In requests: no effect with a descriptor that is sent (SCM_RIGHTS), and refused without \
                      one. In replies: the descriptor of the device that the VMM has.")]
    pub fd: Option<RawFd>,
    /// Device name, unique in the VM. It must not start with two underscores. By default _vfioN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// PCI segment.
    #[option("pci_segment=<number>")]
    pub pci_segment: u16,
    /// Device number on bus 0, 1 to 31, or 0 on another segment than 0. By default the lowest free one.
    #[option("pci_device_id=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SLOT)]
    pub pci_device_id: Option<u8>,
    /// Put the device behind the guest's virtual IOMMU, which confines its access to the guest's memory.
    #[option("iommu=on|off")]
    pub iommu: bool,
    /// BARs that are not mapped into the guest but trapped, such as [2,4]. By default none.
    #[option("x_exclude_mmap_bars=[<number>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(items(maximum = 5))]
    pub x_exclude_mmap_bars: Vec<u8>,
}
