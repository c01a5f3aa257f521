//! The examples of README.md and docs/usage.md work as written. Every block marked `sh` is run; the first one starts
//! the VMM. Other command lines of `cloud-hypervisor` are parsed and planned. The error in the README is the one that
//! is printed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::files::Files;
use crate::rig::vmm::{Kill, wait_for};

/// The documents whose examples are tested.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/usage.md"];

/// Both documents, concatenated.
fn text() -> String {
    DOCUMENTS.map(|name| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()).concat()
}

/// The code blocks of `text` that start with the line `mark`.
pub(crate) fn blocks(text: &str, mark: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.find(|line| line.starts_with("```")) {
        let block = lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
        if line == mark {
            blocks.push(block);
        }
    }
    blocks
}

/// This process's PATH, with the commands under test first.
pub(crate) fn path_with_commands() -> String {
    let commands = Path::new(env!("CARGO_BIN_EXE_cloud-hypervisor")).parent().unwrap();
    format!("{}:{}", commands.display(), std::env::var("PATH").unwrap())
}

/// A shell in `folder`, with the commands under test in its PATH.
fn shell(folder: &Path, script: &str) -> Command {
    // In a separate network namespace, the tap names in the examples are free.
    let mut command = Command::new("unshare");
    command
        .args(["--net", "sh", "-e", "-c", script])
        .current_dir(folder)
        .env("PATH", path_with_commands())
        .stdin(Stdio::null());
    command
}

#[test]
fn the_examples_of_readme_and_usage_run_as_they_are_written() {
    let blocks = blocks(&text(), "```sh");
    let [program, requests @ ..] = blocks.as_slice() else { panic!("there is no example") };
    assert!(requests.concat().contains("ch-remote ") && requests.concat().contains("curl "));
    let files = Files::new();
    fs::rename(files.idle_kernel(), files.path("vmlinuz")).unwrap();
    files.sparse("initrd.img", 4096);
    // `exec`, so that killing the child kills the VMM.
    let program = Kill(shell(&files.path(""), &format!("exec {program}")).spawn().unwrap());
    wait_for("the socket", || files.path("vm.sock").exists());
    for request in requests {
        let done = shell(&files.path(""), request).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{request}{said}{}", String::from_utf8_lossy(&done.stdout));
    }
    let mut client = crate::rig::client::Client::connect(&files.path("vm.sock"));
    let info = client.get("vm.info").expect(200);
    let of = |pf: usize, vf: usize, key: &str| info["sriov"][pf]["vfs"][vf][key].clone();
    assert_eq!((&info["state"], info["sriov"].as_array().unwrap().len()), (&json!("Running"), 3));
    assert_eq!((of(0, 1, "link"), of(2, 3, "link"), of(2, 0, "link")), (json!("down"), json!("down"), json!("up")));
    assert_eq!((&of(1, 0, "backend")["name"], &of(2, 0, "mac")), (&json!("tenant-a"), &json!("52:54:00:00:02:00")));
    wait_for("the event", || fs::read_to_string(files.path("events")).unwrap().contains("device-added"));
    drop(program);
}

#[test]
fn the_command_lines_of_readme_and_usage_are_valid() {
    let joined = blocks(&text(), "```").concat().replace("\\\n", " ");
    let command_lines = joined.lines().filter_map(|line| Some(line.split_once("cloud-hypervisor ")?.1));
    let command_lines = command_lines.filter(|line| line.starts_with("--kernel ") || line.starts_with("--firmware "));
    let command_lines: Vec<_> = command_lines.collect();
    assert_eq!(command_lines.len(), DOCUMENTS.len() + 1, "one per document, and a cloud image: {command_lines:?}");
    for arguments in command_lines {
        let command = format!("cloud-hypervisor --print-config {arguments}");
        let done = shell(Path::new("/"), &command).output().unwrap();
        assert!(done.status.success(), "{command}: {}", String::from_utf8_lossy(&done.stderr));
        let vm: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        assert!(vm["net"][0]["vfs"].as_array().is_some_and(|vfs| !vfs.is_empty()), "{vm}");
    }
}

#[test]
fn the_error_that_the_readme_shows_is_printed() {
    let shown = blocks(&text(), "```").into_iter().find(|block| block.starts_with("--net-vf "));
    let command = "cloud-hypervisor --print-config --kernel vmlinuz --net id=pf0,sriov_vfs=8 --net-vf pf=pf0,index=9";
    let done = shell(Path::new("/"), command).output().unwrap();
    let printed = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(Some(printed.as_str()), shown.map(|line| format!("cloud-hypervisor: {line}")).as_deref());
}
