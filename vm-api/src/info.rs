//! The replies to `vmm.ping`, `vm.info`, `vm.counters` and `vm.add-*`.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::body::Link;
use crate::config::VmConfig;
use crate::config::mac::MacAddress;
use crate::config::net::policy::{LinkPolicy, VlanProto, Vlans};
use crate::config::net::switch::{Mirror, SwitchMode};

/// The reply to `vmm.ping`: version and process ID of the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct VmmPingResponse {
    /// Version of Cloud Hypervisor that the API follows, and the version of this program.
    pub build_version: String,
    /// Version of Cloud Hypervisor that the API follows.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Optional features that are built in.
    pub features: Vec<String>,
}

/// The reply to `vm.info`: configuration and state of the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct VmInfo {
    /// The configuration, with later additions and removals.
    #[serde(with = "crate::config::json")]
    pub config: VmConfig,
    /// The VM's state.
    pub state: VmState,
    /// Size of the guest's memory without its balloon's, in bytes.
    pub memory_actual_size: u64,
    /// The devices by name. Empty, and omitted, until the VM is booted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub device_tree: BTreeMap<String, DeviceNode>,
    /// The NICs without VFs. Omitted if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicInfo>,
    /// The physical functions with their VFs. Omitted if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sriov: Vec<SriovInfo>,
}

/// The state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum VmState {
    /// Never booted.
    Created,
    /// Running vCPUs.
    Running,
    /// Off; can be booted again.
    Shutdown,
    /// Paused vCPUs.
    Paused,
}

/// A device, or its PCI function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct DeviceNode {
    /// Name of the device.
    pub id: String,
    /// Resources in the guest's address space.
    pub resources: Vec<Resource>,
    /// The name of the parent device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The names of the child devices.
    pub children: Vec<String>,
    /// PCI address, such as `0000:00:04.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_bdf: Option<String>,
}

/// A part of the guest's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum Resource {
    /// A base address register.
    PciBar(PciBar),
}

/// A base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct PciBar {
    /// Number of the register, 0 to 5.
    pub index: u8,
    /// Guest address, in bytes.
    pub base: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address space.
    pub type_: BarType,
    /// True if the register is marked prefetchable.
    pub prefetchable: bool,
}

/// The kind of a base address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum BarType {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Mmio32,
    /// Memory anywhere.
    Mmio64,
}

/// A NIC without VFs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct NicInfo {
    /// Name of the device.
    pub id: String,
    /// PCI address, such as `0000:00:04.0`.
    pub bdf: String,
    /// The MAC address that its driver reads.
    pub mac: MacAddress,
    /// Backend that its packets go to.
    pub backend: BackendInfo,
    /// Link state.
    pub link: Link,
    /// True while it waits for its driver to reset it (DEVICE_NEEDS_RESET). Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needs_reset: bool,
    /// Register that keeps the queues of a ready driver stopped. Omitted if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    /// Policy of its packets.
    #[serde(default)]
    pub policy: PolicyInfo,
}

/// A physical function with its VFs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct SriovInfo {
    /// The PF's name.
    pub id: String,
    /// The PF's address, such as `0000:00:04.0`.
    pub bdf: String,
    /// The MAC address that the PF's driver reads.
    pub mac: MacAddress,
    /// Backend of the PF's own packets.
    pub backend: BackendInfo,
    /// Link state of the PF itself.
    pub link: Link,
    /// True while the PF's own function waits for its driver to reset it (DEVICE_NEEDS_RESET). Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needs_reset: bool,
    /// Register that keeps the queues of a ready driver stopped. Omitted if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    /// Policy of the PF's own packets.
    #[serde(default)]
    pub policy: PolicyInfo,
    /// The switch that connects the PF and VFs without their own backend. Omitted if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<SwitchInfo>,
    /// Number of reserved VFs.
    pub total_vfs: u16,
    /// The NumVFs register.
    pub num_vfs: u16,
    /// True if the guest has enabled the VFs.
    pub enabled: bool,
    /// All reserved VFs, by index.
    pub vfs: Vec<VfInfo>,
}

/// A virtual function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct VfInfo {
    /// Index of the VF of its PF, from 0.
    pub index: u16,
    /// PCI address, such as `0000:01:00.0`, also while it is not enabled.
    pub bdf: String,
    /// The MAC address that its driver reads.
    pub mac: MacAddress,
    /// Backend that its packets go to.
    pub backend: BackendInfo,
    /// Link state.
    pub link: Link,
    /// State.
    pub state: VfState,
    /// True while it waits for its driver to reset it (DEVICE_NEEDS_RESET). Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needs_reset: bool,
    /// Register that keeps the queues of a ready driver stopped. Omitted if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    /// Policy of its packets.
    #[serde(default)]
    pub policy: PolicyInfo,
}

