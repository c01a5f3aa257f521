//! Faults that a client asks for, as the driver of a VF meets them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use serde_json::{Value, json};

use super::guest;
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, reasons, wait_for};

/// A guest that enables the VFs of `pf0`, and drives VF 0.
struct Guest {
    vmm: Vmm,
    client: Client,
    memory: File,
}

impl Guest {
    fn boot(arguments: &[&str]) -> Self {
        let mut command = Command::new(BINARY);
        command.args(arguments);
        let vmm = Vmm::of(command);
        let ram = vmm.files.sparse("ram", 64 << 20);
        let mut config = vmm.config(json!([{"id": "pf0", "switch": "veb", "sriov_vfs": 2, "pci_device_id": 1}]));
        config["payload"]["kernel"] = json!(vmm.files.kernel(&guest::code()));
        config["memory"] = json!({"size": 0, "zones": [{"id": "all", "size": 64 << 20, "file": ram, "shared": true}]});
        let client = vmm.boot_config(&config);
        let memory = File::options().read(true).write(true).open(&ram).unwrap();
        Self { vmm, client, memory }
    }

    fn read(&self, address: u32) -> u32 {
        let mut bytes = [0; 4];
        self.memory.read_exact_at(&mut bytes, address.into()).unwrap();
        u32::from_ne_bytes(bytes)
    }

    fn tell(&self, command: u32) {
        self.memory.write_all_at(&command.to_ne_bytes(), guest::COMMAND.into()).unwrap();
        wait_for("the guest", || self.read(guest::COMMAND) == 0);
    }

    /// Enables the VFs and starts the driver of VF 0. Returns the status that the driver reads in the end.
    fn enable(&self) -> u32 {
        self.tell(guest::ENABLE);
        self.read(guest::STATUS)
    }

    fn inject(&mut self, fault: &Value) -> (u16, String) {
        let answer = self.client.put_json("vm.inject-fault", fault);
        let text = if answer.status == 204 { String::new() } else { reasons(&answer).join(": ") };
        (answer.status, text)
    }

    fn ask(&mut self, fault: &Value) {
        assert_eq!(self.inject(fault), (204, String::new()), "{fault}");
    }

    fn pf(&mut self) -> Value {
        self.client.get("vm.info").expect(200)["sriov"][0].clone()
    }

    fn wait_for_log(&self, text: &str) {
        self.wait_for_logs(text, 1);
    }

    /// Waits until the log has `text` so many times.
    fn wait_for_logs(&self, text: &str, times: usize) {
        let log = self.vmm.files.path("log");
        wait_for(text, || fs::read_to_string(&log).unwrap().matches(text).count() >= times);
    }
}

#[test]
fn faults_are_refused_unless_the_program_allows_them() {
    let mut guest = Guest::boot(&[]);
    let (status, text) = guest.inject(&json!({"id": "pf0", "fault": "needs-reset"}));
    assert_eq!(status, 409);
    assert!(text.contains("start the program with --fault-injection"), "{text}");
    assert_eq!(guest.enable(), guest::RUNNING);
}

#[test]
fn a_fault_that_no_function_can_have_is_refused_in_one_line() {
    let mut guest = Guest::boot(&["--fault-injection"]);
    for (fault, expected, part) in [
        (json!({"id": "x", "fault": "needs-reset"}), 404, "x"),
        (json!({"id": "pf0", "fault": "flr"}), 400, "fault"),
        (json!({"id": "pf0", "index": 2, "fault": "needs-reset"}), 404, "there is no VF 2"),
        (json!({"id": "pf0", "index": 0, "fault": "needs-reset"}), 409, "its driver has not set DRIVER_OK"),
        (json!({"id": "pf0", "index": 0, "fault": "surprise-removal"}), 409, "this VF is not enabled"),
        (json!({"id": "pf0", "index": 0, "fault": "refuse-vf-enable"}), 400, "only a PF enables VFs"),
        (json!({"id": "pf0", "fault": "lose-interrupts", "count": 1001}), 400, "give 0 to 1000"),
        (json!({"id": "pf0", "fault": "lose-interrupts", "vector": 99}), 400, "vector 99 does not exist"),
        (json!({"id": "pf0", "fault": "needs-reset", "count": 1}), 400, "leave it out"),
        (json!({"id": "pf0", "fault": "needs-reset", "vector": 1}), 400, "leave it out"),
    ] {
        let (status, text) = guest.inject(&fault);
        assert_eq!(status, expected, "{fault}: {text}");
        assert!(text.contains(part), "{fault}: {text}");
    }
    assert_eq!(guest.enable(), guest::RUNNING);
}

