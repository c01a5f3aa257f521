//! Kata Containers' runtime in Go: an OpenAPI-generated client over Go's net/http, and a separate request for NICs.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use cloud_hypervisor_client::models::{PciDeviceInfo, VmInfo, VmState, VmmPingResponse};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::folder::Folder;
use super::{assert_kept, slot_of};
use crate::net::tap::{self, Kept, Queues};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm};

/// The head of every reply without a body.
const NO_CONTENT: &str = "HTTP/1.1 204 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive";
/// The body of `vm.create` with Kata's default configuration; upper-case words stand for paths.
const CREATE: &str = concat!(
    r#"{"console":{"iommu":false,"mode":"Off"},"cpus":{"boot_vcpus":1,"kvm_hyperv":false,"max_vcpus":4,"nested":true,"#,
    r#""topology":{"cores_per_die":4,"dies_per_package":1,"packages":1,"threads_per_core":1}},"#,
    r#""disks":[{"backing_files":false,"direct":false,"image_type":"Raw","iommu":false,"num_queues":1,"path":"IMAGE","#,
    r#""queue_size":128,"readonly":true,"sparse":true,"vhost_user":false}],"#,
    r#""fs":[{"num_queues":1,"pci_segment":1,"queue_size":1024,"socket":"FOLDER","tag":"kataShared"}],"iommu":false,"#,
    r#""landlock_enable":false,"memory":{"hotplug_method":"Acpi","hotplug_size":17179869184,"hugepages":false,"#,
    r#""mergeable":false,"prefault":false,"shared":true,"size":2147483648,"thp":true},"payload":{"cmdline":"#,
    r#""root=/dev/vda1 rootflags=data=ordered,errors=remount-ro ro rootfstype=ext4 panic=1 no_timer_check "#,
    r#"noreplace-smp quiet","kernel":"KERNEL"},"platform":{"num_pci_segments":2,"sev_snp":false,"tdx":false},"#,
    r#""pvpanic":false,"rng":{"iommu":false,"src":"/dev/urandom"},"serial":{"iommu":false,"mode":"Off"},"#,
    r#""vsock":{"cid":3,"iommu":false,"socket":"VSOCK"},"watchdog":false}"#
);
/// The body of `vm.add-net`.
const ADD_NET: &str = concat!(
    r#"{"iommu":false,"ip":"192.168.249.1","mac":"02:00:00:00:00:01","mask":"255.255.255.0","num_queues":2,"#,
    r#""offload_csum":true,"offload_tso":true,"offload_ufo":true,"queue_size":256,"vhost_mode":"Client","#,
    r#""vhost_user":false}"#
);

/// The generated client. It keeps one connection while the server keeps it open.
struct Generated(Client);

impl Generated {
    /// Sends a request as Go's net/http does; `accept` is true if the API description has a body for its reply.
    fn send(&mut self, method: &str, endpoint: &str, accept: bool, body: Option<&str>) {
        let mut request = format!("{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\n");
        request += "User-Agent: OpenAPI-Generator/1.0.0/go\r\n";
        // Go's JSON encoder ends each document with a newline.
        let body = body.map(|body| format!("{body}\n")).unwrap_or_default();
        if method == "PUT" {
            request += &format!("Content-Length: {}\r\n", body.len());
        }
        if accept {
            request += "Accept: application/json\r\n";
        }
        if !body.is_empty() {
            request += "Content-Type: application/json\r\n";
        }
        self.0.send(format!("{request}Accept-Encoding: gzip\r\n\r\n{body}").as_bytes(), &[]);
    }

    /// Sends a request with a reply, which must parse as `T`.
    fn ask<T: DeserializeOwned>(&mut self, method: &str, endpoint: &str, body: Option<&str>) -> (T, Value) {
        self.send(method, endpoint, true, body);
        let (head, body) = self.0.answer_as_sent();
        let [first, .., length] = head.split("\r\n").collect::<Vec<_>>()[..] else { panic!("{head}") };
        assert_eq!((first, length), ("HTTP/1.1 200 ", &*format!("Content-Length: {}", body.len())), "{head}\n{body}");
        assert!(head.contains("\r\nContent-Type: application/json\r\n"), "{head}");
        let value = serde_json::from_str(&body).unwrap();
        (serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")), value)
    }

    /// Sends a request whose reply has no body.
    fn tell(&mut self, endpoint: &str, body: Option<&str>) {
        self.send("PUT", endpoint, false, body);
        assert_eq!(self.0.answer_as_sent(), (NO_CONTENT.into(), String::new()), "{endpoint}");
    }

    /// Sends a request that must be refused with this status. Returns the reason.
    fn is_refused(&mut self, endpoint: &str, body: &str, status: u16) -> String {
        self.send("PUT", endpoint, true, Some(body));
        let (head, body) = self.0.answer_as_sent();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} \r\n")), "{head}\n{body}");
        body
    }

    fn info(&mut self) -> (VmInfo, Value) {
        self.ask("GET", "vm.info", None)
    }
}

