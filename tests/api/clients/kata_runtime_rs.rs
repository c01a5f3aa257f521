//! Kata Containers' runtime in Rust: Cloud Hypervisor's own client crate over one connection for the VM's life. A
//! request is written in up to four pieces, with descriptors attached to the first. Configurations are Rust structs
//! that print null for missing values, and the fields that they read from `vm.info` must be present.

use std::collections::HashMap;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use super::folder::Folder;
use super::{assert_kept, slot_of};
use crate::net::tap::{self, Kept, Queues};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm};

/// The body of `vm.create`, which alone is printed over several lines. Upper-case words stand for paths.
const CREATE: &str = r#"{
  "cpus": {
    "boot_vcpus": 1,
    "max_vcpus": 4,
    "topology": {
      "threads_per_core": 1,
      "cores_per_die": 4,
      "dies_per_package": 1,
      "packages": 1
    },
    "kvm_hyperv": false,
    "max_phys_bits": 46,
    "features": {
      "amx": false
    }
  },
  "memory": {
    "size": 2147483648,
    "mergeable": false,
    "hotplug_method": "Acpi",
    "hotplug_size": 6442450944,
    "shared": true,
    "hugepages": false,
    "prefault": false
  },
  "payload": {
    "firmware": null,
    "kernel": "KERNEL",
    "cmdline": "reboot=k panic=1 systemd.unit=kata-containers.target quiet root=/dev/vda1 no_timer_check noreplace-smp",
    "initramfs": null,
    "mrconfigid": null,
    "host_data": null
  },
  "disks": [
    {
      "path": "IMAGE",
      "readonly": true,
      "direct": false,
      "iommu": false,
      "num_queues": 1,
      "queue_size": 128,
      "vhost_user": false,
      "vhost_socket": null,
      "rate_limiter_config": null,
      "id": null,
      "disable_io_uring": false,
      "pci_segment": 0,
      "sparse": true,
      "image_type": "Unknown"
    }
  ],
  "rng": {
    "src": "/dev/urandom",
    "iommu": false
  },
  "fs": [],
  "serial": {
    "file": null,
    "mode": "Off",
    "iommu": false
  },
  "console": {
    "file": null,
    "mode": "Off",
    "iommu": false
  },
  "devices": [],
  "vsock": {
    "cid": 3,
    "socket": "VSOCK",
    "iommu": false,
    "id": null,
    "pci_segment": 0
  },
  "iommu": false,
  "watchdog": false
}"#;
/// The body of `vm.add-net`, which also has the descriptors' numbers in the client.
const ADD_NET: &str = concat!(
    r#"{"ip":"192.168.249.1","mask":"255.255.255.0","mac":"02:00:00:00:00:02","iommu":false,"num_queues":2,"#,
    r#""queue_size":256,"vhost_user":false,"vhost_mode":"Client","fds":[FD]}"#
);
/// The body of `vm.add-disk`, with space that the guest cannot free.
const ADD_DISK: &str = concat!(
    r#"{"path":"DISK","readonly":false,"direct":false,"iommu":false,"num_queues":1,"queue_size":128,"#,
    r#""vhost_user":false,"vhost_socket":null,"rate_limiter_config":null,"id":null,"disable_io_uring":false,"#,
    r#""pci_segment":0,"sparse":false,"image_type":"Raw"}"#
);
/// A shared folder in the body of `vm.create`.
const FOLDER: &str =
    r#"[{"tag":"kataShared","socket":"FOLDER","num_queues":1,"queue_size":1024,"id":null,"pci_segment":0}]"#;
/// The body of `vm.add-fs`. The client puts further folders on segment 1.
const ADD_FOLDER: &str =
    r#"{"tag":"more","socket":"FOLDER","num_queues":1,"queue_size":1024,"id":null,"pci_segment":1}"#;

