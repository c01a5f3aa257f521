//! The rules for `guest_control`, and the decision on settings that a guest asks for.
//!
//! [`decide`] is the one place that knows what a guest may do. It has no state: a setting that was allowed is decided
//! again whenever the host's settings change.

use std::fmt::Display;

use virtio_devices::{BackendKind, MAX_VLAN};
use vm_api::channel::{Refusal, RefusalCode, Set};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::mac::{MacAddress, MacChoice};
use vm_api::config::net::NetConfig;
use vm_api::config::net::guest_control::{GuestControl, GuestSettings};
use vm_api::config::net::policy::{LinkPolicy, MAX_QOS, PolicyConfig, VlanProto, Vlans};

use crate::config::net::policy::{self, Carrier};
use crate::config::net::{uplink_rate, x550};
use crate::config::subject::Subject;

/// Checks the key `guest_control` of `net`, which is a NIC of any model.
///
/// # Errors
///
/// Fails if the NIC has no VFs that the guest could govern this way.
pub(crate) fn check(net: &NetConfig, subject: &Subject) -> Result<(), ConfigError> {
    let Some(control) = &net.guest_control else { return Ok(()) };
    let problem = match x550::model(net) {
        Some(model) => Problem::Conflict(format!(
            "the guest owns the VFs of an {model} and configures them (ip link set <PF> vf); leave guest_control out, \
             or give model=virtio"
        )),
        None if net.sriov_vfs == 0 => {
            Problem::Missing("is for the VFs of a PF, and there are none; add sriov_vfs=".to_string())
        }
        None => return Ok(()),
    };
    Err(ConfigError::new(subject.key("guest_control", control), problem))
}

/// A VF as the host has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostVf<'a> {
    /// The host's settings: the VF's own over its PF's.
    pub config: &'a NetConfig,
    /// The host's link, which may differ from the configuration's.
    pub link: LinkPolicy,
    /// Kind of its open backend.
    pub backend: BackendKind,
    /// The PF, with the rate of its uplink.
    pub pf: &'a NetConfig,
}

/// A refusal of one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denial {
    /// Key of the setting that has to change.
    pub key: &'static str,
    /// Code and line for the guest.
    pub refusal: Refusal,
}

impl Denial {
    fn new(code: RefusalCode, key: &'static str, value: impl Display, what: impl Display) -> Self {
        Self { key, refusal: Refusal { code, message: format!("{key}={value}: {what}") } }
    }
}

/// The settings after a request of the guest for a VF that has the settings `now` of it.
pub(crate) fn requested(now: &GuestSettings, request: &Set) -> GuestSettings {
    let Set { vf: _, vlan, vlan_qos, vlan_proto, mac, max_tx_rate, link, spoofchk } = request;
    let mut wanted = now.clone();
    if *vlan == Some(0) {
        wanted.end("vlan");
    }
    wanted.vlan = vlan.filter(|vlan| *vlan != 0).or(wanted.vlan);
    wanted.vlan_qos = vlan_qos.or(wanted.vlan_qos);
    wanted.vlan_proto = vlan_proto.or(wanted.vlan_proto);
    if wanted.vlan.is_none() {
        // Without a VLAN these are the values of none.
        wanted.vlan_qos = wanted.vlan_qos.filter(|qos| *qos != 0);
        wanted.vlan_proto = wanted.vlan_proto.filter(|proto| *proto != VlanProto::Customer);
    }
    if *max_tx_rate == Some(0) {
        wanted.end("max_tx_rate");
    }
    wanted.max_tx_rate = max_tx_rate.filter(|rate| *rate != 0).or(wanted.max_tx_rate);
    wanted.mac = mac.or(wanted.mac);
    wanted.link = link.or(wanted.link);
    wanted.spoofchk = spoofchk.or(wanted.spoofchk);
    wanted
}

/// Decides on the settings `wanted` that a guest has or asks for: the settings of the VF with them, the link included.
/// `is_taken` returns true for the address of another function of the VM.
///
/// # Errors
///
/// Fails with the first setting that the host does not allow, or that cannot be enforced.
pub(crate) fn decide(
    allowed: &GuestControl,
    host: HostVf<'_>,
    wanted: &GuestSettings,
    is_taken: impl Fn(MacAddress) -> bool,
) -> Result<NetConfig, Denial> {
    check_vlan(allowed, host, wanted)?;
    check_mac(allowed, host, wanted, is_taken)?;
    check_rate(allowed, host, wanted)?;
    if let Some(link) = wanted.link {
        let value = link_text(link);
        rule(allowed.link, "link", value)?;
        if host.link == LinkPolicy::Down && link != LinkPolicy::Down {
            return Err(said("link", value, "link=down"));
        }
    }
    if let Some(spoofchk) = wanted.spoofchk {
        let value = if spoofchk { "on" } else { "off" };
        rule(allowed.spoofchk, "spoofchk", value)?;
        if !spoofchk && host.config.policy.spoofchk == Some(true) {
            return Err(said("spoofchk", value, "spoofchk=on"));
        }
    }
    let config = effective(host.config, host.link, wanted);
    check_enforced(&config, host, wanted)?;
    Ok(config)
}

