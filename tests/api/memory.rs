//! Clients' requests take little memory and time for any numbers, and the memory is freed.

mod pmem;
mod virtio_mem;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::rig::vmm::Vmm;

/// The length of large bodies here: the largest has 4 MiB.
const LARGE: usize = 3_600_000;

/// A value of `/proc/PID/status`, in MiB.
fn status(vmm: &Vmm, key: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(":")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() >> 10
}

/// The status of the reply to `vm.create` with this body.
fn create(vmm: &Vmm, body: &str) -> u16 {
    let mut stream = UnixStream::connect(vmm.socket()).unwrap();
    let head = "PUT /api/v1/vm.create HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).unwrap().parse().unwrap()
}

/// `element` repeated `count` times between `before` and `after`.
fn many(before: &str, element: &str, count: usize, after: &str) -> String {
    format!("{before}{}{element}{after}", format!("{element},").repeat(count - 1))
}

/// As [`many`], as large as a body may be.
fn large(before: &str, element: &str, after: &str) -> String {
    many(before, element, LARGE / (element.len() + 1), after)
}

#[test]
fn memory_of_a_refused_request_is_given_back() {
    let vmm = Vmm::start();
    let deep = format!("{}0{}", r#"{"":"#.repeat(100), "}".repeat(100));
    let keys: Vec<_> = (0..LARGE / 16).map(|n| format!(r#""{n}":{{"":0}}"#)).collect();
    let bodies = [
        large(r#"{"payload":{},"disks":["#, "{}", "]}"),
        large(r#"{"payload":{},"disks":[["#, r#"{"":0}"#, "]]}"),
        large(r#"{"payload":{},"net":[{"sriov_vfs":32512,"vfs":["#, r#"{"index":1}"#, "]}]}"),
        large(r#"{"payload":{},"net":[{"sriov_vfs":32512,"vfs":["#, &deep, "]}]}"),
        many(
            r#"{"payload":{},"net":[{"sriov_vfs":32512,"vfs":["#,
            &format!(r#"{{"index":1,{:81}"mtu":0}}"#, ""),
            32_512,
            "]}]}",
        ),
        format!("{{{}}}", keys.join(",")),
        format!(r#"{{"colour":"{}"}}"#, "x".repeat(LARGE)),
    ];
    assert_eq!(create(&vmm, "{"), 400);
    let before = status(&vmm, "VmRSS");
    for body in &bodies {
        assert_eq!(create(&vmm, body), 400, "{}", &body[..40]);
        let after = status(&vmm, "VmRSS");
        assert!(after < before + 10, "{after} MiB instead of {before}: {}", &body[..40]);
    }
    thread::scope(|scope| {
        for body in bodies.iter().chain(&bodies) {
            scope.spawn(|| assert!(matches!(create(&vmm, body), 400 | 429)));
        }
    });
    let after = status(&vmm, "VmRSS");
    assert!(after < before + 10, "{after} MiB instead of {before}");
    let peak = status(&vmm, "VmHWM");
    assert!(peak < before + 150, "{peak} MiB at some time");
}

#[test]
fn memory_of_a_deleted_vm_is_given_back() {
    let vmm = Vmm::start();
    let before = status(&vmm, "VmRSS");
    let vm = |net: &str| format!(r#"{{"payload":{{}},"net":[{{"sriov_vfs":32512{net}}}]}}"#);
    for _ in 0..3 {
        assert_eq!(create(&vmm, &vm(r#","mtu":1"#)), 400);
        assert_eq!(create(&vmm, &vm("")), 204);
        vmm.client().put("vm.delete").expect(204);
    }
    let after = status(&vmm, "VmRSS");
    assert!(after < before + 10, "{after} MiB instead of {before}");
}

/// Sends requests for a VM, which the program must refuse, while it answers other requests.
fn is_refused_in_passing(body: &str) {
    let vmm = Vmm::start();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let refused = scope.spawn(|| {
            let statuses = [(); 3].map(|()| create(&vmm, body));
            is_done.store(true, Ordering::Relaxed);
            statuses
        });
        let (mut client, mut slowest) = (vmm.client(), Duration::ZERO);
        while !is_done.load(Ordering::Relaxed) {
            let asked = Instant::now();
            client.get("vmm.ping").expect(200);
            slowest = slowest.max(asked.elapsed());
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(refused.join().unwrap(), [400; 3]);
        assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    });
    let peak = status(&vmm, "VmHWM");
    assert!(peak < 100, "{peak} MiB at some time");
}

#[test]
fn the_numbers_of_a_request_size_no_memory() {
    for count in [1_000, 10_000, 100_000] {
        is_refused_in_passing(&many(r#"{"payload":{},"net":["#, r#"{"sriov_vfs":32512}"#, count, "]}"));
    }
}
