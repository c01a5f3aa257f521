//! The PFs and VFs, the rates of their traffic, and the frames that they lost.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use vm_api::body::Link;
use vm_api::config::{LinkPolicy, Mirror, Vlans};
use vm_api::counters::drop_counters;
use vm_api::info::{
    BackendInfo, BackendKind, PolicyInfo, SriovInfo, StoppedBy, SwitchInfo, VfInfo, VfState, VmCounters, VmInfo,
};

/// A PF or a VF.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Row {
    /// The PF's id.
    pub pf: String,
    /// Index of the VF, from 0; `None` for the PF itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u16>,
    /// PCI address, such as `0000:01:00.0`.
    pub bdf: String,
    /// State: `reserved`, `enabled`, `running` or `removed`; for a PF, `enabled` or `disabled`, as its VFs are.
    pub state: &'static str,
    /// Number of enabled and of reserved VFs of a PF.
    #[serde(flatten)]
    pub vfs: Option<VfNumbers>,
    /// True while the function waits for its driver to reset it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub needs_reset: bool,
    /// Register by which the guest keeps the queues of its ready driver stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    /// MAC address.
    pub mac: String,
    /// Backend that its packets go to.
    pub backend: String,
    /// `up` or `down`.
    pub link: &'static str,
    /// Cause of a link that is down although there is a backend, and the cure.
    #[serde(skip)]
    pub link_cause: Option<String>,
    /// The VLAN of all its packets, or the list of those that it may use; `None` if there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<VlanLimit>,
    /// True if packets with source addresses other than its own are dropped.
    pub spoofchk: bool,
    /// True if the guest may change addresses and receive everything.
    pub trust: bool,
    /// The transmit limit, in Mbit/s; 0 for none.
    pub max_tx_rate: u32,
    /// Guaranteed bandwidth of its switch's uplink, in Mbit/s; `None` without a switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// True if it reaches only the uplink and the PF of its switch; `None` without a switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// The function that gets a copy of its sent packets on its switch, if there is one.
    #[serde(skip_serializing_if = "Mirror::is_off")]
    pub mirror: Mirror,
    /// Share of the time of its switch's workers; `None` without a switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u8>,
    /// Dropped frames by counter, those that are not 0; `None` if the VM does not run, or the backend has no counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drops: Option<BTreeMap<&'static str, u64>>,
    /// Traffic between two readings; `None` if the VM does not run, or the backend has no counters.
    #[serde(flatten)]
    pub rates: Option<Rates>,
}

impl Row {
    /// Name of the function in `vm.counters`.
    pub(crate) fn function(&self) -> String {
        self.index.map_or_else(|| self.pf.clone(), |index| format!("{}v{index}", self.pf))
    }
}

/// The VFs of a PF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct VfNumbers {
    /// Number of enabled VFs.
    pub num_vfs: u16,
    /// Number of reserved VFs.
    pub total_vfs: u16,
}

/// The VLANs that a function is limited to.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum VlanLimit {
    /// All packets are in this one.
    Port(u16),
    /// The VLANs that the guest may use.
    Trunk(Vlans),
}

impl fmt::Display for VlanLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(vlan) => write!(f, "{vlan}"),
            Self::Trunk(vlans) => write!(f, "{vlans}"),
        }
    }
}

/// Traffic of a function per second, in the guest's directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Rates {
    /// Bits received.
    pub rx_bits_per_second: f64,
    /// Frames received.
    pub rx_frames_per_second: f64,
    /// Bits sent.
    pub tx_bits_per_second: f64,
    /// Frames sent.
    pub tx_frames_per_second: f64,
}

/// Two readings of the counters, and the time in between.
#[derive(Debug)]
pub(crate) struct Readings {
    /// The earlier reading.
    pub before: VmCounters,
    /// The later reading.
    pub after: VmCounters,
    /// Between them.
    pub between: Duration,
}

