//! The switch of an X550 in a guest: its modes, groups, promiscuous VFs, VLANs and large frames.

#![expect(clippy::expect_used, reason = "a test fails by panicking, also in its helpers")]

use std::net::UdpSocket;
use std::time::Duration;

use integration::{BRIDGE, IP, Kernel, Tags, Tenant, X550};

/// A group that no program has joined, its MAC address, and a port of it.
const GROUP: (&str, &str) = ("239.1.2.3:7003", "01:00:5e:01:02:03");
/// A neighbour of the host that does not exist: its port, its address and its MAC address.
const STRANGER: (&str, &str, &str) = ("10.88.0.77:7004", "10.88.0.77", "02:54:00:77:77:77");
/// Frames for it: more than others that a VF receives in the meantime.
const STRAY: u64 = 20;
/// Time in which a frame between VFs would have shown up on the uplink.
const SILENCE: Duration = Duration::from_secs(1);

/// Frames for a group reach the VF that has joined it, and no other.
fn assert_groups_are_joined(nic: &mut X550, tenants: &[Tenant]) {
    nic.guest.ok(&tenants[0].command(&format!("{IP} maddr add {} dev vf", GROUP.1)));
    let host = UdpSocket::bind((X550::UPLINK, 0)).expect("the uplink has an address");
    let received = tenants[0].count(&mut nic.guest, "rx", "multicast");
    for _ in 0..5 {
        host.send_to(b"group", GROUP.0).expect("the host sends to a group");
    }
    // A frame that is answered passes behind them.
    assert!(tenants[0].reaches(&mut nic.guest, &X550::UPLINK.to_string()));
    assert!(tenants[0].count(&mut nic.guest, "rx", "multicast") >= received + 5);
    nic.guest.ok(&tenants[0].command(&format!("{IP} maddr del {} dev vf", GROUP.1)));
}

/// A trusted VF of a promiscuous PF sees frames from the host for addresses that no function has.
fn assert_a_trusted_vf_may_be_promiscuous(nic: &mut X550, tenants: &[Tenant]) {
    let interface = nic.interface();
    X550::host_ip(&format!("neigh add {} lladdr {} dev up0", STRANGER.1, STRANGER.2));
    nic.guest.ok(&format!("{IP} link set {interface} promisc on"));
    // The driver of the VF starts again, with which its trust takes effect.
    nic.restart_of(0, &format!("{IP} link set {interface} vf 0 trust on"));
    tenants[0].await_carrier(&mut nic.guest, true);
    let host = UdpSocket::bind((X550::UPLINK, 0)).expect("the uplink has an address");
    let seen = |nic: &mut X550| {
        let before = tenants[0].count(&mut nic.guest, "rx", "packets");
        for _ in 0..STRAY {
            host.send_to(b"stranger", STRANGER.0).expect("the host sends to a neighbour");
        }
        // A frame that is answered passes behind them.
        assert!(tenants[0].reaches(&mut nic.guest, &X550::UPLINK.to_string()));
        tenants[0].count(&mut nic.guest, "rx", "packets") - before
    };
    let without = seen(nic);
    nic.guest.ok(&tenants[0].command(&format!("{IP} link set dev vf promisc on")));
    let with = seen(nic);
    assert!(without < STRAY && with >= STRAY, "{without} frames, {with} when promiscuous");
    nic.guest.ok(&tenants[0].command(&format!("{IP} link set dev vf promisc off")));
    nic.guest.ok(&format!("{IP} link set {interface} promisc off"));
}

/// Frames between VFs with a tag of their own choice.
fn assert_vfs_have_vlans_of_their_own(nic: &mut X550, tenants: &[Tenant]) {
    nic.guest.load("8021q");
    for (index, tenant) in tenants[..2].iter().enumerate() {
        let add = format!(
            "{IP} link add link vf name vf.5 type vlan id 5; ip addr add 10.88.5.{}/24 dev vf.5; ip link set vf.5 up",
            index + 1
        );
        nic.guest.ok(&tenant.command(&add));
    }
    let reach = |nic: &mut X550, address: &str| {
        nic.guest.run(&tenants[0].command(&format!("ping -c 3 -i 0.3 -W 2 -I vf.5 {address}"))).status == 0
    };
    assert!(reach(nic, "10.88.5.2"));
    nic.guest.ok(&tenants[1].command("ip link del vf.5"));
    assert!(!reach(nic, "10.88.5.2"), "VF 1 has left the VLAN");
    nic.guest.ok(&tenants[0].command("ip link del vf.5"));
}

/// In VEPA mode, what VFs send to each other goes to the host, and nothing comes back by itself.
fn assert_vepa_sends_all_frames_to_the_host(nic: &mut X550, tenants: &[Tenant]) {
    let interface = nic.interface();
    let mac = tenants[0].mac(&mut nic.guest);
    let ping = tenants[0].command(&format!("ping -c 3 -i 0.3 -W 2 -I vf {}", tenants[1].address()));
    let set = |nic: &mut X550, mode: &str| {
        nic.guest.ok(&format!("{BRIDGE} link set dev {interface} hwmode {mode}"));
        let shown = nic.guest.ok(&format!("{BRIDGE} -d link show dev {interface}"));
        assert!(shown.contains(&format!("hwmode {}", mode.to_uppercase())), "{shown}");
        nic.guest.await_carrier(interface, true);
        tenants.iter().for_each(|tenant| tenant.await_carrier(&mut nic.guest, true));
    };
    set(nic, "vepa");
    let tags = Tags::on("up0");
    assert_ne!(nic.guest.run(&ping).status, 0);
    assert_eq!(tags.of(&mac, SILENCE), Some(0), "what VF 0 sends leaves");
    assert!(tenants[0].reaches(&mut nic.guest, &X550::UPLINK.to_string()));
    set(nic, "veb");
    assert_eq!(nic.guest.run(&ping).status, 0);
}

/// Frames of 9,000 bytes pass between VFs, the PF and the host.
fn assert_large_frames_pass(nic: &mut X550, tenants: &[Tenant]) {
    let interface = nic.interface();
    nic.guest.ok(&format!("{IP} link set {interface} mtu 9000"));
    nic.guest.await_carrier(interface, true);
    for tenant in tenants {
        // The PF's driver has reset itself: it refuses what a VF asks for until the VF's driver has done so as well.
        nic.guest.wait_for(&tenant.command("ip link set vf mtu 9000"));
        tenant.await_carrier(&mut nic.guest, true);
    }
    let ping = |address: &str| tenants[0].command(&format!("ping -c 3 -i 0.3 -W 5 -s 8000 -I vf {address}"));
    nic.guest.ok(&ping(&tenants[1].address()));
    nic.guest.ok(&ping(X550::PF));
}

#[test]
fn the_switch_of_an_x550_keeps_to_groups_vlans_and_modes() {
    let mut nic = X550::boot(Kernel::Generic, 3);
    let tenants = nic.tenants(3);
    assert_groups_are_joined(&mut nic, &tenants);
    assert_vfs_have_vlans_of_their_own(&mut nic, &tenants);
    assert_vepa_sends_all_frames_to_the_host(&mut nic, &tenants);
    assert_large_frames_pass(&mut nic, &tenants);
    assert_a_trusted_vf_may_be_promiscuous(&mut nic, &tenants);
    assert_eq!(nic.reachability(&tenants), X550::everyone(3));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
