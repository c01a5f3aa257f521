//! The other devices of a guest: disks, the entropy device, consoles, the power button and NMIs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::{Api, Guest, GuestSpec, Kernel, Place, Terminal};
use rstest::rstest;
use serde_json::json;

const MIB: usize = 1 << 20;
/// Makes the guest read the disk again, instead of its page cache.
const FORGET: &str = "sync; echo 3 > /proc/sys/vm/drop_caches";

/// Creates an image of `mebibytes` MiB in `folder`. All of its blocks differ.
fn image(folder: &Path, name: &str, mebibytes: usize) -> PathBuf {
    let path = folder.join(name);
    // xorshift64: any sequence that does not repeat would do.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ name.len() as u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let contents: Vec<u8> = (0..mebibytes * MIB / 8).flat_map(|_| next()).collect();
    fs::write(&path, contents).unwrap();
    path
}

/// The digest of a file on the host.
fn digest(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    first_word(&String::from_utf8_lossy(&output.stdout))
}

/// The digest of a disk in the guest, read from the device.
fn digest_in(guest: &mut Guest, disk: &str) -> String {
    first_word(&guest.ok(&format!("{FORGET}; sha256sum {disk}")))
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_disk_has_its_images_contents_and_a_readonly_one_keeps_them(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let (data, fixed) = (image(folder.path(), "data", 8), image(folder.path(), "fixed", 2));
    let spec = GuestSpec::new(kernel)
        .with_modules()
        .cpus(2)
        .disk(&format!("path={},serial=data-1,num_queues=2", data.display()))
        .disk(&format!("path={},serial=fixed,readonly=on,direct=on", fixed.display()));
    let mut guest = Guest::boot(spec);
    guest.load("virtio_blk");
    let shown = "cd /sys/block && for disk in vda vdb; do \
                 echo $(cat $disk/serial) $(cat $disk/ro) $(cat $disk/size) $(ls $disk/mq); done";
    assert_eq!(guest.ok(shown), "data-1 0 16384 0 1\nfixed 1 4096 0");
    let untouched = digest(&fixed);
    assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&data));
    assert_eq!(digest_in(&mut guest, "/dev/vdb"), untouched, "read around the page cache");

    // After a sync, the host's file has what both vCPUs wrote.
    let before = digest(&data);
    guest.ok("dd if=/dev/urandom of=/tmp/new bs=1M count=2 2>&1");
    for (cpu, at) in [(0, 1), (1, 4)] {
        guest.ok(&format!("taskset -c {cpu} dd if=/tmp/new of=/dev/vda bs=64k seek={} conv=fsync 2>&1", at * 16));
    }
    let (new, written) = (guest.ok("sha256sum < /tmp/new"), fs::read(&data).unwrap());
    assert_ne!(digest(&data), before);
    fs::write(folder.path().join("new"), &written[MIB..3 * MIB]).unwrap();
    assert_eq!(digest(&folder.path().join("new")), first_word(&new));
    assert_eq!(written[MIB..3 * MIB], written[4 * MIB..6 * MIB]);
    assert_eq!(written.len(), 8 * MIB);
    assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&data));

    // A discarded range takes no space on the host.
    let blocks = fs::metadata(&data).unwrap().blocks();
    guest.ok("blkdiscard -o 3145728 -l 1048576 /dev/vda");
    assert_eq!(fs::metadata(&data).unwrap().blocks(), blocks - (MIB / 512) as u64);
    assert!(fs::read(&data).unwrap()[3 * MIB..4 * MIB].iter().all(|&byte| byte == 0));
    assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&data));

    assert_ne!(guest.run("dd if=/tmp/new of=/dev/vdb bs=64k conv=fsync").status, 0, "the disk is read-only");
    assert_eq!(digest(&fixed), untouched);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_mounted_file_system_survives_a_reboot(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let disk = image(folder.path(), "root", 16);
    let spec = GuestSpec::new(kernel).with_modules().disk(&format!("path={}", disk.display()));
    let mut guest = Guest::boot(spec);
    let mount = "mkdir -p /tmp/disk && mount -t ext4 /dev/vda /tmp/disk";
    guest.load("virtio_blk");
    guest.ok(&format!("mke2fs /dev/vda > /dev/null && {mount}"));
    let put = "cd /tmp/disk && dd if=/dev/urandom of=data bs=64k count=32 2>/dev/null && sha256sum data > sum && sync";
    guest.ok(put);
    guest.reboot();
    guest.load("virtio_blk");
    guest.ok(&format!("{mount} && cd /tmp/disk && sha256sum -c sum"));
    guest.ok("umount /tmp/disk");
    assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&disk));
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_disk_comes_and_goes_while_the_guest_runs(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let disk = image(folder.path(), "hot", 2);
    let api = Api::new("disk");
    let mut guest = Guest::boot(GuestSpec::new(kernel).with_modules().arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_blk");
    let files = |guest: &Guest| fs::read_dir(format!("/proc/{}/fd", guest.vmm().id())).unwrap().count();
    let mut before = None;
    for _ in 0..3 {
        let config = json!({ "id": "hot", "path": disk, "serial": "hot-1", "pci_device_id": 9 });
        let answer = api.put_json("vm.add-disk", &config);
        assert_eq!((answer.status, answer.body), (200, json!({ "id": "hot", "bdf": "0000:00:09.0" })));
        guest.wait_for("grep -q hot-1 /sys/block/vda/serial");
        assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&disk));
        api.remove_device("hot");
        assert_ne!(guest.run("ls /sys/block/vda /sys/bus/pci/devices/0000:00:09.0").status, 0);
        let now = files(&guest);
        assert_eq!(*before.get_or_insert(now), now, "the VMM has closed what it opened");
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// `qemu-img`, which must succeed, in `folder`.
fn qemu_img(folder: &Path, arguments: &[&str]) -> String {
    let run = Command::new("qemu-img").args(arguments).current_dir(folder).output().unwrap();
    assert!(run.status.success(), "qemu-img {arguments:?}: {run:?}");
    String::from_utf8_lossy(&run.stdout).into_owned()
}

/// Several queues write a file system over a raw image, which does not change, and QEMU finds all of it afterwards.
#[test]
fn a_qcow2_image_with_a_backing_file_survives_reboots_intact() {
    let folder = tempfile::tempdir().unwrap();
    let base = image(folder.path(), "base", 32);
    let untouched = digest(&base);
    qemu_img(folder.path(), &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top"]);
    let disk =
        format!("path={},image_type=qcow2,backing_files=on,num_queues=2,serial=q", folder.path().join("top").display());
    let mut guest = Guest::boot(GuestSpec::new(Kernel::V6_12).with_modules().cpus(2).disk(&disk));
    guest.load("virtio_blk");
    assert_eq!(digest_in(&mut guest, "/dev/vda"), untouched, "as long as nothing is written, it is the backing file");
    let mount = "mkdir -p /tmp/disk && mount -t ext4 /dev/vda /tmp/disk && cd /tmp/disk";
    guest.ok("mke2fs /dev/vda > /dev/null");
    guest.ok(&format!(
        "{mount}; for cpu in 0 1; do taskset -c $cpu dd if=/dev/urandom of=data$cpu bs=64k count=64 2>/dev/null & \
         done; wait; sha256sum data0 data1 > sum; sync"
    ));
    guest.reboot();
    guest.load("virtio_blk");
    guest.ok(&format!("{mount} && sha256sum -c sum && rm data0 && cd / && umount /tmp/disk"));
    guest.ok("blkdiscard -o 8388608 -l 4194304 /dev/vda");
    let seen = digest_in(&mut guest, "/dev/vda");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    assert!(qemu_img(folder.path(), &["check", "top"]).contains("No errors were found"));
    qemu_img(folder.path(), &["convert", "-O", "raw", "top", "flat"]);
    assert_eq!((digest(&folder.path().join("flat")), digest(&base)), (seen, untouched));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_uses_what_a_disk_has_become(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let disk = image(folder.path(), "grows", 2);
    let api = Api::new("resize");
    let spec = GuestSpec::new(kernel).with_modules().disk(&format!("id=grows,path={}", disk.display()));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_blk");
    for mebibytes in [6, 3] {
        let size = mebibytes * MIB as u64;
        let answer = api.put_json("vm.resize-disk", &json!({ "id": "grows", "desired_size": size }));
        assert_eq!(answer.status, 204, "{:?}", answer.body);
        guest.wait_for(&format!("[ $(cat /sys/block/vda/size) = {} ]", size / 512));
        guest.ok(&format!(
            "dd if=/dev/urandom of=/dev/vda bs=64k seek={} count=16 conv=fsync 2>&1",
            (mebibytes - 1) * 16
        ));
        assert_eq!(digest_in(&mut guest, "/dev/vda"), digest(&disk));
        assert_eq!(fs::metadata(&disk).unwrap().len(), size);
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Init uses the console `serial` while another client uses the virtio console.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::serial_pty_on_linux_6_1(Kernel::V6_1, Place::Pty, Place::Socket)]
#[ignore = "a longer test: a second kernel"]
#[case::serial_socket_on_linux_6_1(Kernel::V6_1, Place::Socket, Place::Pty)]
#[case::serial_pty_on_linux_6_12(Kernel::V6_12, Place::Pty, Place::Socket)]
#[case::serial_socket_on_linux_6_12(Kernel::V6_12, Place::Socket, Place::Pty)]
fn both_consoles_carry_characters_both_ways(#[case] kernel: Kernel, #[case] serial: Place, #[case] console: Place) {
    let api = Api::new("console");
    let spec = GuestSpec::new(kernel)
        .with_modules()
        .serial(&serial.argument("serial"))
        .console(&console.argument("console"))
        .arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot_over(spec, || serial.connect("serial", &api));
    guest.load("virtio_console");
    let mut client = console.connect("console", &api);
    // Keep the terminal open: its settings are lost when the last descriptor is closed.
    let reader = "stty raw -echo; echo 'this is hvc0'; while read -r line; do echo \"the guest read $line\"; done";
    guest.ok(&format!("({reader}) < /dev/hvc0 > /dev/hvc0 2>&1 &"));
    client.wait_for("this is hvc0\n");
    client.send("one line\nanother line\n");
    client.wait_for("the guest read one line\n");
    client.wait_for("the guest read another line\n");
    // Each line uses at least one descriptor chain. A socket buffers some 70 of them while no client reads; the rest
    // would be dropped.
    guest.ok("for line in $(seq 40); do echo $line; done > /dev/hvc0");
    let lines: Vec<String> = (1..=40).map(|line| format!("{line}\n")).collect();
    client.wait_for(&lines.concat());
    let long = "x".repeat(3000);
    assert_eq!(guest.ok(&format!("echo {long}")), long, "long lines pass the serial port");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn the_console_in_a_terminal_carries_characters_both_ways(#[case] kernel: Kernel) {
    let terminal = Terminal::new();
    let mut guest = boot_in(&terminal, kernel, "typed");
    // Type only after this has been printed: output does not depend on input.
    let reader = "stty raw -echo; echo 'this is hvc0'; while read -r line; do echo \"the guest read $line\"; done";
    guest.ok(&format!("({reader}) < /dev/hvc0 > /dev/hvc0 2>&1 &"));
    terminal.wait_for("this is hvc0");
    terminal.send("one line\nanother line\n");
    terminal.wait_for("the guest read another line");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    assert!(terminal.is_canonical(), "the terminal's settings are restored");
}

/// A guest whose virtio console is in `terminal`. Init uses its own serial socket, called `name`.
fn boot_in(terminal: &Terminal, kernel: Kernel, name: &str) -> Guest {
    let api = Api::new(name);
    let spec = GuestSpec::new(kernel)
        .with_modules()
        .serial(&Place::Socket.argument(name))
        .console("tty")
        .arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot_in(terminal, spec, || Place::Socket.connect(name, &api));
    guest.load("virtio_console");
    guest
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn the_console_is_as_large_as_the_terminal_and_follows_it(#[case] kernel: Kernel) {
    let terminal = Terminal::new();
    terminal.set_size(80, 25);
    let mut guest = boot_in(&terminal, kernel, "window");
    // Linux applies the size only to a terminal that is open.
    guest.ok("sleep 1000 < /dev/hvc0 > /dev/null 2>&1 &");
    guest.wait_for("[ \"$(stty size < /dev/hvc0)\" = '25 80' ]");
    for (columns, rows) in [(132, 50), (300, 7)] {
        terminal.set_size(columns, rows);
        guest.vmm().signal(libc::SIGWINCH);
        guest.wait_for(&format!("[ \"$(stty size < /dev/hvc0)\" = '{rows} {columns}' ]"));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_has_random_numbers_a_power_button_and_nmis(#[case] kernel: Kernel) {
    let api = Api::new("events");
    let mut guest = Guest::boot(GuestSpec::new(kernel).with_modules().arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_rng");
    guest.wait_for("grep -q virtio_rng /sys/class/misc/hw_random/rng_current");
    let mut draw = || guest.ok("head -c 4096 /dev/hwrng > /tmp/random && wc -c < /tmp/random && sha256sum /tmp/random");
    let (one, other) = (draw(), draw());
    assert!(one.starts_with("4096\n") && other.starts_with("4096\n"), "{one} {other}");
    assert_ne!(one, other);
    // gzip cannot compress 4 KiB of random numbers.
    assert!(guest.ok("gzip -c /tmp/random | wc -c").trim().parse::<usize>().unwrap() > 4000);

    guest.load("evdev");
    guest.load("button");
    guest.ok("(head -c 24 /dev/input/event0 | xxd -p > /tmp/event) > /dev/null 2>&1 &");
    guest.wait_for("ls -l /proc/[0-9]*/fd | grep -q /dev/input/event0");
    assert_eq!(api.put("vm.power-button").status, 204);
    guest.wait_for("[ -s /tmp/event ]");
    // struct input_event: a time of 16 bytes, EV_KEY, KEY_POWER, pressed.
    assert!(guest.ok("tr -d '\\n' < /tmp/event").ends_with("0100740001000000"), "{}", guest.ok("cat /tmp/event"));

    assert_eq!(guest.ok("awk '/NMI:/ { print $2 }' /proc/interrupts"), "0");
    guest.ok("echo 0 > /proc/sys/kernel/unknown_nmi_panic");
    assert_eq!(api.put("vm.nmi").status, 204);
    guest.wait_for("grep -q 'NMI: *1 ' /proc/interrupts");
    guest.wait_for("dmesg | grep -q 'NMI received for unknown reason'");
    assert_eq!(guest.power_off().code, Some(0));
}
