//! Host devices passed through to a guest by VFIO (`linux/vfio.h`, `Documentation/driver-api/vfio.rst`).
//!
//! | file | subject |
//! |---|---|
//! | `host` | all such devices of a VM, and what they share |
//! | `function` | one of them as a PCI function of the guest |
//! | `config_space`, `capabilities`, `msi` | the configuration space that the guest finds; no system calls |
//! | `interrupts` | what its messages and its pin ask of the host |
//! | `regions` | which parts of its BARs the guest has without exits |
//! | `host_device` | the device as the kernel gives it |
//! | `spec` | which device is wanted, and how |
//! | `opened` | one that is open, and not a function yet |
//! | `host_iommu`, `iommufd`, `address_space`, `piece` | which memory it reaches |
//! | `guest_memory`, `follower` | that is all of the guest's, or what the guest's virtual IOMMU maps |
//! | `peer_bars`, `bar_memory` | and the BARs of the other devices |
//! | `group`, `cdev`, `passed` | its IOMMU group, or its own file, which may have been given to this process |
//! | `rebound` | a file of its own that was bound before it came here |
//! | `attached`, `space`, `known_files` | to what they are attached, and KVM's knowledge of them |
//! | `watch` | what the host wants of it |
//! | `seldom` | what is logged of that which a guest can repeat |
//! | `sysfs`, `ioctl`, `iommufd_ioctl`, `info` | what is asked of the host's kernel, and how |

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
pub(crate) use host::VfioHost;
pub(crate) use opened::OpenDevice;
pub(crate) use spec::{VfioInterface, VfioSource, VfioSpec};
pub(crate) use watch::Notice;
