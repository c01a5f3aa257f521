//! NICs, PFs and VFs: `--net`, `--net-vf` and their JSON.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use option_derive::{Options, Schema};
use serde::Serialize;

use crate::config::error::{ConfigError, Problem};
use crate::config::grammar::pairs;
use crate::config::mac::{MacAddress, MacChoice};
use crate::config::option::{Key, Options, from_pairs, read};
use crate::config::policy::{LinkPolicy, VlanProto, Vlans};
use crate::config::rate::RateLimiterConfig;
use crate::config::switch::{Mirror, SwitchMode};
use crate::config::vhost::{Vhost, VhostMode};

/// A NIC. With sriov_vfs it is an SR-IOV physical function (PF).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--net")]
pub struct NetConfig {
    /// Device name, unique in the VM. It must not start with two underscores. By default _netN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// Tap interface on the host, at most 15 characters. If it does not exist, it is created, and removed when the
    /// VM ends.
    #[option("tap=<interface>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = INTERFACE)]
    pub tap: Option<String>,
    /// IP address of the tap on the host; needs mask. Kept without effect if the tap is not opened here: with fd,
    /// vhost_user and vdpa.
    #[option("ip=<address>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// Network mask of ip.
    #[option("mask=<mask>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<IpAddr>,
    /// MAC address in the guest. By default a random one at each start.
    #[option("mac=<address>")]
    #[schema(of = MacAddress)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacChoice>,
    /// MAC address of the tap on the host. Kept without effect with vhost_user.
    #[option("host_mac=<address>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_mac: Option<MacAddress>,
    /// MTU of the link in bytes, 1280 to 65521.
    #[option("mtu=<bytes>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1280, maximum = 65_521)]
    pub mtu: Option<u16>,
    /// Number of queues: each pair has a receive and a transmit queue, at most one pair per vCPU. An odd number also
    /// counts the control queue, which every NIC has.
    #[option("num_queues=<number>", default = 2)]
    #[schema(minimum = 2, maximum = 509)]
    pub num_queues: u16,
    /// Entries in each queue, a power of two from 2 to 32768. Below 128 the guest receives no packets larger than the
    /// MTU.
    #[option("queue_size=<number>", default = 256)]
    #[schema(limits = QUEUE_SIZE)]
    pub queue_size: u16,
    /// File descriptors of open taps, one per queue pair and each above 2, instead of tap.
    #[option("fd=[<fd>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Descriptor numbers. The values are ignored: the descriptors are those passed with vm.add-net.")]
    pub fds: Vec<i32>,
    /// Let the guest send and receive TCP packets larger than the MTU, which are segmented outside the guest.
    #[option("offload_tso=on|off", default = true)]
    pub offload_tso: bool,
    /// The same for UDP packets.
    #[option("offload_ufo=on|off", default = true)]
    pub offload_ufo: bool,
    /// Let either side leave checksums to the other. Required by offload_tso and offload_ufo.
    #[option("offload_csum=on|off", default = true)]
    pub offload_csum: bool,
    /// Use this NIC only while the guest has no other with the same mac, such as a VF of the host that is plugged and
    /// unplugged. Needs mac.
    #[option("standby=on|off")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub standby: bool,
    /// PCI segment. A PF with VFs must be on segment 0, which alone has buses for them.
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
    /// Let the host's kernel carry the tap's packets (vhost-net). auto: if the kernel supports it and no rate limit is
    /// given.
    #[option("vhost=on|off|auto")]
    #[serde(skip_serializing_if = "Vhost::is_off")]
    pub vhost: Vhost,
    /// Let another process carry the packets (vhost-user), instead of a tap; needs socket.
    #[option("vhost_user=on|off")]
    #[schema(about = "Let another process carry the packets (vhost-user), instead of a tap; needs vhost_socket.")]
    pub vhost_user: bool,
    /// Unix socket of the vhost-user backend.
    #[option("socket=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SOCKET)]
    pub vhost_socket: Option<PathBuf>,
    /// This program's role on the socket. client: the backend listens; server: this program listens.
    #[option("vhost_mode=client|server", default = VhostMode::Client)]
    pub vhost_mode: VhostMode,
    /// vDPA device of the host, such as /dev/vhost-vdpa-0, instead of a tap. Without mac, the NIC has the device's
    /// MAC address.
    #[option("vdpa=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<PathBuf>,
    /// Limits of the NIC's received packets, and separately of its sent ones. An operation is a packet.
    #[option(part)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// Port VLAN, 1 to 4094, transparent to the guest: packets leave tagged, and only packets with that tag arrive,
    /// untagged. With 802.1q, packets that the guest tags are dropped. 0 disables it.
    #[option("vlan=<id>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 4094)]
    pub vlan: Option<u16>,
    /// Priority in the tag of vlan, 0 to 7. By default 0.
    #[option("vlan_qos=<priority>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 7)]
    pub vlan_qos: Option<u8>,
    /// Tag protocol of vlan, or of trunk. By default 802.1q.
    #[option("vlan_proto=802.1q|802.1ad")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan_proto: Option<VlanProto>,
    /// VLANs that the guest may use with its own tags, instead of vlan; 0 is untagged packets. By default all.
    #[option("trunk=[<id>,<id>-<id>,...]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trunk: Option<Vlans>,
    /// Drop packets that the guest sends with a source MAC address other than its own. By default off, but on for VFs
    /// on a switch.
    #[option("spoofchk=on|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spoofchk: Option<bool>,
    /// Let the guest change a given MAC address, send from further ones and to bridges (01:80:c2:00:00:00 to :0f), and
    /// receive packets for others. By default on, but off with spoofchk=on and for VFs on a switch.
    #[option("trust=on|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// Transmit limit of the guest, in Mbit/s; excess packets wait in its queues. 0 is none.
    #[option("max_tx_rate=<Mbit/s>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// On a switch, guaranteed bandwidth from the guest to the uplink, in Mbit/s of its uplink_rate. By default 0.
    #[option("min_tx_rate=<Mbit/s>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// Limit of broadcast and multicast packets that the guest sends per second; more are dropped. 0 is none.
    #[option("storm=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storm: Option<u32>,
    /// Link when the VM starts. auto: up, unless the backend is lost or the switch's uplink is down; up: also without
    /// the uplink. By default auto.
    #[option("link=auto|up|down")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkPolicy>,
    /// On a switch: reach only the uplink and the PF. By default off.
    #[option("isolated=on|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// On a switch, function that gets a copy of the packets that the guest sends. By default off.
    #[option("mirror=off|pf|<VF>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Mirror>,
    /// On a switch, weight of the function's share of the workers' time and of the uplink's rate under contention, 1 to
    /// 100. By default 10.
    #[option("weight=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub weight: Option<u8>,
    /// Connect the PF and its VFs without a tap or other backend through a switch of this program: veb forwards itself,
    /// vepa through the switch behind the uplink. The uplink is the tap or fd given here; without one, the functions
    /// reach only each other.
    #[option("switch=veb|vepa")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub switch: Option<SwitchMode>,
    /// Number of threads that carry the switch's packets, at most one per vCPU. By default 1.
    #[option("workers=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 64)]
    pub workers: Option<u16>,
    /// Limit of the bandwidth from all functions on the switch to its uplink, in Mbit/s; excess packets wait in their
    /// queues. Bandwidth beyond the min_tx_rate guarantees is shared by weight. 0 is none.
    #[option("uplink_rate=<Mbit/s>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uplink_rate: Option<u32>,
    /// Number of SR-IOV virtual functions (VFs) to reserve, up to 32512. The guest enables them through sriov_numvfs.
    #[option("sriov_vfs=<number>")]
    #[schema(maximum = 32_512)]
    pub sriov_vfs: u16,
    /// Per-VF overrides (--net-vf on the command line). A VF without any has its own tap, or is on the switch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vfs: Vec<VfConfig>,
}