/// Effective policy of a network function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(default)]
pub struct PolicyInfo {
    /// The VLAN of all its packets; 0 if there is none.
    #[schema(maximum = 4094)]
    pub vlan: u16,
    /// The priority of its VLAN's tag.
    #[schema(maximum = 7)]
    pub vlan_qos: u8,
    /// The kind of its tags.
    pub vlan_proto: VlanProto,
    /// The VLANs that the guest may use. Omitted if all.
    #[serde(skip_serializing_if = "is_all")]
    pub trunk: Vlans,
    /// True if packets with source addresses other than its own are dropped.
    pub spoofchk: bool,
    /// True if the guest may change addresses and receive everything.
    pub trust: bool,
    /// The transmit limit, in Mbit/s; 0 if there is none.
    pub max_tx_rate: u32,
    /// Guaranteed bandwidth of its switch's uplink, in Mbit/s. Omitted if 0.
    #[serde(skip_serializing_if = "is_none")]
    pub min_tx_rate: u32,
    /// The limit of broadcast and multicast packets that it sends per second; 0 if there is none.
    pub storm: u32,
    /// The link as set by the host.
    pub link: LinkPolicy,
    /// True if it reaches only the uplink and the PF of its switch. Omitted if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub isolated: bool,
    /// The port of its switch that gets a copy of its sent packets. Omitted if there is none.
    #[serde(skip_serializing_if = "Mirror::is_off")]
    pub mirror: Mirror,
    /// Share of its switch's workers and of the uplink's rate beyond the guarantees. Omitted if it is not on a switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub weight: Option<u8>,
    /// Keys whose values the guest has set. Omitted if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub guest_set: Vec<String>,
}

/// The switch of a PF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct SwitchInfo {
    /// Forwarding rule.
    pub mode: SwitchMode,
    /// The tap that connects the switch to others. Omitted if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// True while the uplink is deleted, and there is no new one of its name. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uplink_lost: bool,
    /// True while the uplink is there and accepts no packet: the host has set it down. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uplink_down: bool,
    /// True if the uplink was passed as a descriptor: no new one of its name replaces it. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uplink_passed: bool,
    /// Number of threads that carry its packets.
    #[schema(minimum = 1, maximum = 64)]
    pub workers: u16,
    /// The limit of the bandwidth to the uplink, in Mbit/s. Omitted if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink_rate: Option<NonZeroU32>,
}

fn is_none(rate: &u32) -> bool {
    *rate == 0
}

fn is_all(trunk: &Vlans) -> bool {
    trunk.0.is_empty()
}

/// Backend of a network function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct BackendInfo {
    /// The kind of the backend.
    pub kind: BackendKind,
    /// The tap's name, the path of the socket or device, or the PF whose switch it is; omitted for passed descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// True if this program made the tap, since there was none of its name: it ends with the VM. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// True while it is lost and not yet restored. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// True while the host has set the tap down: only for `tap` and `fd`, and not for a macvtap. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub down: bool,
    /// Reason why there is no backend, in one line. Omitted if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The kind of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// A tap that this program opened.
    Tap,
    /// Taps that were already open.
    Fd,
    /// A tap whose packets the host's kernel carries.
    VhostNet,
    /// Another process, over a socket.
    VhostUser,
    /// A vDPA device of the host.
    Vdpa,
    /// The switch of the PF.
    Switch,
    /// None: it was missing when the VM was restored or received. The link is down until `vm.set-vf` gives one.
    Missing,
}

/// The state of a VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum VfState {
    /// The guest has not enabled the VF.
    Reserved,
    /// The guest has enabled the VF, and no driver is bound.
    Enabled,
    /// Enabled, with a running driver.
    Running,
    /// Enabled, and removed by surprise (`vm.inject-fault`) until the guest disables the VFs.
    Removed,
}

/// A register by which the guest keeps the queues of a ready driver stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "kebab-case")]
pub enum StoppedBy {
    /// Bus Master Enable is clear.
    BusMaster,
    /// The function is in D3hot.
    D3hot,
    /// The PF of the VF is in D3hot.
    PfD3hot,
}

/// The reply to `vm.add-*`: a device that was added to a running VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct PciDeviceInfo {
    /// Name of the device.
    pub id: String,
    /// PCI address, such as `0000:00:04.0`.
    pub bdf: String,
}

/// The reply to `vm.counters`: for each device, by name, its counters by name.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;
