//! Space that a guest returns in its disk's image, and disks whose storage has blocks of 4 KiB.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use integration::{Guest, GuestSpec, Kernel, loop_device};
use rstest::rstest;

const MIB: u64 = 1 << 20;
/// Makes the guest read the disk again, instead of its page cache.
const FORGET: &str = "sync; echo 3 > /proc/sys/vm/drop_caches";
/// Mounts the disk. Linux's driver for ext4 trims the file systems of mke2fs.
const MOUNT: &str = "mkdir -p /tmp/disk && mount -t ext4 /dev/vda /tmp/disk";

/// `qemu-img`, which must succeed, in `folder`.
fn qemu_img(folder: &Path, arguments: &[&str]) -> String {
    let run = Command::new("qemu-img").args(arguments).current_dir(folder).output().unwrap();
    assert!(run.status.success(), "qemu-img {arguments:?}: {run:?}");
    String::from_utf8_lossy(&run.stdout).into_owned()
}

/// Bytes that a file uses on the host.
fn taken(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

fn digest(guest: &mut Guest, file: &str) -> String {
    guest.ok(&format!("{FORGET}; sha256sum < {file}"))
}

/// Files are written and removed, and the guest trims its file system, as a distribution's timer does each week.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn fstrim_in_the_guest_shrinks_a_qcow2_image_on_the_host(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    qemu_img(folder.path(), &["create", "-q", "-f", "qcow2", "image", "64M"]);
    let disk = format!("path={},image_type=qcow2", image.display());
    let mut guest = Guest::boot(GuestSpec::new(kernel).with_modules().disk(&disk));
    guest.load("virtio_blk");
    guest.ok(&format!("mke2fs /dev/vda > /dev/null && {MOUNT}"));
    guest.ok("cd /tmp/disk && dd if=/dev/urandom of=kept bs=64k count=16 2>/dev/null && sync");
    let (kept, mut before) = (digest(&mut guest, "/tmp/disk/kept"), taken(&image));
    for round in 0..2 {
        guest.ok("cd /tmp/disk && dd if=/dev/urandom of=data bs=64k count=256 conv=fsync 2>/dev/null");
        let full = taken(&image);
        // Some of the 16 MiB lie in clusters that contain other blocks as well, which stay.
        assert!(full >= before + 15 * MIB, "round {round}: {full} after {before}");
        guest.ok("rm /tmp/disk/data && sync && fstrim /tmp/disk && sync");
        let trimmed = taken(&image);
        assert!(trimmed <= before + MIB, "round {round}: {trimmed} of {full}, and {before} before");
        before = trimmed;
    }
    assert_eq!(digest(&mut guest, "/tmp/disk/kept"), kept);
    guest.ok("umount /tmp/disk");
    let seen = digest(&mut guest, "/dev/vda");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    assert!(qemu_img(folder.path(), &["check", "image"]).contains("No errors were found"));
    qemu_img(folder.path(), &["convert", "-O", "raw", "image", "flat"]);
    let flat = Command::new("sha256sum").stdin(File::open(folder.path().join("flat")).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&flat.stdout).trim(), seen);
}

/// A disk with physical and logical blocks of 4 KiB (4Kn), with and without the host's page cache.
#[rstest]
#[case::direct("direct=on")]
#[case::cached("direct=off")]
fn a_guest_sees_and_uses_the_4096_byte_blocks_of_a_disk(#[case] option: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    File::create(&file).unwrap().set_len(32 * MIB).unwrap();
    let device = loop_device(&file, 4096);
    let disk = format!("path={},image_type=raw,{option},num_queues=2", device.path().display());
    let mut guest = Guest::boot(GuestSpec::new(Kernel::V6_12).with_modules().cpus(2).disk(&disk));
    guest.load("virtio_blk");
    let shown = "cd /sys/block/vda && cat size queue/logical_block_size queue/physical_block_size";
    assert_eq!(guest.ok(shown), "65536\n4096\n4096");
    guest.ok("dd if=/dev/urandom of=/tmp/new bs=4k count=64 2>/dev/null");
    // Single blocks that no page cache combines, at odd places, and the last of the disk.
    guest.ok("dd if=/tmp/new of=/dev/vda bs=4k seek=7 count=33 oflag=direct 2>&1");
    guest.ok("dd if=/tmp/new of=/dev/vda bs=4k seek=8191 count=1 oflag=direct 2>&1");
    guest.ok(FORGET);
    let part = |blocks: u64| format!("dd if=/tmp/new bs=4k count={blocks} 2>/dev/null | sha256sum");
    let read = |at: u64, blocks: u64| format!("dd if=/dev/vda bs=4k skip={at} count={blocks} iflag=direct 2>/dev/null");
    for (at, blocks) in [(7, 33), (8191, 1)] {
        let written = guest.ok(&part(blocks));
        assert_eq!(guest.ok(&format!("{} | sha256sum", read(at, blocks))), written, "{at}");
    }
    assert_eq!(guest.ok(&format!("{} | tr -d '\\0' | wc -c", read(40, 8))), "0", "nothing else was written");
    guest.ok(&format!("mke2fs -b 4096 /dev/vda > /dev/null && {MOUNT}"));
    guest.ok("cd /tmp/disk && dd if=/tmp/new of=data bs=1k count=201 2>/dev/null && sha256sum data > sum && sync");
    guest.reboot();
    guest.load("virtio_blk");
    guest.ok(&format!("{MOUNT} && cd /tmp/disk && sha256sum -c sum && cd / && umount /tmp/disk"));
    let seen = digest(&mut guest, "/dev/vda");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    // Through the host's own path to the same device.
    let host = Command::new("sha256sum").stdin(File::open(device.path()).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&host.stdout).trim(), seen);
    let mut magic = [0; 2];
    File::open(&file).unwrap().read_exact_at(&mut magic, 1024 + 56).unwrap();
    assert_eq!(magic, [0x53, 0xef], "the file system is in the file");
}
