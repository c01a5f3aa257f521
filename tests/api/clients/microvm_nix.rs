//! microvm.nix: a command line generated from a NixOS configuration with options in this order, each option's keys
//! sorted; afterwards `curl` for the power button and `ch-remote` for the balloon.

use std::fs::File;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::folder::Folder;
use crate::files::Files;
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Kill, taps, wait_for};

/// The command line of a machine: a balloon, a volume, a share over virtiofs, a tap, a vsock and a control socket.
fn arguments(files: &Files, vcpus: u32, tap: &str) -> Vec<String> {
    let path = |name: &str| files.path(name).into_os_string().into_string().unwrap();
    let (queues, pairs) =
        if vcpus > 1 { (format!("num_queues={vcpus},"), format!("num_queues={},", 2 * vcpus)) } else { <_>::default() };
    [
        ("--cpus", format!("boot={vcpus}")),
        ("--watchdog", String::new()),
        ("--kernel", files.idle_kernel()),
        ("--initramfs", path("initrd")),
        ("--cmdline", "earlyprintk=ttyS0 console=ttyS0 reboot=t panic=-1 root=fstab loglevel=4".into()),
        ("--seccomp", "true".into()),
        ("--memory", "mergeable=on,shared=on,size=512M".into()),
        ("--platform", "oem_strings=[io.systemd.credential:vmm.notify_socket=vsock-stream:2:8888]".into()),
        ("--console", "null".into()),
        ("--serial", "tty".into()),
        ("--vsock", format!("cid=3,socket={}", path("notify.vsock"))),
        ("--balloon", "deflate_on_oom=on,free_page_reporting=on,size=0M".into()),
        ("--disk", format!("{queues}path={},readonly=on", path("store"))),
        ("", format!("direct=off,image_type=raw,{queues}path={},readonly=off,serial=data", path("volume"))),
        ("--fs", format!("socket={},tag=ro-store", path("virtiofs.sock"))),
        ("--api-socket", path("machine.sock")),
        ("--net", format!("mac=02:00:00:00:00:01,{pairs}tap={tap}")),
    ]
    .into_iter()
    .flat_map(|(option, value)| [option.to_owned(), value])
    .filter(|argument| !argument.is_empty())
    .collect()
}

/// The files of a machine, and the backend of its share.
fn files() -> (Files, Folder) {
    let files = Files::new();
    for name in ["initrd", "store", "volume"] {
        files.sparse(name, 1 << 20);
    }
    let folder = Folder::listen(&files.path("virtiofs.sock"));
    (files, folder)
}

fn start(files: &Files, arguments: &[String]) -> Kill {
    let log = File::create(files.path("log")).unwrap();
    let mut command = Command::new(BINARY);
    command.args(arguments).current_dir(files.path("")).stdin(Stdio::null());
    let child: Child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
    Kill(child)
}

#[test]
fn microvm_nix_command_line_starts_a_guest_its_scripts_control() {
    for (vcpus, tap) in [(1, "apmvm0"), (2, "apmvm1")] {
        let (files, _folder) = files();
        let _process = start(&files, &arguments(&files, vcpus, tap));
        wait_for("the socket", || files.path("machine.sock").exists());
        let mut client = Client::connect(&files.path("machine.sock"));
        wait_for("the guest", || client.get("vm.info").body["state"] == "Running");
        let info = client.get("vm.info").expect(200);
        let config = &info["config"];
        assert_eq!((&config["memory"]["mergeable"], &config["memory"]["shared"]), (&json!(true), &json!(true)));
        assert_eq!((&config["console"]["mode"], &config["serial"]["mode"]), (&json!("Null"), &json!("Tty")));
        let disks: Vec<_> =
            config["disks"].as_array().unwrap().iter().map(|disk| disk["num_queues"].as_u64()).collect();
        assert_eq!(disks, [Some(vcpus.into()); 2]);
        assert_eq!(config["net"][0]["num_queues"], 2 * vcpus);
        assert_eq!((&config["fs"][0]["tag"], &config["watchdog"]), (&json!("ro-store"), &json!(true)));
        assert!(files.path("notify.vsock").exists() && taps(tap) == [tap]);

        let remote = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ch-remote"));
            command.arg("--api-socket").arg(files.path("machine.sock")).args(arguments);
            assert!(command.status().unwrap().success(), "{arguments:?}");
        };
        remote(&["resize", "--balloon", "64M"]);
        assert_eq!(client.get("vm.info").expect(200)["config"]["balloon"]["size"], 64 << 20);
        client.put("vm.power-button").expect(204);
    }
}

/// The options of a machine with fewer settings: without strings for its firmware tables, `--platform` is empty, and
/// without shares its memory is private and its pages can be merged with other VMs'.
#[test]
fn options_of_microvm_nix_that_say_nothing_are_taken() {
    let (files, _folder) = files();
    let mut arguments = arguments(&files, 1, "apmvm2");
    let at = |arguments: &[String], option: &str| arguments.iter().position(|argument| argument == option).unwrap();
    let platform = at(&arguments, "--platform");
    arguments[platform + 1] = String::new();
    let memory = at(&arguments, "--memory");
    arguments[memory + 1] = "mergeable=on,shared=off,size=512M".into();
    let fs = at(&arguments, "--fs");
    arguments.drain(fs..fs + 2);
    let mut command = Command::new(BINARY);
    let output = command.args(&arguments).arg("--print-config").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let config: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&config["memory"]["mergeable"], &config["memory"]["shared"]), (&json!(true), &json!(false)));
    assert!(config.get("fs").is_none_or(Value::is_null));
}
