//! Linux started by Cloud Hypervisor's own firmware (rust-hypervisor-firmware). Without the firmware's file, each test
//! prints a line and passes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::{
    Api, Guest, GuestSpec, HostTap, Pf, Place, StoragePeer, Subnet, VmmCommand, firmware_disk, hypervisor_fw, vf_taps,
};
use rstest::rstest;
use serde_json::json;

const VFS: usize = 8;
/// The networks of NICs that are not VFs.
const PLAIN: Subnet = Subnet(210);
const MIB: u64 = 1 << 20;

/// The form of the disk with the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Raw,
    Direct,
    ReadOnly,
    Qcow2,
    VhostUser,
}

/// The files of a VM's disks, and the process that serves one.
struct Disks {
    folder: tempfile::TempDir,
    peer: Option<StoragePeer>,
}

impl Disks {
    fn new() -> Disks {
        Disks { folder: tempfile::tempdir().unwrap(), peer: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn copy(&self) -> PathBuf {
        let copy = self.path("disk");
        fs::copy(firmware_disk(), &copy).unwrap();
        copy
    }

    /// The value of `--disk` for the disk with the kernel. A qcow2 image and a read-only disk share the lab's file.
    fn bootable(&mut self, form: Form) -> String {
        match form {
            Form::Raw => format!("path={}", self.copy().display()),
            Form::Direct => format!("path={},direct=on", self.copy().display()),
            Form::ReadOnly => format!("path={},readonly=on", firmware_disk().display()),
            Form::Qcow2 => {
                let top = self.path("top");
                let mut command = Command::new("qemu-img");
                command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(firmware_disk()).arg(&top);
                assert!(command.status().unwrap().success(), "{command:?}");
                format!("path={},image_type=qcow2,backing_files=on", top.display())
            }
            Form::VhostUser => {
                let peer = StoragePeer::qemu_storage_daemon(self.folder.path(), "blk.sock", &self.copy());
                let value = format!("vhost_user=on,socket={}", peer.socket().display());
                self.peer = Some(peer);
                value
            }
        }
    }

    /// The value of `--disk` for a disk on which the firmware finds nothing.
    fn empty(&self, name: &str) -> String {
        let path = self.path(name);
        fs::File::create(&path).unwrap().set_len(MIB).unwrap();
        format!("path={},image_type=raw", path.display())
    }
}

/// The option that gives the guest a PF with 8 VFs.
fn with_vfs(spec: GuestSpec) -> GuestSpec {
    spec.net(&format!("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs={VFS}"))
}

/// Enables all VFs, and sends frames through each.
fn enable_vfs(guest: &mut Guest) {
    let pf = Pf::find(guest);
    assert_eq!(pf.read(guest, "sriov_numvfs"), "0");
    pf.set_num_vfs(guest, VFS);
    use_vfs(guest, &pf);
}

fn use_vfs(guest: &mut Guest, pf: &Pf) {
    let (vfs, taps) = (pf.vfs(guest), vf_taps(VFS));
    assert_eq!(vfs.len(), VFS);
    for vf in vfs {
        vf.ping_through(guest, &taps, vf.index, Subnet(vf.index as u8));
    }
}

/// Checks that Linux has `count` disks, and reads each.
fn read_disks(guest: &mut Guest, count: usize) {
    guest.load("virtio_blk");
    assert_eq!(guest.ok("ls /sys/block | grep -c '^vd'"), count.to_string());
    guest.ok("for disk in /sys/block/vd*; do head -c 1048576 /dev/${disk##*/} > /dev/null || exit 1; done");
}

fn end(mut guest: Guest) {
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// 256 MiB of memory, and a disk that the firmware reads in unaligned buffers.
#[test]
fn hypervisor_fw_boots_linux_beside_8_vfs_and_again_by_a_reboot() {
    let Some(firmware) = hypervisor_fw() else { return };
    let mut disks = Disks::new();
    let spec = with_vfs(GuestSpec::by_hypervisor_fw("--firmware", &firmware)).disk(&disks.bootable(Form::Direct));
    let mut guest = Guest::start_by_firmware(spec.command());
    guest.wait_for_linux();
    enable_vfs(&mut guest);
    guest.reboot_by_firmware();
    enable_vfs(&mut guest);
    read_disks(&mut guest, 1);
    end(guest);
}

/// Two disks are empty; one of them and another NIC are on a second segment. Linux has 6 GiB of memory and never
/// touches most of it, which exceeds this machine's.
#[test]
fn hypervisor_fw_finds_a_qcow2_image_among_3_disks() {
    let Some(firmware) = hypervisor_fw() else { return };
    let mut disks = Disks::new();
    let far = format!("{},pci_segment=1", disks.empty("far"));
    let spec = with_vfs(GuestSpec::by_hypervisor_fw("--kernel", &firmware))
        .memory("size=6G")
        .arguments(&["--platform", "num_pci_segments=2", "--disk", &far, &disks.empty("first")])
        .arguments(&[&disks.bootable(Form::Qcow2)])
        .net("id=other,tap=other,mac=52:54:00:00:00:02,pci_segment=1");
    let mut guest = Guest::start_by_firmware(spec.command());
    guest.wait_for_linux();
    enable_vfs(&mut guest);
    let kib: u64 = guest.ok("awk '/MemTotal/ { print $2 }' /proc/meminfo").parse().unwrap();
    assert!(kib > 5700 << 10, "{kib} KiB");
    let other = guest.ok("ls /sys/bus/pci/devices/0001:00:*/virtio*/net");
    HostTap::existing("other").join(PLAIN);
    guest.join(other.trim(), PLAIN);
    guest.ping(other.trim(), PLAIN);
    read_disks(&mut guest, 3);
    end(guest);
}

/// A client of the API creates the guest. Another process serves its disk.
#[test]
fn hypervisor_fw_boots_a_disk_of_another_process_by_rest() {
    let Some(firmware) = hypervisor_fw() else { return };
    let disks = Disks::new();
    let peer = StoragePeer::qemu_storage_daemon(disks.folder.path(), "blk.sock", &disks.copy());
    let api = Api::new("firmware");
    let create = json!({
        "payload": {"firmware": firmware}, "memory": {"size": 512 * MIB, "shared": true},
        "disks": [{"vhost_user": true, "vhost_socket": peer.socket()}],
        "net": [{"id": "pf0", "tap": "pf0", "sriov_vfs": VFS}],
        "serial": {"mode": "Tty"}, "console": {"mode": "Off"},
    });
    let mut guest = Guest::restored_by(VmmCommand::new().args(["--api-socket", &api.argument()]));
    let answer = api.put_json("vm.create", &create);
    assert_eq!(answer.status, 204, "{}", answer.body);
    let answer = api.put("vm.boot");
    assert_eq!(answer.status, 204, "{}", answer.body);
    guest.wait_for_linux();
    enable_vfs(&mut guest);
    read_disks(&mut guest, 1);
    end(guest);
}

/// Saves the guest, ends its VMM, and restores it in another one.
fn move_by_snapshot(guest: Guest, api: &Api, folder: &Path, name: &str) -> (Guest, Api) {
    fs::create_dir(folder).unwrap();
    let url = format!("file://{}", folder.display());
    assert_eq!(api.put("vm.pause").status, 204);
    let answer = api.put_json("vm.snapshot", &json!({ "destination_url": url }));
    assert_eq!(answer.status, 204, "{}", answer.body);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);
    let api = Api::new(name);
    let command = VmmCommand::new().args(["--restore", &format!("source_url={url}"), "--api-socket", &api.argument()]);
    let guest = Guest::restored_by(command);
    assert_eq!(api.info()["state"], "Paused");
    (guest, api)
}

/// The firmware is saved while it reads the kernel. Later, Linux is saved with its VFs.
#[test]
fn hypervisor_fw_and_linux_resume_from_snapshots() {
    let Some(firmware) = hypervisor_fw() else { return };
    let mut disks = Disks::new();
    let api = Api::new("first");
    let spec = with_vfs(GuestSpec::by_hypervisor_fw("--firmware", &firmware))
        .disk(&disks.bootable(Form::Raw))
        .arguments(&["--api-socket", &api.argument()]);
    let guest = Guest::start_by_firmware(spec.command());
    assert!(!guest.has_left_firmware());
    let (mut guest, api) = move_by_snapshot(guest, &api, &disks.path("in-firmware"), "second");
    assert_eq!(api.put("vm.resume").status, 204);
    guest.wait_for_linux();
    enable_vfs(&mut guest);
    guest.ok("head -c 32 /dev/urandom | md5sum > /tmp/nonce");
    let known = guest.ok("cat /proc/sys/kernel/random/boot_id /tmp/nonce");
    let (mut guest, api) = move_by_snapshot(guest, &api, &disks.path("in-linux"), "third");
    assert_eq!(api.put("vm.resume").status, 204);
    assert_eq!(guest.ok("cat /proc/sys/kernel/random/boot_id /tmp/nonce"), known);
    let pf = Pf::find(&mut guest);
    use_vfs(&mut guest, &pf);
    read_disks(&mut guest, 1);
    end(guest);
}

/// The command line of virtink's prerunner for a VM without its own kernel: two cores, a container disk.
#[test]
fn hypervisor_fw_boots_linux_as_virtink_starts_it() {
    let Some(firmware) = hypervisor_fw() else { return };
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("ch.sock");
    let tap = HostTap::persistent("tap-eth0");
    let command = VmmCommand::new()
        .args(["--api-socket", &socket.display().to_string(), "--console", "pty", "--serial", "tty", "--kernel"])
        .arg(&firmware)
        .args(["--cpus", "boot=2,topology=1:2:1:1", "--memory", "size=1073741824"])
        .args(["--disk", &format!("id=a,path={},readonly=on", firmware_disk().display())])
        .args(["--net", "id=n,mac=52:54:00:00:00:03,tap=tap-eth0"]);
    let mut guest = Guest::start_by_firmware(command);
    guest.wait_for_linux();
    assert_eq!(guest.ok("nproc; cat /sys/class/net/eth0/address"), "2\n52:54:00:00:00:03");
    tap.join(PLAIN);
    guest.join("eth0", PLAIN);
    guest.ping("eth0", PLAIN);
    read_disks(&mut guest, 1);
    assert_eq!(guest.ok("cat /sys/block/vda/ro"), "1");
    end(guest);
}

/// Requests of libvirt's driver for a domain whose `<kernel>` is the firmware: libvirt has no other key for firmware.
/// `tests/api/clients` replays the requests byte for byte.
#[test]
#[ignore = "a longer test"]
fn hypervisor_fw_boots_linux_as_libvirt_starts_it() {
    let Some(firmware) = hypervisor_fw() else { return };
    let disks = Disks::new();
    let api = Api::new("libvirt");
    let (tap, queues) = HostTap::open_queues("vnet0", 1);
    let create = json!({
        "console": {"mode": "Pty"}, "serial": {"mode": "Pty"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "memory": {"size": 1024 * MIB}, "payload": {"kernel": firmware}, "disks": [{"path": disks.copy()}],
    });
    let add_net = json!({"id": "net_0", "mac": "52:54:00:00:00:04", "num_queues": 2, "queue_size": 256});
    let vmm = VmmCommand::new().args(["--api-socket", &api.argument()]).spawn();
    for (answer, of) in [
        (api.put_json("vm.create", &create), "vm.create"),
        (api.put_with_fds("vm.add-net", &add_net, &queues), "vm.add-net"),
        (api.put("vm.boot"), "vm.boot"),
    ] {
        assert_eq!(answer.status, 204, "{of}: {}", answer.body);
    }
    let mut guest = Guest::over(vmm, Place::Pty.connect("serial", &api));
    guest.wait_for_linux();
    tap.join(PLAIN);
    guest.join("eth0", PLAIN);
    guest.ping("eth0", PLAIN);
    read_disks(&mut guest, 1);
    end(guest);
}

/// Combinations that the tests above leave out: each form of the disk, alone and after two others, with each option,
/// with much and little memory; each guest boots twice.
#[rstest]
#[ignore = "a longer test: disks, options and sizes once more"]
#[case::raw("--kernel", Form::Raw, 3, "size=256M")]
#[ignore = "a longer test: disks, options and sizes once more"]
#[case::direct("--kernel", Form::Direct, 3, "size=6G")]
#[ignore = "a longer test: disks, options and sizes once more"]
#[case::read_only("--firmware", Form::ReadOnly, 3, "size=6G")]
#[ignore = "a longer test: disks, options and sizes once more"]
#[case::qcow2("--firmware", Form::Qcow2, 1, "size=256M")]
#[ignore = "a longer test: disks, options and sizes once more"]
#[case::vhost_user("--kernel", Form::VhostUser, 3, "size=256M,shared=on")]
fn hypervisor_fw_boots_each_disk_twice(
    #[case] option: &'static str,
    #[case] form: Form,
    #[case] count: usize,
    #[case] memory: &str,
) {
    let Some(firmware) = hypervisor_fw() else { return };
    let mut disks = Disks::new();
    let other = |number: usize| format!("{},pci_segment={}", disks.empty(&number.to_string()), number - 1);
    let others: Vec<_> = (1..count).map(other).collect();
    let mut spec = with_vfs(GuestSpec::by_hypervisor_fw(option, &firmware)).memory(memory);
    spec = spec.arguments(&["--platform", "num_pci_segments=2", "--disk"]);
    for other in &others {
        spec = spec.arguments(&[other]);
    }
    let mut guest = Guest::start_by_firmware(spec.arguments(&[&disks.bootable(form)]).command());
    guest.wait_for_linux();
    enable_vfs(&mut guest);
    guest.reboot_by_firmware();
    enable_vfs(&mut guest);
    read_disks(&mut guest, count);
    end(guest);
}
