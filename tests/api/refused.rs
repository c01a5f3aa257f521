//! Devices that cannot be added to a running VM. Each test sends its request 20 times: the client gets one sentence
//! with the fault and the remedy, with the right status; nothing is left behind; and the request succeeds once the
//! cause is gone.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::Command;

use serde_json::{Value, json};

use crate::net::tap::{self, Kept, Queues};
use crate::rig::client::{Answer, Client};
use crate::rig::vmm::{BINARY, Vmm, reasons, taps};

const TIMES: usize = 20;

const NET: &str = "vm.add-net";
const BAD_REQUEST: u16 = 400;
const CONFLICT: u16 = 409;
const HOST: u16 = 500;

/// A request to be sent repeatedly.
struct Asked<'a> {
    vmm: &'a Vmm,
    client: Client,
    endpoint: &'static str,
    body: Value,
    fds: Vec<OwnedFd>,
}

/// The host resources of the VMM, and its report of the VM.
#[derive(Debug, PartialEq)]
struct Held {
    taps: Vec<String>,
    files: usize,
    threads: Vec<String>,
    info: Value,
}

impl<'a> Asked<'a> {
    /// A request to a VM booted with these NICs.
    fn new(vmm: &'a Vmm, nets: Value, endpoint: &'static str, body: Value) -> Self {
        Self::of(vmm, vmm.boot(nets), endpoint, body)
    }

    /// A request to the VM that `client` has booted.
    fn of(vmm: &'a Vmm, client: Client, endpoint: &'static str, body: Value) -> Self {
        Self { vmm, client, endpoint, body, fds: Vec::new() }
    }

    fn net(vmm: &'a Vmm, nets: Value, body: Value) -> Self {
        Self::new(vmm, nets, NET, body)
    }

    fn ask(&mut self) -> Answer {
        self.client.ask("PUT", self.endpoint, Some(&self.body), &self.fds)
    }

    /// Sends the request repeatedly: it must be refused each time, and nothing may change. All taps of the VM have
    /// names with this `prefix`.
    fn is_refused(&mut self, prefix: &str, status: u16, sentence: &str) {
        let before = self.held(prefix);
        let context = match self.endpoint {
            NET => "the NIC cannot be added",
            "vm.add-disk" => "the disk cannot be added",
            "vm.add-fs" => "the file system cannot be added",
            "vm.add-pmem" => "the persistent memory cannot be added",
            "vm.add-generic-vhost-user" | "vm.add-device" => "the device cannot be added",
            _ => "the vDPA device cannot be added",
        };
        for time in 0..TIMES {
            let answer = self.ask();
            assert_eq!((answer.status, reasons(&answer)), (status, vec![context, sentence]));
            assert_eq!(self.held(prefix), before, "after attempt {time}");
        }
    }

    /// Sends the request, which must succeed.
    fn is_done(&mut self) {
        let added = self.ask().expect(200);
        let id = added["id"].as_str().unwrap();
        let info = self.client.get("vm.info").expect(200);
        assert!(info["device_tree"][id].is_object(), "{id} in {info}");
    }

    fn held(&mut self, prefix: &str) -> Held {
        Held {
            taps: taps(prefix),
            files: self.vmm.open_files(),
            threads: self.vmm.threads(),
            info: self.client.get("vm.info").expect(200),
        }
    }

    /// Removes a device. Its guest releases it only by a reboot.
    fn remove(&mut self, id: &str) {
        self.client.put_json("vm.remove-device", &json!({"id": id})).expect(204);
        self.client.put("vm.reboot").expect(204);
    }
}

#[test]
fn a_tap_name_that_cannot_be() {
    let vmm = Vmm::start();
    let mut asked = Asked::net(&vmm, json!([{"tap": "ara0"}]), json!({"id": "n", "tap": "ara a tap", "sriov_vfs": 2}));
    asked.is_refused("ara", BAD_REQUEST, "tap=ara a tap: ' ' cannot be part of the name of an interface; leave it out");
    asked.body["tap"] = json!("ara1");
    asked.is_done();
}

