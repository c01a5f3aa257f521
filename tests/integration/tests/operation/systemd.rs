//! The units of `contrib/systemd` under a systemd of their own, with guests of a few instructions.
//!
//! They run in an emulated machine on any host: see `Test::is_always_nested` of `cargo xtask`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

#[path = "../../../cli/files.rs"]
#[expect(dead_code, reason = "the tests of the command line use the rest")]
mod files;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use integration::{Api, Systemd, interface_exists};
use serde_json::json;

const OWN: &str = "cloud-hypervisor@vm1.service";
const RECEIVER: &str = "cloud-hypervisor-receive@vm1.service";
const OWN_API: &str = "/run/cloud-hypervisor/vm1/api.sock";
const RECEIVER_API: &str = "/run/cloud-hypervisor-receive/vm1/api.sock";
/// Mark of a VM that has moved to another host.
const MOVED: &str = "/var/lib/cloud-hypervisor/vm1.moved";
const SERIAL: &str = "/var/lib/cloud-hypervisor/vm1/serial.sock";
const VSOCK: &str = "/var/lib/cloud-hypervisor/vm1/vsock.sock";
/// Time that the guest may take to return a byte.
const LIMIT: Duration = Duration::from_secs(60);

/// A guest that returns each byte of its serial port. It powers off at `q`, and when its power button is pressed.
fn echo() -> Vec<u8> {
    let mut code = vec![0xb9, 0x00, 0x04, 0, 0, 0xf3, 0x90, 0xe2, 0xfc]; // mov ecx, 0x400; pause; loop to it
    code.extend([0x66, 0xba, 0x10, 0x06, 0xec, 0xa8, 0x02, 0x75, 21]); // mov dx, 0x610; in al, dx; test al, 2; jnz off
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xe5]); // mov dx, 0x3fd; in; test al, 1; jz top
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xec]); // mov dx, 0x3f8; in al, dx
    code.extend([0x3c, b'q', 0x74, 0x03]); // cmp al, 'q'; je off
    code.extend([0xee, 0xeb, 0]); // out dx, al; jmp top
    let back = 0_i8.wrapping_sub(i8::try_from(code.len()).unwrap());
    *code.last_mut().unwrap() = back.cast_unsigned();
    code.extend([0x66, 0xba, 0, 0x06, 0xb0, 0x34, 0xee, 0xf4]); // off: mov dx, 0x600; mov al, 0x34; out dx, al; hlt
    code
}

/// A host with the unit of a VM that has devices as Kata's: vsock, and a serial port that is a socket.
fn host() -> Systemd {
    let systemd = Systemd::start();
    fs::write(systemd.path("/etc/cloud-hypervisor/kernel"), files::kernel(&echo())).unwrap();
    let config = json!({
        "payload": {"kernel": "/etc/cloud-hypervisor/kernel"},
        "memory": {"size": 64 << 20, "shared": true},
        "serial": {"mode": "Socket", "socket": SERIAL},
        "console": {"mode": "Off"},
        "vsock": {"cid": 3, "socket": VSOCK},
        "net": [{"id": "pf0", "tap": "unitpf", "sriov_vfs": 2}],
    });
    fs::write(systemd.path("/etc/cloud-hypervisor/vm1.json"), config.to_string()).unwrap();
    systemd
}

/// Checks that a running guest answers, at the paths of its configuration.
fn assert_guest_answers(systemd: &Systemd, api: &str) {
    let info = Api::at(systemd.path(api)).info();
    assert_eq!(info["state"], "Running");
    let mut serial = UnixStream::connect(systemd.path(SERIAL)).unwrap();
    serial.set_read_timeout(Some(LIMIT)).unwrap();
    for byte in [b'a', b'b'] {
        serial.write_all(&[byte]).unwrap();
        let mut answer = [0];
        serial.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [byte]);
    }
    UnixStream::connect(systemd.path(VSOCK)).unwrap();
    assert!(interface_exists("unitpf") && interface_exists("unitpfv1"));
}

/// The commands for a snapshot in the guide, whose folder belongs to the unit's user.
fn save_as_in_the_guide(systemd: &Systemd) {
    let guide = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/upgrading.md")).unwrap();
    let (_, block) = guide.split_once("```\nmkdir ").unwrap();
    let (commands, _) = block.split_once("```").unwrap();
    systemd.ok(&["sh", "-ec", &format!("mkdir {commands}")]);
    assert!(systemd.path("/var/lib/cloud-hypervisor/vm1/snap/config.json").exists());
    systemd.ok(&["ch-remote", "--api-socket", OWN_API, "resume"]);
}