impl NetConfig {
    /// The overrides of VF `index`, added if missing.
    pub fn vf_mut(&mut self, index: u16) -> &mut VfConfig {
        let position = self.vfs.iter().position(|vf| vf.index == index).unwrap_or_else(|| {
            self.vfs.push(VfConfig { index, ..VfConfig::default() });
            self.vfs.len() - 1
        });
        &mut self.vfs[position]
    }

    /// True if a tap or another backend is given: with a switch, that is the uplink.
    pub fn names_backend(&self) -> bool {
        let Self { tap, fds, vhost_user, vhost_socket, vdpa, .. } = self;
        tap.is_some() || !fds.is_empty() || *vhost_user || vhost_socket.is_some() || vdpa.is_some()
    }

    /// The switch port with these settings, if there is one. Only a PF has VFs.
    pub fn port(&self) -> Option<SwitchPort> {
        self.switch.map(|_| if self.sriov_vfs == 0 { SwitchPort::Vf } else { SwitchPort::Pf })
    }
}

/// Owner of a switch port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchPort {
    /// The PF's own.
    Pf,
    /// A VF's.
    Vf,
}

/// Per-VF overrides of the PF's defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--net-vf", over = NetConfig)]
pub struct VfConfig {
    /// Index of the VF, from 0 to the PF's sriov_vfs - 1.
    #[option("index=<number>", required, apart)]
    #[schema(maximum = 32_511)]
    pub index: u16,
    /// Tap interface on the host. By default the name of the PF's tap, v and the index, such as pf0v3; with a switch,
    /// none.
    #[option("tap=<interface>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = INTERFACE)]
    pub tap: Option<String>,
    /// IP address of the tap on the host; needs mask. Kept without effect if the tap is not opened here: with fd,
    /// vhost_user and vdpa.
    #[option("ip=<address>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// Network mask of ip.
    #[option("mask=<mask>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<IpAddr>,
    /// MAC address in the guest. By default derived from the PF's address and the index: the same at each start if
    /// the PF's mac is given. On a switch the guest cannot change it, given or derived, without trust=on; any is the
    /// derived one, which it may change.
    #[option("mac=<address>|any")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacChoice>,
    /// MAC address of the tap on the host. Kept without effect with vhost_user.
    #[option("host_mac=<address>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_mac: Option<MacAddress>,
    /// MTU of the link in bytes, 1280 to 65521. By default the PF's.
    #[option("mtu=<bytes>", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1280, maximum = 65_521)]
    pub mtu: Option<u16>,
    /// Number of queues, as for --net. Given for one VF, it applies to all VFs of the PF. By default 2.
    #[option("num_queues=<number>", apart)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2, maximum = 509)]
    pub num_queues: Option<u16>,
    /// Entries in each queue, a power of two from 2 to 32768. By default the PF's.
    #[option("queue_size=<number>", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = QUEUE_SIZE)]
    pub queue_size: Option<u16>,
    /// File descriptors of open taps, one per queue pair and each above 2, instead of tap.
    #[option("fd=[<fd>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 0)]
    #[schema(about = "Descriptors for VFs cannot be passed over the API.")]
    pub fds: Vec<i32>,
    /// As for --net. By default the PF's.
    #[option("offload_tso=on|off", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_tso: Option<bool>,
    /// As for --net. By default the PF's.
    #[option("offload_ufo=on|off", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_ufo: Option<bool>,
    /// As for --net. By default the PF's.
    #[option("offload_csum=on|off", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_csum: Option<bool>,
    /// As for --net, but not inherited from the PF.
    #[option("vhost=on|off|auto")]
    #[serde(skip_serializing_if = "Vhost::is_off")]
    pub vhost: Vhost,
    /// Let another process carry the packets (vhost-user), instead of a tap; needs socket.
    #[option("vhost_user=on|off")]
    #[schema(about = "Let another process carry the packets (vhost-user), instead of a tap; needs vhost_socket.")]
    pub vhost_user: bool,
    /// Unix socket of the vhost-user backend.
    #[option("socket=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SOCKET)]
    pub vhost_socket: Option<PathBuf>,
    /// This program's role on the socket. client: the backend listens; server: this program listens.
    #[option("vhost_mode=client|server", default = VhostMode::Client)]
    pub vhost_mode: VhostMode,
    /// vDPA device of the host, such as /dev/vhost-vdpa-0, instead of a tap. Without mac, the NIC has the device's
    /// MAC address.
    #[option("vdpa=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<PathBuf>,
    /// Limits of the VF's received packets, and separately of its sent ones. By default the PF's numbers. Not shared
    /// with other functions.
    #[option(part, inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// As for --net, but not inherited from the PF.
    #[option("vlan=<id>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 4094)]
    pub vlan: Option<u16>,
    /// As for --net, but not inherited from the PF.
    #[option("vlan_qos=<priority>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 7)]
    pub vlan_qos: Option<u8>,
    /// As for --net, but not inherited from the PF.
    #[option("vlan_proto=802.1q|802.1ad")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan_proto: Option<VlanProto>,
    /// As for --net, but not inherited from the PF.
    #[option("trunk=[<id>,<id>-<id>,...]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trunk: Option<Vlans>,
    /// As for --net, but not inherited from the PF.
    #[option("spoofchk=on|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spoofchk: Option<bool>,
    /// As for --net, but not inherited from the PF.
    #[option("trust=on|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// As for --net, but not inherited from the PF.
    #[option("max_tx_rate=<Mbit/s>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// As for --net, but not inherited from the PF.
    #[option("min_tx_rate=<Mbit/s>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// As for --net, but not inherited from the PF.
    #[option("storm=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storm: Option<u32>,
    /// As for --net, but not inherited from the PF.
    #[option("link=auto|up|down")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkPolicy>,
    /// As for --net, but not inherited from the PF.
    #[option("isolated=on|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// As for --net, but not inherited from the PF.
    #[option("mirror=off|pf|<VF>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Mirror>,
    /// As for --net, but not inherited from the PF.
    #[option("weight=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub weight: Option<u8>,
}

