//! Settings of a guest's administrator for VFs of an X550 (`ip link set PF vf N`), and their effects.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::time::Duration;

use integration::{IP, Kernel, Tags, Tenant, X550};
use rstest::rstest;
use serde_json::{Value, json};

/// Addresses that the administrator gives to VF 0, and one that he gives to no VF.
const GIVEN: &str = "52:54:00:00:07:00";
const STRANGER: &str = "02:54:00:99:99:99";
/// The VLAN and the priority of VF 1.
const VLAN: (u16, u16) = (7, 5);
/// The slowest rate of a VF in Mbit/s that ixgbe accepts, and what VF 2 then sends.
const RATE: u32 = 11;
const BYTES: usize = 4 << 20;
/// Time that a frame may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Checks a value that `ip link show` has for the VF.
fn assert_shown(nic: &mut X550, index: usize, key: &str, expected: &Value) {
    let shown = nic.vf(index);
    assert_eq!(&shown[key], expected, "{key}: {shown}");
}

/// VF 1 is in its VLAN, whose tag the host sees with the priority.
fn assert_port_vlan_is_on_the_uplink(nic: &mut X550, tenants: &[Tenant]) {
    let mac = tenants[1].mac(&mut nic.guest);
    let tags = Tags::on("up0");
    assert!(!tenants[1].reaches(&mut nic.guest, &tenants[3].address()), "VF 3 has no VLAN");
    assert_eq!(tags.of(&mac, LIMIT), Some(VLAN.1 << 13 | VLAN.0));
    X550::host_ip(&format!("link add link up0 name up0.7 type vlan id {}", VLAN.0));
    // In a network of its own: to 10.88.0.0/24, the host would answer without a tag.
    X550::host_ip("addr add 10.88.7.201/24 dev up0.7");
    X550::host_ip("link set up0.7 up");
    nic.guest.ok(&tenants[1].command("ip addr add 10.88.7.2/24 dev vf"));
    assert!(tenants[1].reaches(&mut nic.guest, "10.88.7.201"));
    nic.guest.ok(&tenants[1].command("ip addr del 10.88.7.2/24 dev vf"));
    X550::host_ip("link del up0.7");
}

/// VF 2 sends to VF 3 as slowly as it must.
fn assert_rate_is_enforced(nic: &mut X550, tenants: &[Tenant]) {
    tenants[3].listen(&mut nic.guest, 7002, "/tmp/got2");
    let send = format!("head -c {BYTES} /dev/zero | nc {} 7002", tenants[3].address());
    let uptime = "read now rest < /proc/uptime; echo $now";
    let timed = tenants[2].command(&send);
    let told = nic.guest.ok_within(&format!("{uptime}; {timed}; {uptime}"), Duration::from_secs(200));
    let times: Vec<f64> = told.lines().map(|line| line.parse().unwrap()).collect();
    let (took, least) = (times[1] - times[0], BYTES as f64 * 8.0 / f64::from(RATE * 1_000_000));
    println!("{BYTES} bytes at {RATE} Mbit/s in {took} s");
    // A burst and what is still on its way at the end are not paced.
    assert!(took > least * 0.7, "{took} s instead of {least} s");
    nic.guest.wait_for(&format!("[ $(wc -c < /tmp/got2) = {BYTES} ]"));
}

/// VF 0 sends from an address that is not its own. None of these frames leaves, and they are counted.
fn assert_spoofed_frames_are_dropped(nic: &mut X550, tenants: &[Tenant]) {
    nic.guest.load("macvlan");
    let set_up = format!(
        "{IP} link add link vf name mv address {STRANGER} type macvlan mode bridge; \
         ip addr add 10.88.0.50/24 dev mv; ip link set mv up"
    );
    nic.guest.ok(&tenants[0].command(&set_up));
    let knock = tenants[0].command(&format!("arping -c 3 -w 5 -I mv -s 10.88.0.50 {}", X550::UPLINK));
    let tags = Tags::on("up0");
    nic.guest.run(&knock);
    nic.guest.wait_for("dmesg | grep -q 'Spoofed packet'");
    assert_eq!(tags.of(STRANGER, Duration::from_secs(1)), None, "a spoofed frame has left");
    // Without the check they leave.
    nic.set("vf 0 spoofchk off");
    assert_shown(nic, 0, "spoofchk", &json!(false));
    nic.guest.run(&knock);
    assert_eq!(tags.of(STRANGER, LIMIT), Some(0));
    nic.guest.ok(&tenants[0].command("ip link del mv"));
    nic.set("vf 0 spoofchk on");
    assert_shown(nic, 0, "spoofchk", &json!(true));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::Generic6_1)]
