//! Announcements that the program sends for a migrated guest.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use serde_json::json;

use crate::rig::driven::Driven;
use crate::rig::vmm::{BINARY, wait_for};

/// The number of frames sent by the guest behind a tap, or on its behalf.
fn sent(tap: &str) -> u32 {
    fs::read_to_string(format!("/sys/class/net/{tap}/statistics/rx_packets")).unwrap().trim().parse().unwrap()
}

/// For a driver that does not announce itself, the program does, exactly five times.
#[test]
fn a_restored_nic_is_announced_for_a_driver_that_does_not() {
    let Driven { vmm, mut client } = Driven::start(Command::new(BINARY), "announa", &json!({}));
    let path = vmm.files.path("saved");
    fs::create_dir(&path).unwrap();
    let url = format!("file://{}", path.display());
    client.put("vm.pause").expect(204);
    client.put_json("vm.snapshot", &json!({"destination_url": url})).expect(204);
    client.put("vm.delete").expect(204);
    let backends = json!([{"id": "nic", "tap": "announb"}]);
    client.put_json("vm.restore", &json!({"source_url": url, "backends": backends})).expect(204);
    assert_eq!(sent("announb"), 0);
    client.put("vm.resume").expect(204);
    wait_for("all rounds", || sent("announb") >= 5);
    // Neither later nor after a pause.
    client.put("vm.pause").expect(204);
    client.put("vm.resume").expect(204);
    sleep(Duration::from_millis(700));
    assert_eq!(sent("announb"), 5);
}