impl Readings {
    /// Dropped frames of a function since it was plugged in.
    fn drops(&self, function: &str) -> Option<BTreeMap<&'static str, u64>> {
        let counters = self.after.get(function).filter(|counters| counters.contains_key("rx_bytes"))?;
        let drops = drop_counters().filter_map(|name| Some((name, *counters.get(name)?)));
        Some(drops.filter(|(_, count)| *count != 0).collect())
    }

    fn rates(&self, function: &str) -> Option<Rates> {
        let empty = BTreeMap::new();
        let after = self.after.get(function)?;
        // Some backends do not count.
        after.get("rx_bytes")?;
        // A new function has counted everything in between.
        let before = self.before.get(function).unwrap_or(&empty);
        let rate = |name: &str| {
            let value = |counters: &BTreeMap<String, u64>| counters.get(name).copied().unwrap_or_default();
            value(after).saturating_sub(value(before)) as f64 / self.between.as_secs_f64().max(f64::MIN_POSITIVE)
        };
        Some(Rates {
            rx_bits_per_second: 8.0 * rate("rx_bytes"),
            rx_frames_per_second: rate("rx_frames"),
            tx_bits_per_second: 8.0 * rate("tx_bytes"),
            tx_frames_per_second: rate("tx_frames"),
        })
    }
}

/// All PFs, each followed by its VFs.
pub(crate) fn rows(info: &VmInfo, readings: Option<&Readings>) -> Vec<Row> {
    let counted = |row: Row| {
        let name = row.function();
        let rates = readings.and_then(|readings| readings.rates(&name));
        Row { rates, drops: readings.and_then(|readings| readings.drops(&name)), ..row }
    };
    let of = |pf| std::iter::once(of_pf(pf)).chain(pf.vfs.iter().map(move |vf| of_vf(pf, vf)));
    info.sriov.iter().flat_map(of).map(counted).collect()
}

fn of_pf(pf: &SriovInfo) -> Row {
    let enabled = if pf.enabled { pf.num_vfs } else { 0 };
    Row {
        pf: pf.id.clone(),
        index: None,
        bdf: pf.bdf.clone(),
        state: if pf.enabled { "enabled" } else { "disabled" },
        vfs: Some(VfNumbers { num_vfs: enabled, total_vfs: pf.total_vfs }),
        needs_reset: pf.needs_reset,
        stopped_by: pf.stopped_by,
        mac: pf.mac.to_string(),
        backend: backend(&pf.backend, &pf.policy),
        link: word(pf.link),
        link_cause: link_cause(pf.link, &pf.backend, &pf.policy, pf.switch.as_ref()),
        vlan: vlan(&pf.policy),
        spoofchk: pf.policy.spoofchk,
        trust: pf.policy.trust,
        max_tx_rate: pf.policy.max_tx_rate,
        min_tx_rate: pf.policy.weight.map(|_| pf.policy.min_tx_rate),
        isolated: pf.policy.weight.map(|_| pf.policy.isolated),
        mirror: pf.policy.mirror,
        weight: pf.policy.weight,
        drops: None,
        rates: None,
    }
}

fn of_vf(pf: &SriovInfo, vf: &VfInfo) -> Row {
    Row {
        pf: pf.id.clone(),
        index: Some(vf.index),
        bdf: vf.bdf.clone(),
        state: match vf.state {
            VfState::Reserved => "reserved",
            VfState::Enabled => "enabled",
            VfState::Running => "running",
            VfState::Removed => "removed",
        },
        vfs: None,
        needs_reset: vf.needs_reset,
        stopped_by: vf.stopped_by,
        mac: vf.mac.to_string(),
        backend: backend(&vf.backend, &vf.policy),
        link: word(vf.link),
        link_cause: link_cause(vf.link, &vf.backend, &vf.policy, pf.switch.as_ref()),
        vlan: vlan(&vf.policy),
        spoofchk: vf.policy.spoofchk,
        trust: vf.policy.trust,
        max_tx_rate: vf.policy.max_tx_rate,
        min_tx_rate: vf.policy.weight.map(|_| vf.policy.min_tx_rate),
        isolated: vf.policy.weight.map(|_| vf.policy.isolated),
        mirror: vf.policy.mirror,
        weight: vf.policy.weight,
        drops: None,
        rates: None,
    }
}

