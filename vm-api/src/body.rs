//! The bodies of requests that do not describe a device.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::RestoredBackend;
use crate::config::mac::MacChoice;
use crate::config::net::VfConfig;
use crate::config::net::policy::PolicyConfig;
use crate::config::net::vf_range::VfRange;
use crate::config::option::{Argument, Changes, Fields, apply};
use crate::config::rate::RateLimiterConfig;

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

/// Fields of `vm.set-vf` that come first, in the order of arguments and JSON.
const FIRST: &[&str] = &["pf", "index", "link", "mac"];

/// The body of `vm.set-vf`. Omitted fields stay unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Options, Schema)]
#[options(body, changes, order = FIRST)]
#[schema(name = "VmSetVf")]
pub struct SetVf {
    /// The PF's id.
    #[option(required)]
    #[schema(limits = ID)]
    pub pf: String,
    /// The VF's index, from 0, or several: a range such as "0-63", or "*" for all. All of them change, or none. A MAC
    /// address or a backend can be given to one VF. Without an index, only a backend can be given, to the PF itself or
    /// to a NIC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<VfRange>,
    /// The VF's policy. Its link is not part of the configuration.
    #[option(flatten)]
    pub policy: PolicyConfig,
    /// The VF's MAC address. On a switch the guest cannot change it without trust; any is the derived one, which it may
    /// change.
    #[option(
        "mac=<address>|any",
        change("address|any", "New MAC address; on a switch, any is the derived one, which the guest may change")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacChoice>,
    /// The limits of its received and sent packets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// A tap of the host, for a function whose backend is missing, or whose tap was deleted. A backend is given by a
    /// request of its own.
    #[option(
        "tap=<interface>",
        change("interface", "Tap for a function whose backend is missing, or a tap that was deleted")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Number of tap descriptors that come with the request, one for each pair of queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_fds: Option<usize>,
    /// The socket of a vhost-user backend for it.
    #[option("socket=<path>", change("path", "Socket of a vhost-user backend for it"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// A vDPA device of the host for it.
    #[option("vdpa=<path>", change("path", "vDPA device for it"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<PathBuf>,
}

impl SetVf {
    /// The backend given, if any; `fds` are the descriptors passed with the request.
    pub fn backend(&self, fds: &[RawFd]) -> Option<RestoredBackend> {
        let Self { pf, index, tap, num_fds, vhost_socket, vdpa, .. } = self;
        let backend = RestoredBackend {
            id: pf.clone(),
            vf: index.and_then(VfRange::one),
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
        let policy = PolicyConfig { link: None, ..self.policy.clone() };
        let changes = [
            policy.apply(&mut vf.policy),
            apply(&self.mac, &mut vf.mac),
            apply(&self.rate_limiter_config, &mut vf.rate_limiter_config),
        ];
        changes.contains(&true)
    }

    /// The arguments that change a VF, in the order of the help.
    pub fn arguments() -> impl Iterator<Item = Argument> {
        Self::FIELDS.iter().filter_map(|field| Self::argument(field))
    }

    /// Reads the value of the argument with this name.
    ///
    /// # Errors
    ///
    /// Fails with the fault of the value, or if there is no such argument.
    pub fn set_argument(&mut self, name: &str, text: &str) -> Result<(), String> {
        if text.is_empty() {
            return Err("the value is empty; give one, or leave the argument out".to_string());
        }
        self.set(name, text).unwrap_or_else(|| Err(format!("there is no argument {name}")))
    }
}

/// The largest number of interrupts or enables that a fault concerns.
pub const MOST_FAULTS: u32 = 1000;

/// The body of `vm.inject-fault`: a fault of one function of a virtio device, for tests of its driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "VmInjectFault")]
pub struct InjectFault {
    /// The device's id, as given or as in `vm.info`.
    #[schema(limits = ID)]
    pub id: String,
    /// The fault.
    pub fault: Fault,
    /// The VF's index, from 0. Without one the fault is in the device's own function, such as the PF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u16>,
    /// Number of interrupts to lose, or of enables to refuse; 0 ends the fault. Without a number, 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1000)]
    pub count: Option<u32>,
    /// The MSI-X vector whose interrupts are lost; without one, those of all vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vector: Option<u16>,
}

/// A fault of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The function asks its driver, which must be ready, for a reset (DEVICE_NEEDS_RESET).
    NeedsReset,
    /// The next interrupts do not arrive.
    LoseInterrupts,
    /// The PF leaves VF Enable clear at the next writes that would set it.
    RefuseVfEnable,
    /// The function disappears without a request: a VF until the VFs are disabled, a device permanently.
    SurpriseRemoval,
}

