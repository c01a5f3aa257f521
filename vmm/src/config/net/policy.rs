//! The rules for a function's packet policy, and its plan.

use std::fmt::Display;
use std::num::NonZeroU32;

use virtio_devices::{
    BackendKind, MAX_VLAN, NetSpec, Policy, PortVlan, RateLimits, Trunk, UplinkPolicy, VlanProtocol, VlanSet,
};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::mac::MacAddress;
use vm_api::config::net::backend::BackendConfig;
use vm_api::config::net::policy::{LinkPolicy, MAX_QOS, PolicyConfig, VlanProto};
use vm_api::config::net::vhost::Vhost;
use vm_api::config::net::{NetConfig, SwitchPort};
use vm_api::info::PolicyInfo;

use crate::config::net::switch;
use crate::config::subject::Subject;

/// The policy of the function that `config` describes, which was checked. `given` is its configured address.
pub(crate) fn policy_of(config: &NetConfig, given: Option<MacAddress>) -> Policy {
    let PolicyInfo {
        vlan,
        vlan_qos,
        vlan_proto,
        trunk,
        spoofchk,
        trust,
        max_tx_rate,
        storm,
        // Those of a port of a switch, or of the link.
        min_tx_rate: _,
        link: _,
        isolated: _,
        mirror: _,
        weight: _,
        guest_set: _,
    } = info_of(config);
    let protocol = match vlan_proto {
        VlanProto::Customer => VlanProtocol::Customer,
        VlanProto::Service => VlanProtocol::Service,
    };
    Policy {
        address: given.map(|mac| mac.0),
        port_vlan: (vlan != 0).then_some(PortVlan { id: vlan, priority: vlan_qos, protocol }),
        trunk: (!trunk.0.is_empty()).then(|| Trunk { vlans: VlanSet::of(trunk.0), protocol }),
        spoof_check: spoofchk,
        trusted: trust,
        storm: NonZeroU32::new(storm),
        max_tx_rate: NonZeroU32::new(max_tx_rate),
    }
}

/// The host's rules at the uplink of the switch that `config` describes, whose ports its guest governs.
pub(crate) fn uplink_policy_of(config: &NetConfig) -> UplinkPolicy {
    let Policy { port_vlan, trunk, storm, .. } = policy_of(config, None);
    UplinkPolicy { port_vlan, trunk, storm }
}

/// The effective policy of the function that `config` describes.
pub(crate) fn info_of(config: &NetConfig) -> PolicyInfo {
    let PolicyConfig {
        vlan,
        vlan_qos,
        vlan_proto,
        trunk,
        spoofchk,
        trust,
        max_tx_rate,
        storm,
        link,
        mirror,
        // These are in the port's settings.
        min_tx_rate: _,
        isolated: _,
        weight: _,
    } = config.policy.clone();
    // On a wire of its own, a function is not restricted by default; a spoof check would be useless, as the driver
    // could change its address. On a switch, as on hardware, VFs are restricted.
    let port = config.port();
    let spoofchk = spoofchk.unwrap_or(port == Some(SwitchPort::Vf));
    let settings = switch::settings_of(config);
    PolicyInfo {
        vlan: vlan.unwrap_or_default(),
        vlan_qos: vlan_qos.unwrap_or_default(),
        vlan_proto: vlan_proto.unwrap_or_default(),
        trunk: trunk.unwrap_or_default(),
        spoofchk,
        trust: trust.unwrap_or(match port {
            Some(port) => port == SwitchPort::Pf,
            None => !spoofchk,
        }),
        max_tx_rate: max_tx_rate.unwrap_or_default(),
        min_tx_rate: settings.min_tx_rate,
        storm: storm.unwrap_or_default(),
        link: link.unwrap_or_default(),
        isolated: settings.isolated,
        mirror: mirror.unwrap_or_default(),
        weight: port.map(|_| settings.weight),
        guest_set: Vec::new(),
    }
}