/// Decides again on the settings `wanted`, one after the other: those that remain, the settings of the VF with them,
/// and the keys that ended.
pub(crate) fn decide_again(
    allowed: &GuestControl,
    host: HostVf<'_>,
    wanted: &GuestSettings,
    is_taken: impl Fn(MacAddress) -> bool,
) -> (GuestSettings, NetConfig, Vec<&'static str>) {
    let (mut remaining, mut ended) = (wanted.clone(), Vec::new());
    while !remaining.is_empty() {
        match decide(allowed, host, &remaining, &is_taken) {
            Ok(config) => return (remaining, config, ended),
            Err(Denial { key, .. }) if remaining.end(key) => ended.push(key),
            Err(_) => {
                ended.extend(remaining.keys());
                remaining = GuestSettings::default();
            }
        }
    }
    (remaining, effective(host.config, host.link, &GuestSettings::default()), ended)
}

/// The settings `host` of a VF, whose host has set `of_host` as its link, with those of the guest in their place.
pub(crate) fn effective(host: &NetConfig, of_host: LinkPolicy, guest: &GuestSettings) -> NetConfig {
    let mut config = host.clone();
    let GuestSettings { vlan, vlan_qos, vlan_proto, mac, max_tx_rate, link, spoofchk } = guest;
    let given = PolicyConfig {
        vlan: vlan.or(config.policy.vlan),
        vlan_qos: vlan_qos.or(config.policy.vlan_qos),
        vlan_proto: vlan_proto.or(config.policy.vlan_proto),
        max_tx_rate: max_tx_rate.or(config.policy.max_tx_rate),
        link: Some(link.unwrap_or(of_host)),
        spoofchk: spoofchk.or(config.policy.spoofchk),
        // A port VLAN within the host's trunk takes its place: the two cannot be combined.
        trunk: config.policy.trunk.filter(|_| vlan.is_none()),
        ..config.policy
    };
    config.policy = given;
    config.mac = mac.map(MacChoice::Given).or(config.mac);
    config
}

/// Refuses a setting that the host does not allow at all.
fn rule(is_allowed: bool, key: &'static str, value: impl Display) -> Result<(), Denial> {
    let what = "the host does not let the guest set it";
    if is_allowed { Ok(()) } else { Err(Denial::new(RefusalCode::Denied, key, value, what)) }
}

/// The refusal of a setting because of the host's `setting`.
fn said(key: &'static str, value: impl Display, setting: impl Display) -> Denial {
    Denial::new(RefusalCode::Denied, key, value, format_args!("the host has set {setting}"))
}

fn check_vlan(allowed: &GuestControl, host: HostVf<'_>, wanted: &GuestSettings) -> Result<(), Denial> {
    let invalid = |key, value: &dyn Display, what: String| Err(Denial::new(RefusalCode::Invalid, key, value, what));
    let GuestSettings { vlan, vlan_qos, vlan_proto, .. } = wanted;
    if let Some(vlan) = *vlan {
        rule(!allowed.vlans.is_empty(), "vlan", vlan)?;
        if vlan == 0 || vlan > MAX_VLAN {
            return invalid("vlan", &vlan, format!("not a VLAN; give 1 to {MAX_VLAN}, or 0 for the host's"));
        }
        if !allowed.vlans.iter().any(|range| range.contains(&vlan)) {
            let what = format!("the host allows {}", allowed.vlans_text());
            return Err(Denial::new(RefusalCode::Denied, "vlan", vlan, what));
        }
        let PolicyConfig { vlan: of_host, trunk, .. } = &host.config.policy;
        if let Some(of_host) = of_host.filter(|vlan| *vlan != 0) {
            return Err(said("vlan", vlan, format_args!("vlan={of_host}")));
        }
        let outside = |trunk: &&Vlans| !trunk.0.is_empty() && !trunk.0.iter().any(|range| range.contains(&vlan));
        if let Some(trunk) = trunk.as_ref().filter(outside) {
            return Err(said("vlan", vlan, format_args!("trunk={trunk}")));
        }
    }
    let alone = "goes only with a vlan that the guest sets; add vlan";
    if let Some(qos) = *vlan_qos {
        rule(!allowed.vlans.is_empty(), "vlan_qos", qos)?;
        if qos > MAX_QOS {
            return invalid("vlan_qos", &qos, format!("not a priority; give 0 to {MAX_QOS}"));
        }
        if vlan.is_none() {
            return invalid("vlan_qos", &qos, alone.to_string());
        }
    }
    if let Some(proto) = *vlan_proto {
        let value = match proto {
            VlanProto::Customer => "802.1q",
            VlanProto::Service => "802.1ad",
        };
        rule(!allowed.vlans.is_empty(), "vlan_proto", value)?;
        if vlan.is_none() {
            return invalid("vlan_proto", &value, alone.to_string());
        }
    }
    Ok(())
}

