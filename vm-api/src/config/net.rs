//! NICs, PFs and VFs: `--net`, `--net-vf` and their JSON.

pub mod backend;
pub mod guest_control;
pub mod model;
pub mod policy;
pub mod switch;
pub mod vf_range;
pub mod vhost;

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::str::FromStr;

use option_derive::{Options, Schema};

use crate::config::error::{ConfigError, Problem};
use crate::config::grammar::pairs;
use crate::config::keys;
use crate::config::keys::Key;
use crate::config::mac::{MacAddress, MacChoice};
use crate::config::net::backend::BackendConfig;
use crate::config::net::guest_control::GuestControl;
use crate::config::net::model::NicModel;
use crate::config::net::policy::PolicyConfig;
use crate::config::net::switch::SwitchMode;
use crate::config::net::vf_range::VfRange;
use crate::config::net::vhost::VhostMode;
use crate::config::option::{Changes as _, Options, apply, from_pairs};
use crate::config::rate::RateLimiterConfig;
use crate::config::value::read;

/// Fields of a NIC or VF that come first, in the order of help and JSON: those of the backend are not together.
const ORDER: &[&str] = &[
    "id",
    "index",
    "model",
    "tap",
    "ip",
    "mask",
    "mac",
    "host_mac",
    "mtu",
    "num_queues",
    "queue_size",
    "fds",
    "offload_tso",
    "offload_ufo",
    "offload_csum",
    "standby",
    "pci_segment",
    "pci_device_id",
    "numa",
    "iommu",
    "vhost",
    "vhost_user",
    "vhost_socket",
    "vhost_mode",
    "vdpa",
];

/// A NIC. With sriov_vfs it is an SR-IOV physical function (PF).
#[derive(Debug, Clone, PartialEq, Eq, Options, Schema)]
#[options("--net", order = ORDER)]
pub struct NetConfig {
    /// Device name, unique in the VM. It must not start with two underscores. By default _netN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// NIC that the guest sees: virtio, or x550 or x540, an Intel X550 or X540 with up to 63 VFs that the guest's
    /// ixgbe driver configures. These always have a switch, whose uplink is the tap or fd given here, and take no key
    /// that the guest decides (docs/guide/x550.md).
    #[option("model=virtio|x550|x540", default = NicModel::Virtio)]
    #[serde(skip_serializing_if = "NicModel::is_virtio")]
    pub model: NicModel,
    /// Carrier of the packets on the host.
    #[option(flatten)]
    pub backend: BackendConfig,
    /// MAC address in the guest. By default a random one at each start.
    #[option("mac=<address>")]
    #[schema(of = MacAddress)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacChoice>,
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
    /// NUMA node of the guest (--numa) that the NIC and its VFs are on. On PCI segment 0, it has a root bus of its own
    /// there, on which pci_device_id counts. By default the node of the segment.
    #[option("numa=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 63)]
    pub numa: Option<u32>,
    /// Put the device behind the virtual IOMMU, which the VM then has.
    #[option("iommu=on|off")]
    pub iommu: bool,
    /// Limits of the NIC's received packets, and separately of its sent ones. An operation is a packet.
    #[option(part)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// Packets that the NIC may send and receive.
    #[option(flatten)]
    pub policy: PolicyConfig,
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
    /// With model=x550 or x540, up to 63.
    #[option("sriov_vfs=<number>")]
    #[schema(maximum = 32_512)]
    pub sriov_vfs: u16,
    /// Settings of VFs that the guest may change itself, within what the host has set, with their limits. vlan alone is
    /// all VLANs, max_tx_rate alone any limit. By default none (docs/policy.md).
    #[option("guest_control=[vlan:<id>-<id>,mac,max_tx_rate:<Mbit/s>,link,spoofchk]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_control: Option<GuestControl>,
    /// Per-VF overrides (--net-vf on the command line). A VF without any has its own tap, or is on the switch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vfs: Vec<VfConfig>,
}

impl NetConfig {
    /// The overrides of VF `index`, if there are any. Those of a range do not count: planning expands it.
    pub fn vf(&self, index: u16) -> Option<&VfConfig> {
        self.position(index).and_then(|position| self.vfs.get(position))
    }

    /// The overrides of VF `index`, added if missing.
    pub fn vf_mut(&mut self, index: u16) -> &mut VfConfig {
        let position = self.position(index).unwrap_or_else(|| {
            self.vfs.push(VfConfig { index: index.into(), ..VfConfig::default() });
            self.vfs.len() - 1
        });
        &mut self.vfs[position]
    }

