//! The table of PFs and VFs, and the rates of their traffic.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use vm_api::body::Link;
use vm_api::config::{Mirror, Vlans};
use vm_api::info::{BackendInfo, BackendKind, PolicyInfo, SriovInfo, VfInfo, VfState, VmCounters, VmInfo};

use super::show::table;

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
    /// State: `reserved`, `enabled` or `running`; for a PF, `enabled` or `disabled`, as its VFs are.
    pub state: &'static str,
    /// Number of enabled and of reserved VFs of a PF.
    #[serde(flatten)]
    pub vfs: Option<VfNumbers>,
    /// True while the function waits for its driver to reset it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub needs_reset: bool,
    /// MAC address.
    pub mac: String,
    /// Backend that its packets go to.
    pub backend: String,
    /// `up` or `down`; `None` for a PF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<&'static str>,
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
    /// Traffic between two readings; `None` if the VM does not run, or the backend has no counters.
    #[serde(flatten)]
    pub rates: Option<Rates>,
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
    let rates = |function: &str| readings.and_then(|readings| readings.rates(function));
    let mut rows = Vec::new();
    for pf in &info.sriov {
        rows.push(Row { rates: rates(&pf.id), ..of_pf(pf) });
        let vf = |vf: &VfInfo| Row { rates: rates(&format!("{}v{}", pf.id, vf.index)), ..of_vf(pf, vf) };
        rows.extend(pf.vfs.iter().map(vf));
    }
    rows
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
        mac: pf.mac.to_string(),
        backend: backend(&pf.backend, &pf.policy),
        link: None,
        vlan: vlan(&pf.policy),
        spoofchk: pf.policy.spoofchk,
        trust: pf.policy.trust,
        max_tx_rate: pf.policy.max_tx_rate,
        min_tx_rate: pf.policy.weight.map(|_| pf.policy.min_tx_rate),
        isolated: pf.policy.weight.map(|_| pf.policy.isolated),
        mirror: pf.policy.mirror,
        weight: pf.policy.weight,
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
        },
        vfs: None,
        needs_reset: vf.needs_reset,
        mac: vf.mac.to_string(),
        backend: backend(&vf.backend, &vf.policy),
        link: Some(if vf.link == Link::Up { "up" } else { "down" }),
        vlan: vlan(&vf.policy),
        spoofchk: vf.policy.spoofchk,
        trust: vf.policy.trust,
        max_tx_rate: vf.policy.max_tx_rate,
        min_tx_rate: vf.policy.weight.map(|_| vf.policy.min_tx_rate),
        isolated: vf.policy.weight.map(|_| vf.policy.isolated),
        mirror: vf.policy.mirror,
        weight: vf.policy.weight,
        rates: None,
    }
}

/// State of a function as text, with a note if the function waits for its driver to reset it.
fn state(row: &Row) -> String {
    let state = match row.vfs {
        Some(VfNumbers { num_vfs, total_vfs }) => format!("{num_vfs} of {total_vfs} enabled"),
        None => row.state.to_string(),
    };
    if row.needs_reset { format!("{state} (needs reset)") } else { state }
}

fn vlan(policy: &PolicyInfo) -> Option<VlanLimit> {
    match (policy.vlan, &policy.trunk) {
        (0, trunk) if trunk.0.is_empty() => None,
        (0, trunk) => Some(VlanLimit::Trunk(trunk.clone())),
        (vlan, _) => Some(VlanLimit::Port(vlan)),
    }
}

/// Guaranteed and highest rate: `100M-500M`, `100M-`, `500M`.
fn rate(row: &Row) -> Option<String> {
    let mbits = |rate: u32| (rate != 0).then(|| format!("{rate}M"));
    match (row.min_tx_rate.and_then(mbits), mbits(row.max_tx_rate)) {
        (Some(least), most) => Some(format!("{least}-{}", most.unwrap_or_default())),
        (None, most) => most,
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
    let lost = backend.lost.then_some("(lost)");
    let isolated = policy.isolated.then_some("(isolated)");
    let error = backend.error.as_ref().map(|error| format!("({error})"));
    [Some(kind), backend.name.as_deref(), lost, isolated, error.as_deref()]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" ")
}

