//! The rules for a PF's switch, and its plan: its ports and its uplink.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::os::fd::RawFd;

use virtio_devices::{MAX_PORTS, MAX_WORKERS, PortSettings, SwitchMode, TapSpec};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::net::backend::BackendConfig;
use vm_api::config::net::policy::{LinkPolicy, PolicyConfig};
use vm_api::config::net::switch::{Mirror, SwitchMode as Mode};
use vm_api::config::net::vhost::Vhost;
use vm_api::config::net::{NetConfig, SwitchPort};

use crate::config::net::uplink_rate;
use crate::config::subject::Subject;

/// The weight of a port without a given one, from 1 to [`MAX_WEIGHT`].
pub(crate) const WEIGHT: u8 = 10;
const MAX_WEIGHT: u8 = 100;

/// A PF's switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchPlan {
    /// Forwarding rule.
    pub mode: SwitchMode,
    /// Number of threads that carry its packets.
    pub workers: u16,
    /// Connection to other switches; none for a closed switch.
    pub uplink: Option<UplinkPlan>,
    /// Limit of the rate to the uplink, in Mbit/s.
    pub uplink_rate: Option<NonZeroU32>,
}

/// Connection of a switch to others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UplinkPlan {
    /// A tap interface of the host.
    Tap(TapSpec),
    /// A tap that was opened before the program started.
    Fd(RawFd),
}

impl SwitchPlan {
    /// The switch of the PF that `config` describes, if it has one.
    pub(crate) fn of(config: &NetConfig) -> Option<Self> {
        config.switch.map(|mode| Self::new(config, mode))
    }

    /// A switch of this mode, with the uplink of `config`.
    pub(crate) fn new(config: &NetConfig, mode: Mode) -> Self {
        let mode = match mode {
            Mode::Veb => SwitchMode::Veb,
            Mode::Vepa => SwitchMode::Vepa,
        };
        let BackendConfig { tap, fds, ip, mask, host_mac, .. } = &config.backend;
        let (ip, mask, host_mac) = (*ip, *mask, host_mac.map(|mac| mac.0));
        let uplink = match (tap, fds.first()) {
            (_, Some(fd)) => Some(UplinkPlan::Fd(*fd)),
            (Some(name), None) => {
                let name = Some(name.clone());
                Some(UplinkPlan::Tap(TapSpec { name, ip, mask, host_mac, mtu: config.mtu, queue_pairs: 1 }))
            }
            (None, None) => None,
        };
        let uplink_rate = config.uplink_rate.and_then(NonZeroU32::new);
        Self { mode, workers: config.workers.unwrap_or(1), uplink, uplink_rate }
    }
}

/// The number of a VF's port.
pub(crate) const fn port_of(index: u16) -> u16 {
    index.saturating_add(1)
}

/// The host's settings for the port that `config` describes.
pub(crate) fn settings_of(config: &NetConfig) -> PortSettings {
    let PolicyConfig { isolated, mirror, weight, min_tx_rate, link, .. } = config.policy;
    PortSettings {
        isolated: isolated.unwrap_or(false),
        mirror: match mirror.unwrap_or_default() {
            Mirror::Off => None,
            Mirror::Pf => Some(0),
            Mirror::Vf(index) => Some(port_of(index)),
        },
        weight: weight.unwrap_or(WEIGHT),
        min_tx_rate: min_tx_rate.unwrap_or(0),
        follows_uplink: link.unwrap_or_default() == LinkPolicy::Auto,
    }
}

fn wrong<T>(subject: &Subject, key: &str, value: impl Display, problem: Problem) -> Result<T, ConfigError> {
    Err(ConfigError::new(subject.key(key, value), problem))
}

