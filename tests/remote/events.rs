//! Events in `--event-monitor` of a VM whose guest is idle.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::files::Files;
use crate::vmm::{VMM, Vmm, wait_for};

fn events(text: &str) -> Vec<Value> {
    serde_json::Deserializer::from_str(text).into_iter().map(Result::unwrap).collect()
}

fn names(events: &[Value]) -> Vec<String> {
    let name = |event: &Value| format!("{}:{}", event["source"].as_str().unwrap(), event["event"].as_str().unwrap());
    events.iter().map(name).collect()
}

fn monitor(path: &Path) -> String {
    format!("path={}", path.display())
}

/// Boots a VM whose guest is idle, with its events in `file`. The guest's files must outlive it.
fn boot_idle(file: &Path) -> (Vmm, Files) {
    let vmm = Vmm::start(&["--event-monitor", &monitor(file)]);
    let files = Files::new();
    vmm.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M"]);
    vmm.done(&["boot"]);
    (vmm, files)
}

#[test]
fn the_life_of_a_vm_is_reported() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("events");
    let (vmm, _files) = boot_idle(&file);
    vmm.done(&["add-net", "id=n0,tap=rme0,pci_device_id=9"]);
    for command in ["pause", "resume", "resize --cpus 1", "reboot", "shutdown", "delete", "shutdown-vmm"] {
        vmm.done(&command.split(' ').collect::<Vec<_>>());
    }
    assert_eq!(vmm.end(), Some(0));
    let told = events(&fs::read_to_string(&file).unwrap());
    let expected = "vmm:starting vm:booting vm:booted vm:device-added vm:pausing vm:paused vm:resuming vm:resumed \
                    vm:resizing vm:resized vm:rebooting vm:rebooted vm:shutdown vm:deleted vmm:shutdown";
    assert_eq!(names(&told).join(" "), expected);
    assert_eq!(told[3]["properties"], json!({"id": "n0", "bdf": "0000:00:09.0"}));
    assert_eq!(told[2]["properties"], Value::Null);
    let at =
        |event: &Value| (event["timestamp"]["secs"].as_u64().unwrap(), event["timestamp"]["nanos"].as_u64().unwrap());
    assert!(told.is_sorted_by_key(at));
    // In one format and in UTC, texts are in the order of their times.
    let time = |event: &Value| event["time"].as_str().unwrap().to_string();
    assert!(told.iter().all(|event| time(event).len() == 27 && time(event).ends_with('Z')), "{told:?}");
}

#[test]
fn a_change_of_a_vfs_policy_is_reported_with_who_made_it() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("events");
    let (vmm, _files) = boot_idle(&file);
    vmm.done(&["add-net", "id=pf0,tap=rmp0,sriov_vfs=2"]);
    vmm.done(&["set-vf", "pf0", "1", "--spoofchk", "on"]);
    assert!(vmm.refused(&["set-vf", "pf0", "1", "--vlan", "4095"]).contains("not a VLAN"));
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
    let told = events(&fs::read_to_string(&file).unwrap());
    let told: Vec<_> = told.iter().filter(|event| event["event"] == "vf-policy").collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(
        (&told[0]["source"], &told[0]["properties"]),
        (
            &json!("sriov"),
            &json!({"id": "pf0", "index": "1", "by": "host", "changed": "spoofchk false -> true, trust true -> false"})
        )
    );
}

#[test]
fn a_vmm_with_a_socket_in_use_leaves_the_others_events_alone() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("events");
    let vmm = Vmm::start(&["--event-monitor", &monitor(&file)]);
    let mut second = Command::new(VMM);
    second.arg("--api-socket").arg(vmm.path("socket")).args(["--event-monitor", &monitor(&file)]);
    assert!(!second.output().unwrap().status.success());
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
    let told = events(&fs::read_to_string(&file).unwrap());
    assert_eq!(names(&told).join(" "), "vmm:starting vmm:shutdown");
}

#[test]
fn a_pipe_may_be_opened_before_the_vmm_starts_or_after() {
    for late in [false, true] {
        let folder = tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        // In the late case, this thread opens the pipe while the VMM runs: opening it waits for a writer.
        let read = |mut file: File| {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            text
        };
        let early = (!late).then(|| {
            let pipe = pipe.clone();
            thread::spawn(move || read(File::open(pipe).unwrap()))
        });
        let vmm = Vmm::start(&["--event-monitor", &monitor(&pipe)]);
        vmm.done(&["ping"]);
        let reader = early.unwrap_or_else(|| {
            let file = File::open(&pipe).unwrap();
            thread::spawn(move || read(file))
        });
        vmm.done(&["shutdown-vmm"]);
        assert_eq!(vmm.end(), Some(0));
        assert_eq!(names(&events(&reader.join().unwrap())), ["vmm:starting", "vmm:shutdown"], "late: {late}");
    }
}

#[test]
fn a_vmm_whose_events_are_not_read_still_serves_and_exits() {
    let folder = tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let vmm = Vmm::start(&["--event-monitor", &monitor(&pipe)]);
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn a_signal_ends_the_vm_and_the_vmm() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("events");
    let (vmm, _files) = boot_idle(&file);
    let pid = rustix::process::Pid::from_child(&vmm.process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    wait_for("the last event", || fs::read_to_string(&file).unwrap().contains("\"vmm\",\n  \"event\": \"shutdown\""));
    assert_eq!(vmm.end(), Some(0));
    let told = names(&events(&fs::read_to_string(&file).unwrap()));
    assert_eq!(told, ["vmm:starting", "vm:booting", "vm:booted", "vm:shutdown", "vm:deleted", "vmm:shutdown"]);
}
