//! vDPA devices: `--vdpa`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

use crate::config::net::NetConfig;
use crate::config::net::backend::BackendConfig;

/// A NIC that is a vDPA device of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--vdpa")]
pub struct VdpaConfig {
    /// Device name, unique in the VM. It must not start with two underscores. By default _vdpaN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// Device of the host, such as /dev/vhost-vdpa-0.
    #[option("path=<path>", bare, required)]
    pub path: PathBuf,
    /// Number of queues: two per pair, at least one pair, also with 1. The control queue may be counted or not.
    #[option("num_queues=<number>", default = 1)]
    #[schema(minimum = 1)]
    pub num_queues: u16,
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

impl VdpaConfig {
    /// The equivalent plain NIC. Its MAC address is the device's.
    pub fn to_net(&self) -> NetConfig {
        NetConfig {
            id: self.id.clone(),
            backend: BackendConfig { vdpa: Some(self.path.clone()), ..BackendConfig::default() },
            num_queues: (self.num_queues & !1).max(2),
            pci_segment: self.pci_segment,
            pci_device_id: self.pci_device_id,
            iommu: self.iommu,
            ..NetConfig::default()
        }
    }
}
