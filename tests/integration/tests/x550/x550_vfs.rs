//! The VFs of an X550 as they come and go, with their driver ixgbevf.

use std::time::Duration;

use integration::{ETHTOOL, HostTap, IP, Kernel, KvmTrace, Pf, Subnet, Usage, X550, interface_exists, repetitions};
use rstest::rstest;

/// The most VFs of an X550.
const ALL: usize = 63;
/// Time in which 63 VFs are bound.
const LIMIT: Duration = Duration::from_secs(240);

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::Generic6_1)]
#[case::linux_6_12(Kernel::Generic)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::GenericBackports)]
fn vfs_reach_each_other_the_pf_and_the_host(#[case] kernel: Kernel) {
    let mut nic = X550::boot(kernel, 4);
    let tenants = nic.tenants(4);
    assert_eq!(nic.reachability(&tenants), X550::everyone(4));
    let driver = nic.guest.ok(&tenants[0].command(&format!("{ETHTOOL} -i vf")));
    assert!(driver.contains("driver: ixgbevf\n") && driver.contains("bus-info: 0000:01:00.0"), "{driver}");
    let link = nic.guest.ok(&tenants[0].command(&format!("{ETHTOOL} vf")));
    assert!(link.contains("Speed: 10000Mb/s"), "{link}");
    nic.guest.assert_x550_has_no_complaint();

    // FLR of a VF under its driver, which starts again when its interface does.
    nic.guest.ok("echo 1 > /sys/bus/pci/devices/0000:01:00.1/reset");
    nic.guest.ok(&tenants[1].command("ip link set vf down; ip link set vf up"));
    tenants[1].await_carrier(&mut nic.guest, true);
    // The PF goes down, and takes all VFs with it until it is up again.
    let interface = nic.interface();
    nic.guest.ok(&format!("ip link set {interface} down"));
    tenants[0].await_carrier(&mut nic.guest, false);
    nic.guest.join_x550();
    tenants.iter().for_each(|tenant| tenant.await_carrier(&mut nic.guest, true));
    assert_eq!(nic.reachability(&tenants), X550::everyone(4));
    // The end of a namespace returns its VF to the first one; the driver is then loaded again.
    tenants.into_iter().for_each(|tenant| tenant.end(&mut nic.guest));
    nic.guest.wait_for(&format!("[ $(ls -d {} | wc -l) = 4 ]", nic.pf.file("virtfn*/net/*")));
    nic.guest.unbind("0000:01:00.2");
    nic.guest.bind_to("ixgbevf", "0000:01:00.2");
    nic.guest.ok("rmmod ixgbevf");
    nic.guest.load("ixgbevf");
    nic.pf.set_num_vfs(&mut nic.guest, 0);
    assert_eq!(nic.pf.vfs(&mut nic.guest), []);
    let again = nic.tenants(2);
    assert_eq!(nic.reachability(&again), X550::everyone(2));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

/// Resources of the VMM while all VFs are on, and while none is.
fn cycle(nic: &mut X550, trace: &mut KvmTrace) -> [String; 2] {
    [ALL, 0].map(|count| {
        nic.pf.set_num_vfs(&mut nic.guest, count);
        assert_eq!(nic.pf.vfs(&mut nic.guest).len(), count);
        format!("{:?} {:?}", Usage::of(nic.guest.vmm()), trace.objects())
    })
}

/// `CH_X550_CYCLES=100` for a longer run.
#[test]
fn all_63_vfs_are_bound_used_and_removed_without_a_trace() {
    let mut trace = KvmTrace::start();
    let mut nic = X550::boot(Kernel::Generic, ALL);
    let interface = nic.interface();
    let first = cycle(&mut nic, &mut trace);
    for number in 2..=repetitions("CH_X550_CYCLES", 2) {
        assert_eq!(cycle(&mut nic, &mut trace), first, "cycle {number}");
    }
    let vfs = nic.enable(ALL);
    // Some VFs, of each half of the interrupt and mailbox registers.
    for index in [0, 15, 16, 31, 32, 62] {
        let vf = vfs[index].interface();
        let address = format!("10.88.0.{}", index + 1);
        nic.guest.ok(&format!("ip addr add {address}/32 dev {vf}; ip link set {vf} up"));
        nic.guest.await_carrier(vf, true);
        nic.guest.ok_within(&format!("{ETHTOOL} -S {vf} > /dev/null; {IP} -s link show {vf} > /dev/null"), LIMIT);
        nic.guest.ok(&format!("arping -c 2 -w 20 -I {vf} -s {address} {}", X550::UPLINK));
    }
    nic.guest.ok(&format!("ip link set {interface} down"));
    nic.pf.set_num_vfs(&mut nic.guest, 0);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

#[test]
fn an_x550_is_plugged_in_and_removed_with_its_vfs() {
    let mut nic = X550::boot(Kernel::Generic, 2);
    let tenants = nic.tenants(2);
    let mut usages = Vec::new();
    for _ in 0..2 {
        let added = serde_json::json!({
            "id": "hp0", "model": "x550", "tap": "hp0", "mac": "52:54:00:00:00:02", "sriov_vfs": 2, "pci_device_id": 9
        });
        let answer = nic.api.put_json("vm.add-net", &added);
        assert_eq!(answer.status, 200, "{}", answer.body);
        let hot = Pf::at("0000:00:09.0");
        nic.guest.wait_for(&format!("ls {}", hot.file("net/*/address")));
        let interface = nic.guest.ok(&format!("basename {}", hot.file("net/*")));
        let tap = HostTap::existing("hp0");
        tap.join(Subnet(90));
        nic.guest.join(&interface, Subnet(90));
        nic.guest.await_carrier(&interface, true);
        nic.guest.ping(&interface, Subnet(90));
        hot.set_num_vfs(&mut nic.guest, 2);
        let vf = hot.vfs(&mut nic.guest).remove(1);
        assert_eq!(vf.address, "0000:02:00.1");
        nic.guest.ok(&format!("ip addr flush dev {interface}"));
        nic.guest.join(vf.interface(), Subnet(90));
        nic.guest.await_carrier(vf.interface(), true);
        nic.guest.ping(vf.interface(), Subnet(90));
        nic.api.remove_device("hp0");
        assert!(!interface_exists("hp0"));
        assert_ne!(nic.guest.run("ls -d /sys/bus/pci/devices/0000:00:09.0 /sys/bus/pci/devices/0000:02:*").status, 0);
        usages.push(Usage::of(nic.guest.vmm()));
    }
    assert_eq!(usages[0], usages[1]);
    assert_eq!(nic.reachability(&tenants), X550::everyone(2), "the first NIC carries on");
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