    /// The overrides of the VFs `indices`, added if missing.
    pub fn vfs_mut(&mut self, indices: RangeInclusive<u16>) -> impl Iterator<Item = &mut VfConfig> {
        let known: HashSet<_> = self.vfs.iter().filter_map(|vf| vf.index.one()).collect();
        let missing = indices.clone().filter(|index| !known.contains(index));
        self.vfs.extend(missing.map(|index| VfConfig { index: index.into(), ..VfConfig::default() }));
        self.vfs.iter_mut().filter(move |vf| vf.index.one().is_some_and(|index| indices.contains(&index)))
    }

    /// The position of the overrides of VF `index`: its index if all VFs have some in order, as for a range of all.
    fn position(&self, index: u16) -> Option<usize> {
        let place = usize::from(index);
        let is_there = self.vfs.get(place).is_some_and(|vf| vf.index == index);
        if is_there { Some(place) } else { self.vfs.iter().position(|vf| vf.index == index) }
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
#[derive(Debug, Clone, PartialEq, Eq, Options, Schema)]
#[options("--net-vf", over = NetConfig, order = ORDER)]
pub struct VfConfig {
    /// Index of the VF, from 0 to the PF's sriov_vfs - 1; or several: a range such as 0-63, or * for all. Keys of
    /// later entries override those of earlier ones. A backend and a MAC address belong to one VF; of them, several
    /// VFs may be given vhost and mac=any.
    #[option("index=<number>|<first>-<last>|*", bare, required, apart)]
    pub index: VfRange,
    /// Carrier of the packets on the host.
    #[option(
        flatten,
        about(
            tap = "Tap interface on the host. By default the name of the PF's tap, v and the index, such as pf0v3; \
                   with a switch, none.",
            vhost = "As for --net, but not inherited from the PF."
        )
    )]
    #[schema(empty = "fds")]
    pub backend: BackendConfig,
    /// MAC address in the guest. By default derived from the PF's address and the index: the same at each start if
    /// the PF's mac is given. On a switch the guest cannot change it, given or derived, without trust=on; any is the
    /// derived one, which it may change.
    #[option("mac=<address>|any")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacChoice>,
    /// MTU of the link in bytes, 1280 to 65521. By default the PF's.
    #[option("mtu=<bytes>", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1280, maximum = 65_521)]
    pub mtu: Option<u16>,
    /// Number of queues, as for --net. Given for one VF, it applies to all VFs of the PF. By default 2.
    #[option("num_queues=<number>", apart)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2, maximum = 509)]
    #[schema(about = "Number of queues. Given for one VF, it applies to all VFs of the PF. By default 2.")]
    pub num_queues: Option<u16>,
    /// Entries in each queue, a power of two from 2 to 32768. By default the PF's.
    #[option("queue_size=<number>", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = QUEUE_SIZE)]
    pub queue_size: Option<u16>,
    /// As for --net. By default the PF's.
    #[option("offload_tso=on|off", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "Let the guest send and receive TCP packets larger than the MTU. By default as for the PF.")]
    pub offload_tso: Option<bool>,
    /// As for --net. By default the PF's.
    #[option("offload_ufo=on|off", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "The same for UDP packets. By default as for the PF.")]
    pub offload_ufo: Option<bool>,
    /// As for --net. By default the PF's.
    #[option("offload_csum=on|off", inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "Let either side leave checksums to the other. By default as for the PF.")]
    pub offload_csum: Option<bool>,
    /// Limits of the VF's received packets, and separately of its sent ones. By default the PF's numbers. Not shared
    /// with other functions.
    #[option(part, inherited)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// Packets that the VF may send and receive.
    #[option(flatten, about = "As for --net, but not inherited from the PF.")]
    pub policy: PolicyConfig,
}

impl VfConfig {
    /// The effective settings of this VF: its own, and the PF's for omitted ones. All VFs of a PF have `num_queues`
    /// queues. If the VF is on the PF's switch, so are the settings.
    pub fn over(&self, pf: &NetConfig, num_queues: u16) -> NetConfig {
        let own = NetConfig { num_queues, ..self.over_defaults(pf) };
        NetConfig { switch: pf.switch.filter(|_| !own.backend.is_given()), ..own }
    }

    /// Overrides these settings with those that `later` gives. The backend of one VF replaces the whole of this one.
    pub fn override_with(&mut self, later: &Self) {
        let Self {
            index,
            backend,
            mac,
            mtu,
            num_queues,
            queue_size,
            offload_tso,
            offload_ufo,
            offload_csum,
            rate_limiter_config,
            policy,
        } = later;
        let vhost = backend.vhost.or(self.backend.vhost);
        if index.one().is_some() {
            self.backend = backend.clone();
        }
        self.backend.vhost = vhost;
        apply(mac, &mut self.mac);
        apply(mtu, &mut self.mtu);
        apply(num_queues, &mut self.num_queues);
        apply(queue_size, &mut self.queue_size);
        apply(offload_tso, &mut self.offload_tso);
        apply(offload_ufo, &mut self.offload_ufo);
        apply(offload_csum, &mut self.offload_csum);
        apply(rate_limiter_config, &mut self.rate_limiter_config);
        policy.apply(&mut self.policy);
    }