#[test]
fn faults_on_demand_reach_the_driver_and_leave_no_trace() {
    let mut guest = Guest::boot(&["--fault-injection", "-vv"]);
    guest.ask(&json!({"id": "pf0", "fault": "refuse-vf-enable"}));
    assert_ne!(guest.enable(), guest::RUNNING);
    assert_eq!(guest.pf()["enabled"], false);
    guest.wait_for_log("pf0: refused a write (1 so far): VF Enable stays clear: a fault that the host asked for");
    assert_eq!(guest.enable(), guest::RUNNING);
    guest.wait_for_log("pf0v0: driver status 0xf: ACKNOWLEDGE DRIVER DRIVER_OK FEATURES_OK");
    guest.wait_for_log("pf0v0: queue 1 enabled: size ");
    guest.wait_for_log("pf0v0: queues run: ");
    // The interrupt by which the VF asks for a reset is lost.
    guest.ask(&json!({"id": "pf0", "index": 0, "fault": "lose-interrupts", "vector": 0}));
    guest.ask(&json!({"id": "pf0", "index": 0, "fault": "needs-reset"}));
    guest.wait_for_log("pf0v0: fault-injected fault=lose-interrupts count=1 vector=0");
    guest.wait_for_log("pf0v0: dropped an interrupt of vector 0");
    guest.wait_for_log("pf0v0: vf-needs-reset");
    assert_eq!(guest.pf()["vfs"][0]["needs_reset"], true);
    guest.tell(guest::DISABLE);
    guest.wait_for_log("pf0: vfs-disabled num_vfs=2 by=driver");
    assert_eq!(guest.enable(), guest::RUNNING);
    assert_eq!(guest.pf()["vfs"][0]["needs_reset"], Value::Null);
    // Events tell the difference between two looks: a driver that no look has seen is not reported as reset.
    guest.wait_for_logs("pf0v0: vf-driver-ok", 2);
    guest.ask(&json!({"id": "pf0", "index": 0, "fault": "surprise-removal"}));
    let states = |pf: &Value| [0, 1].map(|index| pf["vfs"][index]["state"].clone());
    assert_eq!(states(&guest.pf())[0], "Removed");
    guest.wait_for_log("pf0v0: vf-reset by=surprise-removal");
    // Its window reads as all-ones, and its threads have ended.
    assert_eq!(guest.enable(), 0xff);
    guest.tell(guest::DISABLE);
    assert_eq!(guest.enable(), guest::RUNNING);
    assert_eq!(states(&guest.pf())[0], "Running");
}

#[test]
fn a_vf_whose_bus_master_is_clear_is_shown_as_stopped() {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/guide/no-traffic.md")).unwrap();
    assert!(page.lines().any(|line| line.starts_with("| `stopped` |")), "the page has no row for it");
    let mut guest = Guest::boot(&["-vv"]);
    assert_eq!(guest.enable(), guest::RUNNING);
    assert_eq!(guest.pf()["vfs"][0]["stopped_by"], Value::Null);
    guest.tell(guest::MASTER_OFF);
    assert_eq!(guest.pf()["vfs"][0]["stopped_by"], "bus-master");
    guest.wait_for_log("pf0v0: queues stopped: Bus Master Enable is clear");
    let mut remote = Command::new(env!("CARGO_BIN_EXE_ch-remote"));
    let output = remote.arg("--api-socket").arg(guest.vmm.socket()).args(["--text", "vfs"]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("\npf0v0: stopped: Bus Master Enable is clear\n"), "{shown}");
    guest.tell(guest::MASTER_ON);
    assert_eq!(guest.pf()["vfs"][0]["stopped_by"], Value::Null);
}

#[test]
fn a_pf_that_is_removed_by_surprise_is_gone_with_its_vfs() {
    let mut guest = Guest::boot(&["--fault-injection", "-v"]);
    assert_eq!(guest.enable(), guest::RUNNING);
    guest.ask(&json!({"id": "pf0", "fault": "surprise-removal"}));
    guest.wait_for_log("pf0: fault-injected fault=surprise-removal");
    let info = guest.client.get("vm.info").expect(200);
    assert!(info["sriov"].as_array().is_none_or(Vec::is_empty), "{info}");
    assert_eq!(guest.enable(), 0xff);
    // Its slot is free again.
    let next = json!({"id": "pf1", "switch": "veb", "sriov_vfs": 2, "pci_device_id": 1});
    guest.client.put_json("vm.add-net", &next).expect(200);
}
