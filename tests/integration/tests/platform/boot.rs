//! A guest boots, powers off and reboots.

use std::fs;

use integration::{Guest, GuestSpec, Image, Kernel, resident};
use rstest::rstest;

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_boots_and_its_power_off_ends_the_vmm_with_code_0(#[case] kernel: Kernel) {
    let mut guest = Guest::boot(GuestSpec::new(kernel));
    assert!(guest.ok("uname -r").starts_with(kernel.version()));
    guest.assert_kernel_has_no_complaint();
    let exit = guest.power_off();
    assert_eq!((exit.code, exit.errors.as_str()), (Some(0), ""));
}

#[test]
fn a_vm_without_devices_takes_under_7_mb_beyond_guest_memory() {
    // The whole program is in the page cache, and Linux maps 64 KiB of it around each page that is used.
    let first = Guest::boot(GuestSpec::new(Kernel::V6_12));
    fs::read(format!("/proc/{}/exe", first.vmm().id())).unwrap();
    assert_eq!(first.power_off().code, Some(0));
    let guest = Guest::boot(GuestSpec::new(Kernel::V6_12));
    // Only the mapping of guest memory has 64 MiB or more.
    let resident = resident(guest.vmm(), 64 << 10);
    assert!((0.5..7.0).contains(&resident), "{resident:.2} MB");
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_reboot_starts_the_guest_again_under_the_same_vmm(#[case] kernel: Kernel) {
    const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
    let mut guest = Guest::boot(GuestSpec::new(kernel));
    let first = guest.ok(BOOT_ID);
    guest.reboot();
    let second = guest.ok(BOOT_ID);
    assert_ne!(first, second, "Linux draws a new id at each boot");
    guest.reboot();
    assert_ne!(second, guest.ok(BOOT_ID), "it reboots a second time");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_bzimage_boots_with_two_vcpus_and_memory_around_the_hole(#[case] kernel: Kernel) {
    let mut guest = Guest::boot(GuestSpec::new(kernel).image(Image::BzImage).cpus(2).memory("size=5G"));
    assert_eq!(guest.ok("nproc"), "2");
    // Linux keeps some hundred MiB of the 5 GiB for itself.
    let kib: u64 = guest.ok("awk '/MemTotal/ { print $2 }' /proc/meminfo").parse().unwrap();
    assert!((4_800 << 10..5 << 20).contains(&kib), "MemTotal: {kib} KiB");
    // 3 GiB lie below the hole, so the 5 GiB end at 6 GiB.
    let above = guest.ok("grep 'System RAM' /proc/iomem | tail -n 1");
    assert!(above.trim().starts_with("100000000-17fffffff"), "{above}");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The strings are in SMBIOS. systemd reads credentials from the OEM strings; Linux shows all tables as they are.
#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn smbios_shows_the_guest_the_strings_of_the_platform(#[case] kernel: Kernel) {
    let platform = "system_manufacturer=Maker,system_version=7,uuid=00112233-4455-6677-8899-aabbccddeeff,\
                    chassis_asset_tag=A9,oem_strings=[io.systemd.credential:a=b,\"x, y\"]";
    let mut guest = Guest::boot(GuestSpec::new(kernel).arguments(&["--platform", platform]));
    let id = |name: &str| format!("cat /sys/class/dmi/id/{name}");
    for (name, value) in [
        ("bios_vendor", "cloud-hypervisor"),
        ("sys_vendor", "Maker"),
        ("product_name", "cloud-hypervisor"),
        ("product_version", "7"),
        ("product_uuid", "00112233-4455-6677-8899-aabbccddeeff"),
        ("chassis_asset_tag", "A9"),
    ] {
        assert_eq!(guest.ok(&id(name)), value, "{name}");
    }
    for text in ["io.systemd.credential:a=b", "x, y"] {
        guest.ok(&format!("tr '\\000' '\\n' < /sys/firmware/dmi/tables/DMI | grep -qF '{text}'"));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
