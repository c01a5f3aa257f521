//! Folders of the host that a guest mounts, and disks that another process serves, over vhost-user.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::path::Path;
use std::process::Command;

use integration::{Api, Guest, GuestSpec, Kernel, StoragePeer};
use rstest::rstest;
use serde_json::json;

const MIB: usize = 1 << 20;

/// Writes `mebibytes` MiB to `path`. All blocks differ.
fn write_file(path: &Path, mebibytes: usize) {
    let words = (0..mebibytes * MIB / 8).map(|n| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    fs::write(path, words.flatten().collect::<Vec<u8>>()).unwrap();
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

fn digest(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    first_word(&String::from_utf8_lossy(&output.stdout))
}

fn digest_in(guest: &mut Guest, path: &str) -> String {
    first_word(&guest.ok(&format!("sync; echo 3 > /proc/sys/vm/drop_caches; sha256sum {path}")))
}

/// Mounts the file system `tag` at `/mnt/<tag>`.
fn mount(guest: &mut Guest, tag: &str) {
    guest.ok(&format!("mkdir -p /mnt/{tag} && mount -t virtiofs {tag} /mnt/{tag}"));
}

/// Reads a file of the host and writes one for it in the file system `tag`, which is `folder` on the host.
fn check_files(guest: &mut Guest, tag: &str, folder: &Path) {
    assert_eq!(digest_in(guest, &format!("/mnt/{tag}/from-host")), digest(&folder.join("from-host")));
    guest.ok(&format!("dd if=/dev/urandom of=/mnt/{tag}/from-guest bs=64k count=32 2>&1"));
    assert_eq!(digest_in(guest, &format!("/mnt/{tag}/from-guest")), digest(&folder.join("from-guest")));
    assert_eq!(fs::metadata(folder.join("from-guest")).unwrap().len(), 2 << 20);
    guest.ok(&format!("mkdir /mnt/{tag}/d && mv /mnt/{tag}/from-guest /mnt/{tag}/d/moved && rm -r /mnt/{tag}/d"));
    assert!(!folder.join("d").exists());
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_shared_folder_survives_restarts_of_virtiofsd_and_the_guest(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let [shared, added] = ["shared", "added"].map(|name| folder.path().join(name));
    for folder in [&shared, &added] {
        fs::create_dir(folder).unwrap();
        write_file(&folder.join("from-host"), 3);
    }
    let start = || StoragePeer::virtiofsd(folder.path(), "fs.sock", &shared);
    let virtiofsd = start();
    let api = Api::new("shared");
    // The guest's memory is shared with the backend even without shared=on.
    let fs = format!("tag=host,socket={},id=share", virtiofsd.socket().display());
    let spec = GuestSpec::new(kernel).with_modules();
    let mut guest = Guest::boot(spec.arguments(&["--fs", &fs, "--api-socket", &api.argument()]));
    guest.load("virtiofs");
    mount(&mut guest, "host");
    check_files(&mut guest, "host", &shared);

    // A backend that returns does not have the open files of the previous one, so it is mounted again.
    drop(virtiofsd);
    let virtiofsd = start();
    guest.ok("umount /mnt/host");
    mount(&mut guest, "host");
    check_files(&mut guest, "host", &shared);

    guest.reboot();
    guest.load("virtiofs");
    mount(&mut guest, "host");
    check_files(&mut guest, "host", &shared);

    // The backend is missing while the guest reboots, and returns after the next driver has started.
    // A client reboots the guest: the guest itself would wait for its file system before it ends.
    drop(virtiofsd);
    assert_eq!(api.put("vm.reboot").status, 204);
    guest.wait_for_restart();
    guest.load("virtiofs");
    let _virtiofsd = start();
    mount(&mut guest, "host");
    check_files(&mut guest, "host", &shared);

    let second = StoragePeer::virtiofsd(folder.path(), "added.sock", &added);
    let body = json!({"tag": "added", "socket": second.socket(), "id": "second"});
    assert_eq!(api.put_json("vm.add-fs", &body).status, 200);
    guest.wait_for("mkdir -p /mnt/added && mount -t virtiofs added /mnt/added");
    check_files(&mut guest, "added", &added);
    check_files(&mut guest, "host", &shared);
    guest.ok("umount /mnt/added");
    assert_eq!(api.put_json("vm.remove-device", &json!({"id": "second"})).status, 204);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_vhost_user_disk_survives_restarts_of_its_daemon_and_guest(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    write_file(&image, 16);
    let start = || StoragePeer::qemu_storage_daemon(folder.path(), "blk.sock", &image);
    let mut daemon = start();
    let disk = format!("vhost_user=on,socket={},num_queues=2", daemon.socket().display());
    let mut guest = Guest::boot(GuestSpec::new(kernel).with_modules().cpus(2).disk(&disk));
    for round in ["at first", "after a reboot"] {
        guest.load("virtio_blk");
        assert_eq!(guest.ok("echo $(cat /sys/block/vda/size) $(ls /sys/block/vda/mq)"), "32768 0 1", "{round}");
        assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&image), "{round}");
        // The backend is replaced in the middle of a write, without an error in the guest.
        guest.ok("dd if=/dev/urandom of=/tmp/new bs=1M count=8 2>&1");
        guest.ok("(dd if=/tmp/new of=/dev/vda bs=16k oflag=direct 2>&1; echo $? > /tmp/status) > /dev/null 2>&1 &");
        guest.wait_for("grep -q '^ *[0-9]* *[0-9]* vda .* [1-9][0-9]* ' /proc/diskstats");
        drop(daemon);
        daemon = start();
        guest.wait_for("grep -qx 0 /tmp/status");
        guest.ok("rm /tmp/status");
        assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&image), "{round}");
        guest.ok("cmp -n 8388608 /tmp/new /dev/vda");
        guest.reboot();
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
