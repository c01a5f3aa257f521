//! Connections between programs of a guest and of the host, over the vsock device.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;
use std::{fs, thread};

use integration::{Api, Guest, GuestSpec, Kernel, call, exchange};
use rstest::rstest;
use serde_json::json;

/// Number of bytes that are sent in each direction.
const BYTES: usize = 64 << 20;
/// Time that a transfer may take in the nested lab.
const LIMIT: Duration = Duration::from_secs(240);

/// A guest with a vsock device and the program that uses it, on a disk.
struct Machine {
    folder: tempfile::TempDir,
    api: Api,
    guest: Guest,
}

impl Machine {
    fn boot(kernel: Kernel, vsock: Option<&str>) -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("program");
        let mut program = fs::read(env!("CARGO_BIN_EXE_vsock")).unwrap();
        program.resize(program.len().next_multiple_of(4096), 0);
        fs::write(&disk, program).unwrap();
        let api = Api::new(vsock.unwrap_or("hot"));
        let mut spec = GuestSpec::new(kernel)
            .with_modules()
            .cpus(2)
            .disk(&format!("path={},readonly=on", disk.display()))
            .arguments(&["--api-socket", &api.argument()]);
        if let Some(name) = vsock {
            spec = spec.arguments(&["--vsock", &format!("cid=52,socket={}", folder.path().join(name).display())]);
        }
        let mut guest = Guest::boot(spec);
        guest.load("virtio_blk");
        guest.ok("dd if=/dev/vda of=/tmp/vsock bs=64k 2>/dev/null && chmod +x /tmp/vsock");
        guest.load("vmw_vsock_virtio_transport");
        Machine { folder, api, guest }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the program in the guest, with its output in `/tmp/<name>`.
    fn start(&mut self, name: &str, arguments: &str) {
        self.guest
            .ok(&format!("(/tmp/vsock {arguments} > /tmp/{name} 2>&1; echo ended >> /tmp/{name}) > /dev/null 2>&1 &"));
    }

    fn await_end(&mut self, name: &str) -> String {
        self.guest.wait_for(&format!("grep -q ended /tmp/{name}"));
        self.guest.ok(&format!("cat /tmp/{name}"))
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1, "v61")]
#[case::linux_6_12(Kernel::V6_12, "v612")]
fn programs_of_guest_and_host_exchange_64_mib_both_ways_at_once(#[case] kernel: Kernel, #[case] name: &str) {
    let mut machine = Machine::boot(kernel, Some(name));
    let socket = machine.socket(name);
    // A client that disconnects early, and one that requests a port without a listener.
    drop(UnixStream::connect(&socket).unwrap());
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(b"CONNECT 9\n").unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);

    machine.start("listen", &format!("listen 1234 {BYTES}"));
    let took = exchange(&call(&socket, 1234), BYTES);
    println!("a client's connection: {} MiB each way in {took:?}", BYTES >> 20);
    assert_eq!(machine.await_end("listen"), format!("listening\nsame {BYTES}\nended"));

    let listener = UnixListener::bind(machine.socket(&format!("{name}_77"))).unwrap();
    machine.start("connect", &format!("connect 77 {BYTES}"));
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let took = exchange(&stream, BYTES);
    println!("a guest's connection: {} MiB each way in {took:?}", BYTES >> 20);
    assert_eq!(machine.await_end("connect"), format!("same {BYTES}\nended"));
    assert!(machine.guest.run("/tmp/vsock connect 78 1 2>&1").text.contains("ConnectionReset"));

    machine.guest.reboot();
    machine.guest.assert_kernel_has_no_complaint();
    assert_eq!(machine.guest.power_off().code, Some(0));
}

#[test]
fn a_vsock_device_is_hotplugged_and_connections_survive_a_pause() {
    let mut machine = Machine::boot(Kernel::V6_12, None);
    let socket = machine.socket("hot");
    for round in 0..2 {
        let answer = machine.api.put_json("vm.add-vsock", &json!({"cid": 60, "socket": socket}));
        assert_eq!((answer.status, &answer.body["id"]), (200, &json!("_vsock1")), "{answer:?}");
        let answer = machine.api.put_json("vm.add-vsock", &json!({"cid": 61, "socket": machine.socket("other")}));
        assert_eq!(answer.status, 409, "{answer:?}");
        let (name, bytes) = (format!("round{round}"), 1 << 20);
        machine.start(&name, &format!("listen 5 {bytes}"));
        let stream = call(&socket, 5);
        assert_eq!(machine.api.put("vm.pause").status, 204);
        thread::scope(|scope| {
            let exchange = scope.spawn(|| exchange(&stream, bytes));
            thread::sleep(Duration::from_millis(100));
            assert!(!exchange.is_finished());
            assert_eq!(machine.api.put("vm.resume").status, 204);
        });
        assert_eq!(machine.await_end(&name), format!("listening\nsame {bytes}\nended"));
        machine.api.remove_device("_vsock1");
        assert!(!socket.exists());
    }
    machine.guest.assert_kernel_has_no_complaint();
    assert_eq!(machine.guest.power_off().code, Some(0));
}