#[test]
fn a_tap_that_may_not_be_created() {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", BINARY]);
    let vmm = Vmm::of(command);
    let mut asked = Asked::net(&vmm, json!([]), json!({"id": "n", "tap": "arb0"}));
    asked.is_refused(
        "arb",
        HOST,
        "--net id=n: no permission to create the tap arb0; create it for this user (ip tuntap add arb0 mode tap user \
         USER), \
         or run with CAP_NET_ADMIN",
    );
    let _tap = Kept::new("arb0");
    asked.is_done();
}

#[test]
fn an_id_that_is_used() {
    let vmm = Vmm::start();
    let mut asked = Asked::net(&vmm, json!([{"id": "n", "tap": "arc0"}]), json!({"id": "n", "tap": "arc1"}));
    asked.is_refused("arc", CONFLICT, "id=n: this id is already in use by another NIC; give each NIC its own");
    asked.remove("n");
    asked.is_done();
}

#[test]
fn a_mac_address_of_another_function_of_the_device() {
    let vmm = Vmm::start();
    let vfs = json!([{"index": 1, "mac": "52:54:00:00:00:01"}]);
    let body = json!({"id": "pf", "tap": "ard1", "mac": "52:54:00:00:00:01", "sriov_vfs": 2, "vfs": vfs});
    let mut asked = Asked::net(&vmm, json!([{"id": "n", "tap": "ard0"}]), body);
    asked.is_refused(
        "ard",
        CONFLICT,
        "vfs[0].mac=52:54:00:00:00:01: MAC address 52:54:00:00:00:01 is already in use by pf; give each NIC and each \
         VF its own",
    );
    asked.body["mac"] = json!("52:54:00:00:00:02");
    asked.is_done();
}

#[test]
fn a_device_for_which_there_is_no_slot() {
    let vmm = Vmm::start();
    // 31 slots minus the one of the entropy device.
    let nets: Vec<_> = (0..30).map(|n| json!({"id": format!("n{n}"), "tap": format!("are{n}")})).collect();
    let mut asked = Asked::net(&vmm, json!(nets), json!({"id": "more", "tap": "aremore", "sriov_vfs": 1}));
    let taken = "--net id=more: all slots of bus 0 are taken; remove a device, or give a NIC VFs (sriov_vfs=) in place \
                 of more NICs";
    asked.is_refused("are", CONFLICT, taken);
    asked.remove("n7");
    asked.is_done();
}

#[test]
fn a_slot_that_is_used() {
    let vmm = Vmm::start();
    let mut asked = Asked::net(
        &vmm,
        json!([{"id": "n", "tap": "arf0", "pci_device_id": 9}]),
        json!({"id": "m", "tap": "arf1", "pci_device_id": 9}),
    );
    asked.is_refused(
        "arf",
        CONFLICT,
        "pci_device_id=9: slot 9 is already in use by n; give another, or leave pci_device_id out",
    );
    asked.remove("n");
    asked.is_done();
}

#[test]
fn vfs_for_which_there_are_no_buses() {
    let vmm = Vmm::start();
    let mut asked = Asked::net(
        &vmm,
        json!([{"id": "pf0", "tap": "arg0", "sriov_vfs": 1}]),
        json!({"id": "pf1", "tap": "arg1", "sriov_vfs": 32_512}),
    );
    asked.is_refused(
        "arg",
        BAD_REQUEST,
        "sriov_vfs=32512: takes 127 of the VM's 127 buses for VFs, but 126 are free; reserve fewer",
    );
    asked.body["sriov_vfs"] = json!(4);
    asked.is_done();
}

