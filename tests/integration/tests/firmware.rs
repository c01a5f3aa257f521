//! Guests that UEFI firmware boots from a disk.

use std::fs;

use integration::{Guest, GuestSpec, HostTap, Pf, Subnet, firmware_disk};

/// The firmware is edk2's for Cloud Hypervisor, from Debian. It finds the disk, starts Linux from the EFI system
/// partition, and passes on what it found: ACPI, SMBIOS, the BARs that it placed.
#[test]
fn firmware_boots_linux_from_a_disk_and_its_vfs_carry_traffic() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::copy(firmware_disk(), &disk).unwrap();
    let spec = GuestSpec::from_firmware(&disk)
        .net("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=4")
        .arguments(&["--platform", "system_serial_number=S1,oem_strings=[one,two]"]);
    let mut guest = Guest::boot(spec);
    guest.ok("[ -d /sys/firmware/efi ]");
    assert_eq!(guest.ok("cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_serial"), "Cloud Hypervisor\nS1");
    // The firmware's copy of the host's time.
    let (year, own) = (guest.ok("date +%Y"), guest.ok("cat /sys/class/rtc/rtc0/since_epoch || date +%s"));
    assert!(year.parse::<u32>().unwrap() >= 2024 && own.parse::<u64>().unwrap() > 1_700_000_000, "{year} {own}");
    let pf = Pf::find(&mut guest);
    assert_eq!(pf.read(&mut guest, "sriov_totalvfs"), "4");
    pf.set_num_vfs(&mut guest, 4);
    let vfs = pf.vfs(&mut guest);
    assert_eq!(vfs.len(), 4);
    let tap = HostTap::existing("pf0v3");
    tap.join(Subnet(3));
    let interface = vfs[3].interface.clone().unwrap();
    guest.join(&interface, Subnet(3));
    guest.ping(&interface, Subnet(3));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