/// The policy of a function that its guest governs.
pub(crate) fn info_of_guest(policy: &Policy) -> PolicyInfo {
    let Policy { address: _, port_vlan, trunk: _, spoof_check, trusted, storm: _, max_tx_rate } = policy;
    PolicyInfo {
        vlan: port_vlan.map_or(0, |vlan| vlan.id),
        vlan_qos: port_vlan.map_or(0, |vlan| vlan.priority),
        spoofchk: *spoof_check,
        trust: *trusted,
        max_tx_rate: max_tx_rate.map_or(0, NonZeroU32::get),
        ..info_of(&NetConfig::default())
    }
}

/// True if the function's link should be up when it is plugged in.
pub(crate) fn link_up(config: &NetConfig) -> bool {
    config.policy.link != Some(LinkPolicy::Down)
}

/// True if the function's link is down while its own tap is.
pub(crate) fn follows_tap(config: &NetConfig) -> bool {
    config.policy.link.unwrap_or_default() == LinkPolicy::Auto
}

/// Carrier of a function's packets other than this program, which then cannot enforce a policy on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carrier {
    VhostNet,
    VhostUser,
    Vdpa,
}

impl Carrier {
    /// Carrier of the packets of the function that `config` describes; `None` if this program carries them, or will if
    /// a policy has to be enforced.
    pub(crate) fn of(config: &NetConfig) -> Option<Self> {
        let BackendConfig { vdpa, vhost_user, .. } = &config.backend;
        match (vdpa, vhost_user, config.backend.vhost()) {
            (Some(_), ..) => Some(Self::Vdpa),
            (None, true, _) => Some(Self::VhostUser),
            (None, false, Vhost::On) => Some(Self::VhostNet),
            (None, false, Vhost::Off | Vhost::Auto) => None,
        }
    }

    /// Carrier of the packets of an open backend.
    pub(crate) fn of_open(kind: BackendKind) -> Option<Self> {
        match kind {
            BackendKind::Tap | BackendKind::Switch | BackendKind::Absent => None,
            BackendKind::VhostNet => Some(Self::VhostNet),
            BackendKind::VhostUser => Some(Self::VhostUser),
            BackendKind::Vdpa => Some(Self::Vdpa),
        }
    }

    /// Reason for refusing a policy, and remedy.
    fn refusal(self) -> String {
        let (who, key) = match self {
            Self::VhostNet => ("vhost-net carries", "vhost"),
            Self::VhostUser => ("another process (vhost_user=on) carries", "vhost_user"),
            Self::Vdpa => ("a vDPA device carries", "vdpa"),
        };
        format!(
            "{who} this function's packets past this program; leave {key} out, or set it on the host (docs/policy.md)"
        )
    }
}

/// Checks the packet policy of `config`, whose packets `carrier` carries instead of this program, if there is one.
///
/// # Errors
///
/// Fails with an impossible value, or a restriction that could not be enforced.
pub(crate) fn check(config: &NetConfig, carrier: Option<Carrier>, subject: &Subject) -> Result<(), ConfigError> {
    let wrong = |key: &str, value: &dyn Display, problem| Err(ConfigError::new(subject.key(key, value), problem));
    let info = info_of(config);
    let is_vlan = |id: u16| id <= MAX_VLAN;
    if !is_vlan(info.vlan) {
        let what = format!("not a VLAN; give 1 to {MAX_VLAN}, or 0 for none");
        return wrong("vlan", &info.vlan, Problem::Value(what));
    }
    if info.vlan_qos > MAX_QOS {
        return wrong("vlan_qos", &info.vlan_qos, Problem::Value(format!("not a priority; give 0 to {MAX_QOS}")));
    }
    if let Some(range) = info.trunk.0.iter().find(|range| !is_vlan(*range.end())) {
        let what = format!("{} is not a VLAN; give 1 to {MAX_VLAN}, and 0 for packets without a tag", range.end());
        return wrong("trunk", &info.trunk, Problem::Value(what));
    }
    let has_trunk = !info.trunk.0.is_empty();
    if has_trunk && info.vlan != 0 {
        let what = format!("cannot be combined with vlan={}; give vlan=0 or trunk=[]", info.vlan);
        return wrong("trunk", &info.trunk, Problem::Conflict(what));
    }
    if info.vlan_qos != 0 && info.vlan == 0 {
        let what = "has no effect without a VLAN; add vlan=".to_string();
        return wrong("vlan_qos", &info.vlan_qos, Problem::Missing(what));
    }
    if info.vlan_proto == VlanProto::Service && info.vlan == 0 && !has_trunk {
        let what = "has no effect without a VLAN; add vlan= or trunk=".to_string();
        return wrong("vlan_proto", &"802.1ad", Problem::Missing(what));
    }
    match (carrier, policy_of(config, None).restrictions().next()) {
        (Some(carrier), Some(key)) => {
            let (spoofchk, trust) = (Some(info.spoofchk), Some(info.trust));
            let effective = PolicyConfig { spoofchk, trust, ..config.policy.clone() };
            wrong(key, &effective.value_of(key).unwrap_or_default(), Problem::Conflict(carrier.refusal()))
        }
        _ => Ok(()),
    }
}

