//! The settings of a VF that a configuration asks for, by the keys of sriov-cni.

use vfctl::function::full_address;
use vm_api::channel::{Set, VfState};
use vm_api::config::mac::MacAddress;
use vm_api::config::net::policy::{LinkPolicy, MAX_QOS, MAX_VLAN, VlanProto};

use crate::config::Keys;
use crate::error::{Code, Error, Result};
use crate::parameters::Environment;

/// A VF and what it will be set to. What is `None` is left to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// PCI address of the VF, `0000:01:00.3`.
    pub vf: String,
    /// VLAN with its priority and tag protocol.
    pub vlan: Option<(u16, u8, VlanProto)>,
    /// Address.
    pub mac: Option<MacAddress>,
    /// Transmit limit in Mbit/s.
    pub max_tx_rate: Option<u32>,
    /// State of the link.
    pub link: Option<LinkPolicy>,
    /// True to drop packets from other addresses.
    pub spoofchk: Option<bool>,
}

impl Settings {
    /// Reads the keys.
    ///
    /// # Errors
    ///
    /// [`Code::Config`] for a wrong value, [`Code::Unsupported`] for a value that the channel cannot set, and
    /// [`Code::Environment`].
    pub fn read(keys: &Keys, environment: &Environment) -> Result<Self> {
        refuse_unsupported(keys)?;
        Ok(Self {
            vf: device(keys)?,
            vlan: vlan(keys)?,
            mac: mac(keys, environment)?,
            // 0 and `auto` are defaults that generated configurations have: nothing of the guest's own.
            max_tx_rate: keys.number("max_tx_rate", u32::MAX)?.filter(|rate| *rate > 0),
            link: match word(keys, "link_state", &["auto", "enable", "disable"])? {
                Some("enable") => Some(LinkPolicy::Up),
                Some("disable") => Some(LinkPolicy::Down),
                _ => None,
            },
            spoofchk: word(keys, "spoofchk", &["on", "off"])?.map(|word| word == "on"),
        })
    }

    /// The request that makes a VF in this state as it will be, without the keys that are so already.
    pub fn changes(&self, state: &VfState) -> Option<Set> {
        let mut set = Set::default();
        if let Some((vlan, qos, proto)) = self.vlan
            && (vlan, qos, proto) != (state.vlan, state.vlan_qos, state.vlan_proto)
        {
            set.vlan = Some(vlan);
            set.vlan_qos = Some(qos).filter(|qos| *qos != state.vlan_qos);
            set.vlan_proto = Some(proto).filter(|proto| *proto != state.vlan_proto);
        }
        set.mac = self.mac.filter(|mac| *mac != state.mac);
        set.max_tx_rate = self.max_tx_rate.filter(|rate| *rate != state.max_tx_rate);
        set.link = self.link.filter(|link| *link != state.link);
        set.spoofchk = self.spoofchk.filter(|spoofchk| *spoofchk != state.spoofchk);
        (set != Set::default()).then(|| Set { vf: self.vf.clone(), ..set })
    }

    /// The first setting that a VF in this state does not have, as one line.
    pub fn difference(&self, state: &VfState) -> Option<String> {
        let set = self.changes(state)?;
        let of = |key: &str, wanted: String, is: String| format!("{key}={wanted}: the VF {} has {is}", self.vf);
        if let Some((vlan, qos, proto)) = self.vlan.filter(|_| set.vlan.is_some()) {
            let text = |vlan, qos, proto| format!("{vlan} (vlanQoS {qos}, vlanProto {})", protocol(proto));
            let is = text(state.vlan, state.vlan_qos, state.vlan_proto);
            return Some(of("vlan", text(vlan, qos, proto), is));
        }
        let mac = set.mac.map(|mac| of("mac", mac.to_string(), state.mac.to_string()));
        let rate = set.max_tx_rate.map(|rate| of("max_tx_rate", rate.to_string(), state.max_tx_rate.to_string()));
        let link = set.link.map(|link| of("link_state", link_state(link).into(), link_state(state.link).into()));
        let spoofchk = set.spoofchk.map(|on| of("spoofchk", on_off(on).into(), on_off(state.spoofchk).into()));
        mac.or(rate).or(link).or(spoofchk)
    }
}

fn protocol(proto: VlanProto) -> &'static str {
    match proto {
        VlanProto::Customer => "802.1q",
        VlanProto::Service => "802.1ad",
    }
}

