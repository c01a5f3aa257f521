//! A host that lacks a resource at any one moment: each system call of a VF's enable, of a hot-plug and of an API
//! request fails once. The program stays up, nothing is left behind, and the next try works.

pub(crate) mod guest;
pub(crate) mod injector;
mod on_demand;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use libc::{EMFILE, ENFILE, ENOMEM, ENOSPC, c_int};
use serde_json::{Value, json};

use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, taps, wait_for};
use injector::{Fault, Injector, Report};

const ERRORS: [(c_int, &str); 4] = [(EMFILE, "EMFILE"), (ENFILE, "ENFILE"), (ENOMEM, "ENOMEM"), (ENOSPC, "ENOSPC")];
/// The most log lines for a failure.
const MOST_LINES: usize = 2;

/// Resources of a process: its descriptors by kind, and its threads by name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holding {
    files: BTreeMap<String, usize>,
    threads: Vec<String>,
    taps: Vec<String>,
}

/// Resources of the program, except those for its clients.
fn holding(vmm: &Vmm, tap: &str) -> Holding {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", vmm.pid())).unwrap() {
        let Ok(target) = fs::read_link(entry.unwrap().path()) else { continue };
        let target = target.display().to_string();
        if !target.starts_with("socket:") {
            *files.entry(target).or_default() += 1;
        }
    }
    let threads = vmm.threads().into_iter().filter(|name| !name.starts_with("http-")).collect();
    Holding { files, threads, taps: taps(tap) }
}

/// Waits until the program's resources are the same as before.
fn await_holding(vmm: &Vmm, tap: &str, expected: &Holding, what: &str) {
    let mut now = holding(vmm, tap);
    for _ in 0..6000 {
        if now == *expected {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
        now = holding(vmm, tap);
    }
    assert_eq!(&now, expected, "{what}");
}

fn log_lines(vmm: &Vmm) -> usize {
    let log = fs::read_to_string(vmm.files.path("log")).unwrap();
    assert!(!log.contains("panicked"), "{log}");
    log.lines().count()
}

/// Makes each system call of `action` fail in each way, and checks the state `after` each. Prints their number.
fn at_each_call(vmm: &Vmm, name: &str, mut action: impl FnMut(), mut after: impl FnMut(&str, &Report)) {
    let mut points = Vec::new();
    for (errno, error) in ERRORS {
        let mut number = 0;
        loop {
            let lines = log_lines(vmm);
            let injector = Injector::attach(vmm.pid(), Fault { number, errno });
            action();
            let report = injector.end();
            let what = format!("{name}, {error} at call {number}: {:?}", report.failed);
            after(&what, &report);
            if report.failed.is_none() {
                break;
            }
            let said = log_lines(vmm) - lines;
            assert!(said <= MOST_LINES, "{what}: {said} lines");
            number += 1;
        }
        assert!(number > 0 || errno == ENOSPC, "{name} has no call that could fail with {error}");
        points.push(format!("{number} of {error}"));
    }
    println!("{name}: points tried: {}", points.join(", "));
}

#[test]
fn each_call_of_a_request_may_fail_once() {
    let vmm = Vmm::start();
    drop(vmm.boot(json!([])));
    // So that each round has its thread.
    std::thread::sleep(Duration::from_millis(100));
    let before = holding(&vmm, "flta");
    let request = || {
        // The connection may be dropped without a reply.
        let _ = Client::connect(&vmm.socket()).try_ask("GET", "vm.info", None);
    };
    at_each_call(&vmm, "an API request", request, |what, _| {
        await_holding(&vmm, "flta", &before, what);
        vmm.client().get("vm.info").expect(200);
    });
}

/// Removes a device that the guest does not release until it restarts.
fn remove(vmm: &Vmm, id: &str) {
    vmm.client().put_json("vm.remove-device", &json!({"id": id})).expect(204);
    vmm.client().put("vm.reboot").expect(204);
}

fn each_call_of_a_hot_plug(name: &str, endpoint: &str, key: &str, tap: &str, body: impl Fn(&Vmm) -> Value) {
    let vmm = Vmm::start();
    drop(vmm.boot(json!([])));
    let body = body(&vmm);
    let is_there = || vmm.client().get("vm.info").expect(200)["config"][key].to_string().contains("\"new\"");
    // Resources kept after the first use exist already.
    vmm.client().put_json(endpoint, &body).expect(200);
    remove(&vmm, "new");
    let before = holding(&vmm, tap);
    let add = || {
        // The connection may be dropped without a reply.
        let _ = Client::connect(&vmm.socket()).try_ask("PUT", endpoint, Some(&body));
    };
    at_each_call(&vmm, name, add, |what, _| {
        // The program may have recovered from the failure.
        if !is_there() {
            await_holding(&vmm, tap, &before, what);
            let again = vmm.client().put_json(endpoint, &body);
            assert_eq!(again.status, 200, "{what}: {}", again.body);
        }
        remove(&vmm, "new");
        assert!(!is_there(), "{what}");
        await_holding(&vmm, tap, &before, what);
    });
}

#[test]
fn each_call_of_a_nics_hot_plug_may_fail_once() {
    each_call_of_a_hot_plug(
        "a NIC's hot-plug",
        "vm.add-net",
        "net",
        "fltb",
        |_| json!({"id": "new", "tap": "fltb", "sriov_vfs": 2}),
    );
}

#[test]
fn each_call_of_a_disks_hot_plug_may_fail_once() {
    each_call_of_a_hot_plug(
        "a disk's hot-plug",
        "vm.add-disk",
        "disks",
        "fltc",
        |vmm| json!({"id": "new", "path": vmm.files.sparse("disk", 1 << 20), "image_type": "Raw"}),
    );
}

#[test]
fn each_call_of_a_vfs_enable_may_fail_once() {
    let vmm = Vmm::start();
    let ram = vmm.files.sparse("ram", 64 << 20);
    let mut config = vmm.config(json!([{"id": "pf0", "tap": "fltd", "sriov_vfs": 2, "pci_device_id": 1}]));
    config["payload"]["kernel"] = json!(vmm.files.kernel(&guest::code()));
    config["memory"] = json!({"size": 0, "zones": [{"id": "all", "size": 64 << 20, "file": ram, "shared": true}]});
    drop(vmm.boot_config(&config));
    let memory = File::options().read(true).write(true).open(&ram).unwrap();
    let read = |address: u32| {
        let mut bytes = [0; 4];
        memory.read_exact_at(&mut bytes, address.into()).unwrap();
        u32::from_ne_bytes(bytes)
    };
    let tell = |command: u32| {
        memory.write_all_at(&command.to_ne_bytes(), guest::COMMAND.into()).unwrap();
        wait_for("the guest", || read(guest::COMMAND) == 0);
    };
    let works = |what: &str| {
        tell(guest::ENABLE);
        assert_eq!(read(guest::STATUS), guest::RUNNING, "{what}");
        wait_for("the VF's thread", || vmm.threads().iter().any(|name| name.starts_with("pf0v0")));
        tell(guest::DISABLE);
    };
    let before = holding(&vmm, "fltd");
    works("without a fault");
    await_holding(&vmm, "fltd", &before, "without a fault");
    let enable = || {
        tell(guest::ENABLE);
        // Its threads begin.
        std::thread::sleep(Duration::from_millis(20));
    };
    at_each_call(&vmm, "a VF's enable", enable, |what, _| {
        vmm.client().get("vmm.ping").expect(200);
        tell(guest::DISABLE);
        await_holding(&vmm, "fltd", &before, what);
        works(what);
        await_holding(&vmm, "fltd", &before, what);
    });
}
