//! Files of logs, events and consoles, over starts, migrations and rotation.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::files::Files;
use crate::migration::{config, dots, receive, send, url, wait_for_state};
use crate::rig::vmm::{BINARY, Vmm, wait_for};

const EARLIER: &str = "of an earlier start\n";

fn signal(vmm: &Vmm, signal: Signal) {
    kill_process(Pid::from_raw(vmm.pid().cast_signed()).unwrap(), signal).unwrap();
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// A VMM that writes its log and events to these files, which exist.
fn logging([log, events]: [&Path; 2]) -> Vmm {
    for path in [log, events] {
        fs::write(path, EARLIER).unwrap();
    }
    // The tests may have been started by nohup.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", BINARY, "-v", "--log-file"]).arg(log);
    command.arg("--event-monitor").arg(format!("path={}", events.display()));
    Vmm::of(command)
}

#[test]
fn sighup_opens_renamed_files_again_and_the_vm_runs_on() {
    let files = Files::new();
    let [log, events, old_log, old_events] = ["vm.log", "vm.events", "vm.log.1", "vm.events.1"].map(|n| files.path(n));
    let vmm = logging([&log, &events]);
    let mut client = vmm.boot(json!([]));
    wait_for("events", || text(&events).contains("\"booted\""));
    // Without a new name, nothing happens.
    signal(&vmm, Signal::HUP);
    client.put("vm.pause").expect(204);
    wait_for("events", || text(&events).contains("\"paused\""));
    fs::rename(&log, &old_log).unwrap();
    fs::rename(&events, &old_events).unwrap();
    signal(&vmm, Signal::HUP);
    wait_for("new files", || log.exists() && events.exists());
    client.put("vm.resume").expect(204);
    wait_for("events in the new file", || text(&events).contains("\"resumed\""));
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    signal(&vmm, Signal::TERM);
    assert_eq!(vmm.end(), Some(0));
    assert!(text(&old_events).starts_with(EARLIER) && !text(&old_events).contains("\"resumed\""));
    assert!(!text(&events).contains("\"paused\""), "{}", text(&events));
    assert!(text(&old_log).starts_with(EARLIER) && !text(&old_log).contains("stopped by a signal"));
    assert!(text(&log).contains("stopped by a signal"), "{}", text(&log));
}

/// The folder of the API's socket may be written; the log's may not.
#[test]
fn a_confined_vm_warns_of_a_renamed_log_that_it_cannot_open() {
    let files = Files::new();
    let [log, events, old] = ["vm.log", "vm.events", "vm.log.1"].map(|name| files.path(name));
    let vmm = logging([&log, &events]);
    let mut config = vmm.config(json!([]));
    config["landlock_enable"] = json!(true);
    let mut client = vmm.boot_config(&config);
    fs::rename(&log, &old).unwrap();
    signal(&vmm, Signal::HUP);
    let expected =
        "cannot be opened again: Permission denied (os error 13); the renamed file is still written; Landlock";
    wait_for("a warning", || text(&old).contains(expected));
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    assert!(!log.exists());
}

#[test]
fn a_console_file_of_both_sides_of_a_migration_is_kept() {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let (source, target) = (Vmm::of(command), Vmm::start());
    let mut config = config(&source);
    config["serial"]["file"] = json!(source.files.path("serial"));
    let mut client = source.boot_config(&config);
    wait_for("the guest", || dots(&source) > 2);
    let mut there = receive(&target, &url(&target));
    let before = text(&source.files.path("serial"));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    let moved = dots(&source);
    wait_for("output of the moved guest", || dots(&source) > moved + 1);
    let whole = text(&source.files.path("serial"));
    assert!(whole.len() > before.len() && whole.bytes().all(|byte| byte == b'.'), "{whole}");
}
