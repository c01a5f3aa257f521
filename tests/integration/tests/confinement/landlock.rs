//! Guests of a program confined by Landlock. The host kernel must have Landlock.

use std::fs::{self, File};
use std::path::Path;

use integration::{Api, Guest, GuestSpec, Kernel, StoragePeer};
use rstest::rstest;
use serde_json::json;

/// Uses all devices of the guest once more.
fn use_devices(guest: &mut Guest) {
    guest.load("virtio_net");
    guest.load("virtio_blk");
    guest.load("virtiofs");
    guest.ok("dd if=/dev/urandom of=/dev/vda bs=64k count=4 conv=fsync 2>&1");
    guest.ok("mkdir -p /mnt/host && mount -t virtiofs host /mnt/host && cat /mnt/host/file && umount /mnt/host");
    guest.load("virtio_rng");
    guest.wait_for("grep -q virtio_rng /sys/class/misc/hw_random/rng_current");
    guest.ok("dd if=/dev/hwrng of=/dev/null bs=16 count=1 2>&1");
    // The disk is in a slot before the PF's.
    let enable =
        "cd /sys/bus/pci/devices/0000:00:02.0 && echo 2 > sriov_numvfs && ls -d virtfn0 virtfn1 && cat sriov_numvfs";
    assert_eq!(guest.ok(enable), "virtfn0\nvirtfn1\n2");
    guest.wait_for("test $(ls -d /sys/bus/pci/devices/0000:00:02.0/virtfn*/virtio*/net/* | wc -l) = 2");
    // A driver that starts creates workers, which are confined as well.
    guest.ok("for dev in $(ls /sys/class/net | grep -v lo); do ip link set $dev up; done");
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_confined_guest_keeps_its_devices_over_reboots_and_restarts(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let (shared, later) = (folder.path().join("shared"), folder.path().join("later"));
    fs::create_dir(&shared).unwrap();
    fs::create_dir(&later).unwrap();
    fs::write(shared.join("file"), "contents").unwrap();
    let image = |path: &Path| File::create(path).unwrap().set_len(4 << 20).unwrap();
    let (disk, added, beyond) = (folder.path().join("disk"), later.join("added"), folder.path().join("beyond"));
    for path in [&disk, &added, &beyond] {
        image(path);
    }
    let virtiofsd = StoragePeer::virtiofsd(folder.path(), "fs.sock", &shared);
    // In its own folder, in which sockets may be created and removed.
    let api = Api::new("landlock");
    let (fs, rule) =
        (format!("tag=host,socket={}", virtiofsd.socket().display()), format!("path={},access=rw", later.display()));
    let vsock = format!("cid=9,socket={}", folder.path().join("vsock").display());
    let spec = GuestSpec::new(kernel)
        .with_modules()
        .cpus(2)
        .net("id=pf0,tap=llpf,sriov_vfs=2")
        .net_vf("pf=pf0,index=1,tap=llvf,vhost=auto")
        .disk(&format!("path={}", disk.display()))
        .arguments(&["--fs", &fs, "--vsock", &vsock, "--landlock", "--landlock-rules", &rule])
        .arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    use_devices(&mut guest);

    drop(virtiofsd);
    let virtiofsd = StoragePeer::virtiofsd(folder.path(), "fs.sock", &shared);
    guest.reboot();
    use_devices(&mut guest);

    // Files named by the rules can be added, and also a tap, which only needs /dev/net/tun; other files cannot.
    assert_eq!(api.put_json("vm.add-disk", &json!({"id": "added", "path": added})).status, 200);
    guest.wait_for("test -b /dev/vdb");
    guest.ok("dd if=/dev/zero of=/dev/vdb bs=64k count=1 conv=fsync 2>&1");
    assert_eq!(api.put_json("vm.add-net", &json!({"id": "more", "tap": "llmore"})).status, 200);
    let refused = api.put_json("vm.add-disk", &json!({"id": "beyond", "path": beyond}));
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert!(refused.body.to_string().contains("--landlock-rules"), "{}", refused.body);
    assert_eq!(api.put_json("vm.resize", &json!({"desired_vcpus": 1})).status, 204);
    api.remove_device("added");

    assert_eq!(api.put("vm.shutdown").status, 204);
    // virtiofsd ends with its client.
    drop(virtiofsd);
    let _virtiofsd = StoragePeer::virtiofsd(folder.path(), "fs.sock", &shared);
    let booted = api.put("vm.boot");
    assert_eq!(booted.status, 204, "{}", booted.body);
    guest.wait_for_restart();
    use_devices(&mut guest);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
