//! Taps that are deleted under a running VM, with the system call filters of all its threads.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::net::tap::ip;
use crate::rig::driven::Driven;
use crate::rig::vmm::{BINARY, taps, wait_for};

/// A VM whose guest drives the NIC `nic` over the tap of this name.
fn driven(tap: &str) -> Driven {
    let mut command = Command::new(BINARY);
    command.args(["-v", "--event-monitor", "path=events"]);
    Driven::start(command, tap, &json!({}))
}

fn read(driven: &Driven, name: &str) -> String {
    fs::read_to_string(driven.vmm.files.path(name)).unwrap()
}

fn count(driven: &Driven, event: &str) -> usize {
    read(driven, "events").matches(&format!("\"{event}\"")).count()
}

fn nic(driven: &mut Driven) -> Value {
    driven.client.get("vm.info").expect(200)["sriov"][0].clone()
}

fn is_lost(backend: &Value) -> bool {
    backend["lost"] == true
}

#[test]
fn a_deleted_tap_is_found_again_by_its_name_or_replaced() {
    let mut driven = driven("apilost");
    assert!(!is_lost(&nic(&mut driven)["backend"]));
    ip(&["link", "del", "apilost"]);
    wait_for("the loss", || is_lost(&nic(&mut driven)["backend"]));
    wait_for("the event", || count(&driven, "backend-lost") == 1);
    wait_for("the line", || read(&driven, "log").contains("nic: apilost is lost (1 so far): it was deleted"));
    ip(&["tuntap", "add", "apilost", "mode", "tap"]);
    wait_for("the return", || !is_lost(&nic(&mut driven)["backend"]));
    wait_for("the event", || count(&driven, "backend-restored") == 1);

    let give = |tap: &str| json!({"pf": "nic", "tap": tap});
    assert_eq!(driven.client.put_json("vm.set-vf", &give("apilosttwo")).status, 409, "it has one that works");
    ip(&["link", "del", "apilost"]);
    wait_for("the loss", || is_lost(&nic(&mut driven)["backend"]));
    driven.client.put_json("vm.set-vf", &give("apilosttwo")).expect(204);
    assert_eq!(nic(&mut driven)["backend"], json!({"kind": "tap", "name": "apilosttwo", "made": true}));
    wait_for("the events", || count(&driven, "backend-restored") == 2 && count(&driven, "backend-lost") == 2);
    assert!(taps("apilost").contains(&"apilosttwo".to_string()));
}

#[test]
fn a_tap_that_is_deleted_without_a_driver_is_replaced() {
    let mut driven = driven("apigone");
    let vf = driven.client.get("vm.info").expect(200)["sriov"][0]["vfs"][1]["backend"].clone();
    ip(&["link", "del", vf["name"].as_str().unwrap()]);
    let vf = |driven: &mut Driven| nic(driven)["vfs"][1]["backend"].clone();
    assert!(is_lost(&vf(&mut driven)));
    assert_eq!(nic(&mut driven)["vfs"][1]["link"], "down");
    driven.client.put_json("vm.set-vf", &json!({"pf": "nic", "index": 1, "tap": "apigonetwo"})).expect(204);
    assert_eq!(vf(&mut driven), json!({"kind": "tap", "name": "apigonetwo", "made": true}));
    assert!(!is_lost(&nic(&mut driven)["backend"]));
}

#[test]
fn a_switch_finds_its_deleted_uplink_again_by_its_name() {
    let mut command = Command::new(BINARY);
    command.args(["-v", "--event-monitor", "path=events"]);
    let net = json!([{"id": "nic", "tap": "apiup", "sriov_vfs": 2, "switch": "veb"}]);
    let mut driven = Driven::start(command, "apiup", &json!({"net": net}));
    let lost = |driven: &mut Driven| nic(driven)["switch"]["uplink_lost"] == true;
    assert!(!lost(&mut driven));
    ip(&["link", "del", "apiup"]);
    wait_for("the loss", || lost(&mut driven) && nic(&mut driven)["link"] == "down");
    wait_for("the event", || count(&driven, "backend-lost") == 1);
    let line = "nic: apiup, its switch's uplink, is lost (1 so far): it was deleted; make it again: ip tuntap";
    wait_for("the line", || read(&driven, "log").contains(line));
    // As the page about no traffic says.
    let row = "link down: the uplink apiup of its switch was deleted; make it again";
    let output = Command::new(env!("CARGO_BIN_EXE_ch-remote"))
        .arg("--api-socket")
        .arg(driven.vmm.socket())
        .args(["--text", "vfs"])
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains(row), "{shown}");
    let refused = driven.client.put_json("vm.set-vf", &json!({"pf": "nic", "tap": "apiuptwo"}));
    let said = refused.body.to_string();
    assert!(refused.status == 409 && said.contains("uplink apiup was deleted: make it again"), "{said}");
    ip(&["tuntap", "add", "apiup", "mode", "tap"]);
    wait_for("the return", || !lost(&mut driven) && nic(&mut driven)["link"] == "up");
    wait_for("the event", || count(&driven, "backend-restored") == 1);
}
