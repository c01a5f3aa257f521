//! The entropy device: `--rng`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// The entropy device, which every VM has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--rng")]
pub struct RngConfig {
    /// Source of random bytes on the host.
    #[option("src=<path>", bare, default = PathBuf::from("/dev/urandom"))]
    pub src: PathBuf,
    /// Device name, unique in the VM. It must not start with two underscores. By default __rng.
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
