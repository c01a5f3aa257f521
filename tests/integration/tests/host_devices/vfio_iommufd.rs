//! Host devices through iommufd, and by descriptor: VFs of an igb of the first-level machine, whose kernel has iommufd.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use integration::{Api, Guest, GuestSpec, HostNic, Kernel, for_each_boot, open_iommufd, record_exits, repetitions};
use serde_json::json;

/// Time that a transfer of 1 MiB may take.
const TRANSFER: Duration = Duration::from_secs(120);
/// The guest's memory, in KiB.
const MEMORY: u64 = 256 << 10;

/// A guest on a machine with this platform.
fn guest(spec: GuestSpec, api: &Api, platform: &str) -> Guest {
    Guest::boot(spec.arguments(&["--api-socket", &api.argument(), "--platform", platform]))
}

/// The interrupts of the guest's `eth0`.
fn interrupts(guest: &mut Guest) -> u64 {
    guest.ok("awk '/eth0/ { n += $2 } END { print n + 0 }' /proc/interrupts").trim().parse().unwrap()
}

/// Pings, and sends `bytes` bytes and compares the echo.
fn use_nic(guest: &mut Guest, nic: &HostNic, bytes: usize) {
    let before = interrupts(guest);
    nic.join(guest, "eth0");
    assert!(interrupts(guest) >= before + 6, "MSI-X");
    guest.ok(&format!("head -c {bytes} /dev/urandom > /tmp/sent"));
    guest.ok_within(&nic.echo("/tmp/sent"), TRANSFER);
}

#[test]
fn a_host_vf_by_iommufd_carries_traffic_also_after_a_reboot() {
    let vfs = HostNic::igb_vfs();
    let api = Api::new("iommufd-path");
    let spec = GuestSpec::new(Kernel::Generic).arguments(&["--device", &vfs[0].option(",id=nic")]);
    let mut guest = guest(spec, &api, "iommufd=on");
    use_nic(&mut guest, &vfs[0], 1 << 20);
    assert!(guest.vmm().pinned() >= MEMORY, "{} KiB are pinned", guest.vmm().pinned());
    guest.reboot();
    use_nic(&mut guest, &vfs[0], 256 << 10);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_vf_by_fd_behind_the_guests_iommu_reaches_only_its_mappings() {
    let vfs = HostNic::igb_vfs();
    let api = Api::new("iommufd-fd");
    let (iommufd, file) = (open_iommufd(), vfs[0].open());
    let platform = format!("iommufd_fd={}", iommufd.as_raw_fd());
    let device = format!("fd={},id=nic,iommu=on", file.as_raw_fd());
    let spec = GuestSpec::new(Kernel::Generic).with_modules().kernel_argument("iommu.strict=1");
    let spec = spec.inheriting(vec![iommufd, file]).arguments(&["--device", &device]);
    let mut guest = guest(spec, &api, &platform);
    let pinned = |guest: &Guest| guest.vmm().pinned();
    assert!(pinned(&guest) >= MEMORY, "{} KiB are pinned", pinned(&guest));
    guest.load("virtio_iommu");
    guest.wait_for("[ -e /sys/class/net/eth0 ]");
    use_nic(&mut guest, &vfs[0], 128 << 10);
    assert!(pinned(&guest) < 64 << 10, "{} KiB are within reach", pinned(&guest));
    assert_eq!(api.get("vm.counters").body["nic"]["map_failures"], 0);
    let address = guest.ok("basename $(readlink -f /sys/class/net/eth0/device)").trim().to_string();
    guest.ok(&format!("echo {address} > /sys/bus/pci/drivers/igbvf/unbind"));
    assert!(pinned(&guest) < 1 << 10, "{} KiB are mapped without a device", pinned(&guest));
    guest.reboot();
    let once = MEMORY..2 * MEMORY;
    assert!(once.contains(&pinned(&guest)), "as at first");
    let added = api.put_with_fds("vm.add-device", &json!({"id": "other"}), &[vfs[1].open()]);
    assert_eq!(added.status, 200, "{added:?}");
    assert!(once.contains(&pinned(&guest)), "{} KiB are pinned for two devices", pinned(&guest));
    guest.assert_kernel_has_no_complaint();
    // The descriptors stay: the devices stay bound to the iommufd, and the guest's memory is unmapped from them.
    assert_eq!(api.put("vm.shutdown").status, 204);
    assert_eq!(pinned(&guest), 0);
    let booted = api.put("vm.boot");
    assert_eq!(booted.status, 204, "{booted:?}");
    assert!(once.contains(&pinned(&guest)), "as before");
}

#[test]
fn vfs_by_client_descriptors_leave_nothing_open_when_removed() {
    record_exits();
    let rounds = repetitions("CH_VFIO_ROUNDS", 3);
    for_each_boot(|| come_and_go(rounds));
}

/// Boots a guest, and adds and removes `rounds` times a VF whose descriptor a client sends.
fn come_and_go(rounds: usize) {
    let vfs = HostNic::igb_vfs();
    let api = Api::new("iommufd-plug");
    let iommufd: OwnedFd = open_iommufd();
    let platform = format!("iommufd_fd={}", iommufd.as_raw_fd());
    let mut guest = guest(GuestSpec::new(Kernel::Generic).inheriting(vec![iommufd]), &api, &platform);
    let mut first = None;
    for round in 0..rounds {
        let nic = &vfs[round % 2];
        let added = api.put_with_fds("vm.add-device", &json!({"id": "nic"}), &[nic.open()]);
        assert_eq!(added.status, 200, "{added:?}");
        let twice = api.put_json("vm.add-device", &json!({"path": nic.folder(), "id": "again"}));
        assert_eq!(twice.status, 409, "{twice:?}");
        let wrong = api.put_with_fds("vm.add-device", &json!({"id": "other"}), &[open_iommufd()]);
        assert_eq!(wrong.status, 400, "{wrong:?}");
        guest.wait_for("[ -e /sys/class/net/eth0 ]");
        use_nic(&mut guest, nic, 64 << 10);
        api.remove_device("nic");
        assert!(!guest.vmm().has_bar_mapped());
        let now = (guest.vmm().held().0, guest.vmm().pinned());
        assert_eq!(first.get_or_insert(now), &now);
        assert_eq!(now.1, 0, "nothing is pinned without a device");
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