impl VfConfig {
    /// The effective settings of this VF: its own, and the PF's for omitted ones. All VFs of a PF have `num_queues`
    /// queues. If the VF is on the PF's switch, so are the settings.
    pub fn over(&self, pf: &NetConfig, num_queues: u16) -> NetConfig {
        let own = NetConfig { num_queues, ..self.over_defaults(pf) };
        NetConfig { switch: pf.switch.filter(|_| !own.names_backend()), ..own }
    }
}

/// A VF on the command line, with the name of its PF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetVf {
    /// The id of the PF.
    pub pf: String,
    /// The VF.
    pub vf: VfConfig,
}

impl NetVf {
    /// Appends the VF to its PF in `nets`. `ids` are those of the NICs ([`Ids::net`](super::id::Ids::net)).
    ///
    /// # Errors
    ///
    /// Fails if no NIC has that name.
    pub fn add_to(self, nets: &mut [NetConfig], ids: &[String]) -> Result<(), ConfigError> {
        let Self { pf, vf } = self;
        match nets.iter_mut().zip(ids).find(|(_, id)| **id == pf) {
            Some((net, _)) => {
                net.vfs.push(vf);
                Ok(())
            }
            None => {
                let what = format!("there is no NIC {pf}; add --net id={pf},sriov_vfs=<number>");
                Err(ConfigError::new(format!("--net-vf pf={pf},index={}", vf.index), Problem::Missing(what)))
            }
        }
    }
}