/// Checks the switch of a PF, if it has one, in a VM of `vcpus` vCPUs.
///
/// # Errors
///
/// Fails if a switch connects nothing, or more than it can have.
pub(crate) fn check(pf: &NetConfig, vcpus: u32, subject: &Subject) -> Result<(), ConfigError> {
    uplink_rate::check_uplink(pf, subject)?;
    let Some(mode) = pf.switch else {
        return match pf.workers {
            Some(workers) => {
                let what = "only a switch has workers; add switch=veb, or leave workers out".to_string();
                wrong(subject, "workers", workers, Problem::Conflict(what))
            }
            None => Ok(()),
        };
    };
    let value = if mode == Mode::Veb { "veb" } else { "vepa" };
    let conflict = |key: &str, what: &str| {
        let what = format!("the switch's uplink is a tap whose packets this program carries; {what}");
        wrong(subject, "switch", value, Problem::Conflict(format!("{what}, or leave {key} out")))
    };
    if pf.sriov_vfs == 0 {
        let what = "connects a PF with its VFs, and there are none; add sriov_vfs=".to_string();
        return wrong(subject, "switch", value, Problem::Missing(what));
    }
    if pf.sriov_vfs >= MAX_PORTS {
        let what = format!("a switch has ports for {} VFs; reserve fewer", MAX_PORTS - 1);
        return wrong(subject, "sriov_vfs", pf.sriov_vfs, Problem::Limit(what));
    }
    let BackendConfig { vdpa, vhost_user, vhost_socket, .. } = &pf.backend;
    if vdpa.is_some() {
        return conflict("vdpa", "give it tap= instead of vdpa");
    }
    if *vhost_user || vhost_socket.is_some() {
        return conflict("vhost_user", "give it tap= instead of vhost_user");
    }
    if pf.backend.vhost() == Vhost::On {
        return conflict("switch", "leave vhost out");
    }
    if mode == Mode::Vepa && !pf.backend.is_given() {
        let what = "forwards by way of the uplink, and there is none; add tap=, or give switch=veb".to_string();
        return wrong(subject, "switch", value, Problem::Missing(what));
    }
    check_closed(pf, subject)?;
    check_workers(pf, vcpus, subject)
}

/// Refuses the keys of the uplink for a switch without one.
pub(crate) fn check_closed(pf: &NetConfig, subject: &Subject) -> Result<(), ConfigError> {
    if pf.backend.is_given() {
        return Ok(());
    }
    check_no_tap(pf, "the switch has no uplink", "add tap=", subject)
}

/// Checks the number of a switch's workers in a VM of `vcpus` vCPUs.
pub(crate) fn check_workers(pf: &NetConfig, vcpus: u32, subject: &Subject) -> Result<(), ConfigError> {
    let workers = pf.workers.unwrap_or(1);
    let most = u32::from(MAX_WORKERS).min(vcpus);
    if workers == 0 || u32::from(workers) > most {
        let what = format!("at most one for each of the VM's {vcpus} vCPUs, and {MAX_WORKERS}; give 1 to {most}");
        return wrong(subject, "workers", workers, Problem::Value(what));
    }
    Ok(())
}

/// Refuses the keys of a tap for a function without one.
fn check_no_tap(config: &NetConfig, why: &str, remedy: &str, subject: &Subject) -> Result<(), ConfigError> {
    let BackendConfig { ip, mask, host_mac, .. } = &config.backend;
    let given = [
        ("ip", ip.map(|ip| ip.to_string())),
        ("mask", mask.map(|mask| mask.to_string())),
        ("host_mac", host_mac.map(|mac| mac.to_string())),
        ("vhost", (config.backend.vhost() == Vhost::On).then(|| "on".to_string())),
    ];
    match given.into_iter().find_map(|(key, value)| Some((key, value?))) {
        Some((key, value)) => {
            let what = format!("{why}, so that there is no tap; {remedy}, or leave {key} out");
            wrong(subject, key, value, Problem::Conflict(what))
        }
        None => Ok(()),
    }
}