    /// The key that only one VF can have, if this is for several and gives one.
    pub fn key_of_one(&self) -> Option<&'static str> {
        let BackendConfig { tap, ip, mask, host_mac, fds, vhost: _, vhost_user, vhost_socket, vhost_mode, vdpa } =
            &self.backend;
        let keys = [
            ("tap", tap.is_some()),
            ("ip", ip.is_some()),
            ("mask", mask.is_some()),
            ("host_mac", host_mac.is_some()),
            ("fd", !fds.is_empty()),
            ("vhost_user", *vhost_user),
            ("socket", vhost_socket.is_some()),
            ("vhost_mode", *vhost_mode == VhostMode::Server),
            ("vdpa", vdpa.is_some()),
            ("mac", self.mac.and_then(MacChoice::given).is_some()),
        ];
        keys.into_iter().find(|(_, is_given)| *is_given && self.index.one().is_none()).map(|(key, _)| key)
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
    /// Appends the VF to its PF in `nets`. `ids` are those of all NICs.
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
        let mut keys = vec![Key { name: "pf", syntax: "<id>", default: None, about, is_bare: false }];
        keys.extend(VfConfig::keys());
        keys
    }
}

impl FromStr for NetVf {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |what| ConfigError::new(format!("{} {text}", Self::OPTION), Problem::Syntax(what));
        let pairs = pairs(text).map_err(wrong)?;
        keys::check_once(&pairs, Self::OPTION)?;
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
        let of_the_pf = [
            "id",
            "model",
            "standby",
            "pci_segment",
            "pci_device_id",
            "numa",
            "iommu",
            "switch",
            "workers",
            "uplink_rate",
            "sriov_vfs",
            "guest_control",
        ];
        assert_eq!(missing, of_the_pf);
    }

    #[test]
    fn flattened_fields_have_their_place_in_json_and_help() {
        let text = "mac=any,vhost=on,tap=t,fd=[7],mtu=1400,host_mac=02:00:00:00:00:02,storm=3,offload_tso=off";
        let vf: VfConfig = format!("weight=9,vlan=5,index=1,ops_size=1,ops_refill_time=2,{text}").parse().unwrap();
        let json = r#"{"index":1,"tap":"t","mac":"any","host_mac":"02:00:00:00:00:02","mtu":1400,"fds":[7],"#
            .to_string()
            + r#""offload_tso":false,"vhost":true,"vhost_user":false,"vhost_mode":"Client","#
            + r#""rate_limiter_config":{"ops":{"size":1,"refill_time":2}},"vlan":5,"storm":3,"weight":9}"#;
        assert_eq!(serde_json::to_string(&vf).unwrap(), json);
        assert_eq!(serde_json::from_str::<VfConfig>(&json).unwrap(), vf);
        let printed = "index=1,tap=t,mac=any,host_mac=02:00:00:00:00:02,mtu=1400,fd=[7],offload_tso=off,vhost=on,\
            vhost_user=off,vhost_mode=client,ops_size=1,ops_refill_time=2,vlan=5,storm=3,weight=9";
        assert_eq!(vf.to_string(), printed);
        let names: Vec<_> = NetConfig::keys().into_iter().map(|key| key.name).collect();
        let ends = ["id", "model", "tap", "ip", "mask", "mac", "host_mac", "mtu", "num_queues", "queue_size", "fd"];
        assert_eq!(names[..11], ends);
        let last = ["mirror", "weight", "switch", "workers", "uplink_rate", "sriov_vfs", "guest_control"];
        assert_eq!(names[names.len() - last.len()..], last);
    }

    #[test]
    fn a_flattened_field_is_refused_as_any_other() {
        let refused = |text: &str| serde_json::from_str::<NetConfig>(text).unwrap_err().to_string();
        assert!(
            refused(r#"{"x": 1}"#).starts_with("unknown field `x`, expected one of `id`, `model`, `tap`, `ip`, `mask`")
        );
        assert!(refused(r#"{"storm": 1, "storm": 2}"#).starts_with("duplicate field `storm`"));
        assert!(refused(r#"{"vhost_user": 1}"#).starts_with("invalid type: integer `1`, expected a boolean"));
        let refused = |text: &str| text.parse::<NetConfig>().unwrap_err().to_string();
        assert_eq!(refused("storm=x"), "--net storm=x: give a whole number from 0 to 4294967295");
        assert_eq!(refused("fds=[3]"), "--net fds=[3]: unknown key; did you mean fd? --help lists those of --net");
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
