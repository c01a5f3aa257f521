//! libvirt's Cloud Hypervisor driver, as of 11.3: curl over an inherited socket, separate requests for NICs with
//! descriptors, and events over a named pipe.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::{Value, json};

use super::assert_kept;
use crate::files::Files;
use crate::firmware::hypervisor_fw;
use crate::net::tap::{self, Kept, Queues};
use crate::rig::client::{Answer, Client};
use crate::rig::vmm::{BINARY, Kill, wait_for};

/// The longest reply to `vm.add-net` that it reads, in bytes: with one call.
const ONE_RECV: usize = 1023;

/// A domain: the program as started by libvirt.
struct Domain {
    process: Kill,
    files: Files,
    events: File,
    seen: String,
}

impl Domain {
    /// Starts the program with a listening socket, and then opens the reading end of its events.
    fn start() -> Self {
        let files = Files::new();
        let listener = OwnedFd::from(UnixListener::bind(files.path("socket")).unwrap());
        let pipe = files.path("events");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut command = Command::new(BINARY);
        command.args(["--api-socket", &format!("fd={}", listener.as_raw_fd()), "--event-monitor"]);
        command.arg(format!("path={}", pipe.display()));
        let log = File::create(files.path("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        // SAFETY: the closure makes one system call without memory effects, which is sound between fork and exec.
        unsafe {
            command.pre_exec(move || Ok(fcntl_setfd(&listener, FdFlags::empty())?));
        }
        let process = Kill(command.spawn().unwrap());
        let events = File::open(pipe).unwrap();
        rustix::io::ioctl_fionbio(&events, true).unwrap();
        Self { process, files, events, seen: String::new() }
    }

    /// A request as libcurl sends it for the driver.
    fn curl(&self, method: &str, endpoint: &str, body: Option<&Value>) -> Answer {
        let body = body.map(Value::to_string).unwrap_or_default();
        let accept = if method == "GET" { "*/*" } else { "application/json" };
        let mut request = format!("{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n");
        if !body.is_empty() {
            request += "Content-Type: application/json\r\n";
        }
        if method == "PUT" {
            request += &format!("Content-Length: {}\r\n", body.len());
        }
        let mut client = self.connect();
        client.send(format!("{request}\r\n{body}").as_bytes(), &[]);
        client.answer()
    }

    fn connect(&self) -> Client {
        Client::connect(&self.files.path("socket"))
    }

    /// The VM's state, and the pseudo-terminals of its consoles.
    fn info(&self) -> Value {
        self.curl("GET", "vm.info", None).expect(200)
    }

    fn put(&self, endpoint: &str) {
        self.curl("PUT", endpoint, None).expect(204);
    }

    /// Waits for an event of the VM.
    fn await_event(&mut self, source: &str, event: &str) {
        wait_for(&format!("{source}:{event}"), || {
            let mut bytes = [0; 4096];
            if let Ok(count) = self.events.read(&mut bytes) {
                self.seen += std::str::from_utf8(&bytes[..count]).unwrap();
            }
            let mut documents = serde_json::Deserializer::from_str(&self.seen).into_iter::<Value>();
            documents.by_ref().map_while(Result::ok).any(|said| said["source"] == source && said["event"] == event)
        });
    }

    /// The IDs of threads whose names begin with `prefix`.
    fn threads(&self, prefix: &str) -> usize {
        let tasks = Path::new("/proc").join(self.process.0.id().to_string()).join("task");
        let names = tasks
            .read_dir()
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
        names.filter(|name| name.starts_with(prefix)).count()
    }
}

/// Adds NICs over one socket. `sscanf` reads the status from the data of a single receive call.
fn add_nets<const N: usize>(mut client: Client, nics: [Vec<OwnedFd>; N]) {
    for (index, fds) in nics.into_iter().enumerate() {
        let body = json!({
            "id": format!("net_{index}"), "mac": format!("52:54:00:00:11:0{index}"), "ip": "192.168.122.10",
            "mask": "255.255.255.0", "iommu": false, "num_queues": 2 * fds.len(), "queue_size": 256, "mtu": 1500,
        })
        .to_string();
        let head = "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
        client.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes(), &fds);
        let mut bytes = [0; ONE_RECV];
        let count = client.receive_once(&mut bytes);
        let answer = String::from_utf8_lossy(&bytes[..count]);
        assert!(answer.starts_with("HTTP/1.1 204 ") && answer.ends_with("\r\n\r\n"), "{answer}");
    }
}

#[test]
fn libvirt_starts_a_domain_controls_it_and_ends_it() {
    let version = Command::new(BINARY).arg("--version").output().unwrap();
    assert!(version.stdout.starts_with(b"cloud-hypervisor v53."));

    let mut domain = Domain::start();
    domain.curl("GET", "vmm.ping", None).expect(200);
    let image = domain.files.path("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let create = json!({
        "serial": {"mode": "Pty"}, "console": {"mode": "Pty"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "memory": {"size": 64 << 20}, "disks": [{"path": image, "readonly": false}],
        "payload": {"kernel": domain.files.idle_kernel(), "cmdline": "console=ttyS0 root=/dev/vda"},
    });
    domain.curl("PUT", "vm.create", Some(&create)).expect(204);
    let _taps = [Kept::of_many_queues("aplvq0"), Kept::new("aplvq1")];
    let two = vec![tap::queue("aplvq0", Queues::Many), tap::queue("aplvq0", Queues::Many)];
    add_nets(domain.connect(), [two, vec![tap::queue("aplvq1", Queues::One)]]);
    domain.put("vm.boot");
    domain.await_event("vm", "booted");
    let info = domain.info();
    assert_eq!((&info["state"], info["config"]["net"].as_array().unwrap().len()), (&json!("Running"), 2));
    assert_kept(&create, &info["config"], "config");
    for console in ["serial", "console"] {
        let file = info["config"][console]["file"].as_str().unwrap();
        assert!(file.starts_with("/dev/pts/") && Path::new(file).exists(), "{file}");
    }
    // Threads that it finds by name, and pins to processors of the host.
    wait_for("the vCPU's thread", || domain.threads("vcpu0") == 1);

    domain.put("vm.pause");
    assert_eq!(domain.info()["state"], "Paused");
    domain.put("vm.resume");
    domain.put("vm.reboot");
    domain.await_event("vm", "rebooted");
    assert_eq!(domain.info()["state"], "Running");
    domain.put("vm.shutdown");
    domain.await_event("vm", "shutdown");
    assert_eq!(domain.info()["state"], "Shutdown");
    domain.curl("PUT", "vmm.shutdown", None).expect(200);
    domain.await_event("vmm", "shutdown");
    wait_for("the program's end", || domain.process.0.try_wait().unwrap().is_some());
}

/// A domain whose `<kernel>` is Cloud Hypervisor's own firmware, as the driver has no other key for firmware. The
/// driver itself refuses a domain without `<kernel>`.
#[test]
fn hypervisor_fw_boots_a_disk_by_what_libvirt_sends() {
    let Some(firmware) = hypervisor_fw::firmware() else { return };
    let mut domain = Domain::start();
    let disk = hypervisor_fw::bootable(&domain.files, "disk");
    let seed = domain.files.sparse("seed", 1 << 20);
    let create = json!({
        "console": {"mode": "Pty"}, "serial": {"mode": "Pty"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "memory": {"size": 256 << 20}, "payload": {"kernel": firmware},
        "disks": [{"path": disk}, {"path": seed, "readonly": true}],
    });
    domain.curl("PUT", "vm.create", Some(&create)).expect(204);
    let _tap = Kept::new("aplvq2");
    add_nets(domain.connect(), [vec![tap::queue("aplvq2", Queues::One)]]);
    domain.put("vm.boot");
    domain.await_event("vm", "booted");
    assert_kept(&create, &domain.info()["config"], "config");
    let terminal = domain.info()["config"]["serial"]["file"].as_str().unwrap().to_owned();
    let mut terminal = File::open(terminal).unwrap();
    rustix::io::ioctl_fionbio(&terminal, true).unwrap();
    let mut printed = Vec::new();
    wait_for("the kernel", || {
        let mut bytes = [0; 4096];
        let count = terminal.read(&mut bytes).unwrap_or(0);
        printed.extend_from_slice(&bytes[..count]);
        String::from_utf8_lossy(&printed).contains(hypervisor_fw::OPTIONS)
    });
    domain.put("vm.shutdown");
    domain.await_event("vm", "shutdown");
}

/// Cyberus' driver describes memory with a zone and NUMA, resizes disks and adds devices while the domain runs.
#[test]
fn cyberus_driver_adds_and_resizes_disks_in_slots_it_chooses() {
    let domain = Domain::start();
    let [image, second] = ["image", "second"].map(|name| domain.files.path(name));
    for file in [&image, &second] {
        File::create(file).unwrap().set_len(1 << 20).unwrap();
    }
    let create = json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1}, "payload": {"kernel": domain.files.idle_kernel()},
        "memory": {"size": 0, "zones": [{"id": "zone_0", "size": 64 << 20, "shared": true}]},
        "disks": [{"path": image, "id": "virtio-disk0", "pci_device_id": 3}],
        "serial": {"mode": "Pty"}, "console": {"mode": "Off"},
    });
    domain.curl("PUT", "vm.create", Some(&create)).expect(204);
    domain.put("vm.boot");
    assert_kept(&create, &domain.info()["config"], "config");
    let add = json!({"path": second, "id": "virtio-disk1", "pci_device_id": 7});
    assert_eq!(domain.curl("PUT", "vm.add-disk", Some(&add)).expect(200)["bdf"], "0000:00:07.0");
    let resize = json!({"id": "virtio-disk0", "desired_size": 2 << 20});
    domain.curl("PUT", "vm.resize-disk", Some(&resize)).expect(204);
    assert_eq!(image.metadata().unwrap().len(), 2 << 20);
    domain.curl("PUT", "vm.remove-device", Some(&json!({"id": "virtio-disk1"}))).expect(204);
}
