//! The bodies of requests that do not describe a device.

use std::os::fd::RawFd;
use std::path::PathBuf;

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::config::RestoredBackend;
use crate::config::mac::MacChoice;
use crate::config::net::VfConfig;
use crate::config::policy::{LinkPolicy, VlanProto, Vlans};
use crate::config::rate::RateLimiterConfig;
use crate::config::switch::Mirror;

/// The body of `vm.remove-device`: the device to remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "VmRemoveDevice")]
pub struct RemoveDevice {
    /// The device's id, as given or as in `vm.info`.
    #[schema(limits = ID)]
    pub id: String,
}

/// The body of `vm.resize`: new sizes of the VM. Omitted fields stay unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, default)]
#[schema(name = "VmResize")]
pub struct Resize {
    /// Number of vCPUs, 1 to max_vcpus.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 254)]
    pub desired_vcpus: Option<u32>,
    /// Size of the memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
    /// Memory that the guest with a balloon returns to the host, in bytes, less than all of it. vm.info reports in
    /// memory_actual_size how far it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_balloon: Option<u64>,
}

/// The body of `vm.resize-zone`: the new size of a memory zone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "VmResizeZone")]
pub struct ResizeZone {
    /// The zone's name.
    pub id: String,
    /// New size in bytes: the one at boot, and up to hotplug_size more.
    pub desired_ram: u64,
}

/// The body of `vm.resize-disk`: the new size of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "VmResizeDisk")]
pub struct ResizeDisk {
    /// The disk's id, as given or as in `vm.info`.
    pub id: String,
    /// New size in bytes, a multiple of 512.
    #[schema(minimum = 512, multiple_of = 512)]
    pub desired_size: u64,
}

/// The body of `vm.snapshot`: the destination of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "VmSnapshotConfig")]
pub struct SnapshotConfig {
    /// The folder of the snapshot, which must exist, such as `file:///var/lib/vm/snapshot`.
    pub destination_url: String,
}

/// The body of `vm.set-vf`. Omitted fields stay unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "VmSetVf")]
pub struct SetVf {
    /// The PF's id.
    #[schema(limits = ID)]
    pub pf: String,
    /// The VF's index, from 0. Without an index, only a backend can be given, to the PF itself or to a NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u16>,
    /// The VF's link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkPolicy>,
    /// The VF's MAC address. On a switch the guest cannot change it without trust; any is the derived one, which it may
    /// change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacChoice>,
    /// The VLAN of all its packets; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 4094)]
    pub vlan: Option<u16>,
    /// The priority of its VLAN's tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 7)]
    pub vlan_qos: Option<u8>,
    /// The kind of its tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan_proto: Option<VlanProto>,
    /// The VLANs that the guest may use; an empty list for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trunk: Option<Vlans>,
    /// True to drop packets with source addresses other than its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoofchk: Option<bool>,
    /// True to let the guest change addresses and receive everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// The transmit limit, in Mbit/s; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// The guaranteed share of the switch's uplink rate, in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// The limit of broadcast and multicast packets that it sends per second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storm: Option<u32>,
    /// On a switch, true to let it reach only the uplink and the PF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// On a switch, the function that gets a copy of the packets that the VF sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Mirror>,
    /// On a switch, the weight of its share of the workers' time and of the uplink's rate under contention, 1 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub weight: Option<u8>,
    /// The limits of its received and sent packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// A tap of the host, for a function whose backend is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Number of tap descriptors that come with the request, one for each pair of queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_fds: Option<usize>,
    /// The socket of a vhost-user backend for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// A vDPA device of the host for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<PathBuf>,
}

impl SetVf {
    /// The backend given, if any; `fds` are the descriptors passed with the request.
    pub fn backend(&self, fds: &[RawFd]) -> Option<RestoredBackend> {
        let Self { pf, index, tap, num_fds, vhost_socket, vdpa, .. } = self;
        let backend = RestoredBackend {
            id: pf.clone(),
            vf: *index,
            tap: tap.clone(),
            num_fds: *num_fds,
            fds: fds.to_vec(),
            vhost_socket: vhost_socket.clone(),
            vdpa: vdpa.clone(),
            link: None,
        };
        let is_none = tap.is_none() && num_fds.is_none() && vhost_socket.is_none() && vdpa.is_none();
        (!is_none).then_some(backend)
    }

    /// True if it changes more than the backend.
    pub fn changes_more(&self) -> bool {
        let only = Self {
            pf: self.pf.clone(),
            index: self.index,
            tap: self.tap.clone(),
            num_fds: self.num_fds,
            vhost_socket: self.vhost_socket.clone(),
            vdpa: self.vdpa.clone(),
            ..Self::default()
        };
        *self != only
    }

    /// Applies everything except the link, which is not persisted, and the backend. Returns true if the policy may have
    /// changed.
    pub fn apply(&self, vf: &mut VfConfig) -> bool {
        let Self {
            pf: _,
            index: _,
            link: _,
            mac,
            vlan,
            vlan_qos,
            vlan_proto,
            trunk,
            spoofchk,
            trust,
            max_tx_rate,
            min_tx_rate,
            storm,
            isolated,
            mirror,
            weight,
            rate_limiter_config,
            tap: _,
            num_fds: _,
            vhost_socket: _,
            vdpa: _,
        } = self;
        let changes = [
            set(&mut vf.mac, mac),
            set(&mut vf.vlan, vlan),
            set(&mut vf.vlan_qos, vlan_qos),
            set(&mut vf.vlan_proto, vlan_proto),
            set(&mut vf.trunk, trunk),
            set(&mut vf.spoofchk, spoofchk),
            set(&mut vf.trust, trust),
            set(&mut vf.max_tx_rate, max_tx_rate),
            set(&mut vf.min_tx_rate, min_tx_rate),
            set(&mut vf.storm, storm),
            set(&mut vf.isolated, isolated),
            set(&mut vf.mirror, mirror),
            set(&mut vf.weight, weight),
            set(&mut vf.rate_limiter_config, rate_limiter_config),
        ];
        changes.contains(&true)
    }
}

fn set<T: Clone>(setting: &mut Option<T>, new: &Option<T>) -> bool {
    if new.is_some() {
        setting.clone_from(new);
    }
    new.is_some()
}

/// Link state of a network function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// Frames pass.
    Up,
    /// Down: the guest sees no carrier, and no frame passes.
    Down,
}