impl Options for NetVf {
    const OPTION: &'static str = VfConfig::OPTION;

    fn keys() -> Vec<Key> {
        let about = "Id of the PF. Without disks, the first --net without an id is _net0.".to_string();
        let mut keys = vec![Key { name: "pf", syntax: "<id>", default: None, about }];
        keys.extend(VfConfig::keys());
        keys
    }
}

impl FromStr for NetVf {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |what| ConfigError::new(format!("{} {text}", Self::OPTION), Problem::Syntax(what));
        let pairs = pairs(text).map_err(wrong)?;
        let (pf, rest): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|pair| pair.key == "pf");
        let pf = match pf.into_iter().last().and_then(|pair| pair.value) {
            Some(raw) => read(&raw).map_err(wrong)?,
            None => None,
        };
        let missing = || wrong("pf= is required; add the id of the PF".to_string());
        Ok(Self { pf: pf.ok_or_else(missing)?, vf: from_pairs(rest)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vf_overrides_its_pf_in_every_setting_that_it_has() {
        let vf = r#"{"index": 0, "tap": "t", "ip": "10.0.0.1", "mask": "255.0.0.0", "mac": "52:54:00:00:00:01",
            "host_mac": "52:54:00:00:00:02", "mtu": 1400, "num_queues": 8, "queue_size": 64, "fds": [3],
            "offload_tso": false, "offload_ufo": false, "offload_csum": false, "vhost": "auto", "vhost_user": true,
            "vhost_socket": "/s", "vhost_mode": "Server", "vdpa": "/d", "vlan": 5, "vlan_qos": 1,
            "vlan_proto": "802.1ad", "trunk": [7, "9-11"], "spoofchk": true, "trust": false, "max_tx_rate": 10,
            "min_tx_rate": 1, "storm": 3, "link": "down", "isolated": true, "mirror": 3, "weight": 7,
            "rate_limiter_config": {"ops": {"size": 1, "refill_time": 1}}}"#;
        let vf: VfConfig = serde_json::from_str(vf).unwrap();
        let settings = serde_json::to_value(&vf).unwrap();
        let settings = settings.as_object().unwrap();
        // The limits are one setting in JSON, and six keys.
        assert_eq!(settings.len() + 5, VfConfig::keys().len(), "a setting is missing above");
        let merged = serde_json::to_value(vf.over(&NetConfig::default(), 8)).unwrap();
        for (name, value) in settings.iter().filter(|(name, _)| *name != "index") {
            assert_eq!(merged.get(name), Some(value), "{name}");
        }
    }

    /// A new key of `--net` must be added to VFs, too, or to this list.
    #[test]
    fn a_vf_has_every_setting_of_a_nic_but_those_of_the_device() {
        let names = |keys: Vec<Key>| keys.into_iter().map(|key| key.name).collect::<Vec<_>>();
        let (nic, vf) = (names(NetConfig::keys()), names(VfConfig::keys()));
        let missing: Vec<_> = nic.into_iter().filter(|name| !vf.contains(name)).collect();
        let of_the_pf =
            ["id", "standby", "pci_segment", "pci_device_id", "iommu", "switch", "workers", "uplink_rate", "sriov_vfs"];
        assert_eq!(missing, of_the_pf);
    }

    #[test]
    fn a_vf_inherits_what_describes_the_link_and_no_backend() {
        let pf = "id=pf0,tap=t,mac=52:54:00:00:00:01,mtu=9000,queue_size=64,offload_ufo=off,vhost=on,sriov_vfs=4,\
            ops_size=1,ops_refill_time=2,vlan=5,vlan_qos=2,vlan_proto=802.1ad,spoofchk=on,trust=off,max_tx_rate=7,\
            storm=9,link=down,isolated=on,mirror=1,weight=5,workers=2,\
            min_tx_rate=3,uplink_rate=9";
        let pf: NetConfig = pf.parse().unwrap();
        let limits = pf.rate_limiter_config.clone();
        assert!(limits.is_some());
        let expected = NetConfig {
            mtu: Some(9000),
            queue_size: 64,
            offload_ufo: false,
            rate_limiter_config: limits,
            ..NetConfig::default()
        };
        assert_eq!(VfConfig::default().over(&pf, 2), expected);
    }

    #[test]
    fn a_vf_that_names_no_backend_is_on_its_pfs_switch() {
        let pf: NetConfig = "tap=t,sriov_vfs=4,switch=vepa".parse().unwrap();
        let port = |vf: &str| vf.parse::<VfConfig>().unwrap().over(&pf, 2).port();
        assert_eq!(pf.port(), Some(SwitchPort::Pf));
        assert_eq!([port("index=0"), port("index=0,vhost=on,vlan=5")], [Some(SwitchPort::Vf); 2]);
        for own in ["tap=x", "fd=[3]", "vdpa=/d", "vhost_user=on,socket=/s"] {
            assert_eq!(port(&format!("index=0,{own}")), None, "{own}");
        }
        assert_eq!(NetConfig::default().port(), None);
    }
}
