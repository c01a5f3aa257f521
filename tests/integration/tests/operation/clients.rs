//! Linux guests that are started in the way of Cloud Hypervisor's clients. `tests/api/clients` replays these clients'
//! requests byte for byte, with guests of a few instructions.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use integration::{
    Api, Guest, HostTap, Image, Kernel, StoragePeer, Subnet, Userland, VmmCommand, call, exchange, initramfs,
    kernel_file,
};
use serde_json::json;

const KERNEL: Kernel = Kernel::V6_12;
const SUBNET: Subnet = Subnet(210);
const MIB: u64 = 1 << 20;
/// Linux's memory blocks of 128 MiB from 4 GiB on, the place of added memory.
const FIRST_BLOCK: u64 = 32;

/// The files of a VM: a folder to share, and a disk with the program that uses vsock.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        let files = Files(tempfile::tempdir().unwrap());
        fs::create_dir(files.path("shared")).unwrap();
        fs::write(files.path("shared/from-host"), "a file of the host").unwrap();
        let mut program = fs::read(env!("CARGO_BIN_EXE_vsock")).unwrap();
        program.resize(program.len().next_multiple_of(4096), 0);
        fs::write(files.path("program"), program).unwrap();
        fs::write(files.path("empty"), vec![0; 1 << 20]).unwrap();
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn virtiofsd(&self) -> StoragePeer {
        StoragePeer::virtiofsd(self.0.path(), "virtiofsd.sock", &self.path("shared"))
    }
}

/// The guest has its disk, its shared folder and its vsock.
fn check_devices(guest: &mut Guest, files: &Files, tag: &str, vsock: &Path) {
    guest.load("virtio_blk");
    guest.ok("dd if=/dev/vda of=/tmp/vsock bs=64k 2>/dev/null && chmod +x /tmp/vsock");
    guest.load("virtiofs");
    guest.ok(&format!("mkdir -p /mnt/shared && mount -t virtiofs {tag} /mnt/shared"));
    assert_eq!(guest.ok("cat /mnt/shared/from-host"), "a file of the host");
    guest.ok("echo a file of the guest > /mnt/shared/from-guest");
    assert_eq!(fs::read_to_string(files.path("shared/from-guest")).unwrap(), "a file of the guest\n");
    guest.load("vmw_vsock_virtio_transport");
    guest.ok("(/tmp/vsock listen 1024 1048576 > /tmp/listen 2>&1; echo ended >> /tmp/listen) > /dev/null 2>&1 &");
    exchange(&call(vsock, 1024), 1 << 20);
    guest.wait_for("grep -q ended /tmp/listen");
    assert_eq!(guest.ok("cat /tmp/listen"), "listening\nsame 1048576\nended");
}

/// Kata's default configuration, with less memory and a console: a shared folder on a second PCI segment, a NIC whose
/// tap was opened in another namespace, a vsock for the agent, and memory and vCPUs that a container adds.
#[test]
fn a_kata_guest_has_nic_disk_vsock_and_folder_and_grows() {
    let files = Files::new();
    let virtiofsd = files.virtiofsd();
    let api = Api::new("kata");
    let (tap, queues) = HostTap::open_queues("kata0", 1);
    let create = json!({
        "console": {"iommu": false, "mode": "Off"},
        "cpus": {
            "boot_vcpus": 1, "kvm_hyperv": false, "max_vcpus": 4, "nested": true,
            "topology": {"cores_per_die": 4, "dies_per_package": 1, "packages": 1, "threads_per_core": 1},
        },
        "disks": [{
            "backing_files": false, "direct": false, "image_type": "Raw", "iommu": false, "num_queues": 1,
            "path": files.path("program"), "queue_size": 128, "readonly": true, "sparse": true, "vhost_user": false,
        }],
        "fs": [{
            "num_queues": 1, "pci_segment": 1, "queue_size": 1024, "socket": virtiofsd.socket(), "tag": "kataShared",
        }],
        "iommu": false, "landlock_enable": false,
        "memory": {
            "hotplug_method": "Acpi", "hotplug_size": 2048 * MIB, "hugepages": false, "mergeable": false,
            "prefault": false, "shared": true, "size": 512 * MIB, "thp": true,
        },
        "payload": {
            "cmdline": "console=ttyS0,115200n8 quiet panic=-1 ipv6.disable=1 no_timer_check noreplace-smp",
            "initramfs": initramfs(KERNEL, Userland::Modules), "kernel": kernel_file(KERNEL, Image::Vmlinux),
        },
        "platform": {"num_pci_segments": 2, "sev_snp": false, "tdx": false}, "pvpanic": false,
        "rng": {"iommu": false, "src": "/dev/urandom"}, "serial": {"iommu": false, "mode": "Tty"},
        "vsock": {"cid": 3, "iommu": false, "socket": files.path("clh.sock")}, "watchdog": false,
    });
    let add_net = json!({
        "iommu": false, "ip": "192.168.249.1", "mac": "02:00:00:00:00:01", "mask": "255.255.255.0", "num_queues": 2,
        "offload_csum": true, "offload_tso": true, "offload_ufo": true, "queue_size": 256, "vhost_mode": "Client",
        "vhost_user": false,
    });
    let command = VmmCommand::new().args(["--seccomp", "false", "--api-socket", &api.argument()]);
    let mut guest = Guest::boot_by(command, || {
        for (answer, of) in [
            (api.put_json("vm.create", &create), "vm.create"),
            (api.put_with_fds("vm.add-net", &add_net, &queues), "vm.add-net"),
            (api.put("vm.boot"), "vm.boot"),
        ] {
            assert_eq!(answer.status, 204, "{of}: {answer:?}");
        }
        drop(queues);
    });
    tap.join(SUBNET);
    assert_eq!(guest.ok("cat /sys/class/net/eth0/address"), "02:00:00:00:00:01");
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    check_devices(&mut guest, &files, "kataShared", &files.path("clh.sock"));
    assert_eq!(guest.ok("ls -d /sys/bus/pci/devices/0001:*"), "/sys/bus/pci/devices/0001:00:01.0");

    // A container: its disk, at the address in the answer, more memory and another vCPU.
    let disk = json!({"path": files.path("empty"), "readonly": false, "num_queues": 1, "queue_size": 1024});
    let added = api.put_json("vm.add-disk", &disk);
    assert_eq!(added.status, 200, "{added:?}");
    let block = format!("/sys/bus/pci/devices/{}/virtio*/block/vdb", added.body["bdf"].as_str().unwrap());
    guest.wait_for(&format!("ls -d {block}"));
    assert_eq!(api.put_json("vm.resize", &json!({"desired_ram": 1024 * MIB})).status, 204);
    for block in FIRST_BLOCK..FIRST_BLOCK + 4 {
        guest.wait_for(&format!("[ -e /sys/devices/system/memory/memory{block} ]"));
    }
    assert_eq!(api.info()["config"]["memory"]["size"], json!(1024 * MIB));
    assert_eq!(api.put_json("vm.resize", &json!({"desired_vcpus": 2})).status, 204);
    guest.wait_for("[ -e /sys/devices/system/cpu/cpu1/online ]");
    assert_eq!(api.put_json("vm.remove-device", &json!({"id": added.body["id"]})).status, 204);
    guest.wait_for("[ ! -e /sys/block/vdb ]");
    // The backend of the folder reaches the new memory as well.
    assert_eq!(guest.ok("cat /mnt/shared/from-host"), "a file of the host");
    guest.assert_kernel_has_no_complaint();
    let exit = guest.end_by(|| assert_eq!(api.put("vmm.shutdown").status, 200));
    assert_eq!(exit.code, Some(0));
    drop(tap);
}

