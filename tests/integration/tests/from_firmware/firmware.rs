//! Guests that UEFI firmware boots from a disk: edk2's for Cloud Hypervisor, from Debian.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::{Guest, GuestSpec, HostTap, Pf, PortTrace, Subnet, firmware_disk};

/// The ports of configuration space: the address, and four bytes of data.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: [u16; 4] = [0xcfc, 0xcfd, 0xcfe, 0xcff];
/// The index and the data of the real-time clock.
const RTC: [u16; 2] = [0x70, 0x71];
/// The ACPI power management timer. No table describes it, so Linux does not use it.
const PM_TIMER: u16 = 0x608;

/// A copy of the disk, to which firmware writes.
fn copy_of_disk(folder: &Path) -> PathBuf {
    let disk = folder.join("disk");
    fs::copy(firmware_disk(), &disk).unwrap();
    disk
}

/// The firmware finds the disk, starts Linux from the EFI system partition, and passes on ACPI, SMBIOS and the BARs
/// that it has placed. It does not place VF BARs, which could overlap others.
#[test]
fn firmware_boots_linux_from_a_disk_and_its_vfs_carry_traffic() {
    let folder = tempfile::tempdir().unwrap();
    let disk = copy_of_disk(folder.path());
    let spec = GuestSpec::from_firmware(&disk)
        .net("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=4")
        .arguments(&["--platform", "system_serial_number=S1,oem_strings=[one,two]"]);
    let trace = PortTrace::start(&[&[CONFIG_ADDRESS, PM_TIMER][..], &CONFIG_DATA, &RTC].concat());
    let before = today();
    let mut guest = Guest::boot(spec);
    let accesses = trace.accesses();
    drop(trace);
    for port in [CONFIG_ADDRESS, RTC[0]] {
        assert!(accesses[&port].1 > 0, "writes of {port:#x}: {accesses:?}");
    }
    for port in CONFIG_DATA.into_iter().chain([RTC[1], PM_TIMER]) {
        assert!(accesses[&port].0 > 0, "reads of {port:#x}: {accesses:?}");
    }

    guest.ok("[ -d /sys/firmware/efi ]");
    assert_eq!(guest.ok("cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_serial"), "Cloud Hypervisor\nS1");
    for text in ["one", "two"] {
        guest.ok(&format!("tr '\\000' '\\n' < /sys/firmware/dmi/tables/DMI | grep -qF '{text}'"));
    }

    let pf = Pf::find(&mut guest);
    let found = guest.ok(&format!("dmesg | grep '{}: VF BAR'", pf.address));
    assert!(found.contains("[mem 0x00000000-"), "VF BARs as the firmware left them: {found}");
    assert_eq!(guest.run("dmesg | grep -iE 'can.t claim|address conflict'").text, "");
    assert_ranges_are_apart(&guest.ok("cat /sys/bus/pci/devices/*/resource"));
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

    // The firmware stores its variables in a file, and dates it with its clock.
    let days = [before, today()];
    let written = day_of_variables(&fs::read(&disk).unwrap());
    assert!(days.contains(&written), "{written} is none of {days:?}");
}

/// Asserts that the BARs of PFs and the VF BARs do not overlap. `resource` has a line for each: start, end and flags.
fn assert_ranges_are_apart(resource: &str) {
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let mut ranges: Vec<_> = resource
        .lines()
        .map(|line| line.split(' ').map(number).collect::<Vec<_>>())
        .filter(|range| range[2] != 0)
        .map(|range| (range[0], range[1]))
        .collect();
    ranges.sort_unstable();
    // Two BARs of the PF, of the disk and of the console, and two VF BARs.
    assert!(ranges.len() >= 6, "{ranges:x?}");
    assert!(ranges[0].0 > 0 && ranges.windows(2).all(|pair| pair[0].1 < pair[1].0), "{ranges:x?}");
}

/// The date, in UTC.
fn today() -> String {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Date at which the firmware wrote its variables to the FAT file system on `disk`, from the file's directory entry.
fn day_of_variables(disk: &[u8]) -> String {
    const NAME: &[u8] = b"NVVARS     ";
    let entry = disk.windows(NAME.len()).position(|bytes| bytes == NAME).expect("the disk has a file NvVars");
    let date = u16::from_le_bytes([disk[entry + 24], disk[entry + 25]]);
    format!("{}-{:02}-{:02}", 1980 + (date >> 9), date >> 5 & 0xf, date & 0x1f)
}