/// State of a link in a word.
const fn word(link: Link) -> &'static str {
    match link {
        Link::Up => "up",
        Link::Down => "down",
    }
}

/// Cause of a link that is down, if that is not the lack of a backend. `switch` is that of its PF.
fn link_cause(link: Link, backend: &BackendInfo, policy: &PolicyInfo, switch: Option<&SwitchInfo>) -> Option<String> {
    if link == Link::Up || backend.lost || backend.kind == BackendKind::Missing {
        return None;
    }
    Some(match backend.kind {
        _ if policy.link == LinkPolicy::Down => "set down by the host; set-vf --link auto".to_string(),
        BackendKind::Switch => uplink_cause(switch),
        BackendKind::Tap | BackendKind::Fd if backend.down => {
            let tap = backend.name.as_deref().unwrap_or("<tap>");
            format!("its tap is down; set that up: ip link set {tap} up")
        }
        _ => "its backend has set it down".to_string(),
    })
}

/// Cause of a link that is down because the uplink of its switch is.
fn uplink_cause(switch: Option<&SwitchInfo>) -> String {
    let Some((switch, name)) = switch.and_then(|switch| Some((switch, switch.uplink.as_deref()?))) else {
        return "the uplink of its switch is down; set that up".to_string();
    };
    match (switch.uplink_lost, switch.uplink_passed) {
        (true, true) => format!("the uplink {name} of its switch was deleted; it was passed: restart with another"),
        (true, false) => {
            format!("the uplink {name} of its switch was deleted; make it again: ip tuntap add {name} mode tap")
        }
        (false, _) => format!("the uplink {name} of its switch is down; set that up: ip link set {name} up"),
    }
}

fn vlan(policy: &PolicyInfo) -> Option<VlanLimit> {
    match (policy.vlan, &policy.trunk) {
        (0, trunk) if trunk.0.is_empty() => None,
        (0, trunk) => Some(VlanLimit::Trunk(trunk.clone())),
        (vlan, _) => Some(VlanLimit::Port(vlan)),
    }
}

