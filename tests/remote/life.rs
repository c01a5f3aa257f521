//! The life of a VM, controlled with `ch-remote`. Tests with a guest need /dev/kvm and the right to create taps.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::files::Files;
use crate::vmm::{REMOTE, VMM, Vmm, wait_for};

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn a_vm_is_created_changed_and_deleted() {
    let vmm = Vmm::start(&[]);
    let ping = json_of(&vmm.done(&["ping"]));
    assert_eq!((&ping["version"], &ping["features"]), (&json!("53.0.0"), &json!(["io_uring", "kvm"])));
    assert_eq!(vmm.done(&["create", "--kernel", "k", "--memory", "size=1G", "--net", "id=n0,tap=rmt0"]), "");
    assert_eq!(vmm.done(&["add-net", "id=pf0,tap=rmt1,sriov_vfs=2", "--vf", "index=1,tap=rmt2"]), "");
    let info = json_of(&vmm.done(&["info"]));
    assert_eq!((&info["state"], &info["memory_actual_size"]), (&json!("Created"), &json!(1 << 30)));
    assert_eq!(info["config"]["net"][1]["vfs"][0]["tap"], json!("rmt2"));
    let shown = vmm.done(&["info", "--text"]);
    assert!(shown.contains("state   Created\n") && shown.contains("2 VFs reserved"), "{shown}");
    assert_eq!(vmm.done(&["remove-device", "n0"]), "");
    assert_eq!(json_of(&vmm.done(&["info"]))["config"]["net"].as_array().unwrap().len(), 1);
    assert_eq!(vmm.done(&["delete"]), "");
    assert!(vmm.refused(&["info"]).contains("(status 404)"));
    assert_eq!(vmm.done(&["shutdown-vmm"]), "");
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn a_vm_is_created_from_a_file() {
    let vmm = Vmm::start(&[]);
    let file = vmm.path("vm.json");
    fs::write(&file, r#"{"payload": {"kernel": "k"}, "cpus": {"boot_vcpus": 3, "max_vcpus": 3}}"#).unwrap();
    vmm.done(&["create", file.to_str().unwrap()]);
    assert_eq!(json_of(&vmm.done(&["info"]))["config"]["cpus"]["boot_vcpus"], json!(3));
    vmm.done(&["delete"]);
    let status = vmm.remote_command(&["create", "-"]).stdin(File::open(&file).unwrap()).status().unwrap();
    assert!(status.success());
    assert_eq!(json_of(&vmm.done(&["info"]))["config"]["cpus"]["boot_vcpus"], json!(3));
}

#[test]
fn an_x550_is_added_and_its_vfs_are_left_to_the_guest() {
    let vmm = Vmm::start(&[]);
    vmm.done(&["create", "--kernel", "k"]);
    vmm.done(&["add-net", "id=x,model=x550,tap=rmx1,sriov_vfs=63"]);
    let config = &json_of(&vmm.done(&["info"]))["config"]["net"][0];
    assert_eq!((&config["model"], &config["sriov_vfs"]), (&"x550".into(), &63.into()));
    let said = vmm.refused(&["add-net", "id=y,model=x550,sriov_vfs=64"]);
    assert!(said.contains("an X550 has at most 63 VFs; reserve fewer") && said.ends_with("(status 400)"), "{said}");
    let said = vmm.refused(&["add-net", "id=y,model=x550,sriov_vfs=4", "--vf", "index=1,vlan=5"]);
    assert!(said.contains("the guest owns the VFs of an X550"), "{said}");
    let said = vmm.refused(&["set-vf", "x", "3", "--vlan", "5"]);
    assert!(said.contains("pf=x,index=3: the guest owns the functions of an X550"), "{said}");
    assert!(said.ends_with("(status 409)"), "{said}");
    let said = vmm.misused(&["add-net", "model=x710"]);
    assert_eq!(said, "ch-remote: --net model=x710: give virtio, x550 or x540");
}

#[test]
fn a_refusal_by_the_vmm_is_shown_with_its_reasons() {
    let vmm = Vmm::start(&[]);
    let said = vmm.refused(&["boot"]);
    assert!(said.starts_with("ch-remote: vm.boot: ") && said.contains("vm.create"), "{said}");
    let said = vmm.refused(&["--json", "boot"]);
    assert!(json_of(&said)[0].is_string(), "{said}");
    vmm.done(&["create", "--kernel", "k", "--net", "id=a"]);
    let said = vmm.refused(&["add-net", "id=a"]);
    assert!(said.contains("in use") && said.ends_with("(status 409)"), "{said}");
    let said = vmm.refused(&["add-net", "num_queues=1"]);
    assert!(said.contains("one pair of queues or more"), "{said}");
    // ch-remote has the VMM's grammar and need not send the request.
    assert_eq!(
        vmm.misused(&["add-net", "tapp=x"]),
        "ch-remote: --net tapp=x: unknown key; did you mean tap? --help lists those of --net"
    );
}

#[test]
fn features_not_in_this_version_are_refused_by_the_vmm() {
    let vmm = Vmm::start(&[]);
    for arguments in [&["add-user-device", "socket=s"][..], &["coredump", "file:///tmp/x"]] {
        let said = vmm.refused(arguments);
        assert!(said.ends_with("not supported yet (status 501)"), "{said}");
    }
}

#[test]
fn a_vm_is_saved_and_restored() {
    let vmm = Vmm::start(&[]);
    let said = vmm.refused(&["snapshot", "file:///nonexistent"]);
    assert!(said.contains("there is no VM") && said.ends_with("(status 404)"), "{said}");
    let said = vmm.refused(&["restore", "source_url=file:///nonexistent"]);
    assert!(
        said.contains("source_url: /nonexistent: there is no snapshot;") && said.ends_with("(status 404)"),
        "{said}"
    );
    let said = vmm.misused(&["restore", "source_url=x,colour=red"]);
    assert_eq!(said, "ch-remote: --restore colour=red: unknown key; --help lists those of --restore");
}

#[test]
fn a_vmm_that_cannot_be_reached_is_named() {
    let vmm = Vmm::start(&[]);
    fs::remove_file(vmm.path("socket")).unwrap();
    let said = vmm.refused(&["ping"]);
    assert!(said.contains("is cloud-hypervisor running with this --api-socket?"), "{said}");
}

#[test]
fn an_invalid_command_line_has_its_own_exit_status() {
    let vmm = Vmm::start(&[]);
    for (wrong, said) in [
        (&["no-such"][..], "unrecognized subcommand 'no-such'"),
        (&["resize"], "at least one setting is required, such as --cpus or --memory; see ch-remote resize --help"),
        (&["resize", "--memory", "1T"], "invalid value '1T' for '--memory <MEMORY>': give a number of bytes"),
        (&["resize", "--cpus", "x"], "invalid value 'x' for '--cpus <number>': give a whole number from 0 to"),
        (
            &["set-vf", "pf0", "0"],
            "at least one setting is required, such as --link or --mac; see ch-remote set-vf --help",
        ),
        (&["set-vf", "pf0", "x", "--link", "up"], "invalid value 'x' for '[INDEX]': give the index of a VF, an"),
        (
            &["set-vf", "pf0", "0", "--vlan", "abc"],
            "invalid value 'abc' for '--vlan <id>': give a whole number from 0 to 4094",
        ),
        (&["create", "f", "--kernel", "k"], "[FILE] cannot be combined with --kernel"),
        (&["add-net", "id=a", "--vf", "tap=x"], "--vf: index is required; add it"),
        (
            &["add-net", "id=a", "--vf", "index=0,tapp=x"],
            "--vf tapp=x: unknown key; did you mean tap? --help lists those of --vf",
        ),
        (&["send-migration", "local=on"], "send-migration: destination_url is required; add it"),
    ] {
        let line = vmm.misused(wrong);
        assert!(line.starts_with(&format!("ch-remote: {said}")), "{line}");
    }
    let mut nowhere = Command::new(REMOTE);
    let output = nowhere.arg("ping").env_remove("CH_API_SOCKET").output().unwrap();
    let said = "ch-remote: no API socket is named; give --api-socket, or set CH_API_SOCKET\n";
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(2), said));
}

