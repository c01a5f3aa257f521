//! Policies of VFs, seen from Linux guests and the host's taps.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::process::Command;

use integration::{
    Api, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Tenant, Vf, VlanBridge, predicted_vf_address, reachability,
    spec_with_vfs, vf_mac, vf_taps,
};
use rstest::rstest;
use serde_json::{Value, json};

/// An address that the host gave to no function.
const STRANGER: &str = "52:54:00:99:99:99";
/// The VLAN of VF 1.
const VLAN: u16 = 100;

/// A guest with two VFs over taps: VF 0 has a spoof check, VF 1 a port VLAN. Also returns a client for its API.
fn boot(kernel: Kernel) -> (Guest, Pf, Api) {
    let api = Api::new("policy");
    let spec = GuestSpec::new(kernel)
        .net("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=2")
        .net_vf(&format!("pf=pf0,index=0,mac={},spoofchk=on,trust=off", vf_mac(0)))
        .net_vf(&format!("pf=pf0,index=1,mac={},vlan={VLAN}", vf_mac(1)));
    let guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    (guest, Pf::at("0000:00:01.0"), api)
}

fn counter(api: &Api, vf: usize, name: &str) -> u64 {
    let counters = api.get("vm.counters").body;
    counters[format!("pf0v{vf}")][name].as_u64().unwrap_or_else(|| panic!("no {name} of VF {vf}: {counters}"))
}

fn set(api: &Api, index: usize, change: &Value) {
    let mut body = change.clone();
    (body["pf"], body["index"]) = (json!("pf0"), json!(index));
    assert_eq!(api.put_json("vm.set-vf", &body).status, 204, "{change}");
}

fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}

/// Gives the VF's netdev another address. Returns true if the VF accepted it.
fn change_address(guest: &mut Guest, vf: &Vf, mac: &str) -> bool {
    let interface = vf.interface();
    let command = format!("ip link set {interface} down; ip link set {interface} address {mac}");
    let taken = guest.run(&command).status == 0;
    guest.ok(&format!("ip link set {interface} up"));
    taken
}

/// Pings the host, which must not answer.
fn ping_in_vain(guest: &mut Guest, vf: &Vf) {
    let command = format!("ping -c 3 -i 0.3 -W 1 -I {} {}", vf.interface(), Subnet(vf.index as u8).host());
    assert_ne!(guest.run(&command).status, 0);
}

/// VF 0 sends from an address that is no longer its own: its frames are counted, and none reaches the tap.
fn assert_spoofed_frames_are_dropped(guest: &mut Guest, vf: &Vf, tap: &HostTap, api: &Api) {
    assert!(!change_address(guest, vf, STRANGER), "the address was given");
    set(api, 0, &json!({"trust": true}));
    assert!(change_address(guest, vf, STRANGER));
    set(api, 0, &json!({"trust": false}));
    let (spoofed, before) = (counter(api, 0, "tx_spoofed_mac"), tap.counters().from_guest);
    ping_in_vain(guest, vf);
    assert!(counter(api, 0, "tx_spoofed_mac") > spoofed);
    assert_eq!(tap.counters().from_guest, before);
    assert!(change_address(guest, vf, &vf_mac(0)), "the one that was given");
    guest.ping(vf.interface(), Subnet(0));
}

/// Only with the tag of its VLAN does the host reach VF 1, whose guest sees no tags.
fn assert_only_its_vlan_is_reached(guest: &mut Guest, vf: &Vf, tap: &HostTap, api: &Api) {
    let filtered = counter(api, 1, "rx_vlan_filtered");
    guest.join(vf.interface(), Subnet(1));
    tap.join(Subnet(1));
    ping_in_vain(guest, vf);
    let _ = Command::new("ping").args(["-c", "2", "-i", "0.3", "-W", "1", "10.77.1.2"]).output().unwrap();
    assert!(counter(api, 1, "rx_vlan_filtered") > filtered);
    let vlan = format!("{}.{VLAN}", tap.name());
    ip(&["addr", "flush", "dev", tap.name()]);
    ip(&["link", "add", "link", tap.name(), "name", &vlan, "type", "vlan", "id", &VLAN.to_string()]);
    ip(&["addr", "add", "10.77.1.1/24", "dev", &vlan]);
    ip(&["link", "set", &vlan, "up"]);
    guest.ping(vf.interface(), Subnet(1));
    ip(&["link", "del", &vlan]);
}

