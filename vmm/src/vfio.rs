//! Host devices passed through to a guest by VFIO (`linux/vfio.h`, `Documentation/driver-api/vfio.rst`).
//!
//! | file | subject |
//! |---|---|
//! | `host` | all such devices of a VM, and their shared state |
//! | `opened` | an open device that is not a function yet |
//! | `function` | a host device as a PCI function of the guest: interrupts, BARs, notices of the host |
//! | `config_space` | the configuration space that the guest sees; no system calls |
//! | `spec` | the device to pass through, and its options |
//! | `host_device` | the device as the kernel presents it |
//! | `attachment` | attachment of a group, or of a device's file, to an address space and to KVM |
//! | `memory` | the memory that a device reaches: the guest's, by its virtual IOMMU or all, and BARs of others |
//! | `kernel` | requests to the host's kernel |
//! | `piece` | a mapping for a device |
//! | `seldom` | rate limit for log messages that a guest can repeat |

mod attachment;
mod config_space;
mod error;
#[cfg(test)]
mod fake;
mod function;
mod host;
mod host_device;
mod kernel;
mod memory;
mod opened;
mod piece;
mod seldom;
mod spec;

pub(crate) use attachment::cdev;
pub(crate) use error::VfioError;
pub(crate) use function::TEXTS as COUNTER_TEXTS;
pub(crate) use function::watch::Notice;
pub(crate) use host::VfioHost;
pub(crate) use opened::OpenDevice;
pub(crate) use spec::{VfioInterface, VfioSource, VfioSpec};