fn link_state(link: LinkPolicy) -> &'static str {
    match link {
        LinkPolicy::Auto => "auto",
        LinkPolicy::Up => "enable",
        LinkPolicy::Down => "disable",
    }
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Refuses what only the host can set.
fn refuse_unsupported(keys: &Keys) -> Result<()> {
    let refusal = |text: String| Err(Error::new(Code::Unsupported, text));
    if word(keys, "trust", &["on", "off"])? == Some("on") {
        return refusal("trust=on: a guest cannot trust its own VFs; leave it out, and set trust on the host".into());
    }
    if let Some(rate) = keys.number("min_tx_rate", u32::MAX)?.filter(|rate| *rate > 0) {
        return refusal(format!("min_tx_rate={rate}: a guest cannot set it; leave it out, and set it on the host"));
    }
    if let Some(trunk) = keys.text("vlan_trunk")? {
        return refusal(format!("vlan_trunk={trunk}: a guest cannot set it; leave it out, and set trunk on the host"));
    }
    if let Some(guid) = keys.object("runtimeConfig")?.text("infinibandGUID")? {
        return refusal(format!("runtimeConfig.infinibandGUID={guid}: VFs are of Ethernet; leave the capability out"));
    }
    Ok(())
}

/// The VF: what multus passes as `runtimeConfig.deviceID` for this pod, or `deviceID`.
fn device(keys: &Keys) -> Result<String> {
    let runtime = keys.object("runtimeConfig")?;
    let text = runtime.text("deviceID")?.or(keys.text("deviceID")?);
    let text = text.ok_or_else(|| Error::new(Code::Config, "deviceID: missing; give the PCI address of a VF"))?;
    let refusal = || Error::new(Code::Config, format!("deviceID={text}: give the PCI address of a VF, 0000:01:00.3"));
    full_address(text).ok_or_else(refusal)
}

fn vlan(keys: &Keys) -> Result<Option<(u16, u8, VlanProto)>> {
    let vlan = keys.number("vlan", MAX_VLAN.into())?.and_then(|vlan| u16::try_from(vlan).ok()).unwrap_or_default();
    let qos = keys.number("vlanQoS", MAX_QOS.into())?.and_then(|qos| u8::try_from(qos).ok()).unwrap_or_default();
    let proto = match keys.text("vlanProto")?.map(str::to_ascii_lowercase).as_deref() {
        None | Some("802.1q") => VlanProto::Customer,
        Some("802.1ad") => VlanProto::Service,
        Some(other) => {
            return Err(Error::new(Code::Config, format!("vlanProto={other}: give 802.1q or 802.1ad")));
        }
    };
    if vlan > 0 {
        return Ok(Some((vlan, qos, proto)));
    }
    if qos > 0 {
        return Err(Error::new(Code::Config, format!("vlanQoS={qos}: give a vlan from 1 to {MAX_VLAN}, too")));
    }
    if proto == VlanProto::Service {
        return Err(Error::new(Code::Config, format!("vlanProto=802.1ad: give a vlan from 1 to {MAX_VLAN}, too")));
    }
    Ok(None)
}

/// The address of the pod's annotation, that of `CNI_ARGS`, or that of the network.
fn mac(keys: &Keys, environment: &Environment) -> Result<Option<MacAddress>> {
    let runtime = keys.object("runtimeConfig")?;
    let choices = [
        ("runtimeConfig.mac", runtime.text("mac")?),
        ("CNI_ARGS MAC", environment.argument("MAC")?),
        ("mac", keys.text("mac")?),
    ];
    let Some((key, text)) = choices.into_iter().find_map(|(key, text)| Some((key, text?))) else { return Ok(None) };
    let mac: Option<MacAddress> = text.parse().ok();
    let mac = mac.filter(|mac| !mac.is_multicast() && !mac.is_zero());
    let refusal = || Error::new(Code::Config, format!("{key}={text}: give a unicast address, 52:54:00:00:01:aa"));
    mac.map(Some).ok_or_else(refusal)
}

fn word<'a>(keys: &'a Keys, key: &str, words: &[&str]) -> Result<Option<&'a str>> {
    let refusal = |text| Error::new(Code::Config, format!("{key}={text}: give {}", words.join(" or ")));
    match keys.text(key)? {
        Some(text) if !words.contains(&text) => Err(refusal(text)),
        text => Ok(text),
    }
}

#[cfg(test)]
#[path = "settings/tests.rs"]
mod tests;
