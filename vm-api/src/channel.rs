//! The channel by which a guest governs its VFs: lines of JSON on a port of a virtio console.
//!
//! The guest writes a [`Request`] per line to [`CONTROL_PORT`] and reads a [`Reply`] for each. The VMM writes a
//! [`Notice`] per line to [`EVENTS_PORT`]. A function is named by its PCI address as the guest sees it,
//! `0000:00:03.1`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::mac::MacAddress;
use crate::config::net::policy::{LinkPolicy, VlanProto};

/// Name of the port for requests and replies, `/dev/virtio-ports/sriov.control` with udev.
pub const CONTROL_PORT: &str = "sriov.control";
/// Name of the port on which changes are announced. What the guest writes to it is dropped.
pub const EVENTS_PORT: &str = "sriov.events";
/// Version of the protocol, in the answer to [`Command::Hello`].
pub const VERSION: u32 = 1;
/// Largest request in bytes, with its newline.
pub const MAX_REQUEST: usize = 4096;
/// Largest reply or notice in bytes, with its newline.
pub const MAX_REPLY: usize = 16 * 1024;
/// VFs in the answer to one [`Command::List`].
pub const LISTED_VFS: u16 = 16;

/// A request of the guest: a number that its reply repeats, and one command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Number that the reply repeats.
    pub id: u64,
    /// Ask for the version and the PFs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hello: Option<Hello>,
    /// Ask for several VFs of a PF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list: Option<List>,
    /// Ask for one VF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub get: Option<Named>,
    /// Change settings of one VF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<Set>,
    /// Return one VF to the host's settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset: Option<Named>,
}

/// The command of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// The version and the PFs: [`Welcome`].
    Hello(Hello),
    /// Several VFs of a PF: [`Listed`].
    List(List),
    /// State of a VF: [`VfState`].
    Get(Named),
    /// Settings of one VF, all or none: its [`VfState`] after the change.
    Set(Set),
    /// The host's settings for one VF: its [`VfState`] after the change.
    Reset(Named),
}

impl Request {
    /// Creates a request.
    pub fn new(id: u64, command: Command) -> Self {
        let mut request = Self { id, hello: None, list: None, get: None, set: None, reset: None };
        match command {
            Command::Hello(hello) => request.hello = Some(hello),
            Command::List(list) => request.list = Some(list),
            Command::Get(named) => request.get = Some(named),
            Command::Set(set) => request.set = Some(set),
            Command::Reset(named) => request.reset = Some(named),
        }
        request
    }

    /// The command, if there is exactly one.
    pub fn command(self) -> Option<Command> {
        let commands = [
            self.hello.map(Command::Hello),
            self.list.map(Command::List),
            self.get.map(Command::Get),
            self.set.map(Command::Set),
            self.reset.map(Command::Reset),
        ];
        let mut given = commands.into_iter().flatten();
        given.next().filter(|_| given.next().is_none())
    }
}

/// Version that the guest's program speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// Version of the protocol, 1.
    pub version: u32,
}

/// Up to [`LISTED_VFS`] enabled VFs of a PF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// PCI address of the PF.
    pub pf: String,
    /// Index of the first VF, counted from 0.
    #[serde(default)]
    pub from: u16,
}

/// A VF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// PCI address of the VF.
    pub vf: String,
}

/// New settings of a VF. What is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
// The keys of `GuestSettings` once more: with `flatten`, serde would ignore keys that it does not know.
pub struct Set {
    /// PCI address of the VF.
    pub vf: String,
    /// Port VLAN, 1 to 4094; 0 returns to the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Priority in the tag of `vlan`, 0 to 7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan_qos: Option<u8>,
    /// Tag protocol of `vlan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan_proto: Option<VlanProto>,
    /// MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Transmit limit in Mbit/s; 0 returns to the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// State of the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkPolicy>,
    /// Drop packets from other MAC addresses than the VF's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoofchk: Option<bool>,
}

/// The answer to one request: a result, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Number of the request; none if the line had no readable one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Result: [`Welcome`], [`Listed`] or [`VfState`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<Value>,
    /// Reason why nothing was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
}

