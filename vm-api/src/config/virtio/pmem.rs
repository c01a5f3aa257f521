//! Persistent memory: `--pmem`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// A file that the guest uses as persistent memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--pmem")]
pub struct PmemConfig {
    /// A file, a block device, or a folder for an unnamed temporary file.
    #[option("file=<path>", bare, required)]
    #[schema(min_length = 1)]
    pub file: PathBuf,
    /// Size, a multiple of 2M. By default the file's; required for a folder.
    #[option("size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2_097_152, maximum = 35_184_372_088_832_u64, multiple_of = 2_097_152)]
    pub size: Option<u64>,
    /// Do not write the guest's writes to the file, and discard them when the guest restarts.
    #[option("discard_writes=on|off")]
    pub discard_writes: bool,
    /// Device name, unique in the VM. It must not start with two underscores. By default _pmemN, where
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
    /// Put the device behind the virtual IOMMU, which the VM then has.
    #[option("iommu=on|off")]
    pub iommu: bool,
}