/// Number of open files that the VM needs, according to the error.
fn enough(asked: &mut Asked<'_>) -> u64 {
    let answer = asked.ask();
    let words = reasons(&answer)[1].strip_prefix("this VM needs up to ").unwrap();
    words.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn vfs_that_need_more_open_files_than_there_may_be() {
    let vmm = Vmm::limited(686);
    let mut asked = Asked::net(
        &vmm,
        json!([{"id": "pf0", "tap": "arh0", "sriov_vfs": 16}]),
        json!({"id": "pf1", "tap": "arh1", "sriov_vfs": 24}),
    );
    let needed = enough(&mut asked);
    asked.is_refused(
        "arh",
        HOST,
        &format!(
            "this VM needs up to {needed} open files, and the limit is 686; raise it (ulimit -n {needed}, or \
             LimitNOFILE={needed} in a systemd unit), or reserve fewer VFs"
        ),
    );
    asked.remove("pf0");
    asked.is_done();
}

#[test]
fn a_disk_without_an_image() {
    let vmm = Vmm::start();
    let image = vmm.files.path("image");
    let mut asked = Asked::new(&vmm, json!([]), "vm.add-disk", json!({"id": "d", "path": &image}));
    let shown = image.display();
    let sentence = format!("--disk id=d: path={shown}: does not exist; create it: truncate -s 10G {shown}");
    asked.is_refused("ari", BAD_REQUEST, &sentence);
    vmm.files.sparse("image", 1 << 20);
    asked.is_done();
}

#[test]
fn a_tap_that_another_process_has() {
    let other = Vmm::start();
    let mut others = other.boot(json!([{"tap": "arj1"}]));
    let vmm = Vmm::start();
    // VF 0's tap is created and removed again.
    let body = json!({"id": "pf", "tap": "arj0", "sriov_vfs": 2, "vfs": [{"index": 1, "tap": "arj1"}]});
    let mut asked = Asked::net(&vmm, json!([]), body);
    asked.is_refused(
        "arj",
        CONFLICT,
        "--net-vf pf=pf,index=1: arj1 is in use by another process; stop that one, or name another tap",
    );
    others.put("vm.delete").expect(204);
    asked.is_done();
}

/// Error for a device with this option that is added to a VM booted with private memory.
fn private_memory(option: &str) -> String {
    format!(
        "{option}: its backend must map the guest's memory, which is private in this VM; boot the VM with --memory \
         shared=on, or with such a backend"
    )
}

#[test]
fn a_backend_that_cannot_reach_the_memory() {
    let vmm = Vmm::start();
    let vdpa = json!({"id": "v", "path": "/dev/vhost-vdpa-none"});
    let mut asked = Asked::new(&vmm, json!([]), "vm.add-vdpa", vdpa);
    asked.is_refused("ark", BAD_REQUEST, &private_memory("--vdpa id=v"));
    let socket = "/nonexistent/s";
    for (endpoint, option, body) in [
        ("vm.add-fs", "--fs id=f", json!({"id": "f", "tag": "t", "socket": socket})),
        ("vm.add-disk", "--disk id=f", json!({"id": "f", "vhost_user": true, "vhost_socket": socket})),
        (
            "vm.add-generic-vhost-user",
            "--generic-vhost-user id=f",
            json!({"id": "f", "device_type": 25, "socket": socket, "queue_sizes": [64]}),
        ),
    ] {
        (asked.endpoint, asked.body) = (endpoint, body);
        asked.is_refused("ark", BAD_REQUEST, &private_memory(option));
    }
    asked.endpoint = NET;
    for body in [
        json!({"id": "n", "vhost_user": true, "vhost_socket": "/nonexistent/s"}),
        json!({"id": "n", "tap": "ark0", "sriov_vfs": 2, "vfs": [{"index": 1, "vdpa": "/dev/vhost-vdpa-none"}]}),
    ] {
        asked.body = body;
        asked.is_refused("ark", BAD_REQUEST, &private_memory("--net id=n"));
    }
    asked.body["vfs"] = json!([]);
    asked.is_done();
}

#[test]
fn a_vdpa_device_that_is_missing() {
    let vmm = Vmm::start();
    let vdpa = json!({"id": "v", "path": "/dev/vhost-vdpa-none", "num_queues": 3});
    let mut asked = Asked::of(&vmm, vmm.boot_shared(json!([])), "vm.add-vdpa", vdpa);
    let missing = "no such device; create one (vdpa dev add name NAME mgmtdev DEVICE) and load the module vhost_vdpa \
                   (modprobe vhost_vdpa)";
    asked.is_refused("aro", BAD_REQUEST, &format!("--vdpa id=v,path=/dev/vhost-vdpa-none: {missing}"));
    asked.endpoint = NET;
    // The taps are created and removed again.
    asked.body =
        json!({"id": "n", "tap": "aro0", "sriov_vfs": 2, "vfs": [{"index": 1, "vdpa": "/dev/vhost-vdpa-none"}]});
    let option = "--net-vf pf=n,index=1,vdpa=/dev/vhost-vdpa-none";
    asked.is_refused("aro", BAD_REQUEST, &format!("{option}: {missing}"));
    asked.body["vfs"] = json!([]);
    asked.is_done();
}

#[test]
fn a_vhost_user_socket_that_is_missing_or_deserted() {
    let vmm = Vmm::start();
    let socket = vmm.files.path("backend");
    let body = json!({"id": "n", "vhost_user": true, "vhost_socket": socket});
    let mut asked = Asked::of(&vmm, vmm.boot_shared(json!([])), NET, body);
    let option = format!("--net id=n,socket={}", socket.display());
    let missing = "no such file; start the backend first, or give the path of its socket";
    asked.is_refused("arp", BAD_REQUEST, &format!("{option}: {missing}"));
    let listener = UnixListener::bind(&socket).unwrap();
    // Closing it is not enough if a child that another test has just forked has it, too.
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    drop(listener);
    let deserted = "nothing is listening there (Connection refused); start the backend first";
    asked.is_refused("arp", BAD_REQUEST, &format!("{option}: {deserted}"));
    for (endpoint, flag, body) in [
        ("vm.add-fs", "--fs", json!({"id": "n", "tag": "t", "socket": socket, "num_queues": 1, "queue_size": 1024})),
        ("vm.add-disk", "--disk", json!({"id": "n", "vhost_user": true, "vhost_socket": socket})),
        (
            "vm.add-generic-vhost-user",
            "--generic-vhost-user",
            json!({"id": "n", "virtio_id": 25, "socket": socket, "queue_sizes": [64, 64]}),
        ),
    ] {
        (asked.endpoint, asked.body) = (endpoint, body);
        let option = format!("{flag} id=n,socket={}", socket.display());
        asked.is_refused("arp", BAD_REQUEST, &format!("{option}: {deserted}"));
    }
}

/// Runs the command with a /dev that has everything it needs except vhost-net.
const WITHOUT_VHOST_NET: &str = "mkdir -p dev/net
    for node in kvm net/tun null random urandom; do touch dev/$node && mount --bind /dev/$node dev/$node; done
    mount --rbind dev /dev && exec \"$@\"";

#[test]
fn a_kernel_without_vhost_net() {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-ec", WITHOUT_VHOST_NET, "sh", BINARY]);
    let vmm = Vmm::of(command);
    let body = json!({"id": "n", "tap": "arq0", "sriov_vfs": 2, "vhost": "auto", "vfs": [{"index": 1, "vhost": true}]});
    let mut asked = Asked::net(&vmm, json!([]), body);
    asked.is_refused(
        "arq",
        HOST,
        "--net-vf pf=n,index=1,vhost=on: there is no /dev/vhost-net; load the module (modprobe vhost_net), or leave \
         vhost out",
    );
    asked.body["vfs"] = json!([{"index": 0, "vhost": "auto"}, {"index": 1, "vhost": "auto"}]);
    asked.is_done();
    let info = asked.client.get("vm.info").expect(200);
    assert_eq!(info["sriov"][0]["backend"], json!({"kind": "tap", "name": "arq0", "made": true}));
    let log = fs::read_to_string(vmm.files.path("log")).unwrap();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("vhost=auto")).collect();
    let warning = "--net id=n: vhost=auto: this program moves the packets itself: ";
    assert!(
        matches!(*warnings, [once] if once.contains(warning)),
        "a device is warned about once, when it is there: {log}"
    );
}