/// Lets the guest power off.
fn power_off(systemd: &Systemd) {
    let mut serial = UnixStream::connect(systemd.path(SERIAL)).unwrap();
    serial.set_read_timeout(Some(LIMIT)).unwrap();
    serial.write_all(b"q").unwrap();
    // The VMM ends.
    assert_eq!(serial.read(&mut [0]).unwrap_or(0), 0);
}

/// Checks that the unit has ended as `result`, has left nothing, and that no client starts it.
fn assert_gone(systemd: &Systemd, unit: &str, api: &str, result: &str) {
    systemd.wait_until(unit, if result == "success" { "inactive" } else { "failed" });
    assert_eq!(systemd.show(unit, "Result"), result);
    let path: PathBuf = systemd.path(api);
    assert!(UnixStream::connect(&path).is_err(), "a client reaches {api}");
    assert!(!path.parent().unwrap().exists(), "{api}: its folder is left");
    assert_eq!(systemd.show(unit, "NRestarts"), "0");
    assert_ne!(systemd.show(unit, "ActiveState"), "active");
}

#[test]
fn only_an_operator_starts_a_vm_of_the_units_again() {
    let systemd = host();
    // The guest powers off.
    systemd.ok(&["systemctl", "start", OWN]);
    assert_guest_answers(&systemd, OWN_API);
    systemd.ok(&["systemctl", "reload", OWN]);
    save_as_in_the_guide(&systemd);
    assert_guest_answers(&systemd, OWN_API);
    power_off(&systemd);
    assert_gone(&systemd, OWN, OWN_API, "success");
    // An operator stops it, by the power button.
    systemd.ok(&["systemctl", "start", OWN]);
    assert_guest_answers(&systemd, OWN_API);
    systemd.ok(&["systemctl", "stop", OWN]);
    assert_gone(&systemd, OWN, OWN_API, "success");
    // The program is killed.
    systemd.ok(&["systemctl", "start", OWN]);
    systemd.ok(&["systemctl", "kill", "--signal=KILL", OWN]);
    assert_gone(&systemd, OWN, OWN_API, "signal");
    assert!(!interface_exists("unitpf"));
    // A receiver to which no VM comes stops at once.
    systemd.ok(&["systemctl", "start", RECEIVER]);
    systemd.ok(&["systemctl", "stop", RECEIVER]);
    assert_gone(&systemd, RECEIVER, RECEIVER_API, "success");
}

#[test]
fn a_vm_of_a_unit_moves_away_and_is_upgraded_twice() {
    let systemd = host();
    for unit in [OWN, RECEIVER] {
        drop_in(&systemd, unit, "[Service]\nEnvironment=\"OPTIONS=-v --log-file %L/cloud-hypervisor/%i/vm.log\"\n");
    }
    systemd.ok(&["systemctl", "start", OWN]);
    let process = || systemd.show(OWN, "MainPID");
    let mut before = process();
    for _ in 0..2 {
        // Of a VM that has come back.
        fs::write(systemd.path(MOVED), "the guest moved away to tcp:192.0.2.7:4711").unwrap();
        systemd.ok(&["upgrade-vm", "vm1"]);
        assert!(!systemd.path(MOVED).exists());
        assert_guest_answers(&systemd, OWN_API);
        assert_ne!(process(), before);
        before = process();
        assert_gone(&systemd, RECEIVER, RECEIVER_API, "success");
    }
    // Each program has the operator's options.
    let log = fs::read_to_string(systemd.path("/var/log/private/cloud-hypervisor/vm1/vm.log")).unwrap();
    assert_eq!(log.matches("migration-receive-finished").count(), 4, "{log}");
    // It moves away.
    systemd.ok(&["systemctl", "start", RECEIVER]);
    let url = "/run/cloud-hypervisor-receive/vm1/move";
    let receive = format!("receiver_url=unix:{url},detach=on");
    systemd.ok(&["ch-remote", "--api-socket", RECEIVER_API, "receive-migration", &receive]);
    let send = format!("destination_url=unix:{url},local=on");
    systemd.ok(&["ch-remote", "--api-socket", OWN_API, "send-migration", &send, "--wait"]);
    assert_gone(&systemd, OWN, OWN_API, "success");
    assert_guest_answers(&systemd, RECEIVER_API);
    // The guest powers off where it is, and ends that unit.
    power_off(&systemd);
    assert_gone(&systemd, RECEIVER, RECEIVER_API, "success");
    assert!(!interface_exists("unitpf") && !systemd.path(VSOCK).exists() && !systemd.path(SERIAL).exists());
    // It moved on this host, so a start is allowed, and is that of the configuration.
    assert!(!systemd.path(MOVED).exists());
    systemd.ok(&["systemctl", "start", OWN]);
    assert_guest_answers(&systemd, OWN_API);
}

