//! Linux whose command line turns off ACPI, the ECAM, the IOAPIC or the local APIC.

use std::fs;
use std::time::{Duration, Instant};

use integration::{Guest, GuestSpec, HostTap, Kernel, Subnet};
use rstest::rstest;

const SUBNET: Subnet = Subnet(200);
/// Time that a guest may take to its init.
const PATIENCE: Duration = Duration::from_secs(180);

/// Two vCPUs and a NIC on a tap.
fn spec(argument: &str) -> GuestSpec {
    GuestSpec::new(Kernel::V6_12).cpus(2).net("tap=legacy0").kernel_argument(argument)
}

/// Debian's generic kernel: the cloud kernel has no parser of MP tables.
#[test]
fn generic_linux_without_acpi_has_all_vcpus_and_its_nic() {
    let tap = HostTap::persistent("legacy0");
    let spec = GuestSpec::new(Kernel::Generic).cpus(2).net("tap=legacy0").kernel_argument("acpi=off");
    let mut guest = Guest::boot(spec);
    tap.join(SUBNET);
    assert_eq!(guest.ok("nproc"), "2");
    guest.ok("dmesg | grep -q 'MPTABLE: '");
    guest.ok("dmesg | grep -q 'PCI: Using configuration type 1'");
    assert_eq!(guest.run("ls /sys/firmware/acpi").status, 1, "ACPI is off");
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    assert_ne!(guest.ok("grep -c 'MSI.*virtio' /proc/interrupts"), "0");
    assert_ne!(guest.ok("grep -c 'IO-APIC.*ttyS0' /proc/interrupts"), "0");
    guest.assert_kernel_has_no_complaint();
    // Linux then has no power button and no power switch.
    assert_eq!(guest.stop_by(libc::SIGTERM).code, Some(0));
}

#[test]
fn linux_without_ecam_has_all_vcpus_and_its_nic() {
    let tap = HostTap::persistent("legacy0");
    let mut guest = Guest::boot(spec("pci=nommconf"));
    tap.join(SUBNET);
    assert_eq!(guest.ok("nproc"), "2");
    guest.ok("dmesg | grep -q 'PCI: Using configuration type 1'");
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    assert_ne!(guest.ok("grep -c 'MSI.*virtio' /proc/interrupts"), "0");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Linux then does not use the IOAPIC, and finds no PICs. So the serial port has no interrupt, and the only command is
/// on the command line. MSI-X works.
#[rstest]
#[case::without_ioapic("noapic", 2)]
#[case::without_smp("nosmp", 1)]
fn linux_without_ioapic_boots_and_its_nic_answers(#[case] argument: &str, #[case] vcpus: u32) {
    let tap = HostTap::persistent("legacy0");
    tap.join(SUBNET);
    let (host, own) = (SUBNET.host(), SUBNET.guest());
    let command = format!(
        "ip link set eth0 up; ip addr add {own}/24 dev eth0; until ping -c 1 -W 5 {host}; do sleep 1; done; \
         echo $(nproc) vCPUs; [ $(nproc) = {vcpus} ] && ! dmesg | grep -q 'Oops[:]' && echo @@ready 1"
    );
    let spec = spec(argument).kernel_argument(&format!("LAB_COMMAND=\"{command}\""));
    let mut guest = Guest::restored_by(spec.command());
    guest.wait_for_restart();
    assert!(tap.counters().from_guest >= 1);
    assert_eq!(guest.end_by(|| {}).code, Some(0), "it powers off by itself");
}

/// Linux then gets no interrupts: there is no PIT or HPET, and MSIs need a local APIC. Only its messages show its
/// progress.
#[test]
fn linux_without_local_apic_reaches_its_init_on_one_vcpu() {
    let _tap = HostTap::persistent("legacy0");
    let path = std::env::temp_dir().join(format!("nolapic-{}", std::process::id()));
    let spec = spec("nolapic").kernel_argument("ignore_loglevel").serial(&format!("file={}", path.display()));
    let vmm = spec.command().spawn();
    let until = Instant::now() + PATIENCE;
    let printed = loop {
        let printed = fs::read_to_string(&path).unwrap_or_default();
        if printed.contains("Run /init as init process") {
            break printed;
        }
        assert!(Instant::now() < until, "{printed}");
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(printed.contains("No local APIC present") && printed.contains("Brought up 1 node, 1 CPU"), "{printed}");
    assert!(!printed.contains("Oops") && !printed.contains("Call Trace"), "{printed}");
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait(PATIENCE).code, Some(0));
    _ = fs::remove_file(path);
}