/// VF 1 has the link speed of its limit. Linux reads it when the link goes up.
fn assert_link_has_the_speed_of_its_limit(guest: &mut Guest, vf: &Vf, api: &Api) {
    let folder = format!("/sys/class/net/{}", vf.interface());
    assert_eq!(guest.ok(&format!("cat {folder}/speed {folder}/duplex")), "10000\nfull");
    set(api, 1, &json!({"max_tx_rate": 250, "link": "down"}));
    guest.wait_for(&format!("[ $(cat {folder}/carrier) = 0 ]"));
    set(api, 1, &json!({"link": "up"}));
    guest.wait_for(&format!("[ $(cat {folder}/speed) = 250 ]"));
}

fn assert_enforced(guest: &mut Guest, pf: &Pf, api: &Api) {
    let (vfs, taps) = (pf.vfs(guest), vf_taps(2));
    vfs[0].ping_through(guest, &taps, 0, Subnet(0));
    assert_spoofed_frames_are_dropped(guest, &vfs[0], &taps[0], api);
    assert_only_its_vlan_is_reached(guest, &vfs[1], &taps[1], api);
}

/// The guest cannot change its policy: it applies after resets, to new VFs and after a reboot.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::Backports)]
fn a_policy_holds_after_resets_disabling_and_a_reboot(#[case] kernel: Kernel) {
    let (mut guest, pf, api) = boot(kernel);
    pf.set_num_vfs(&mut guest, 2);
    assert_enforced(&mut guest, &pf, &api);
    (0..2).for_each(|index| guest.reset_function(&predicted_vf_address(index)));
    assert_enforced(&mut guest, &pf, &api);
    pf.set_num_vfs(&mut guest, 0);
    pf.set_num_vfs(&mut guest, 2);
    assert_enforced(&mut guest, &pf, &api);
    guest.reboot();
    pf.set_num_vfs(&mut guest, 2);
    assert_enforced(&mut guest, &pf, &api);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// A change by the host applies at once, and only to that VF.
#[test]
fn the_host_changes_the_policy_of_a_vf_under_traffic() {
    let api = Api::new("policy-live");
    let mut guest = Guest::boot(spec_with_vfs(Kernel::V6_12, 2).arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    let (vfs, taps) = (pf.vfs(&mut guest), vf_taps(2));
    vfs.iter().for_each(|vf| vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8)));
    set(&api, 0, &json!({"vlan": 7}));
    let before = taps[0].counters().from_guest;
    ping_in_vain(&mut guest, &vfs[0]);
    assert!(taps[0].counters().from_guest > before, "they leave in another VLAN");
    guest.ping(vfs[1].interface(), Subnet(1));
    set(&api, 0, &json!({"vlan": 0, "spoofchk": true}));
    guest.ping(vfs[0].interface(), Subnet(0));
    assert_spoofed_frames_are_dropped(&mut guest, &vfs[0], &taps[0], &api);
    guest.ping(vfs[1].interface(), Subnet(1));
    assert_link_has_the_speed_of_its_limit(&mut guest, &vfs[1], &api);
    assert_eq!(guest.power_off().code, Some(0));
}

/// The script of `contrib/network` and the commands of the guide make a bridge whose ports have the VLANs of their VFs:
/// VFs 0 and 1 are in VLAN 100, by the bridge, VF 2 is in VLAN 200, and VF 3 by `vlan=` on a port that carries both.
#[test]
fn a_bridge_with_vlans_separates_tenants_over_taps() {
    let api = Api::new("policy-bridge");
    let bridge = VlanBridge::make("br0", "bpf0", &["100", "100", "200"]);
    bridge.add_trunk_port("tenant-b", &["100", "200"]);
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,tap=bpf0,mac=52:54:00:00:00:01,sriov_vfs=4");
    let spec = (0..3).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index))));
    let spec = spec.net_vf(&format!("pf=pf0,index=3,tap=tenant-b,mac={},vlan={VLAN}", vf_mac(3)));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    let tenants = Tenant::all(&mut guest, &Pf::at("0000:00:01.0"), 4);
    assert_eq!(reachability(&mut guest, &tenants), [".+-+", "+.-+", "--.-", "++-."]);
    // The guest's VF moves to the other VLAN, which its port carries, too.
    set(&api, 3, &json!({"vlan": 200}));
    assert_eq!(reachability(&mut guest, &tenants), [".+--", "+.--", "--.+", "--+."]);
    // The network, a trunk, has the frames of both VLANs with their tags.
    for (vlan, tenant) in [("100", 0), ("200", 2)] {
        bridge.join_vlan(vlan, "10.88.0.9");
        assert!(tenants[tenant].reaches(&mut guest, "10.88.0.9"), "VLAN {vlan}");
        assert!(!tenants[2 - tenant].reaches(&mut guest, "10.88.0.9"), "VLAN {vlan}");
        bridge.leave_vlan(vlan);
    }
    assert_eq!(guest.power_off().code, Some(0));
}