#[test]
fn descriptors_that_are_too_few() {
    let vmm = Vmm::start();
    let mut asked = Asked::net(&vmm, json!([]), json!({"id": "n", "num_queues": 4}));
    asked.fds.push(tap::queue("arl0", Queues::Many));
    let said = "num_queues=4: each queue pair needs a file descriptor (fd=); pass 2 instead of 1";
    asked.is_refused("arl", BAD_REQUEST, said);
    asked.fds.push(tap::queue("arl0", Queues::Many));
    asked.is_done();
}

#[test]
fn a_descriptor_that_is_no_tap() {
    let vmm = Vmm::start();
    let mut asked = Asked::net(&vmm, json!([]), json!({"id": "n"}));
    asked.fds.push(File::open("/dev/null").unwrap().into());
    let said = "--net id=n: file descriptor 0 (counted from 0) of fd= is not a tap (Inappropriate ioctl for device (os \
                error 25)); pass /dev/net/tun after TUNSETIFF";
    asked.is_refused("arm", BAD_REQUEST, said);
    asked.fds = vec![tap::queue("arm0", Queues::One)];
    asked.is_done();
}

#[test]
fn a_file_that_cannot_be_persistent_memory() {
    let vmm = Vmm::start();
    let file = vmm.files.path("pmem");
    let (path, folder) = (file.display().to_string(), vmm.files.path("").display().to_string());
    let mut asked = Asked::new(&vmm, json!([]), "vm.add-pmem", json!({"id": "p", "file": file}));
    let remedy = "give a file, a block device, or a folder with size=";
    let missing =
        format!("--pmem id=p: file={path}: cannot be opened: No such file or directory (os error 2); {remedy}");
    asked.is_refused("ars", BAD_REQUEST, &missing);
    asked.body["file"] = json!("/dev/null");
    asked.is_refused("ars", BAD_REQUEST, &format!("--pmem id=p: file=/dev/null: is not a file; {remedy}"));
    asked.body["file"] = json!(folder);
    let needs = "is a folder; add size= for a temporary file in it, or give a file";
    asked.is_refused("ars", BAD_REQUEST, &format!("--pmem id=p: file={folder}: {needs}"));
    vmm.files.sparse("pmem", 2 << 20);
    asked.body = json!({"id": "p", "file": file, "size": 4 << 20});
    let short = "the file has 2097152 bytes; give at most that, or enlarge it";
    asked.is_refused("ars", BAD_REQUEST, &format!("--pmem id=p: file={path},size=4194304: {short}"));
    asked.body["size"] = json!(3);
    asked.is_refused("ars", BAD_REQUEST, "size=3: not a multiple of 2M above 0; round it up");
    asked.body["size"] = json!(2 << 20);
    asked.is_done();
}