/// Adds a NIC over its own connection: the request and the descriptors are one message.
fn add_net(vmm: &Vmm, fds: &[OwnedFd]) -> (String, String) {
    let mut connection = vmm.client();
    let request = format!(
        "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nContent-Length: {}\r\n\
         Content-Type: application/json\r\n\r\n{ADD_NET}",
        ADD_NET.len()
    );
    connection.send(request.as_bytes(), fds);
    connection.answer_as_sent()
}

/// Creates a VM, checks it, adds a NIC and boots, as `bootVM` does.
fn boot(vmm: &Vmm, client: &mut Generated, create: &str) {
    let (ping, _): (VmmPingResponse, _) = client.ask("GET", "vmm.ping", None);
    assert_eq!((ping.version.as_str(), ping.pid), ("53.0.0", Some(vmm.pid().into())));
    client.tell("vm.create", Some(create));
    let (info, printed) = client.info();
    assert_eq!(info.state, VmState::Created);
    let sent: Value = serde_json::from_str(create).unwrap();
    assert_kept(&sent, &printed["config"], "config");
    let _tap = Kept::new("apkgo0");
    assert_eq!(add_net(vmm, &[tap::queue("apkgo0", Queues::One)]), (NO_CONTENT.into(), String::new()));
    client.tell("vm.boot", None);
    let (info, printed) = client.info();
    assert_eq!(info.state, VmState::Running);
    assert_kept(&sent, &printed["config"], "config");
    assert_kept(&serde_json::from_str(ADD_NET).unwrap(), &printed["config"]["net"][0], "config.net[0]");
}

/// Kata's default configuration: a rootfs image, a shared folder on a second PCI segment, a NIC by descriptor, a vsock,
/// and memory that can grow; then a container with a disk, more memory and more vCPUs; then the shutdown.
#[test]
fn kata_go_starts_a_vm_grows_it_and_ends_it() {
    let mut command = Command::new(BINARY);
    command.args(["-vv", "--seccomp", "false"]);
    let vmm = Vmm::of(command);
    let [image, folder, vsock, disk] = ["image", "virtiofsd.sock", "clh.sock", "disk"].map(|name| vmm.files.path(name));
    for file in [&image, &disk] {
        File::create(file).unwrap().set_len(1 << 20).unwrap();
    }
    let virtiofsd = Folder::listen(&folder);
    let create = CREATE.replace("IMAGE", image.to_str().unwrap()).replace("FOLDER", folder.to_str().unwrap());
    let create = create.replace("KERNEL", &vmm.files.idle_kernel()).replace("VSOCK", vsock.to_str().unwrap());
    let mut client = Generated(vmm.client());
    boot(&vmm, &mut client, &create);
    assert!(UnixStream::connect(&vsock).unwrap().write_all(b"CONNECT 1024\n").is_ok());

    let (_, printed) = client.info();
    let tree = &printed["device_tree"];
    let at = |id: &str| tree[format!("_virtio-pci-{id}")]["pci_bdf"].as_str().unwrap().to_owned();
    let kind = |kind: &str| printed["config"][kind][0]["id"].as_str().unwrap();
    assert_eq!(at(kind("fs")), "0001:00:01.0");
    slot_of(&at(kind("disks")));
    slot_of(&at(kind("net")));

    // ResizeMemory: reads the size and the hotplug limit first.
    let (info, _) = client.info();
    let memory = info.config.memory.unwrap();
    assert_eq!((memory.size, memory.hotplug_size), (2 << 30, Some(16 << 30)));
    assert!(virtiofsd.has_first_memory());
    client.tell("vm.resize", Some(r#"{"desired_ram":2684354560}"#));
    virtiofsd.await_added_memory();
    let (info, _) = client.info();
    assert_eq!(info.config.memory.unwrap().size, 2560 << 20);

    let add_disk = json!({
        "backing_files": false, "direct": false, "image_type": "Raw", "iommu": false, "num_queues": 1, "path": disk,
        "queue_size": 1024, "readonly": false, "sparse": true, "vhost_user": false,
    });
    let (added, _): (PciDeviceInfo, _) = client.ask("PUT", "vm.add-disk", Some(&add_disk.to_string()));
    assert!(slot_of(&added.bdf) > 0);
    client.tell("vm.remove-device", Some(&json!({"id": added.id}).to_string()));

    // ResizeVCPUs: this guest never releases a vCPU, so a further request must wait. Kata retries up to 20 times.
    client.tell("vm.resize", Some(r#"{"desired_vcpus":2}"#));
    client.tell("vm.resize", Some(r#"{"desired_vcpus":1}"#));
    client.is_refused("vm.resize", r#"{"desired_vcpus":2}"#, 429);
    let reason =
        client.is_refused("vm.add-device", r#"{"iommu":false,"path":"/sys/bus/pci/devices/ffff:ff:1f.7"}"#, 400);
    assert!(reason.contains("there is no such device"), "{reason}");

    let _: (VmmPingResponse, _) = client.ask("GET", "vmm.ping", None);
    // Cloud Hypervisor replies with 200 and an empty body, which the client does not read.
    client.send("PUT", "vmm.shutdown", false, None);
    let (head, body) = client.0.answer_as_sent();
    assert!(head.starts_with("HTTP/1.1 200 \r\n") && body.is_empty(), "{head}\n{body}");
    assert_eq!(vmm.end(), Some(0));
    assert!(!vsock.exists());
}
