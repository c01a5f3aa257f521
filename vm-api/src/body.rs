//! The bodies of requests that describe no device.

use serde::{Deserialize, Serialize};

use crate::config::mac::MacAddress;

/// The body of `vm.remove-device`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveDevice {
    /// The device's id, as given or as in `vm.info`.
    pub id: String,
}

/// The body of `vm.resize`. What is left out stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resize {
    /// The number of vCPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// The amount of memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
    /// The memory that the guest should return, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_balloon: Option<u64>,
}

/// The body of `vm.resize-zone`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeZone {
    /// The zone's name.
    pub id: String,
    /// The amount of memory that it is to have, in bytes.
    pub desired_ram: u64,
}

/// The body of `vm.resize-disk`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeDisk {
    /// The disk's id, as given or as in `vm.info`.
    pub id: String,
    /// Its new size in bytes, a multiple of 512.
    pub desired_size: u64,
}

/// The body of `vm.set-vf`. What is left out stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetVf {
    /// The PF's id.
    pub pf: String,
    /// The VF's index, from 0.
    pub index: u16,
    /// Whether the VF has a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// The VF's MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
}

/// Whether a network function has a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// Frames pass.
    Up,
    /// The guest sees no carrier, and no frame passes.
    Down,
}
