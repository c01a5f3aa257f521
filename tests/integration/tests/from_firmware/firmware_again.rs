//! Guests that UEFI firmware boots repeatedly. They take longer: `cargo xtask test --all`.

use std::fs;

use integration::{Guest, GuestSpec, Pf, firmware_disk};

/// The firmware is given as a kernel, as in the description of Debian's package. After a reboot it starts in the
/// power-on state, with the variables that it has written.
#[test]
#[ignore = "a longer test"]
fn firmware_as_a_kernel_boots_again_after_a_reboot_with_vfs() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::copy(firmware_disk(), &disk).unwrap();
    let spec = GuestSpec::from_firmware(&disk).firmware_as_kernel().net("id=pf0,tap=pf0,sriov_vfs=4");
    let mut guest = Guest::boot(spec);
    let pf = Pf::find(&mut guest);
    for _ in 0..2 {
        guest.ok("[ -d /sys/firmware/efi ]");
        pf.set_num_vfs(&mut guest, 4);
        assert_eq!(pf.vfs(&mut guest).len(), 4);
        guest.assert_kernel_has_no_complaint();
        guest.reboot();
        assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    }
    assert_eq!(guest.power_off().code, Some(0));
}
