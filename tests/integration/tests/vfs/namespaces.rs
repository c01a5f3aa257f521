//! A VF for a container: in a network namespace, with its own name and MTU.

use integration::{Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Vf, vf_taps};
use rstest::rstest;

const JUMBO: u32 = 9000;
/// The guest's file with the id of the process that keeps the namespace alive.
const TENANT: &str = "/tmp/tenant";

/// Creates a network namespace that lasts until [`end_namespace`].
fn make_namespace(guest: &mut Guest) {
    guest.ok(&format!("unshare -n sleep 1000 > /dev/null 2>&1 & echo $! > {TENANT}"));
    guest.wait_for(&format!("[ $(readlink /proc/$(cat {TENANT})/ns/net) != $(readlink /proc/self/ns/net) ]"));
}

fn end_namespace(guest: &mut Guest) {
    guest.ok(&format!("kill $(cat {TENANT})"));
}

/// Moves the netdev of `vf` into the namespace, renames it to `tenant0` and gives it an address in `subnet`.
fn give(guest: &mut Guest, vf: &Vf, subnet: Subnet) {
    let interface = vf.interface();
    guest.ok(&format!("ip link set {interface} netns $(cat {TENANT})"));
    inside(guest, &format!("ip link set {interface} name tenant0"));
    inside(guest, &format!("ip addr add {}/24 dev tenant0", subnet.guest()));
    // The MTU is the configured one until the guest sets a smaller one.
    for mtu in [1500, JUMBO] {
        inside(guest, &format!("ip link set tenant0 mtu {mtu}"));
    }
    inside(guest, "ip link set tenant0 up");
    // A neighbour's probe would be counted as a misrouted frame.
    inside(guest, "echo 600 > /proc/sys/net/ipv4/neigh/tenant0/delay_first_probe_time");
}

/// Runs a command inside the namespace.
fn inside(guest: &mut Guest, command: &str) -> String {
    guest.ok(&format!("nsenter -t $(cat {TENANT}) -n sh -c '{command}'"))
}

/// Pings the host with frames of the full MTU, and checks that no packet was fragmented.
fn ping_in_large_frames(guest: &mut Guest, tap: &HostTap, subnet: Subnet) {
    // After this ping, both sides have their neighbour's address.
    inside(guest, &format!("ping -c 1 -W 5 -I tenant0 {}", subnet.host()));
    let before = tap.counters();
    // The headers before the payload: 20 bytes of IP and 8 of ICMP.
    inside(guest, &format!("ping -c 2 -i 0.2 -W 5 -s {} -I tenant0 {}", JUMBO - 28, subnet.host()));
    let after = tap.counters();
    let passed = (after.from_guest - before.from_guest, after.to_guest - before.to_guest);
    assert_eq!(passed, (2, 2), "two requests and two replies passed {}", tap.name());
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_vf_carries_traffic_in_a_namespace_with_own_name_and_mtu(#[case] kernel: Kernel) {
    let spec = GuestSpec::new(kernel).net(&format!("id=pf0,tap=pf0,mac=52:54:00:00:00:01,mtu={JUMBO},sriov_vfs=2"));
    let mut guest = Guest::boot(spec);
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let (vfs, taps) = (pf.vfs(&mut guest), vf_taps(2));
    taps[0].join(Subnet(0));
    make_namespace(&mut guest);
    give(&mut guest, &vfs[0], Subnet(0));
    ping_in_large_frames(&mut guest, &taps[0], Subnet(0));
    vfs[1].ping_through(&mut guest, &taps, 1, Subnet(1));

    // When a namespace ends, Linux returns its netdevs to the initial one.
    end_namespace(&mut guest);
    guest.wait_for("[ -e /sys/class/net/tenant0 ]");
    let back = pf.vfs(&mut guest).remove(0);
    assert_eq!((back.interface(), &back.mac), ("tenant0", &vfs[0].mac));
    back.ping_through(&mut guest, &taps, 0, Subnet(0));

    // VFs can be disabled whichever namespace their netdevs are in.
    make_namespace(&mut guest);
    give(&mut guest, &vfs[1], Subnet(1));
    pf.set_num_vfs(&mut guest, 0);
    assert_eq!(inside(&mut guest, "ip -o link | grep -c :"), "1", "only lo is left");
    pf.set_num_vfs(&mut guest, 2);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    end_namespace(&mut guest);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