/// Fields of `vm.info` that the client reads. A field without `Option` must be present, and its type is as narrow as
/// the client's.
#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct VmInfo {
    config: VmConfig,
    state: String,
    memory_actual_size: u64,
    device_tree: Option<HashMap<String, Value>>,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct VmConfig {
    cpus: Cpus,
    memory: Memory,
    payload: Option<HashMap<String, Option<String>>>,
    disks: Option<Vec<Disk>>,
    net: Option<Vec<Net>>,
    rng: Rng,
    balloon: Option<Value>,
    fs: Option<Vec<Fs>>,
    serial: Console,
    console: Console,
    vsock: Option<Vsock>,
    iommu: bool,
    watchdog: bool,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Cpus {
    boot_vcpus: u8,
    max_vcpus: u8,
    kvm_hyperv: bool,
    max_phys_bits: u8,
    features: HashMap<String, bool>,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Memory {
    size: u64,
    mergeable: bool,
    hotplug_method: HotplugMethod,
    hotplug_size: Option<u64>,
    hotplugged_size: Option<u64>,
    shared: bool,
    hugepages: bool,
    prefault: bool,
    zones: Option<Vec<Value>>,
}

#[derive(Debug, PartialEq, Deserialize)]
enum HotplugMethod {
    Acpi,
    VirtioMem,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Disk {
    path: Option<PathBuf>,
    readonly: bool,
    direct: bool,
    num_queues: usize,
    queue_size: u16,
    vhost_user: bool,
    id: Option<String>,
    pci_segment: u16,
    sparse: bool,
    image_type: ImageType,
}

#[derive(Debug, PartialEq, Deserialize)]
enum ImageType {
    FixedVhd,
    Qcow2,
    Raw,
    Vhdx,
    Unknown,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Net {
    tap: Option<String>,
    ip: Ipv4Addr,
    mask: Ipv4Addr,
    mac: String,
    mtu: Option<u16>,
    iommu: bool,
    num_queues: usize,
    queue_size: u16,
    vhost_user: bool,
    vhost_mode: VhostMode,
    id: Option<String>,
    fds: Option<Vec<i32>>,
}

#[derive(Debug, PartialEq, Deserialize)]
enum VhostMode {
    Client,
    Server,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Rng {
    src: PathBuf,
    iommu: bool,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Fs {
    tag: String,
    socket: PathBuf,
    num_queues: usize,
    queue_size: u16,
    id: Option<String>,
    pci_segment: u16,
}

#[derive(Deserialize)]
struct Console {
    file: Option<PathBuf>,
    mode: ConsoleMode,
    iommu: bool,
}

#[derive(Debug, PartialEq, Deserialize)]
enum ConsoleMode {
    Off,
    Pty,
    Tty,
    File,
    Null,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Vsock {
    cid: u64,
    socket: PathBuf,
    iommu: bool,
    id: Option<String>,
    pci_segment: u16,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "the fields say what can be read")]
struct Platform {
    num_pci_segments: u16,
}

/// Fields that it reads from the reply to an addition.
#[derive(Deserialize)]
struct Added {
    id: String,
    bdf: String,
}

/// The client's only connection.
struct ApiClient(Client);

impl ApiClient {
    /// Sends a request and reads its reply. Returns the body if there is one.
    fn ask(&mut self, method: &str, endpoint: &str, body: Option<&str>, fds: &[OwnedFd]) -> Result<String, String> {
        let first = format!("{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n");
        self.0.send(first.as_bytes(), fds);
        if let Some(body) = body {
            self.0.send(format!("Content-Length: {}\r\n", body.len()).as_bytes(), &[]);
        }
        self.0.send(b"\r\n", &[]);
        if let Some(body) = body {
            self.0.send(body.as_bytes(), &[]);
        }
        let (head, body) = self.0.answer_as_sent();
        // Each part of 256 bytes must be UTF-8, wherever it is split.
        assert!(head.is_ascii() && body.is_ascii(), "{head}\n{body}");
        // All between these two is the number.
        let status = head.strip_prefix("HTTP/1.1 ").unwrap().split('\r').next().unwrap().trim();
        match status.parse().unwrap() {
            200u16 | 204 => Ok(body),
            _ => Err(format!("{status} {body}")),
        }
    }

    fn put(&mut self, endpoint: &str, body: Option<&str>) -> String {
        self.ask("PUT", endpoint, body, &[]).unwrap()
    }

    fn added(&mut self, endpoint: &str, body: &str) -> Added {
        serde_json::from_str(&self.put(endpoint, Some(body))).unwrap()
    }

    fn info(&mut self) -> (VmInfo, Value) {
        let body = self.ask("GET", "vm.info", None, &[]).unwrap();
        let info = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
        (info, serde_json::from_str(&body).unwrap())
    }
}

/// Starts the program as the client does with `debug` and without seccomp filters. Creates, completes and boots a VM.
fn boot(create: &str, tap: &str) -> (Vmm, ApiClient) {
    let mut command = Command::new(BINARY);
    command.args(["-v", "--seccomp", "false"]).env("RUST_BACKTRACE", "full");
    let vmm = Vmm::of(command);
    let image = vmm.files.path("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let create = create.replace("KERNEL", &vmm.files.idle_kernel()).replace("IMAGE", image.to_str().unwrap());
    let create = create.replace("VSOCK", vmm.files.path("clh.sock").to_str().unwrap());
    let mut client = ApiClient(vmm.client());
    let ping: Value = serde_json::from_str(&client.ask("GET", "vmm.ping", None, &[]).unwrap()).unwrap();
    assert!(ping["build_version"].is_string() && ping["version"].is_string() && ping["features"].is_array(), "{ping}");
    assert_eq!(ping["pid"], vmm.pid());
    assert_eq!(client.put("vm.create", Some(&create)), "");
    let _kept = Kept::new(tap);
    let queue = tap::queue(tap, Queues::One);
    let add_net = ADD_NET.replace("FD", &queue.as_raw_fd().to_string());
    assert_eq!(client.ask("PUT", "vm.add-net", Some(&add_net), &[queue]), Ok(String::new()));
    assert_eq!(client.put("vm.boot", None), "");
    let (info, printed) = client.info();
    assert_eq!(info.state, "Running");
    assert_kept(&serde_json::from_str(&create).unwrap(), &printed["config"], "config");
    (vmm, client)
}

#[test]
fn kata_runtime_rs_starts_a_vm_grows_it_and_ends_it() {
    let (vmm, mut client) = boot(CREATE, "apkrs0");
    let (info, _) = client.info();
    let config = info.config;
    assert_eq!((config.memory.size, config.memory.hotplug_method), (2 << 30, HotplugMethod::Acpi));
    let net = &config.net.as_ref().unwrap()[0];
    assert_eq!((net.ip, net.mask), (Ipv4Addr::new(192, 168, 249, 1), Ipv4Addr::new(255, 255, 255, 0)));
    assert_eq!((&net.vhost_mode, &config.disks.unwrap()[0].image_type), (&VhostMode::Client, &ImageType::Unknown));
    assert_eq!((config.console.mode, config.console.file, config.console.iommu), (ConsoleMode::Off, None, false));

    let resize = r#"{"desired_vcpus":null,"desired_ram":3221225472,"desired_balloon":null}"#;
    assert_eq!(client.put("vm.resize", Some(resize)), "");
    assert_eq!(client.info().0.config.memory.size, 3 << 30);
    let disk = vmm.files.path("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let added = client.added("vm.add-disk", &ADD_DISK.replace("DISK", disk.to_str().unwrap()));
    assert!(slot_of(&added.bdf) > 0);
    assert_eq!(client.put("vm.remove-device", Some(&format!(r#"{{"id":"{}"}}"#, added.id))), "");
    let resize = r#"{"desired_vcpus":2,"desired_ram":null,"desired_balloon":null}"#;
    assert_eq!(client.put("vm.resize", Some(resize)), "");
    assert_eq!(client.put("vmm.shutdown", None), "");
    assert_eq!(vmm.end(), Some(0));
}

/// A folder of the configuration is on segment 0. Further ones are sent for segment 1, which a VM with two segments
/// has; otherwise Cloud Hypervisor refuses them, too.
#[test]
fn kata_runtime_rs_shares_a_folder_and_one_on_a_second_segment() {
    for (segments, tap) in [(None, "apkrs1"), (Some(2), "apkrs2")] {
        let folders = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folders.path().join(name));
        let (virtiofsd, _more) = (Folder::listen(&first), Folder::listen(&second));
        let fs = format!(r#""fs": {}"#, FOLDER.replace("FOLDER", first.to_str().unwrap()));
        let platform = segments.map_or(String::new(), |n| format!(r#", "platform": {{"num_pci_segments": {n}}}"#));
        let (_vmm, mut client) = boot(&CREATE.replace(r#""fs": []"#, &(fs + &platform)), tap);
        assert!(virtiofsd.has_first_memory());
        let (info, _) = client.info();
        let first = &info.config.fs.unwrap()[0];
        assert_eq!((first.tag.as_str(), first.pci_segment), ("kataShared", 0));
        let add = ADD_FOLDER.replace("FOLDER", second.to_str().unwrap());
        if segments.is_some() {
            assert_eq!(client.added("vm.add-fs", &add).bdf, "0001:00:01.0");
            assert_eq!(client.info().0.config.fs.unwrap()[1].pci_segment, 1);
        } else {
            let refused = client.ask("PUT", "vm.add-fs", Some(&add), &[]).unwrap_err();
            assert!(refused.starts_with("400 ") && refused.contains("pci_segment=1"), "{refused}");
        }
    }
}