impl Fault {
    /// The name, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NeedsReset => "needs-reset",
            Self::LoseInterrupts => "lose-interrupts",
            Self::RefuseVfEnable => "refuse-vf-enable",
            Self::SurpriseRemoval => "surprise-removal",
        }
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ALL: [Fault; 4] =
            [Fault::NeedsReset, Fault::LoseInterrupts, Fault::RefuseVfEnable, Fault::SurpriseRemoval];
        let named = ALL.into_iter().find(|fault| fault.name() == text);
        named.ok_or_else(|| format!("give one of {}", ALL.map(Fault::name).join(", ")))
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::net::policy::Vlans;

    #[test]
    fn each_fault_has_the_same_name_in_json_and_as_an_argument() {
        for name in ["needs-reset", "lose-interrupts", "refuse-vf-enable", "surprise-removal"] {
            let fault: Fault = name.parse().unwrap();
            assert_eq!((fault.name(), serde_json::to_value(fault).unwrap()), (name, name.into()));
        }
        assert!("flr".parse::<Fault>().unwrap_err().starts_with("give one of needs-reset, "));
    }

    #[test]
    fn an_empty_argument_is_refused() {
        for argument in SetVf::arguments() {
            let refused = SetVf::default().set_argument(argument.name, "").unwrap_err();
            assert!(refused.starts_with("the value is empty"), "{}: {refused}", argument.name);
        }
    }

    #[test]
    fn every_setting_of_a_policy_has_an_argument_that_sets_it() {
        let arguments: Vec<_> = SetVf::arguments().map(|argument| argument.name).collect();
        assert_eq!(arguments[..3], ["link", "mac", "vlan"]);
        for field in PolicyConfig::FIELDS {
            assert!(arguments.contains(field), "{field}");
        }
        let mut change = SetVf { pf: "pf0".to_string(), index: Some(3.into()), ..SetVf::default() };
        for (name, text) in [("storm", "9"), ("mac", "any"), ("link", "down"), ("socket", "/s"), ("trust", "off")] {
            change.set_argument(name, text).unwrap();
        }
        let json = r#"{"pf":"pf0","index":3,"link":"down","mac":"any","trust":false,"storm":9,"vhost_socket":"/s"}"#;
        assert_eq!(serde_json::to_string(&change).unwrap(), json);
        assert_eq!(serde_json::from_str::<SetVf>(json).unwrap(), change);
        assert!(change.set_argument("storm", "x").is_err() && change.set_argument("pf", "x").is_err());
    }

    #[test]
    fn a_change_leaves_what_it_omits_and_never_the_link() {
        let mut vf: VfConfig = "index=3,vlan=5,storm=1,link=up,mac=any".parse().unwrap();
        let change = |json| serde_json::from_str::<SetVf>(json).unwrap();
        assert!(!change(r#"{"pf": "p", "link": "down", "tap": "t"}"#).apply(&mut vf));
        assert_eq!(vf, "index=3,vlan=5,storm=1,link=up,mac=any".parse().unwrap());
        assert!(change(r#"{"pf": "p", "link": "down", "storm": 9, "trunk": []}"#).apply(&mut vf));
        let policy = PolicyConfig { storm: Some(9), trunk: Some(Vlans::default()), ..vf.policy.clone() };
        assert_eq!((vf.policy, vf.mac), (policy, Some(MacChoice::Any)));
    }

    #[test]
    fn a_change_without_a_pf_is_refused() {
        let refused = |text: &str| serde_json::from_str::<SetVf>(text).unwrap_err().to_string();
        assert!(refused("{}").starts_with("missing field `pf`"));
        assert!(
            refused(r#"{"pf": "p", "x": 1}"#).starts_with("unknown field `x`, expected one of `pf`, `index`, `link`")
        );
    }
}