/// Checks that `spec` has no policy to enforce, because `carrier` carries the packets.
///
/// # Errors
///
/// Fails if it has.
pub(crate) fn check_carried(spec: &NetSpec, carrier: Carrier, subject: &Subject) -> Result<(), ConfigError> {
    let limits = (spec.limits != RateLimits::default()).then_some("rate_limiter_config");
    match spec.policy.restrictions().chain(limits).next() {
        Some(key) => {
            let subject = format!("{} {key}", subject.bare());
            Err(ConfigError::new(subject, Problem::Conflict(carrier.refusal())))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NetVf, PlannedVm, VmConfig, VmPlan};

    fn config(net: &str, vf: &str) -> Result<VmConfig, ConfigError> {
        let mut config = VmConfig { net: vec![net.parse()?], ..VmConfig::default() };
        if !vf.is_empty() {
            config.net[0].vfs.push(format!("pf=pf0,index=0,{vf}").parse::<NetVf>()?.vf);
        }
        config.memory.shared = true;
        Ok(config)
    }

    fn policies(net: &str, vf: &str) -> Result<Vec<Policy>, String> {
        let plan = config(net, vf).and_then(|config| VmPlan::of(&config)).map_err(|error| error.to_string())?;
        Ok(plan.nets().flat_map(|net| net.functions().map(|nic| nic.spec.policy.clone()).collect::<Vec<_>>()).collect())
    }

    #[test]
    fn a_policy_that_is_not_given_restricts_nothing() {
        for policy in policies("id=pf0,sriov_vfs=2", "mac=52:54:00:00:01:00").unwrap() {
            assert!(policy.is_open() && policy.trusted, "{policy:?}");
        }
        let spoofchk = policies("id=pf0,sriov_vfs=2,mac=52:54:00:00:00:01", "spoofchk=on").unwrap();
        assert!(spoofchk[1].spoof_check && !spoofchk[1].trusted && spoofchk[1].address.is_none());
        assert!(spoofchk[0].is_open() && spoofchk[2].is_open(), "the PF and another VF");
        let trusted = policies("id=pf0,sriov_vfs=1", "spoofchk=on,trust=on,mac=52:54:00:00:01:00").unwrap();
        assert!(trusted[1].trusted && trusted[1].address == Some([0x52, 0x54, 0, 0, 1, 0]));
    }

    #[test]
    fn each_key_is_in_the_policy_of_its_function_alone() {
        let keys = "vlan=100,vlan_qos=3,vlan_proto=802.1AD,trust=off,max_tx_rate=500,storm=1000,link=down";
        let planned = policies("id=pf0,sriov_vfs=2", keys).unwrap();
        let expected = Policy {
            port_vlan: Some(PortVlan { id: 100, priority: 3, protocol: VlanProtocol::Service }),
            trusted: false,
            storm: NonZeroU32::new(1000),
            max_tx_rate: NonZeroU32::new(500),
            ..Policy::default()
        };
        assert_eq!(planned[1], expected);
        assert!(planned[0].is_open() && planned[2].is_open());
        let trunk = policies("id=pf0,trunk=[10,20,100-199]", "").unwrap().remove(0).trunk.unwrap();
        assert!([10, 20, 100, 199].iter().all(|id| trunk.vlans.contains(*id)) && !trunk.vlans.contains(0));
        let plan = VmPlan::of(&config("id=pf0,sriov_vfs=2", keys).unwrap()).unwrap();
        let links: Vec<_> = plan.nets().next().unwrap().functions().map(|nic| nic.spec.link_up).collect();
        assert_eq!(links, [true, false, true]);
    }

    #[test]
    fn an_impossible_policy_is_refused_with_what_to_do() {
        for (vf, expected) in [
            ("vlan=4095", "vlan=4095: not a VLAN; give 1 to 4094, or 0 for none"),
            ("vlan=1,vlan_qos=8", "vlan_qos=8: not a priority; give 0 to 7"),
            ("vlan_qos=1", "vlan_qos=1: has no effect without a VLAN; add vlan="),
            ("vlan_proto=802.1ad", "vlan_proto=802.1ad: has no effect without a VLAN; add vlan= or trunk="),
            ("trunk=[1,5000]", "trunk=[1,5000]: 5000 is not a VLAN; give 1 to 4094, and 0 for packets without a tag"),
            ("trunk=[1],vlan=2", "trunk=[1]: cannot be combined with vlan=2; give vlan=0 or trunk=[]"),
        ] {
            let expected = format!("--net-vf pf=pf0,index=0,{expected}");
            assert_eq!(policies("id=pf0,sriov_vfs=1", vf), Err(expected));
        }
        let refused = policies("id=pf0,sriov_vfs=1", "query_rss=on").unwrap_err();
        let what = "queries of receive side scaling, which no NIC has, are not supported yet; leave query_rss out";
        assert_eq!(refused, format!("--net-vf query_rss=on: {what}"));
    }

    #[test]
    fn unenforceable_policy_is_refused_and_an_empty_one_accepted() {
        for (backend, carrier) in [
            ("vhost=on", "vhost-net carries this function's packets past this program; leave vhost out"),
            (
                "vhost_user=on,socket=/s",
                "another process (vhost_user=on) carries this function's packets past this program; leave vhost_user \
                 out",
            ),
            ("vdpa=/d", "a vDPA device carries this function's packets past this program; leave vdpa out"),
        ] {
            for key in ["vlan=5", "trunk=[5]", "spoofchk=on", "trust=off", "max_tx_rate=5", "storm=5"] {
                let refused = policies("id=pf0,sriov_vfs=1", &format!("{backend},{key}"));
                let expected = format!("{key}: {carrier}, or set it on the host (docs/policy.md)");
                assert_eq!(refused, Err(format!("--net-vf pf=pf0,index=0,{expected}")));
            }
            let nothing =
                "vlan=0,vlan_qos=0,vlan_proto=802.1q,trunk=[],spoofchk=off,trust=on,max_tx_rate=0,storm=0,link=up";
            assert!(policies("id=pf0,sriov_vfs=1", &format!("{backend},{nothing}")).is_ok());
        }
    }

    #[test]
    fn auto_leaves_packets_that_a_policy_is_about_to_this_program() {
        let carried = |vf: &str| {
            let plan = VmPlan::of(&config("id=pf0,sriov_vfs=1", &format!("vhost=auto,{vf}")).unwrap()).unwrap();
            let crate::config::BackendPlan::Tap { vhost, .. } = plan.nets().next().unwrap().vfs[0].backend else {
                panic!()
            };
            vhost
        };
        assert_eq!((carried("spoofchk=off"), carried("spoofchk=on")), (Vhost::Auto, Vhost::Off));
    }

    #[test]
    fn the_kept_policy_is_planned_again_as_it_is() {
        let vm = PlannedVm::new(config("id=pf0,sriov_vfs=2,spoofchk=on,vlan=7", "trust=off,trunk=[0,5-9]").unwrap());
        let vm = vm.unwrap();
        assert_eq!(PlannedVm::new(vm.config().clone()).unwrap(), vm);
    }
}