fn check_mac(
    allowed: &GuestControl,
    host: HostVf<'_>,
    wanted: &GuestSettings,
    is_taken: impl Fn(MacAddress) -> bool,
) -> Result<(), Denial> {
    let Some(mac) = wanted.mac else { return Ok(()) };
    rule(allowed.mac, "mac", mac)?;
    if mac.is_multicast() || mac.is_zero() {
        let what = "not the address of a NIC; give one with an even first byte, such as 52:54:00:12:34:56";
        return Err(Denial::new(RefusalCode::Invalid, "mac", mac, what));
    }
    if let Some(MacChoice::Given(of_host)) = host.config.mac {
        return Err(said("mac", mac, format_args!("mac={of_host}")));
    }
    let conflict = |what| Err(Denial::new(RefusalCode::Conflict, "mac", mac, what));
    if host.backend == BackendKind::Vdpa {
        return conflict("a VF on a vDPA device has that device's address; leave mac out");
    }
    if is_taken(mac) {
        return conflict("another function has this address; give another");
    }
    Ok(())
}

fn check_rate(allowed: &GuestControl, host: HostVf<'_>, wanted: &GuestSettings) -> Result<(), Denial> {
    let Some(rate) = wanted.max_tx_rate else { return Ok(()) };
    let limit = allowed.max_tx_rate;
    rule(limit.is_some(), "max_tx_rate", rate)?;
    if rate == 0 {
        let what = "not a limit; give 1 or more Mbit/s";
        return Err(Denial::new(RefusalCode::Invalid, "max_tx_rate", rate, what));
    }
    if let Some(limit) = limit.filter(|limit| rate > *limit) {
        let what = format!("the host allows up to {limit}");
        return Err(Denial::new(RefusalCode::Denied, "max_tx_rate", rate, what));
    }
    match host.config.policy.max_tx_rate.filter(|of_host| *of_host != 0) {
        Some(of_host) if rate > of_host => Err(said("max_tx_rate", rate, format_args!("max_tx_rate={of_host}"))),
        _ => Ok(()),
    }
}

/// Checks that the VF's backend and port can have the settings of `config`, with the words that the host would read.
fn check_enforced(config: &NetConfig, host: HostVf<'_>, wanted: &GuestSettings) -> Result<(), Denial> {
    let carrier = Carrier::of_open(host.backend).or_else(|| Carrier::of(config));
    // The subject is empty: the guest knows the VF.
    let subject = Subject::nothing();
    let checked = policy::check(config, carrier, &subject);
    let checked = checked.and_then(|()| uplink_rate::check_port(config, Some(host.pf), &subject));
    checked.map_err(|error| {
        let named = |key: &&'static str| error.subject.split('=').next() == Some(*key);
        // Turning the spoof check on takes trust away, which may be what cannot be enforced.
        let keys = wanted.keys();
        let key = keys.iter().copied().find(named);
        let key = key.or_else(|| error.subject.starts_with("min_tx_rate").then_some("max_tx_rate"));
        let key = key.or_else(|| keys.contains(&"spoofchk").then_some("spoofchk"));
        let key = key.or_else(|| keys.first().copied()).unwrap_or("vlan");
        Denial { key, refusal: Refusal { code: RefusalCode::Conflict, message: error.to_string() } }
    })
}

const fn link_text(link: LinkPolicy) -> &'static str {
    match link {
        LinkPolicy::Auto => "auto",
        LinkPolicy::Up => "up",
        LinkPolicy::Down => "down",
    }
}

#[cfg(test)]
mod tests;
