//! The socket device: `--vsock`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// A device for connections between programs of the guest and of the host. A VM has at most one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--vsock")]
pub struct VsockConfig {
    /// Context ID of the guest, from 3 to 4294967294.
    #[option("cid=<number>", bare, required)]
    #[schema(minimum = 3, maximum = 4_294_967_294_u32)]
    pub cid: u32,
    /// Unix socket that clients connect to. A connection of the guest to port P goes to <path>_P.
    #[option("socket=<path>", required)]
    #[schema(limits = SOCKET)]
    pub socket: PathBuf,
    /// Device name, unique in the VM. It must not start with two underscores. By default _vsockN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment.
    #[option("pci_segment=<number>")]
    pub pci_segment: u16,
    /// Device number on bus 0, 1 to 31, or 0 on another segment than 0. By default the lowest free one.
    #[option("pci_device_id=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
    /// Put the device behind the virtual IOMMU, which the VM then has.
    #[option("iommu=on|off")]
    pub iommu: bool,
}
