//! Tables of VFs for people.

use vm_api::channel::VfState;
use vm_api::config::net::policy::{LinkPolicy, VlanProto};

use crate::view::{PfView, VfView, short};

const HEAD: [&str; 10] = ["VF", "ADDRESS", "NETDEV", "MAC", "VLAN", "RATE", "LINK", "SPOOFCHK", "DRIVER", "SET"];

/// The PFs, each with a table of its VFs.
pub(crate) fn of_pfs(pfs: &[PfView]) -> String {
    if pfs.is_empty() {
        return "there are no PFs whose VFs this guest may govern\n".to_string();
    }
    pfs.iter().map(of_pf).collect::<Vec<_>>().join("\n")
}

fn of_pf(pf: &PfView) -> String {
    let name = pf.netdev.as_ref().map_or_else(|| pf.pf.clone(), |netdev| format!("{netdev} ({})", pf.pf));
    let allowed = if pf.allowed.is_empty() { "nothing".to_string() } else { pf.allowed.join(", ") };
    let head = format!("{name}: the host allows {allowed}\n");
    if pf.vfs.is_empty() {
        let file = format!("/sys/bus/pci/devices/{}/sriov_numvfs", pf.pf);
        return format!("{head}no VF is enabled; enable some by writing their number to {file}\n");
    }
    head + &of_vfs(&pf.vfs)
}