/// The rows for people.
pub(crate) fn text(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "there are no PFs; boot a VM with a NIC that has sriov_vfs=\n".to_string();
    }
    let head = ["PF", "VF", "ADDRESS", "STATE", "MAC", "BACKEND", "LINK", "VLAN", "SPOOF", "TRUST", "RATE", "RX", "TX"];
    let head = head.map(str::to_string).to_vec();
    let on_off = |on: bool| if on { "on" } else { "off" }.to_string();
    let cells = |row: &Row| {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
        let traffic = |bits: f64, frames: f64| format!("{}b/s {}f/s", scaled(bits), scaled(frames));
        vec![
            row.pf.clone(),
            or_dash(row.index.map(|index| index.to_string())),
            row.bdf.clone(),
            state(row),
            row.mac.clone(),
            row.backend.clone(),
            or_dash(row.link.map(str::to_string)),
            or_dash(row.vlan.as_ref().map(VlanLimit::to_string)),
            on_off(row.spoofchk),
            on_off(row.trust),
            or_dash(rate(row)),
            or_dash(row.rates.map(|rates| traffic(rates.rx_bits_per_second, rates.rx_frames_per_second))),
            or_dash(row.rates.map(|rates| traffic(rates.tx_bits_per_second, rates.tx_frames_per_second))),
        ]
    };
    table(&[head].into_iter().chain(rows.iter().map(cells)).collect::<Vec<_>>())
}

/// A number with a prefix of its unit, such as 1.5M.
fn scaled(number: f64) -> String {
    let (scaled, prefix) = match number {
        ..1e3 => return format!("{number:.0} "),
        ..1e6 => (number / 1e3, 'k'),
        ..1e9 => (number / 1e6, 'M'),
        _ => (number / 1e9, 'G'),
    };
    format!("{scaled:.1} {prefix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> VmInfo {
        serde_json::from_value(serde_json::json!({
            "config": {"net": [{"id": "pf0", "tap": "t0", "mac": "52:54:00:00:00:01", "sriov_vfs": 2}]},
            "state": "Running", "memory_actual_size": 1 << 29,
            "sriov": [{"id": "pf0", "bdf": "0000:00:01.0", "mac": "52:54:00:00:00:01",
             "backend": {"kind": "vhost-user", "name": "/run/s", "lost": true},
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
    fn each_pf_and_each_of_its_vfs_has_a_line() {
        let shown = text(&rows(&info(), None));
        let lines: Vec<_> = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "PF VF ADDRESS STATE MAC BACKEND LINK VLAN SPOOF TRUST RATE RX TX",
                "pf0 - 0000:00:01.0 2 of 2 enabled 52:54:00:00:00:01 vhost-user /run/s (lost) - - off off - - -",
                "pf0 0 0000:01:00.0 running (needs reset) 52:54:00:00:01:00 tap t0v0 up 100 on off 500M - -",
                "pf0 1 0000:01:00.1 enabled 52:54:00:00:01:01 fd down [7,10-19] off on - - -",
                "pf0 2 0000:01:00.2 running 52:54:00:00:01:02 switch pf0 (isolated) up - on off 100M- - -",
            ]
        );
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
    fn rates_are_what_was_counted_between_two_readings() {
        let counters = |bytes: u64| serde_json::from_value(serde_json::json!({"pf0v0": {"rx_bytes": bytes}})).unwrap();
        let readings = Readings { before: counters(1000), after: counters(251_000), between: Duration::from_secs(2) };
        let rows = rows(&info(), Some(&readings));
        assert_eq!(rows[1].rates.unwrap().rx_bits_per_second, 1_000_000.0);
        assert_eq!((rows[0].rates, rows[2].rates), (None, None));
        assert_eq!((rows[3].isolated, rows[3].mirror, rows[3].weight), (Some(true), Mirror::Vf(0), Some(10)));
        assert!(text(&rows).contains("1.0 Mb/s 0 f/s"));
    }

    #[test]
    fn a_number_is_scaled_to_its_unit() {
        assert_eq!([0.0, 999.4, 1500.0, 2.5e6, 3e12].map(scaled), ["0 ", "999 ", "1.5 k", "2.5 M", "3000.0 G"]);
    }
}
