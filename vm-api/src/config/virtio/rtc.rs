//! The clock: `--rtc`.

use option_derive::{Options, Schema};
use serde::Serialize;

/// The virtio clock, which provides the host's UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--rtc")]
pub struct RtcConfig {
    /// Device name, unique in the VM. It must not start with two underscores. By default __rtc.
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
