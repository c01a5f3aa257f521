//! Host devices passed through to a guest by VFIO (`linux/vfio.h`, `Documentation/driver-api/vfio.rst`).
//!
//! | file | subject |
//! |---|---|
//! | `host` | all such devices of a VM, and their shared state |
//! | `function` | a host device as a PCI function of the guest |
//! | `config_space`, `capabilities`, `msi` | the configuration space that the guest sees; no system calls |
//! | `interrupts` | requests to the host for the function's messages and pin |
//! | `regions` | the parts of its BARs that the guest accesses without exits |
//! | `host_device` | the device as the kernel presents it |
//! | `spec` | the device to pass through, and its options |
//! | `opened` | an open device that is not a function yet |
//! | `host_iommu`, `iommufd`, `address_space`, `piece` | the memory that a device reaches |
//! | `guest_memory`, `follower` | all of the guest's memory, or the mappings of its virtual IOMMU |
//! | `peer_bars`, `bar_memory` | the BARs of other devices |
//! | `group`, `cdev`, `passed` | an IOMMU group, or a device's file, which another process may have passed |
//! | `rebound` | a device's file that was bound before it was passed here |
//! | `attached`, `space`, `known_files` | attachment to an address space, and registration with KVM |
//! | `watch` | notices of the host |
//! | `seldom` | rate limit for log messages that a guest can repeat |
//! | `sysfs`, `ioctl`, `iommufd_ioctl`, `info` | requests to the host's kernel |

mod address_space;
mod attached;
mod bar_memory;
mod capabilities;
pub(crate) mod cdev;
mod config_space;
mod error;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod fake_iommu;
mod follower;
mod function;
mod group;
mod guest_memory;
mod host;
mod host_device;
mod host_iommu;
mod info;
mod interrupts;
mod ioctl;
mod iommufd;
mod iommufd_ioctl;
mod known_files;
mod msi;
mod opened;
mod peer_bars;
mod piece;
mod rebound;
mod regions;
mod seldom;
mod space;
mod spec;
mod sysfs;
mod watch;

pub(crate) use error::VfioError;
pub(crate) use function::TEXTS as COUNTER_TEXTS;
pub(crate) use host::VfioHost;
pub(crate) use opened::OpenDevice;
pub(crate) use spec::{VfioInterface, VfioSource, VfioSpec};
pub(crate) use watch::Notice;
