//! The balloon: `--balloon`.

use option_derive::{Options, Schema};
use serde::Serialize;

/// A balloon, through which the guest returns memory to the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--balloon")]
pub struct BalloonConfig {
    /// Memory that the guest should return, in whole pages of 4 KiB. Must be less than the guest's memory.
    #[option("size=<bytes>[K|M|G]", bare)]
    pub size: u64,
    /// Give memory back to a guest that runs out of it.
    #[option("deflate_on_oom=on|off")]
    pub deflate_on_oom: bool,
    /// Let the guest report unused memory, which is returned to the host.
    #[option("free_page_reporting=on|off")]
    pub free_page_reporting: bool,
    /// Device name, unique in the VM. It must not start with two underscores. By default __balloon.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment.
    #[option("pci_segment=<number>")]
    pub pci_segment: u16,
    /// Device number on bus 0, 1 to 31, or 0 on another segment than 0. By default the lowest free one.
    #[option("pci_device_id=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SLOT)]
    pub pci_device_id: Option<u8>,
    /// Put the device behind the virtual IOMMU, which the VM then has.
    #[option("iommu=on|off")]
    pub iommu: bool,
}
