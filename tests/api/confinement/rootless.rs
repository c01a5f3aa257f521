//! The recipe for a VM of an ordinary user: contrib/rootless/run-vm. It drops root privileges, so it must be started
//! with them.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::files::Files;
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Kill, reasons, taps, wait_for};

/// The group that may open /dev/kvm in the test.
const GROUP: &str = "nogroup";
const USER: &str = "nobody";

#[test]
fn a_vm_of_an_ordinary_user_has_what_it_is_passed_and_no_rights() {
    let files = Files::new();
    let at = |name: &str| files.path(name).into_os_string().into_string().unwrap();
    // The binary may lie where only root can reach it, and only root may be able to use /dev/kvm: this test has its
    // own. Another program makes the copy: a child that another test has just forked would inherit the file opened for
    // writing here, and such a file cannot be executed.
    assert!(Command::new("cp").args([Path::new(BINARY), &files.path("vmm")]).status().unwrap().success());
    let kernel = files.idle_kernel();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/rootless/run-vm");
    let script = format!(
        "set -e; mount --bind {node} /dev/kvm; exec {recipe} --user {USER} --group {GROUP} --api-socket {socket} \
         --tap apirl0 --tap apirl1 --vmm {vmm} -- --kernel {kernel} --memory size=64M --console off --landlock \
         --net id=a,fd=4 id=b,fd=5",
        node = at("kvm"),
        recipe = recipe.display(),
        socket = at("socket"),
        vmm = at("vmm"),
    );
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).status().unwrap();
        assert!(status.success(), "{program} {arguments:?}: this test needs root");
    };
    run("mknod", &[&at("kvm"), "c", "10", "232"]);
    run("chgrp", &[GROUP, &at("kvm")]);
    run("chmod", &["0660", &at("kvm")]);
    let log = fs::File::create(files.path("log")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]).stdin(Stdio::null());
    let vmm = Kill(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    wait_for("the VM's user", || {
        let said = fs::read_to_string(files.path("log")).unwrap();
        assert!(said.is_empty(), "{said}");
        files.path("socket").exists() && status(&vmm, "Uid:").starts_with("65534")
    });
    let mut client = Client::connect(&files.path("socket"));
    let info = client.get("vm.info").expect(200);
    assert_eq!((&info["state"], info["config"]["net"].as_array().unwrap().len()), (&json!("Running"), 2));
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(status(&vmm, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(&vmm, "NoNewPrivs:"), "1");
    assert_eq!(taps("apirl"), ["apirl0", "apirl1"]);
    // The program can use only the files that it was given.
    let answer = client.put_json("vm.add-disk", &json!({"path": "/etc/hostname", "readonly": true}));
    assert!(reasons(&answer).concat().contains("--landlock-rules path=/etc/hostname,access=r"), "{answer:?}");
    // The socket of a running VM is not taken from it.
    let again = Command::new(&recipe)
        .args(["--user", USER, "--group", GROUP, "--api-socket", &at("socket"), "--vmm", &at("vmm"), "--", "--version"])
        .output()
        .unwrap();
    let line = String::from_utf8_lossy(&again.stderr);
    assert!(!again.status.success() && line.contains("is in use by a running VM"), "{again:?}");
    assert_eq!(line.lines().count(), 1, "{line}");
    Client::connect(&files.path("socket")).get("vm.info").expect(200);
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    drop(vmm);
    wait_for("the taps to go", || taps("apirl").is_empty());
}

/// A line of the program's status, without its name: `capabilities(7)`.
fn status(vmm: &Kill, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", vmm.0.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim().to_string()
}
