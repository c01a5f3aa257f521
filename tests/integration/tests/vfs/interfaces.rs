//! XDP programs that Linux runs in a VF's driver, and interfaces and addresses that it adds to a VF.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use integration::{
    Guest, GuestSpec, HostTap, Kernel, Pf, ProgramDisk, Subnet, Tenant, Vf, spec_with_vfs, vf_mac, vf_taps,
};

/// The limit for commands that take seconds even outside the lab.
const SLOW: Duration = Duration::from_secs(100);
/// More than Linux fits into a virtio NIC's table of addresses.
const MACVLANS: usize = 40;
/// The IPv6 addresses of the tenants, without their last digit, and their form in `/proc/net/if_inet6`.
const PREFIX: &str = "fd00::";
const LISTED: &str = "fd00000000000000000000000000000";
/// States of an address there: in use, or a duplicate.
const IN_USE: &str = "80";
const DUPLICATE: &str = "c8";

/// Attaches an XDP program to the VF in place of the previous one, and waits until its driver runs it.
fn attach(guest: &mut Guest, vf: &Vf, program: &str) {
    guest.ok(&format!("rm -f /tmp/said; /tmp/xdp {} {program} > /tmp/said 2>&1 &", vf.interface()));
    guest.wait_for("[ -s /tmp/said ]");
    assert_eq!(guest.ok("cat /tmp/said"), "attached", "the program `{program}`");
}

fn detach(guest: &mut Guest) {
    guest.ok("killall -9 xdp");
}

/// True if the guest's address in `subnet` answers the host, at most `limit` seconds after the last request.
fn answers(subnet: Subnet, limit: &str) -> bool {
    let address = subnet.guest().to_string();
    Command::new("ping").args(["-c", "3", "-i", "0.3", "-W", limit, &address]).output().unwrap().status.success()
}

/// Panics unless the VF, which has joined `subnet`, passes and drops frames as an XDP program decides, and sends back
/// replies that a program makes from requests that the guest's kernel does not answer.
fn assert_xdp_runs_in_the_driver(guest: &mut Guest, vf: &Vf, tap: &HostTap, subnet: Subnet) {
    attach(guest, vf, "pass");
    guest.ping(vf.interface(), subnet);
    detach(guest);
    attach(guest, vf, "drop");
    let before = tap.counters();
    let lost = guest.run(&format!("ping -c 2 -i 0.2 -W 10 -I {} {}", vf.interface(), subnet.host()));
    assert_ne!(lost.status, 0, "replies arrive behind a program that drops them: {}", lost.text);
    let began = Instant::now();
    while tap.counters().to_guest < before.to_guest + 2 {
        assert!(began.elapsed() < SLOW, "the host's replies are not taken");
        thread::sleep(Duration::from_millis(20));
    }
    detach(guest);
    guest.ok("echo 1 > /proc/sys/net/ipv4/icmp_echo_ignore_all");
    assert!(!answers(subnet, "10"), "the guest's kernel answers");
    attach(guest, vf, "answer");
    assert!(answers(subnet, "20"), "the program's frames do not arrive");
    detach(guest);
    guest.ok("echo 0 > /proc/sys/net/ipv4/icmp_echo_ignore_all");
    guest.wait_for(&format!("ping -c 1 -W 5 -I {} {} > /dev/null", vf.interface(), subnet.host()));
}

/// Panics unless the host answers each of many macvlans on the VF, which has joined `subnet`.
fn assert_macvlans_are_answered(guest: &mut Guest, vf: &Vf, subnet: Subnet) {
    guest.load("macvlan");
    let Subnet(number) = subnet;
    guest.ok_within(
        &format!(
            "for i in $(seq 1 {MACVLANS}); do ip link add link {} name m$i type macvlan && \
             ip addr add 10.77.{number}.$((100 + i))/24 dev m$i && ip link set m$i up || exit 1; done",
            vf.interface()
        ),
        SLOW,
    );
    let ping = format!("ping -c 1 -W 10 -I m$i {} > /dev/null", subnet.host());
    let silent = guest.ok_within(&format!("for i in $(seq 1 {MACVLANS}); do {ping} || {ping} || echo m$i; done"), SLOW);
    assert_eq!(silent, "", "macvlans that the host does not answer");
    guest.ping(vf.interface(), subnet);
}