#[test]
fn the_socket_is_also_named_by_the_environment() {
    let vmm = Vmm::start(&[]);
    let remote = |value: &str| {
        let output = Command::new(REMOTE).args(["ping", "--text"]).env("CH_API_SOCKET", value).output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let path = vmm.path("socket").display().to_string();
    for value in [path.clone(), format!("path={path}")] {
        let (code, text) = remote(&value);
        assert_eq!(code, Some(0), "{text}");
        assert!(
            text.lines().any(|line| line.starts_with("pid ") && line.ends_with(&vmm.process.id().to_string())),
            "{text}"
        );
    }
    let (code, said) = remote("fd=3");
    assert_eq!((code, said.as_str()), (Some(2), "ch-remote: CH_API_SOCKET=fd=3: give a path, or path=<path>\n"));
}

#[test]
fn a_stopped_vmm_is_given_up() {
    let vmm = Vmm::start(&[]);
    let pid = rustix::process::Pid::from_child(&vmm.process);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let said = vmm.refused(&["ping", "--timeout", "1"]);
    assert!(said.contains("did not answer within 1 s"), "{said}");
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    vmm.done(&["ping", "--timeout", "0"]);
}

#[test]
fn a_migration_that_fails_is_an_error_for_who_waits() {
    let (vmm, files) = (Vmm::start(&[]), Files::new());
    vmm.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M", "--console", "off"]);
    vmm.done(&["boot"]);
    let nowhere = format!("unix:{}", vmm.path("nowhere").display());
    let said = vmm.refused(&["send-migration", &nowhere, "--wait"]);
    assert!(said.starts_with("ch-remote: send-migration: failed: "), "{said}");
    let shown = vmm.done(&["migration-progress", "--text"]);
    assert!(shown.lines().any(|line| line.starts_with("state ") && line.ends_with(" failed")), "{shown}");
}

#[test]
fn a_migration_that_succeeds_is_reported_to_who_waits() {
    let (source, target, files) = (Vmm::start(&[]), Vmm::start(&[]), Files::new());
    source.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M", "--console", "off"]);
    source.done(&["boot"]);
    let url = format!("unix:{}", target.path("migration").display());
    std::thread::scope(|scope| {
        let received = scope.spawn(|| target.done(&["receive-migration", &url]));
        // The target refuses this connection, and waits for a source.
        wait_for("the target", || UnixStream::connect(target.path("migration")).is_ok());
        assert_eq!(source.done(&["send-migration", &url, "--wait"]), "");
        received.join().unwrap();
    });
    assert!(target.done(&["info", "--text"]).contains("state   Running"));
}

#[test]
fn a_descriptor_that_is_no_tap_is_refused_by_the_vmm() {
    let vmm = Vmm::start(&[]);
    let files = Files::new();
    vmm.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M"]);
    // A descriptor without close-on-exec, which ch-remote inherits and passes on.
    let file = File::open("/dev/null").unwrap();
    let passed = rustix::io::dup(&file).unwrap();
    let net = format!("id=a,fd=[{}]", passed.as_raw_fd());
    vmm.done(&["add-net", &net]);
    // The VMM got the descriptor: only the boot shows that it is not a tap.
    let said = vmm.refused(&["boot"]);
    assert!(said.contains("--net id=a"), "{said}");
}

#[test]
fn the_vfs_of_a_running_vm_are_shown_and_changed() {
    let vmm = Vmm::start(&[]);
    let files = Files::new();
    let kernel = files.idle_kernel();
    vmm.done(&["create", "--kernel", &kernel, "--memory", "size=64M", "--net", "id=pf0,tap=rmv0,sriov_vfs=2"]);
    assert_eq!(vmm.done(&["vfs", "--text"]), "there are no PFs; boot a VM with a NIC that has sriov_vfs=\n");
    vmm.done(&["boot"]);
    let rows = json_of(&vmm.done(&["vfs"]));
    let index = |n: usize| rows[n]["index"].as_u64();
    assert_eq!((index(0), index(1), index(2)), (None, Some(0), Some(1)));
    assert_eq!((&rows[2]["state"], &rows[2]["link"]), (&json!("reserved"), &json!("up")));
    assert_eq!(rows[2]["rx_bits_per_second"], json!(0.0));
    vmm.done(&["set-vf", "pf0", "1", "--link", "down"]);
    let shown = vmm.done(&["vfs", "--text"]);
    let third = |shown: &str| shown.lines().nth(3).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(third(&shown).contains("tap rmv0v1 (made) down"), "{shown}");
    let policy = ["--vlan", "100", "--vlan-qos", "3", "--vlan-proto", "802.1q", "--spoofchk", "on", "--trust", "off"];
    vmm.done(&[&["set-vf", "pf0", "1", "--max-tx-rate", "500", "--storm", "7"][..], &policy].concat());
    let shown = vmm.done(&["vfs", "--text"]);
    assert!(third(&shown).contains("down 100 S 500M"), "{shown}");
    vmm.done(&["set-vf", "pf0", "1", "--vlan", "0", "--vlan-qos", "0", "--trunk", "[5,10-19]", "--link", "auto"]);
    let rows = json_of(&vmm.done(&["vfs"]));
    assert_eq!((&rows[2]["vlan"], &rows[2]["spoofchk"]), (&json!([5, "10-19"]), &json!(true)));
    let refused = vmm.refused(&["set-vf", "pf0", "1", "--vlan", "5"]);
    assert!(refused.contains("trunk=[5,10-19]: cannot be combined with vlan=5"), "{refused}");
    assert!(vmm.refused(&["set-vf", "pf0", "7", "--link", "down"]).contains("reserves 2 VFs"));
    let added = json_of(&vmm.done(&["add-net", "id=pf1,tap=rmv1,sriov_vfs=1"]));
    assert_eq!(added["id"], json!("pf1"));
    assert!(json_of(&vmm.done(&["counters"]))["pf1"]["rx_frames"].is_u64());
    assert!(vmm.done(&["counters", "--explain", "rx_frames"]).contains("rx_frames"));
    vmm.done(&["pause"]);
    assert_eq!(json_of(&vmm.done(&["info"]))["state"], json!("Paused"));
    vmm.done(&["resume"]);
    vmm.done(&["shutdown"]);
    assert_eq!(json_of(&vmm.done(&["info"]))["state"], json!("Shutdown"));
}

#[test]
fn watched_vfs_are_shown_repeatedly() {
    let vmm = Vmm::start(&[]);
    vmm.done(&["create", "--kernel", "k"]);
    let mut watching = vmm.remote_command(&["vfs", "--watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "[]");
    assert_eq!(lines.next().unwrap().unwrap(), "[]");
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn with_no_shutdown_the_vmm_outlives_its_guest() {
    let files = Files::new();
    let kernel = files.off_kernel();
    let vmm = Vmm::start(&["--no-shutdown", "--kernel", &kernel, "--memory", "size=64M"]);
    wait_for("the guest's power-off", || json_of(&vmm.done(&["info"]))["state"] == json!("Shutdown"));
    vmm.done(&["boot"]);
    wait_for("the guest's power-off", || json_of(&vmm.done(&["info"]))["state"] == json!("Shutdown"));
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
}

/// The service manager may pass the API socket. A datagram notifies it when clients are served.
#[test]
fn a_service_manager_passes_the_socket_and_gets_notifications() {
    let folder = tempfile::tempdir().unwrap();
    let notify = UnixDatagram::bind(folder.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    // A descriptor without close-on-exec.
    let passed = rustix::io::dup(&listener).unwrap();
    let mut command = Command::new(VMM);
    command.arg("--api-socket").arg(format!("fd={}", passed.as_raw_fd()));
    let mut vmm = command.env("NOTIFY_SOCKET", folder.path().join("notify")).spawn().unwrap();
    let mut told = [0; 64];
    let count = notify.recv(&mut told).unwrap();
    assert_eq!(&told[..count], b"READY=1\n");
    let remote = |subcommand: &str| {
        let status =
            Command::new(REMOTE).arg("--api-socket").arg(&socket).arg(subcommand).stdout(Stdio::null()).status();
        assert!(status.unwrap().success(), "{subcommand}");
    };
    remote("ping");
    remote("shutdown-vmm");
    assert!(vmm.wait().unwrap().success());
    let count = notify.recv(&mut told).unwrap();
    assert_eq!(&told[..count], b"STOPPING=1\n");
}

#[test]
fn the_pseudo_terminal_of_a_debug_console_is_reported() {
    let files = Files::new();
    let vmm = Vmm::start(&[]);
    // mov al, 'x'; out 0xe9, al; again: hlt; jmp again
    let kernel = files.kernel(&[0xb0, b'x', 0xe6, 0xe9, 0xf4, 0xeb, 0xfd]);
    vmm.done(&["create", "--kernel", &kernel, "--console", "off", "--debug-console", "pty"]);
    let debug = || json_of(&vmm.done(&["info"]))["config"]["debug_console"].clone();
    assert_eq!(debug(), json!({"mode": "Pty", "iobase": 0xe9}));
    vmm.done(&["boot"]);
    let mut terminal = File::open(debug()["file"].as_str().unwrap()).unwrap();
    let mut byte = [0];
    std::io::Read::read_exact(&mut terminal, &mut byte).unwrap();
    assert_eq!(byte, [b'x']);
}

#[test]
fn a_vm_has_a_clock_if_it_is_asked_for() {
    let files = Files::new();
    let vmm = Vmm::start(&[]);
    let kernel = files.idle_kernel();
    let create = |options: &[&str]| {
        vmm.done(&["delete"]);
        vmm.done(&[&["create", "--kernel", &kernel, "--console", "off"], options].concat());
        json_of(&vmm.done(&["info"]))["config"]["rtc"].clone()
    };
    assert_eq!(create(&[]), Value::Null);
    assert_eq!(create(&["--rtc", "id=clock,pci_device_id=9"])["id"], json!("clock"));
    assert_eq!(create(&["--rtc"])["id"], json!("__rtc"));
    vmm.done(&["boot"]);
    let slot = &json_of(&vmm.done(&["info"]))["device_tree"]["_virtio-pci-__rtc"]["pci_bdf"];
    assert!(vmm.done(&["info", "--text"]).contains(slot.as_str().unwrap()), "{slot}");
    assert!(vmm.refused(&["remove-device", "__rtc"]).contains("__rtc stays as long as its VM"));
    assert!(json_of(&vmm.done(&["counters"]))["__rtc"]["readings"].is_u64());
}