#[ignore = "a longer test: more than three minutes"]
#[case::linux_6_12(Kernel::Generic)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::GenericBackports)]
fn the_guest_sets_the_policy_of_vfs_of_an_x550(#[case] kernel: Kernel) {
    let mut nic = X550::boot(kernel, 4);
    let tenants = nic.tenants(4);
    let old = tenants[0].mac(&mut nic.guest);
    assert_ne!(old, GIVEN);
    // Drivers of VFs start again at most every 10 s, so all changes come first.
    nic.set(&format!("vf 0 mac {GIVEN}"));
    nic.set(&format!("vf 1 vlan {} qos {}", VLAN.0, VLAN.1));
    nic.set(&format!("vf 2 max_tx_rate {RATE}"));
    assert_shown(&mut nic, 0, "address", &json!(GIVEN));
    assert_shown(&mut nic, 1, "vlan_list", &json!([{"vlan": VLAN.0, "qos": VLAN.1}]));
    assert_shown(&mut nic, 2, "rate", &json!({"max_tx": RATE, "min_tx": 0}));
    // The driver of a VF takes its address over when the interface is set up.
    nic.guest.ok(&tenants[0].command(&format!("{IP} link set dev vf down; {IP} link set dev vf up")));
    nic.guest.wait_for(&format!(
        "[ \"$({})\" = {GIVEN} ]",
        tenants[0].command(&format!("{IP} -br link show vf | grep -o {GIVEN}"))
    ));
    tenants.iter().for_each(|tenant| tenant.await_carrier(&mut nic.guest, true));
    assert_port_vlan_is_on_the_uplink(&mut nic, &tenants);
    assert_rate_is_enforced(&mut nic, &tenants);
    assert_spoofed_frames_are_dropped(&mut nic, &tenants);
    // VF 1 is alone in its VLAN.
    assert_eq!(nic.reachability(&tenants), [".+-+++", "+.-+++", "--.---", "++-.++", "++-+.+", "++-++."]);

    // VF 3 has no link until the administrator says so, VF 2 no limit, and VF 1 no VLAN.
    nic.set("vf 3 state disable");
    nic.set("vf 2 max_tx_rate 0");
    nic.set("vf 1 vlan 0");
    nic.set("vf 0 trust on");
    // Linux 6.1 does not show it.
    let shown = if kernel == Kernel::Generic6_1 { "auto" } else { "disable" };
    assert_shown(&mut nic, 3, "link_state", &json!(shown));
    assert_shown(&mut nic, 0, "trust", &json!(true));
    tenants[3].await_carrier(&mut nic.guest, false);
    tenants[..3].iter().for_each(|tenant| tenant.await_carrier(&mut nic.guest, true));
    assert_eq!(nic.reachability(&tenants), [".+++-+", "+.++-+", "++.+-+", "+++.-+", "----.-", "++++-."]);
    // A trusted VF may change its address.
    assert!(tenants[0].change_address(&mut nic.guest, STRANGER));
    nic.set("vf 3 state auto");
    tenants.iter().for_each(|tenant| tenant.await_carrier(&mut nic.guest, true));
    assert_eq!(nic.reachability(&tenants), X550::everyone(4));
    assert_statistics_of_vfs(&mut nic, &tenants);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

/// The PF counts the frames of each VF. Linux 6.1 does not show it.
fn assert_statistics_of_vfs(nic: &mut X550, tenants: &[Tenant]) {
    let before = nic.vf(1);
    if before["stats"].is_null() {
        println!("this kernel shows no statistics of VFs");
        return;
    }
    assert!(tenants[1].reaches(&mut nic.guest, &X550::UPLINK.to_string()));
    let has_grown = |after: &Value| {
        // As iproute2 calls them in JSON.
        let counted = [("rx", "packets", 3), ("rx", "bytes", 294), ("tx", "tx_packets", 3), ("tx", "tx_bytes", 294)];
        counted.iter().all(|(direction, counter, least)| {
            let [before, after] = [&before, after].map(|vf| vf["stats"][direction][counter].as_u64().unwrap_or(0));
            after >= before + least
        })
    };
    // The driver reads its NIC's counters every other second.
    let mut after = nic.vf(1);
    for _ in 0..20 {
        if has_grown(&after) {
            return;
        }
        nic.guest.ok("sleep 1");
        after = nic.vf(1);
    }
    assert!(has_grown(&after), "{before} and {after}");
}