/// A table with a line for each VF.
pub(crate) fn of_vfs(vfs: &[VfView]) -> String {
    let rows: Vec<_> = std::iter::once(HEAD.map(str::to_string)).chain(vfs.iter().map(cells)).collect();
    let mut widths = [0; HEAD.len()];
    for row in &rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    let line = |row: &[String; HEAD.len()]| {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn cells(vf: &VfView) -> [String; HEAD.len()] {
    let state = &vf.state;
    [
        vf.name(),
        short(&state.vf).to_owned(),
        or_dash(vf.netdev.clone()),
        state.mac.to_string(),
        vlan(state),
        or_dash((state.max_tx_rate != 0).then(|| format!("{}M", state.max_tx_rate))),
        format!("{}/{}", link(state.link), if state.link_up { "up" } else { "down" }),
        on_off(state.spoofchk).to_owned(),
        or_dash(vf.driver.clone()),
        or_dash((!state.set.is_empty()).then(|| state.set.join(","))),
    ]
}

/// All of a VF, a line for each value.
pub(crate) fn of_vf(vf: &VfView) -> String {
    let state = &vf.state;
    let set_by = |key: &str| if state.set.iter().any(|set| set == key) { ", set by the guest" } else { "" };
    let rate = if state.max_tx_rate == 0 { "none".to_string() } else { format!("{} Mbit/s", state.max_tx_rate) };
    let fields = [
        ("VF", format!("{} ({})", vf.name(), state.vf)),
        ("netdev", or_dash(vf.netdev.clone())),
        ("driver", or_dash(vf.driver.clone())),
        ("mac", format!("{}{}", state.mac, set_by("mac"))),
        ("vlan", format!("{}{}", vlan(state), set_by("vlan"))),
        ("max_tx_rate", format!("{rate}{}", set_by("max_tx_rate"))),
        ("link", format!("{}{}", link(state.link), set_by("link"))),
        ("link state", if state.link_up { "up" } else { "down" }.to_string()),
        ("spoofchk", format!("{}{}", on_off(state.spoofchk), set_by("spoofchk"))),
    ];
    let counters = state.counters.iter().map(|(name, count)| (name.as_str(), count.to_string()));
    let all: Vec<_> = fields.into_iter().chain(counters).collect();
    let width = all.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    all.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

/// VLAN with its priority and protocol where these are not the usual ones: `120/3 802.1ad`.
fn vlan(state: &VfState) -> String {
    let qos = if state.vlan_qos == 0 { String::new() } else { format!("/{}", state.vlan_qos) };
    match (state.vlan, state.vlan_proto) {
        (0, _) => "-".to_string(),
        (vlan, VlanProto::Customer) => format!("{vlan}{qos}"),
        (vlan, VlanProto::Service) => format!("{vlan}{qos} 802.1ad"),
    }
}

const fn link(link: LinkPolicy) -> &'static str {
    match link {
        LinkPolicy::Auto => "auto",
        LinkPolicy::Up => "up",
        LinkPolicy::Down => "down",
    }
}

const fn on_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vm_api::config::mac::MacAddress;

    use super::*;

    fn view(index: u16) -> VfView {
        let state = VfState {
            vf: format!("0000:00:03.{}", index + 1),
            index,
            mac: MacAddress([0x52, 0x54, 0, 0, 1, index as u8]),
            vlan: 0,
            vlan_qos: 0,
            vlan_proto: VlanProto::Customer,
            max_tx_rate: 0,
            link: LinkPolicy::Auto,
            spoofchk: true,
            link_up: true,
            set: Vec::new(),
            counters: BTreeMap::new(),
        };
        let pf = Some("0000:00:03.0".to_string());
        VfView {
            state,
            pf,
            pf_netdev: Some("eth0".into()),
            netdev: Some(format!("eth{}", index + 1)),
            driver: Some("virtio-pci".into()),
        }
    }

    fn set() -> VfView {
        let mut vf = view(1);
        vf.state = VfState {
            vlan: 120,
            vlan_qos: 3,
            vlan_proto: VlanProto::Service,
            max_tx_rate: 200,
            link: LinkPolicy::Down,
            link_up: false,
            spoofchk: false,
            set: vec!["link".into(), "vlan".into()],
            counters: BTreeMap::from([("rx_frames".into(), 7), ("tx_spoofed_mac".into(), 0)]),
            ..vf.state
        };
        (vf.netdev, vf.driver) = (None, Some("vfio-pci".into()));
        vf
    }

    fn pf(vfs: Vec<VfView>) -> PfView {
        let allowed = vec!["vlan:100-199".to_string(), "mac".to_string()];
        PfView { pf: "0000:00:03.0".into(), netdev: Some("eth0".into()), allowed, vfs }
    }

    #[test]
    fn a_pf_has_its_limits_and_a_line_for_each_vf() {
        let expected = "\
eth0 (0000:00:03.0): the host allows vlan:100-199, mac
VF      ADDRESS  NETDEV  MAC                VLAN           RATE  LINK       SPOOFCHK  DRIVER      SET
eth0/0  00:03.1  eth1    52:54:00:00:01:00  -              -     auto/up    on        virtio-pci  -
eth0/1  00:03.2  -       52:54:00:00:01:01  120/3 802.1ad  200M  down/down  off       vfio-pci    link,vlan
";
        assert_eq!(of_pfs(&[pf(vec![view(0), set()])]), expected);
    }

    #[test]
    fn a_pf_without_vfs_says_where_to_enable_them() {
        let mut bare = pf(Vec::new());
        (bare.netdev, bare.allowed) = (None, Vec::new());
        let expected = "\
eth0 (0000:00:03.0): the host allows vlan:100-199, mac
no VF is enabled; enable some by writing their number to /sys/bus/pci/devices/0000:00:03.0/sriov_numvfs

0000:00:03.0: the host allows nothing
no VF is enabled; enable some by writing their number to /sys/bus/pci/devices/0000:00:03.0/sriov_numvfs
";
        assert_eq!(of_pfs(&[pf(Vec::new()), bare]), expected);
        assert_eq!(of_pfs(&[]), "there are no PFs whose VFs this guest may govern\n");
    }

    #[test]
    fn a_vf_alone_has_a_line_for_each_value() {
        let expected = "\
VF              eth0/1 (0000:00:03.2)
netdev          -
driver          vfio-pci
mac             52:54:00:00:01:01
vlan            120/3 802.1ad, set by the guest
max_tx_rate     200 Mbit/s
link            down, set by the guest
link state      down
spoofchk        off
rx_frames       7
tx_spoofed_mac  0
";
        assert_eq!(of_vf(&set()), expected);
    }

    #[test]
    fn a_vf_has_a_name_by_which_it_is_found() {
        let mut vf = view(3);
        assert_eq!(vf.name(), "eth0/3");
        vf.pf_netdev = None;
        assert_eq!(vf.name(), "00:03.0/3");
        vf.pf = None;
        assert_eq!(vf.name(), "00:03.4");
    }
}