/// Checks the port settings of `config`. `functions` are those of the PF, itself first.
///
/// # Errors
///
/// Fails with a setting without a port, or that no port can have.
pub(crate) fn check_port(config: &NetConfig, functions: &[&NetConfig], subject: &Subject) -> Result<(), ConfigError> {
    let PolicyConfig { isolated, mirror, weight, min_tx_rate, .. } = config.policy;
    let mirror = mirror.filter(|mirror| !mirror.is_off());
    let mirror_text = match mirror {
        Some(Mirror::Vf(index)) => index.to_string(),
        _ => "pf".to_string(),
    };
    let Some(port) = config.port() else {
        let asked = [
            ("isolated", isolated.filter(|isolated| *isolated).map(|_| "on".to_string())),
            ("mirror", mirror.map(|_| mirror_text)),
            ("weight", weight.map(|weight| weight.to_string())),
            ("min_tx_rate", min_tx_rate.filter(|rate| *rate != 0).map(|rate| rate.to_string())),
        ];
        return match asked.into_iter().find_map(|(key, value)| Some((key, value?))) {
            Some((key, value)) => {
                let what = format!(
                    "only a port of a switch has this; add switch=veb to the PF and name no tap or other backend for \
                     the VF, or leave {key} out (docs/switch.md)"
                );
                wrong(subject, key, value, Problem::Conflict(what))
            }
            None => Ok(()),
        };
    };
    if port == SwitchPort::Vf {
        check_no_tap(config, "this VF is on the PF's switch", "add tap= to keep it out of the switch", subject)?;
    }
    if let Some(weight) = weight.filter(|weight| !(1..=MAX_WEIGHT).contains(weight)) {
        let what = format!("not a weight; give 1 to {MAX_WEIGHT}");
        return wrong(subject, "weight", weight, Problem::Value(what));
    }
    uplink_rate::check_port(config, functions.first().copied(), subject)?;
    let Some(mirror) = mirror else { return Ok(()) };
    let target = match mirror {
        Mirror::Vf(index) => functions.get(1 + usize::from(index)),
        Mirror::Pf | Mirror::Off => functions.first(),
    };
    match target {
        Some(target) if std::ptr::eq(*target, config) => {
            let what = "a port cannot get copies of what it sends itself; name another".to_string();
            wrong(subject, "mirror", mirror_text, Problem::Value(what))
        }
        Some(target) if target.port().is_some() => Ok(()),
        Some(_) => {
            let what = "that VF has a backend of its own and is not on the switch; name another".to_string();
            wrong(subject, "mirror", mirror_text, Problem::Conflict(what))
        }
        None => {
            let what = format!("there is no such VF; give pf, or 0 to {}", functions.len().saturating_sub(2));
            wrong(subject, "mirror", mirror_text, Problem::Value(what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::net::policy::info_of;
    use crate::config::{BackendPlan, NetPlan, NetVf, PlannedVm, VmConfig, VmPlan};
    use virtio_devices::Policy;

    fn config(net: &str, vfs: &[&str]) -> Result<VmConfig, ConfigError> {
        let mut config = VmConfig { net: vec![net.parse()?], ..VmConfig::default() };
        config.cpus.boot_vcpus = 4;
        config.cpus.max_vcpus = 4;
        for vf in vfs {
            format!("pf=pf0,{vf}").parse::<NetVf>()?.add_to(&mut config.net, &["pf0".to_string()])?;
        }
        Ok(config)
    }

    fn plan(net: &str, vfs: &[&str]) -> Result<NetPlan, String> {
        let plan = config(&format!("id=pf0,{net}"), vfs).and_then(|config| VmPlan::of(&config));
        Ok(plan.map_err(|error| error.to_string())?.nets().next().unwrap().clone())
    }

    #[test]
    fn a_switch_without_a_backend_is_closed_and_makes_no_tap() {
        let plan = plan("switch=veb,sriov_vfs=3", &[]).unwrap();
        assert_eq!(
            plan.switch,
            Some(SwitchPlan { mode: SwitchMode::Veb, workers: 1, uplink: None, uplink_rate: None })
        );
        for function in plan.functions() {
            assert_eq!(function.backend, BackendPlan::Port(PortSettings::default()));
        }
    }

    #[test]
    fn pf_backend_is_the_uplink_and_a_vf_with_its_own_not_a_port() {
        let tap = "switch=vepa,workers=4,tap=up0,mtu=9000,num_queues=8,vhost=auto,sriov_vfs=3";
        let planned = plan(tap, &["index=1,tap=own,vhost=on"]).unwrap();
        let spec = TapSpec {
            name: Some("up0".to_string()),
            ip: None,
            mask: None,
            host_mac: None,
            mtu: Some(9000),
            queue_pairs: 1,
        };
        let uplink = Some(UplinkPlan::Tap(spec));
        let switch = SwitchPlan { mode: SwitchMode::Vepa, workers: 4, uplink, uplink_rate: None };
        assert_eq!(planned.switch, Some(switch));
        let is_port = |nic: &crate::config::NicPlan| matches!(nic.backend, BackendPlan::Port(_));
        assert_eq!(planned.functions().map(is_port).collect::<Vec<_>>(), [true, true, false, true]);
        assert_eq!((planned.pf.spec.queue_pairs, planned.vfs[1].backend.tap_name()), (4, Some("own")));
        let passed = plan("switch=veb,fd=[9],num_queues=4,sriov_vfs=1", &[]).unwrap();
        assert_eq!(passed.switch.unwrap().uplink, Some(UplinkPlan::Fd(9)));
        assert_eq!(plan("sriov_vfs=1", &[]).unwrap().switch, None);
    }

    #[test]
    fn switch_restricts_vfs_by_default_and_not_the_pf() {
        let vfs = ["index=1,spoofchk=off,trust=on", "index=2,tap=own", "index=3,trust=on"];
        let planned = plan("switch=veb,sriov_vfs=4", &vfs).unwrap();
        let of = |policy: &Policy| (policy.spoof_check, policy.trusted);
        let all: Vec<_> = planned.functions().map(|nic| of(&nic.spec.policy)).collect();
        assert_eq!(all, [(false, true), (true, false), (false, true), (false, true), (true, true)]);
        let pf = plan("switch=veb,sriov_vfs=1,spoofchk=on,trust=off", &[]).unwrap();
        assert_eq!(of(&pf.pf.spec.policy), (true, false));
    }

    #[test]
    fn each_port_has_its_settings() {
        let vfs = ["index=0,isolated=on,mirror=pf,weight=100", "index=1,mirror=0,weight=1", "index=2,mirror=off"];
        let planned = plan("switch=veb,sriov_vfs=3,mirror=2,isolated=off", &vfs).unwrap();
        let settings: Vec<_> = planned
            .functions()
            .map(|nic| match nic.backend {
                BackendPlan::Port(PortSettings { isolated, mirror, weight, min_tx_rate: 0, follows_uplink: true }) => {
                    (isolated, mirror, weight)
                }
                _ => panic!("{nic:?}"),
            })
            .collect();
        assert_eq!(settings, [(false, Some(3), 10), (true, Some(0), 100), (false, Some(1), 1), (false, None, 10)]);
        let planned = plan("switch=veb,sriov_vfs=3,link=up", &["index=0,link=auto", "index=1,link=down"]).unwrap();
        let follows: Vec<_> = planned
            .functions()
            .map(|nic| matches!(nic.backend, BackendPlan::Port(PortSettings { follows_uplink: true, .. })))
            .collect();
        assert_eq!(follows, [false, true, false, true]);
        let config = config("id=pf0,switch=veb,sriov_vfs=2", &["index=1,isolated=on,mirror=0"]).unwrap();
        let of = |vf: usize| {
            let unsaid = crate::config::VfConfig::default();
            info_of(&config.net[0].vfs.get(vf).unwrap_or(&unsaid).over(&config.net[0], 2))
        };
        assert_eq!((of(0).isolated, of(0).mirror, of(0).weight), (true, Mirror::Vf(0), Some(10)));
        assert_eq!((of(7).isolated, of(7).spoofchk, of(7).weight), (false, true, Some(10)));
    }

    #[test]
    fn an_impossible_switch_is_refused_with_what_to_do() {
        let carried = "the switch's uplink is a tap whose packets this program carries";
        for (net, expected) in [
            ("switch=veb", "switch=veb: connects a PF with its VFs, and there are none; add sriov_vfs="),
            ("switch=veb,sriov_vfs=4096", "sriov_vfs=4096: a switch has ports for 4095 VFs; reserve fewer"),
            (
                "switch=veb,sriov_vfs=1,tap=t,vhost=on",
                &format!("switch=veb: {carried}; leave vhost out, or leave switch out"),
            ),
            (
                "switch=veb,sriov_vfs=1,vdpa=/d",
                &format!("switch=veb: {carried}; give it tap= instead of vdpa, or leave vdpa out"),
            ),
            (
                "switch=vepa,sriov_vfs=1,vhost_user=on,socket=/s",
                &format!("switch=vepa: {carried}; give it tap= instead of vhost_user, or leave vhost_user out"),
            ),
            (
                "switch=vepa,sriov_vfs=1",
                "switch=vepa: forwards by way of the uplink, and there is none; add tap=, or give switch=veb",
            ),
            (
                "switch=veb,sriov_vfs=1,host_mac=52:54:00:00:00:09",
                "host_mac=52:54:00:00:00:09: the switch has no uplink, so that there is no tap; add tap=, or leave \
                 host_mac out",
            ),
            (
                "switch=veb,sriov_vfs=1,workers=5",
                "workers=5: at most one for each of the VM's 4 vCPUs, and 64; give 1 to 4",
            ),
            (
                "switch=veb,sriov_vfs=1,workers=0",
                "workers=0: at most one for each of the VM's 4 vCPUs, and 64; give 1 to 4",
            ),
            ("workers=1", "workers=1: only a switch has workers; add switch=veb, or leave workers out"),
            (
                "switch=veb,sriov_vfs=1,fd=[8,9],num_queues=4",
                "num_queues=4: the uplink of a switch has one queue; pass 1 file descriptor (fd=) instead of 2",
            ),
            ("switch=veb,sriov_vfs=1,weight=0", "weight=0: not a weight; give 1 to 100"),
            (
                "switch=veb,sriov_vfs=1,mirror=pf",
                "mirror=pf: a port cannot get copies of what it sends itself; name another",
            ),
            ("switch=veb,sriov_vfs=2,mirror=2", "mirror=2: there is no such VF; give pf, or 0 to 1"),
        ] {
            assert_eq!(plan(net, &[]), Err(format!("--net id=pf0,{expected}")));
        }
    }

    #[test]
    fn a_vf_that_is_no_port_has_no_key_of_one() {
        let why = "only a port of a switch has this; add switch=veb to the PF and name no tap or other backend for the \
                   VF, or leave";
        for (key, value) in [("isolated", "on"), ("mirror", "pf"), ("mirror", "1"), ("weight", "10")] {
            let vf = format!("index=0,tap=own,{key}={value}");
            for net in ["sriov_vfs=2", "switch=veb,sriov_vfs=2"] {
                let expected = format!("--net-vf pf=pf0,index=0,{key}={value}: {why} {key} out (docs/switch.md)");
                assert_eq!(plan(net, &[&vf]), Err(expected));
            }
        }
        assert!(plan("sriov_vfs=1", &["index=0,isolated=off,mirror=off"]).is_ok());
        for (key, value) in [("vhost", "on"), ("host_mac", "52:54:00:00:00:09"), ("ip", "10.0.0.1")] {
            let expected = format!(
                "--net-vf pf=pf0,index=0,{key}={value}: this VF is on the PF's switch, so that there is no tap; add \
                 tap= to keep it out of the switch, or leave {key} out"
            );
            let vf = format!("index=0,{key}={value}");
            assert_eq!(plan("switch=veb,tap=up0,sriov_vfs=1", &[&vf]), Err(expected));
        }
        let own = plan("switch=veb,sriov_vfs=2", &["index=0,mirror=1", "index=1,tap=own"]);
        let expected = "--net-vf pf=pf0,index=0,mirror=1: that VF has a backend of its own and is not on the switch; \
                        name another";
        assert_eq!(own, Err(expected.to_string()));
    }

    #[test]
    fn the_kept_switch_is_planned_again_as_it_is() {
        let vfs = ["index=0,isolated=on", "index=1,tap=own"];
        for net in ["switch=veb", "switch=vepa,tap=up0", "switch=veb,fd=[7]"] {
            let vm = PlannedVm::new(config(&format!("id=pf0,sriov_vfs=3,{net}"), &vfs).unwrap()).unwrap();
            assert_eq!(PlannedVm::new(vm.config().clone()).unwrap(), vm);
        }
    }
}
