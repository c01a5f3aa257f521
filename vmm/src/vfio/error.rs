//! Reasons why a host device cannot be passed through: one line, to follow the option that names it.

use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use virtio_devices::Locking;

use crate::error_kind::ErrorKind;
use crate::vfio::config_space::ConfigError;

/// Reason why a host device cannot be passed through.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// There is no such folder.
    #[error("there is no such device ({0}); give its folder, such as /sys/bus/pci/devices/0000:01:00.1")]
    NoDevice(io::Error),
    /// The folder is not that of a PCI device.
    #[error("this is not the folder of a PCI device; give one such as /sys/bus/pci/devices/0000:01:00.1")]
    NotPci,
    /// The device has no IOMMU group.
    #[error(
        "the device is in no IOMMU group; turn the host's IOMMU on (firmware, and intel_iommu=on on the kernel's \
         command line)"
    )]
    NoGroup,
    /// The device has another driver.
    #[error("the device has the driver {0}; bind it to vfio-pci (driverctl set-override, or driver_override in sysfs)")]
    Driver(String),
    /// The device has no driver.
    #[error("the device has no driver; bind it to vfio-pci (driverctl set-override, or driver_override in sysfs)")]
    NoDriver,
    /// A VFIO file cannot be opened.
    #[error("cannot open {}: {error}; {}", path.display(), open_remedy(.error))]
    Open {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// Another device of the group has another driver.
    #[error(
        "its IOMMU group {group} also has {}; bind {} to vfio-pci or to no driver, or give a device with a group of \
         its own", .others.join(", "), if .others.len() == 1 { "that" } else { "these" }
    )]
    NotViable {
        /// The group.
        group: u32,
        /// The others' addresses, with their drivers.
        others: Vec<String>,
    },
    /// This VM has the device already.
    #[error("this VM has the device already; give another")]
    Taken,
    /// The host's IOMMU does not remap interrupts.
    #[error(
        "the host's IOMMU does not remap interrupts, so a guest could raise any interrupt of the host; turn interrupt \
         remapping on in the firmware, or trust the guest ({0}.allow_unsafe_interrupts=1)"
    )]
    NoRemapping(&'static str),
    /// The kernel lacks the type 1 IOMMU.
    #[error("the host's kernel has no type 1 IOMMU for VFIO; load vfio_iommu_type1")]
    NoType1,
    /// The host has no iommufd.
    #[error(
        "cannot open {}: {error}; {}", path.display(), iommufd_remedy(.error)
    )]
    OpenIommufd {
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// A descriptor is closed, or not an iommufd.
    #[error("--platform iommufd_fd=: not an iommufd; open /dev/iommu and pass that")]
    NotIommufd,
    /// The kernel has no character devices for VFIO devices.
    #[error(
        "the host's kernel has no file of its own for the device (CONFIG_VFIO_DEVICE_CDEV, Linux 6.6 or later); leave \
         iommufd out of --platform"
    )]
    NoCdev,
    /// A descriptor is not a VFIO device's.
    #[error("not a VFIO device descriptor; open one of /dev/vfio/devices and pass that")]
    NotCdev,
    /// A file was bound before, but not to this VM's iommufd.
    #[error(
        "the device's file has been given to another iommufd than that of --platform iommufd_fd=; pass the iommufd \
         that it was given to, or open the device's file again"
    )]
    BoundElsewhere,
    /// Another program has the device.
    #[error("in use, or a device of its IOMMU group is; stop the other program, or give another device")]
    InUse,
    /// The guest has memory out of an added device's reach.
    #[error(
        "the guest has memory at addresses that the device cannot have (reserved_regions of its IOMMU group in sysfs); \
         give the guest less memory, or another device"
    )]
    Reserved,
    /// The guest has memory out of the device's reach.
    #[error(
        "the guest has memory at {:#x} to {:#x}, and the device reaches {}; give the guest less memory, or another \
         device", .memory.start(), .memory.end(), ranges(.reach)
    )]
    Unreachable {
        /// The guest's addresses.
        memory: RangeInclusive<u64>,
        /// Addresses that the device reaches.
        reach: Vec<RangeInclusive<u64>>,
    },
    /// The IOMMU supports fewer mappings.
    #[error(
        "a device can have {0} mappings, and the guest needs more; give the guest larger pages, or without iommufd \
         raise vfio_iommu_type1.dma_entry_limit"
    )]
    TooManyMappings(usize),
    /// Devices in one IOMMU group need separate address spaces.
    #[error(
        "its IOMMU group {0} has another device of this VM, and the host's IOMMU cannot tell the two apart: behind a \
         virtual IOMMU, give a device with a group of its own"
    )]
    SharedGroup(u32),
    /// A mapping was requested that the device cannot reach; the log has the cause.
    #[error("the device cannot reach what the virtual IOMMU maps for it; see the log")]
    NotFollowed,
    /// The limit on pinned memory is too low.
    #[error(
        "the device needs {} KiB of locked memory in all, and {} KiB are allowed; raise the limit (ulimit -l {}, \
         LimitMEMLOCK= in a systemd unit)", .0.needed.div_ceil(1024), .0.limit.unwrap_or(0) / 1024,
        .0.needed.div_ceil(1024)
    )]
    MemoryLock(Locking),
    /// The kernel refuses to map the guest's memory.
    #[error("cannot let the device reach the guest's memory: {0}")]
    Map(io::Error),
    /// A system call failed unexpectedly.
    #[error("cannot {action}: {error}")]
    Call {
        /// Failed action.
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
    /// The device's configuration space cannot be emulated.
    #[error("{0}")]
    Config(#[from] ConfigError),
}

impl VfioError {
    /// An error of a call that should `action`.
    pub(super) const fn of(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Call { action, error }
    }

    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::NoDevice(_)
            | Self::NotPci
            | Self::NoGroup
            | Self::Driver(_)
            | Self::NoDriver
            | Self::NotViable { .. }
            | Self::NotIommufd
            | Self::NotCdev
            | Self::Reserved
            | Self::Unreachable { .. }
            | Self::Config(_) => ErrorKind::Invalid,
            Self::Taken | Self::SharedGroup(_) | Self::InUse | Self::BoundElsewhere => ErrorKind::Conflict,
            Self::Open { error, .. } if error.kind() == io::ErrorKind::ResourceBusy => ErrorKind::Conflict,
            Self::Open { .. }
            | Self::OpenIommufd { .. }
            | Self::NoCdev
            | Self::NoRemapping(_)
            | Self::NoType1
            | Self::MemoryLock(_)
            | Self::TooManyMappings(_)
            | Self::NotFollowed
            | Self::Map(_)
            | Self::Call { .. } => ErrorKind::Host,
        }
    }
}

fn open_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "load the module vfio-pci, and bind the device to it",
        io::ErrorKind::PermissionDenied => "make this user the owner of the file (chown)",
        io::ErrorKind::ResourceBusy => "another program has a device of this group; end that, or give another device",
        _ => "see docs/vfio.md",
    }
}

fn iommufd_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "make this user the owner of the file (chown)",
        _ => {
            "load the module iommufd (Linux 6.6 or later with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV), or leave \
             iommufd out of --platform"
        }
    }
}

/// `reach` as text.
pub(super) fn ranges(reach: &[RangeInclusive<u64>]) -> String {
    let one = |range: &RangeInclusive<u64>| format!("{:#x} to {:#x}", range.start(), range.end());
    if reach.is_empty() { "nothing".to_string() } else { reach.iter().map(one).collect::<Vec<_>>().join(", ") }
}
