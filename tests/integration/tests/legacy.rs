//! Linux whose command line turns off what it finds hardware, interrupts or time by.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use integration::{Guest, GuestSpec, HostTap, Kernel, Subnet};
use rstest::rstest;

const SUBNET: Subnet = Subnet(200);

/// Two vCPUs and a NIC on a tap.
fn spec(argument: &str) -> GuestSpec {
    GuestSpec::new(Kernel::V6_12).cpus(2).net("tap=legacy0").kernel_argument(argument)
}

/// Each way of finding PCI devices and vCPUs, and each source for the frequency of the time stamp counter.
#[rstest]
#[case::without_acpi("acpi=off", "MultiProcessor Specification")]
#[case::without_ecam("pci=nommconf", "PCI: Using configuration type 1")]
#[case::without_kvmclock("no-kvmclock", "PMTIMER reference calibration")]
#[case::without_paravirtualization("nopv", "PMTIMER reference calibration")]
fn linux_without_it_has_all_vcpus_and_its_nic(#[case] argument: &str, #[case] message: &str) {
    let tap = HostTap::persistent("legacy0");
    let mut guest = Guest::boot(spec(argument));
    tap.join(SUBNET);
    assert_eq!(guest.ok("nproc"), "2");
    guest.ok(&format!("dmesg | grep -q '{message}'"));
    let year: u32 = guest.ok("date +%Y").parse().unwrap();
    assert!(year >= 2025, "the year {year}");
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    assert_ne!(guest.ok("grep -c 'MSI.*virtio' /proc/interrupts"), "0");
    guest.assert_kernel_has_no_complaint();
    // Without ACPI, Linux cannot power the machine off.
    drop(guest);
}

/// Linux does not use the IOAPIC then, and believes that there are no PICs. So nothing interrupts it for the serial port, and its
/// only command comes by the command line. MSI-X works.
#[rstest]
#[case::without_ioapic("noapic", 2)]
#[case::without_smp("nosmp", 1)]
fn linux_without_ioapic_boots_and_its_nic_answers(#[case] argument: &str, #[case] vcpus: u32) {
    let tap = HostTap::persistent("legacy0");
    tap.join(SUBNET);
    let (host, own) = (SUBNET.host(), SUBNET.guest());
    let command = format!(
        "ip link set eth0 up; ip addr add {own}/24 dev eth0; until ping -c 1 -W 5 {host}; do sleep 1; done; \
         echo $(nproc) vCPUs; [ $(nproc) = {vcpus} ] && ! dmesg | grep -qi oops && echo @@ready 1"
    );
    let spec = spec(argument).kernel_argument(&format!("LAB_COMMAND=\"{command}\""));
    let mut guest = Guest::restored_by(spec.command());
    guest.wait_for_restart();
    assert!(tap.counters().from_guest >= 1);
    assert_eq!(guest.end_by(|| {}).code, Some(0), "it powers off by itself");
}