#[test]
fn a_path_that_is_no_device_of_the_host() {
    let vmm = Vmm::start();
    let folder = vmm.files.path("none").display().to_string();
    let mut asked = Asked::new(&vmm, json!([]), "vm.add-device", json!({"id": "d", "path": folder}));
    let like = "such as /sys/bus/pci/devices/0000:01:00.1";
    let missing = format!("there is no such device (No such file or directory (os error 2)); give its folder, {like}");
    asked.is_refused("art", BAD_REQUEST, &format!("--device id=d,path={folder}: {missing}"));
    asked.body["path"] = json!("/sys/class/net/lo");
    let other = format!("this is not the folder of a PCI device; give one {like}");
    asked.is_refused("art", BAD_REQUEST, &format!("--device id=d,path=/sys/class/net/lo: {other}"));
    asked.body = json!({"id": "d"});
    asked.is_refused("art", BAD_REQUEST, "id=d: give path=, or fd= with --platform iommufd_fd=");
    asked.fds = vec![File::open("/dev/null").unwrap().into()];
    let needs = "a device by descriptor (fd=) needs a VM with an iommufd by descriptor";
    let remedy = "add --platform iommufd_fd=, or give the device's path";
    asked.is_refused("art", BAD_REQUEST, &format!("id=d: {needs}; {remedy}"));
}