/// A request that was not carried out, and that changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Kind of the error, for programs.
    pub code: RefusalCode,
    /// Line for people: the key, the value, what is wrong, what to do.
    pub message: String,
}

/// The kinds of refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RefusalCode {
    /// The line is no request.
    Invalid,
    /// There is no such function, or the VF is not enabled.
    Missing,
    /// The host does not allow it.
    Denied,
    /// The VF's backend or state does not permit it.
    Conflict,
    /// The host failed, or cannot do it at present; the request may succeed later.
    Failed,
}

/// The answer to [`Command::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the protocol, 1.
    pub version: u32,
    /// PFs whose VFs the guest may govern.
    pub pfs: Vec<PfState>,
}

/// A PF whose VFs the guest may govern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PfState {
    /// PCI address.
    pub pf: String,
    /// Number of VFs that are enabled.
    pub vfs: u16,
    /// Limits as in `--net guest_control=`: `["vlan:100-199", "mac"]`.
    pub allowed: Vec<String>,
}

/// The answer to [`Command::List`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// VFs in the order of their indices.
    pub vfs: Vec<VfState>,
    /// Index to continue from, if there are more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u16>,
}

/// A VF with its effective settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfState {
    /// PCI address.
    pub vf: String,
    /// Index, counted from 0.
    pub index: u16,
    /// MAC address.
    pub mac: MacAddress,
    /// Port VLAN, 0 for none.
    pub vlan: u16,
    /// Priority in the tag of `vlan`.
    pub vlan_qos: u8,
    /// Tag protocol of `vlan`.
    pub vlan_proto: VlanProto,
    /// Transmit limit in Mbit/s, 0 for none.
    pub max_tx_rate: u32,
    /// Setting of the link.
    pub link: LinkPolicy,
    /// True if packets from other MAC addresses are dropped.
    pub spoofchk: bool,
    /// True if the link is up for the driver.
    pub link_up: bool,
    /// Keys that the guest has set: `["mac", "vlan"]`.
    pub set: Vec<String>,
    /// Counters by the names that `vm.counters` has for them.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
}

/// A change of a VF, on [`EVENTS_PORT`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// PCI address of the VF.
    pub vf: String,
    /// Side that changed it: `host` or `guest`.
    pub by: String,
    /// The differences, as in the VMM's event `vf-policy`: `vlan 0 -> 100`.
    pub changed: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> Option<Command> {
        serde_json::from_str::<Request>(line).ok().and_then(Request::command)
    }

    /// The keys that a type has, from the error for another one.
    fn keys<T: serde::de::DeserializeOwned>() -> Vec<String> {
        let error = serde_json::from_str::<T>(r#"{"none":1}"#).err().unwrap().to_string();
        let keys = error.split('`').skip(3).step_by(2).map(String::from);
        keys.collect()
    }

    #[test]
    fn a_change_has_the_keys_of_a_guests_settings() {
        let settings = keys::<crate::config::net::guest_control::GuestSettings>();
        assert!(settings.contains(&"max_tx_rate".to_string()), "{settings:?}");
        assert_eq!(keys::<Set>(), ["vf".to_string()].into_iter().chain(settings).collect::<Vec<_>>());
    }

    #[test]
    fn a_request_has_one_command_and_no_unknown_key() {
        let set = Set { vf: "0000:00:03.1".into(), vlan: Some(120), max_tx_rate: Some(200), ..Set::default() };
        let line = r#"{"id":7,"set":{"vf":"0000:00:03.1","vlan":120,"max_tx_rate":200}}"#;
        assert_eq!(request(line), Some(Command::Set(set.clone())));
        assert_eq!(serde_json::to_string(&Request::new(7, Command::Set(set))).unwrap(), line);
        for wrong in [
            r#"{"id":7}"#,
            r#"{"id":7,"hello":{"version":1},"get":{"vf":"0000:00:03.1"}}"#,
            r#"{"id":7,"set":{"vf":"0000:00:03.1","trust":true}}"#,
            r#"{"id":-1,"hello":{"version":1}}"#,
            r#"{"id":7,"get":{}}"#,
        ] {
            assert_eq!(request(wrong), None, "{wrong}");
        }
    }
}
