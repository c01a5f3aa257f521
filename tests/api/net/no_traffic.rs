//! Causes of a function without traffic, which the page docs/guide/no-traffic.md names by its commands.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::net::tap::ip;
use crate::rig::driven::Driven;
use crate::rig::vmm::{BINARY, wait_for};

/// Runs a command of the page, and returns its text for people.
fn shown(driven: &Driven, command: &str) -> String {
    let mut remote = Command::new(env!("CARGO_BIN_EXE_ch-remote"));
    let output = remote.arg("--api-socket").arg(driven.vmm.socket()).args(["--text", command]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A VM whose guest has a driver of the PF `nic` with these settings, which has sent one frame: 60 bytes of 0.
fn sender(tap: &str, settings: &Value) -> Driven {
    let mut net = json!({"id": "nic", "tap": tap, "sriov_vfs": 2});
    settings.as_object().unwrap().iter().for_each(|(key, value)| net[key] = value.clone());
    Driven::start(Command::new(BINARY), tap, &json!({"net": [net]}))
}

#[test]
fn causes_of_no_traffic_are_shown_by_the_commands_of_the_page() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/no-traffic.md")).unwrap();
    let names = |sign: &str| page.lines().any(|line| line.starts_with('|') && line.contains(&format!("`{sign}`")));
    assert!(page.contains("--text vfs") && page.contains("--text counters"));
    for (tap, settings, cause) in [
        ("notrspoof", json!({"spoofchk": true}), "tx_spoofed_mac"),
        ("notrvlan", json!({"trunk": [7]}), "tx_bad_vlan"),
        ("notrdown", json!({"link": "down"}), "tx_link_down"),
    ] {
        let driven = sender(tap, &settings);
        assert!(names(cause), "{cause}");
        // The host may have sent frames, too, which a link that is down also drops.
        let (counted, begin) = (format!("{cause} 1"), "nic: dropped: ");
        let is_note =
            |line: &str| line.strip_prefix(begin).is_some_and(|causes| causes.split(", ").any(|one| one == counted));
        wait_for(cause, || shown(&driven, "vfs").lines().any(is_note));
        let counters = shown(&driven, "counters");
        assert!(counters.lines().any(|line| line.split_whitespace().eq(["nic", cause, "1"])), "{counters}");
        let vfs = shown(&driven, "vfs");
        assert!(names("reserved") && vfs.lines().filter(|line| line.contains(" reserved ")).count() == 2, "{vfs}");
    }
    let driven = sender("notrgone", &json!({}));
    assert!(names("(lost)") && !shown(&driven, "vfs").contains("dropped"));
    ip(&["link", "del", "notrgone"]);
    wait_for("the loss", || shown(&driven, "vfs").contains("nic: backend lost"));
}