fn backend(backend: &BackendInfo, policy: &PolicyInfo) -> String {
    let kind = match backend.kind {
        BackendKind::Tap => "tap",
        BackendKind::Fd => "fd",
        BackendKind::VhostNet => "vhost-net",
        BackendKind::VhostUser => "vhost-user",
        BackendKind::Vdpa => "vdpa",
        BackendKind::Switch => "switch",
        BackendKind::Missing => "missing",
    };
    // A tap that was made is gone with its deletion.
    let state = if backend.lost { Some("(lost)") } else { backend.made.then_some("(made)") };
    let isolated = policy.isolated.then_some("(isolated)");
    let error = backend.error.as_ref().map(|error| format!("({error})"));
    [Some(kind), backend.name.as_deref(), state, isolated, error.as_deref()]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn info() -> VmInfo {
        serde_json::from_value(serde_json::json!({
            "config": {"net": [{"id": "pf0", "tap": "t0", "mac": "52:54:00:00:00:01", "sriov_vfs": 2}]},
            "state": "Running", "memory_actual_size": 1 << 29,
            "sriov": [{"id": "pf0", "bdf": "0000:00:01.0", "mac": "52:54:00:00:00:01",
             "backend": {"kind": "vhost-user", "name": "/run/s", "lost": true}, "link": "down",
             "total_vfs": 2, "num_vfs": 2, "enabled": true, "vfs": [
                {"index": 0, "bdf": "0000:01:00.0", "mac": "52:54:00:00:01:00", "link": "up", "state": "Running",
                 "needs_reset": true, "backend": {"kind": "tap", "name": "t0v0"},
                 "policy": {"vlan": 100, "spoofchk": true, "max_tx_rate": 500}},
                {"index": 1, "bdf": "0000:01:00.1", "mac": "52:54:00:00:01:01", "link": "down", "state": "Enabled",
                 "backend": {"kind": "fd"}, "policy": {"trunk": [7, "10-19"], "trust": true}},
                {"index": 2, "bdf": "0000:01:00.2", "mac": "52:54:00:00:01:02", "link": "up", "state": "Running",
                 "backend": {"kind": "switch", "name": "pf0"},
                 "policy": {"isolated": true, "mirror": 0, "weight": 10, "spoofchk": true, "min_tx_rate": 100}},
            ]}],
        }))
        .unwrap()
    }

    #[test]
    fn numbers_are_numbers_in_json() {
        let rows = serde_json::to_value(rows(&info(), None)).unwrap();
        assert_eq!(
            (&rows[0]["state"], &rows[0]["num_vfs"], &rows[0]["total_vfs"]),
            (&"enabled".into(), &2.into(), &2.into())
        );
        assert_eq!((&rows[1]["state"], &rows[1]["needs_reset"]), (&"running".into(), &true.into()));
        assert_eq!((&rows[1]["vlan"], &rows[2]["vlan"]), (&100.into(), &serde_json::json!([7, "10-19"])));
        assert_eq!((rows[2].get("num_vfs"), rows[0].get("vlan")), (None, None));
    }

    #[test]
    fn a_tap_that_was_made_is_marked() {
        let text = |lost: bool| {
            let json = serde_json::json!({"kind": "tap", "name": "t", "made": true, "lost": lost});
            backend(&serde_json::from_value(json).unwrap(), &PolicyInfo::default())
        };
        assert_eq!([text(false), text(true)], ["tap t (made)", "tap t (lost)"]);
    }

    #[test]
    fn a_link_that_is_down_has_a_cause() {
        let cause = |backend: serde_json::Value, policy: serde_json::Value| {
            let (backend, policy) = (serde_json::from_value(backend), serde_json::from_value(policy));
            let switch = serde_json::json!({"mode": "veb", "workers": 1, "uplink": "up0"});
            let switch: SwitchInfo = serde_json::from_value(switch).unwrap();
            link_cause(Link::Down, &backend.unwrap(), &policy.unwrap(), Some(&switch))
        };
        let json = |link: &str| serde_json::json!({"link": link});
        let tap = serde_json::json!({"kind": "tap", "name": "t"});
        assert_eq!(cause(tap.clone(), json("down")).unwrap(), "set down by the host; set-vf --link auto");
        assert_eq!(cause(tap, json("auto")).unwrap(), "its backend has set it down");
        let tap = serde_json::json!({"kind": "tap", "name": "t", "down": true});
        assert_eq!(cause(tap, json("auto")).unwrap(), "its tap is down; set that up: ip link set t up");
        let switch = serde_json::json!({"kind": "switch", "name": "pf0"});
        let expected = "the uplink up0 of its switch is down; set that up: ip link set up0 up";
        assert_eq!(cause(switch, json("auto")).unwrap(), expected);
        let lost = |passed| {
            let json = serde_json::json!({"mode": "veb", "workers": 1, "uplink": "up0", "uplink_lost": true,
                "uplink_passed": passed});
            uplink_cause(Some(&serde_json::from_value(json).unwrap()))
        };
        assert!(lost(false).ends_with("was deleted; make it again: ip tuntap add up0 mode tap"), "{}", lost(false));
        assert!(lost(true).ends_with("it was passed: restart with another"), "{}", lost(true));
        assert_eq!(cause(serde_json::json!({"kind": "tap", "name": "t", "lost": true}), json("auto")), None);
        assert_eq!(cause(serde_json::json!({"kind": "missing"}), json("auto")), None);
    }

    #[test]
    fn rates_are_what_was_counted_between_two_readings() {
        let counters = |bytes: u64| serde_json::from_value(serde_json::json!({"pf0v0": {"rx_bytes": bytes}})).unwrap();
        let readings = Readings { before: counters(1000), after: counters(251_000), between: Duration::from_secs(2) };
        let rows = rows(&info(), Some(&readings));
        assert_eq!(rows[1].rates.unwrap().rx_bits_per_second, 1_000_000.0);
        assert_eq!((rows[0].rates, rows[2].rates), (None, None));
        assert_eq!((rows[3].isolated, rows[3].mirror, rows[3].weight), (Some(true), Mirror::Vf(0), Some(10)));
        assert_eq!((&rows[0].drops, rows[1].drops.as_ref().map(BTreeMap::len)), (&None, Some(0)));
    }
}
