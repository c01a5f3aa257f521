//! Linux that measures its time stamp counter's frequency with the ACPI timer, in a guest without a KVM clock.

use integration::{Guest, GuestSpec, HostTap, Kernel, Subnet, read_into_memory};
use rstest::rstest;

const SUBNET: Subnet = Subnet(200);

#[rstest]
#[case::without_kvm_clock("no-kvmclock")]
#[case::without_paravirtualisation("nopv")]
fn linux_measures_its_counter_by_the_acpi_timer(#[case] argument: &str) {
    // While the machine waits for the files, its clock jumps beyond the time limit of a boot.
    read_into_memory(Kernel::V6_12);
    let tap = HostTap::persistent("timers0");
    let spec = GuestSpec::new(Kernel::V6_12).net("tap=timers0").kernel_argument(argument);
    let mut guest = Guest::boot(spec);
    println!("{}", guest.ok("dmesg | grep -e tsc: -e clocksource:"));
    guest.ok("dmesg | grep -q 'using PMTIMER reference calibration'");
    tap.join(SUBNET);
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
