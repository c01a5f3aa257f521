//! NICs without VFs, over each kind of tap.

use integration::{Guest, GuestSpec, HostTap, Kernel, Subnet, interface_exists};
use rstest::rstest;

const SUBNET: Subnet = Subnet(200);

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_plain_nic_carries_traffic_over_a_tap_removed_with_the_vmm(#[case] kernel: Kernel) {
    let mut guest = Guest::boot(GuestSpec::new(kernel).net("tap=plain0,mac=52:54:00:12:34:56"));
    let tap = HostTap::existing("plain0");
    tap.join(SUBNET);
    assert_eq!(guest.ok("cat /sys/class/net/eth0/address"), "52:54:00:12:34:56");
    assert_eq!(guest.run("ls /sys/bus/pci/devices/*/sriov_totalvfs").status, 1, "a plain NIC has no VFs");
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    assert!(tap.counters().from_guest >= 2);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    assert!(!interface_exists("plain0"), "the tap that the VMM made is gone");
}

#[test]
fn a_tap_that_exists_is_used_and_left_in_place() {
    let tap = HostTap::persistent("mine0");
    let mut guest = Guest::boot(GuestSpec::new(Kernel::V6_12).net("tap=mine0"));
    tap.join(SUBNET);
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    guest.power_off();
    assert!(interface_exists("mine0"));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_nic_with_two_queue_pairs_gives_each_vcpu_one(#[case] kernel: Kernel) {
    let mut guest = Guest::boot(GuestSpec::new(kernel).cpus(2).net("tap=multi0,num_queues=4"));
    let tap = HostTap::existing("multi0");
    tap.join(SUBNET);
    let queues = guest.ok("cd /sys/class/net/eth0/queues && echo *");
    assert_eq!(queues, "rx-0 rx-1 tx-0 tx-1");
    guest.join("eth0", SUBNET);
    for cpu in [0, 1] {
        // Linux sends on the queue pair of the vCPU that the sender runs on.
        guest.ok(&format!("taskset -c {cpu} ping -c 2 -i 0.2 -W 5 {}", SUBNET.host()));
    }
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_nic_takes_tap_queues_that_are_passed_in_open() {
    let (tap, queues) = HostTap::open_queues("passed0", 2);
    let spec = GuestSpec::new(Kernel::V6_12).cpus(2);
    let mut guest = Guest::boot(spec.net_by_fds(queues, "num_queues=4,mac=52:54:00:ab:cd:ef"));
    tap.join(SUBNET);
    assert_eq!(guest.ok("cat /sys/class/net/eth0/address"), "52:54:00:ab:cd:ef");
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    assert_eq!(guest.power_off().code, Some(0));
}