#[test]
fn a_vf_runs_xdp_in_its_driver_and_another_carries_40_macvlans() {
    let disk = ProgramDisk::of(Path::new(env!("CARGO_BIN_EXE_xdp")));
    let mut guest = Guest::boot(disk.add_to(spec_with_vfs(Kernel::V6_12, 2).with_modules()));
    guest.take_program("xdp");
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let (vfs, taps) = (pf.vfs(&mut guest), vf_taps(2));
    for vf in &vfs {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    assert_xdp_runs_in_the_driver(&mut guest, &vfs[0], &taps[0], Subnet(0));
    assert_macvlans_are_answered(&mut guest, &vfs[1], Subnet(1));
    pf.set_num_vfs(&mut guest, 0);
    assert_eq!(guest.ok("ls /sys/class/net"), "eth0\nlo", "macvlans go with their VF");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Adds the address that ends with `last` to the tenant's VF, and waits until Linux has probed for duplicates.
fn add_address(guest: &mut Guest, tenant: &Tenant, last: usize, outcome: &str) {
    guest.ok(&tenant.command(&format!("ip -6 addr add {PREFIX}{last}/64 dev vf")));
    guest.wait_for(&tenant.command(&state_is(last, outcome)));
}

/// A command that succeeds if the address that ends with `last` is in the state `outcome`.
fn state_is(last: usize, outcome: &str) -> String {
    format!("grep -q \"^{LISTED}{last} .* {outcome} *vf\\$\" /proc/net/if_inet6")
}

/// Creates an interface for a VLAN on the tenant's VF, called `tagged`.
fn add_vlan(guest: &mut Guest, tenant: &Tenant, id: u16) {
    let address = Ipv4Addr::new(10, 99, 0, tenant.index() as u8 + 1);
    for command in [
        format!("ip link add link vf name tagged type vlan id {id}"),
        format!("ip addr add {address}/24 dev tagged"),
        "ip link set tagged up".to_owned(),
    ] {
        guest.ok(&tenant.command(&command));
    }
}

#[test]
fn vfs_on_a_switch_find_duplicates_by_ipv6_and_tag_frames() {
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=2");
    let spec = (0..2).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index))));
    let mut guest = Guest::boot(spec.with_modules().kernel_argument("ipv6.disable=0"));
    let tenants = Tenant::all(&mut guest, &Pf::at("0000:00:01.0"), 2);
    add_address(&mut guest, &tenants[0], 1, IN_USE);
    add_address(&mut guest, &tenants[1], 2, IN_USE);
    for (from, to) in [(0, 2), (1, 1)] {
        guest.ok(&tenants[from].command(&format!("ping6 -c 3 -i 0.3 -W 10 -I vf {PREFIX}{to}")));
    }
    // The owner's reply to a probe is a multicast. Linux sends one probe a second, and by default only one.
    guest.ok(&tenants[1].command("echo 60 > /proc/sys/net/ipv6/conf/vf/dad_transmits"));
    add_address(&mut guest, &tenants[1], 1, DUPLICATE);
    guest.ok(&tenants[0].command(&state_is(1, IN_USE)));

    guest.load("8021q");
    for tenant in &tenants {
        add_vlan(&mut guest, tenant, 42);
    }
    let ping = |count: u8, limit: u8| format!("ping -c {count} -i 0.3 -W {limit} -I tagged 10.99.0.2");
    guest.ok(&tenants[0].command(&ping(3, 10)));
    guest.ok(&tenants[1].command("ip link del tagged"));
    add_vlan(&mut guest, &tenants[1], 43);
    let answered = guest.run(&tenants[0].command(&ping(3, 10)));
    assert_ne!(answered.status, 0, "the VLANs differ: {}", answered.text);
    assert!(tenants[0].reaches(&mut guest, &tenants[1].address()), "without a tag");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