/// The command line of microvm.nix, each option's keys sorted, with the console that the test needs. Debian's kernels
/// have no driver for the watchdog, so it has no effect.
#[test]
fn a_microvm_nix_guest_has_volumes_share_tap_and_notify_socket() {
    let files = Files::new();
    let virtiofsd = files.virtiofsd();
    let path = |name: &str| files.path(name).display().to_string();
    let api = Api::new("microvm");
    let kernel = kernel_file(KERNEL, Image::Vmlinux).display().to_string();
    let initrd = initramfs(KERNEL, Userland::Modules).display().to_string();
    let command = VmmCommand::new()
        .args(["--cpus", "boot=2", "--watchdog", "--kernel", &kernel, "--initramfs", &initrd])
        .args(["--cmdline", "earlyprintk=ttyS0 console=ttyS0 reboot=t panic=-1 quiet ipv6.disable=1"])
        .args(["--seccomp", "true", "--memory", "mergeable=on,shared=on,size=512M"])
        .args(["--platform", "oem_strings=[io.systemd.credential:vmm.notify_socket=vsock-stream:2:8888]"])
        .args(["--console", "null", "--serial", "tty"])
        .args(["--vsock", &format!("cid=3,socket={}", path("notify.vsock"))])
        .args(["--balloon", "deflate_on_oom=on,free_page_reporting=on,size=0M"])
        .args(["--disk", &format!("num_queues=2,path={},readonly=on", path("program"))])
        .arg(format!("direct=off,image_type=raw,num_queues=2,path={},readonly=off,serial=data", path("empty")))
        .args(["--fs", &format!("socket={},tag=ro-store", virtiofsd.socket().display())])
        .args(["--api-socket", &api.argument(), "--net", "mac=02:00:00:00:00:02,num_queues=4,tap=microvm0"]);
    let notified = UnixListener::bind(files.path("notify.vsock_8888")).unwrap();
    let mut guest = Guest::boot_by(command, || {});
    let tap = HostTap::existing("microvm0");
    tap.join(SUBNET);
    guest.join("eth0", SUBNET);
    guest.ping("eth0", SUBNET);
    check_devices(&mut guest, &files, "ro-store", &files.path("notify.vsock"));
    assert_eq!(guest.ok("cat /sys/block/vdb/serial"), "data");
    // systemd finds the address of its notification socket among the strings of the firmware tables.
    guest.ok("tr '\\000' '\\n' < /sys/firmware/dmi/tables/DMI | grep -q vmm.notify_socket=vsock-stream:2:8888");
    guest.ok("(/tmp/vsock connect 8888 4096 > /tmp/connect 2>&1; echo ended >> /tmp/connect) > /dev/null 2>&1 &");
    let (stream, _) = notified.accept().unwrap();
    exchange(&stream, 4096);
    guest.wait_for("grep -q ended /tmp/connect");
    assert_eq!(guest.ok("cat /tmp/connect"), "same 4096\nended");
    guest.load("button");
    guest.load("virtio_balloon");
    assert_eq!(api.put_json("vm.resize", &json!({"desired_balloon": 64 * MIB})).status, 204);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
