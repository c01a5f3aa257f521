//! Log lines that a guest can cause, and the effect of a full disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::rig::vmm::{BINARY, Vmm, wait_for};

/// An in-memory file system of limited size, mounted in a folder.
struct Disk(PathBuf);

impl Disk {
    fn new(at: PathBuf, size: &str) -> Self {
        fs::create_dir(&at).unwrap();
        let disk = Self(at);
        disk.mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "none"]);
        disk
    }

    fn resize(&self, size: &str) {
        self.mount(&["-o", &format!("remount,size={size}")]);
    }

    fn mount(&self, arguments: &[&str]) {
        let done = Command::new("mount").args(arguments).arg(&self.0).status().unwrap();
        assert!(done.success(), "this test mounts a file system, and needs root to do it");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn events(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap();
    let events = serde_json::Deserializer::from_str(&text).into_iter().map(|event: Result<Value, _>| event.unwrap());
    events.map(|event| event["event"].as_str().unwrap().to_string()).collect()
}

#[test]
fn endless_guest_reboots_fill_neither_the_log_nor_the_events() {
    let folder = tempfile::tempdir().unwrap();
    let [log, monitor] = ["log", "events"].map(|name| folder.path().join(name));
    let mut command = Command::new(BINARY);
    command.arg("-v").arg("--log-file").arg(&log);
    command.arg("--event-monitor").arg(format!("path={}", monitor.display()));
    let vmm = Vmm::of(command);
    let mut config = vmm.config(json!([]));
    config["payload"]["kernel"] = json!(vmm.files.faulting_kernel());
    let mut client = vmm.client();
    client.put_json("vm.create", &config).expect(204);
    client.put("vm.boot").expect(204);
    let written = || fs::read_to_string(&log).unwrap();
    // Each reboot creates a KVM VM, which waits for grace periods of the kernel. On a busy machine, 256 take longer
    // than one wait.
    for number in [64, 128, 256] {
        wait_for("reboots", || written().contains(&format!("after a triple fault (number {number})")));
    }
    client.put("vmm.shutdown").expect(200);
    vmm.end();
    let lines = written().lines().filter(|line| line.contains("the guest reboots")).count();
    // One for each reboot up to an hourly limit, one for each doubling of their number, and a few for the minutes
    // passed.
    assert!((60..90).contains(&lines), "{lines} lines");
    let told = events(&monitor).iter().filter(|event| *event == "rebooting").count();
    assert!((60..80).contains(&told), "{told} events");
}

#[test]
fn a_full_disk_keeps_events_whole_and_takes_more_given_room() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::new(folder.path().join("disk"), "4k");
    let file = disk.0.join("events");
    let mut command = Command::new(BINARY);
    command.arg("--event-monitor").arg(format!("path={}", file.display()));
    let vmm = Vmm::of(command);
    let mut client = vmm.boot(json!([]));
    let mut go_round = || {
        client.put("vm.pause").expect(204);
        client.put("vm.resume").expect(204);
    };
    let len = || fs::metadata(&file).unwrap().len();
    while len() < 4096 {
        go_round();
    }
    // The last event is probably truncated.
    (0..5).for_each(|_| go_round());
    disk.resize("64k");
    while len() < 4096 + 2000 {
        go_round();
    }
    client.put("vmm.shutdown").expect(200);
    vmm.end();
    assert_eq!(events(&file).last().map(String::as_str), Some("shutdown"));
}

#[test]
fn a_disk_that_is_full_at_the_end_holds_whole_events() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::new(folder.path().join("disk"), "4k");
    let file = disk.0.join("events");
    let mut command = Command::new(BINARY);
    command.arg("--event-monitor").arg(format!("path={}", file.display()));
    let vmm = Vmm::of(command);
    let mut client = vmm.boot(json!([]));
    while fs::metadata(&file).unwrap().len() < 4096 {
        client.put("vm.pause").expect(204);
        client.put("vm.resume").expect(204);
    }
    client.put("vmm.shutdown").expect(200);
    vmm.end();
    assert!(events(&file).len() > 20);
}
