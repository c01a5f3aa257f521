//! The README's examples run as they are written: each block that is marked as `sh`. The first one is the program.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::files::Files;
use crate::vmm::{Kill, wait_for};

/// The blocks of `text` that are marked as `sh`.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while lines.by_ref().any(|line| line == "```sh") {
        blocks.push(lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect());
    }
    blocks
}

/// A shell that finds the commands under test, in `folder`.
fn shell(folder: &Path, script: &str) -> Command {
    let commands = Path::new(env!("CARGO_BIN_EXE_cloud-hypervisor")).parent().unwrap();
    let path = format!("{}:{}", commands.display(), std::env::var("PATH").unwrap());
    // Taps of any name can come and go in a network namespace of its own.
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-e", "-c", script]).current_dir(folder).env("PATH", path).stdin(Stdio::null());
    command
}

#[test]
fn the_examples_of_the_readme_run_as_they_are_written() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let blocks = blocks(&readme);
    let [program, requests @ ..] = blocks.as_slice() else { panic!("no example") };
    assert!(requests.concat().contains("ch-remote ") && requests.concat().contains("curl "));
    let files = Files::new();
    fs::rename(files.idle_kernel(), files.path("vmlinuz")).unwrap();
    files.sparse("initrd.img", 4096);
    // The shell gives way to the only command in it.
    let program = Kill(shell(&files.path(""), &format!("exec {program}")).spawn().unwrap());
    wait_for("the socket", || files.path("vm.sock").exists());
    for request in requests {
        let done = shell(&files.path(""), request).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{request}{said}{}", String::from_utf8_lossy(&done.stdout));
    }
    let mut client = crate::client::Client::connect(&files.path("vm.sock"));
    let info = client.get("vm.info").expect(200);
    let of = |pf: usize, vf: usize, key: &str| info["sriov"][pf]["vfs"][vf][key].clone();
    assert_eq!((&info["state"], info["sriov"].as_array().unwrap().len()), (&json!("Running"), 3));
    assert_eq!((of(0, 1, "link"), of(2, 3, "link"), of(2, 0, "link")), (json!("down"), json!("down"), json!("up")));
    assert_eq!((&of(1, 0, "backend")["name"], &of(2, 0, "mac")), (&json!("tenant-a"), &json!("52:54:00:00:02:00")));
    assert!(fs::read_to_string(files.path("events")).unwrap().contains("device-added"));
    drop(program);
}
