//! Linux that finds out the frequency of its time stamp counter by the ACPI timer, as no clock of KVM tells it.

use integration::{Guest, GuestSpec, HostTap, Kernel, Subnet, read_into_memory};

const SUBNET: Subnet = Subnet(200);

#[test]
fn linux_measures_its_counter_by_the_acpi_timer() {
    // While the machine waits for the files, its clock jumps beyond the time limit of a boot.
    read_into_memory(Kernel::V6_12);
    let tap = HostTap::persistent("timers0");
    let spec = GuestSpec::new(Kernel::V6_12).net("tap=timers0").kernel_argument("no-kvmclock");
    let mut guest = Guest::boot(spec);
    println!("{}", guest.ok("dmesg | grep -e tsc: -e clocksource:"));
    guest.ok("dmesg | grep -q 'using PMTIMER reference calibration'");
    tap.join(SUBNET);
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