/// Sets the drop-in of `unit`: an operator's settings, or a fault.
fn drop_in(systemd: &Systemd, unit: &str, text: &str) {
    let folder = systemd.path(&format!("/etc/systemd/system/{unit}.d"));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("test.conf"), text).unwrap();
    systemd.ok(&["systemctl", "daemon-reload"]);
}

/// Checks that an upgrade fails in one line with `reason`, and that the guest stays in `unit`, whose API is at `api`.
fn assert_upgrade_fails(systemd: &Systemd, reason: &str, (unit, api): (&str, &str), idle: &str) {
    let output = systemd.run(&["upgrade-vm", "vm1"]);
    let line = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty() && line.lines().count() == 1, "{output:?}");
    assert!(line.starts_with("upgrade-vm: ") && line.contains(reason), "{line}");
    let end = format!("; the guest stays in {unit} (Running); remove the cause and call upgrade-vm vm1 again\n");
    assert!(line.ends_with(&end), "{line}");
    assert_guest_answers(systemd, api);
    assert_eq!(systemd.show(unit, "ActiveState"), "active");
    assert_ne!(systemd.show(idle, "ActiveState"), "active");
    // The next start of the VM's own unit has its VM.
    assert!(!systemd.path(&format!("/run/systemd/system/{OWN}.d")).exists());
}

#[test]
fn a_failed_step_of_an_upgrade_leaves_the_guest_running() {
    let systemd = host();
    systemd.ok(&["systemctl", "start", OWN]);
    let not_started = "[Service]\nExecStartPost=/bin/false\n";
    let without_kvm = "[Service]\nInaccessiblePaths=/dev/kvm\n";
    // The first step: the receiving unit does not start, or cannot run the VM.
    for (fault, reason) in [(not_started, "did not start"), (without_kvm, "/dev/kvm")] {
        drop_in(&systemd, RECEIVER, fault);
        assert_upgrade_fails(&systemd, reason, (OWN, OWN_API), RECEIVER);
    }
    drop_in(&systemd, RECEIVER, "");
    // The second.
    for (fault, reason) in [(not_started, "did not start"), (without_kvm, "/dev/kvm")] {
        drop_in(&systemd, OWN, fault);
        assert_upgrade_fails(&systemd, reason, (RECEIVER, RECEIVER_API), OWN);
    }
    drop_in(&systemd, OWN, "");
    systemd.ok(&["upgrade-vm", "vm1"]);
    assert_guest_answers(&systemd, OWN_API);
    assert_gone(&systemd, RECEIVER, RECEIVER_API, "success");
}

#[test]
fn a_unit_does_not_start_a_vm_that_has_moved_away() {
    let systemd = host();
    let config = json!({
        "payload": {"kernel": "/etc/cloud-hypervisor/kernel"},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "Null"},
        "console": {"mode": "Off"},
        "net": [{"id": "pf0", "switch": "veb", "sriov_vfs": 2}],
    });
    fs::write(systemd.path("/etc/cloud-hypervisor/vm1.json"), config.to_string()).unwrap();
    systemd.ok(&["systemctl", "start", OWN]);
    systemd.ok(&["systemctl", "start", RECEIVER]);
    let url = "unix:/run/cloud-hypervisor-receive/vm1/move";
    let receive = format!("receiver_url={url},detach=on");
    systemd.ok(&["ch-remote", "--api-socket", RECEIVER_API, "receive-migration", &receive]);
    let send = format!("destination_url={url}");
    systemd.ok(&["ch-remote", "--api-socket", OWN_API, "send-migration", &send, "--wait"]);
    assert_gone(&systemd, OWN, OWN_API, "success");
    assert_eq!(Api::at(systemd.path(RECEIVER_API)).info()["state"], "Running");
    let mark = fs::read_to_string(systemd.path(MOVED)).unwrap();
    assert!(mark.starts_with(&format!("the guest moved away to {url} at 20")), "{mark}");

    // As at the start of the host, and by an operator.
    assert!(!systemd.run(&["systemctl", "start", OWN]).status.success());
    let refusal = format!("not started: {}; once it runs nowhere else: rm {MOVED}\n", mark.trim_end());
    let log = fs::read_to_string(systemd.path("/var/log/vm")).unwrap();
    assert!(log.ends_with(&refusal), "{log}");
    assert_gone(&systemd, OWN, OWN_API, "exit-code");
    systemd.ok(&["systemctl", "stop", RECEIVER]);
    systemd.ok(&["rm", MOVED]);
    systemd.ok(&["systemctl", "start", OWN]);
    assert_eq!(Api::at(systemd.path(OWN_API)).info()["state"], "Running");
    // A power-off is no move.
    systemd.ok(&["systemctl", "stop", OWN]);
    assert!(!systemd.path(MOVED).exists());
}
