//! Properties of all kinds.

use std::path::Path;

use crate::config::{DevicePlan, PlannedVm};
use crate::devices::kind;
use crate::landlock::{READ, Rule, WRITE};

/// The devices of a VM whose files are in `folder`.
fn devices(folder: &Path) -> Vec<DevicePlan> {
    let text = |name: &str| folder.join(name).display().to_string();
    let config = serde_json::json!({
        "disks": [{"id": "d", "path": text("disk")}, {"id": "r", "path": text("kept"), "readonly": true}],
        "net": [
            {"id": "t", "tap": "t"}, {"id": "k", "tap": "k", "vhost": true}, {"id": "f", "fds": [9]},
            {"id": "u", "vhost_user": true, "vhost_socket": text("peer")},
            {"id": "s", "vhost_user": true, "vhost_socket": text("server/nic"), "vhost_mode": "Server"},
            {"id": "v", "vdpa": text("vdpa")}, {"id": "x", "model": "x550", "tap": "x", "sriov_vfs": 63},
        ],
        "pmem": [{"id": "p", "file": text("pmem")}, {"id": "q", "file": text("lost"), "discard_writes": true}],
        "fs": [{"id": "shared", "tag": "t", "socket": text("fs")}],
        "rng": {"src": text("rng")},
        "vsock": {"id": "vs", "cid": 3, "socket": text("vsock/s")},
        "watchdog": true, "pvpanic": true, "guest_channel": true, "rtc": {},
    });
    PlannedVm::new(serde_json::from_value(config).unwrap()).unwrap().plan().devices.clone()
}

#[test]
fn a_device_names_its_files_and_what_they_are_needed_for() {
    let folder = tempfile::tempdir().unwrap();
    let rules = kind::all_files(&devices(folder.path()));
    let name = |path: &Path| match path.strip_prefix(folder.path()) {
        Ok(name) => name.display().to_string(),
        Err(_) => path.display().to_string(),
    };
    let all = |is_of: &dyn Fn(&Rule) -> bool| {
        rules.iter().filter(|rule| is_of(rule)).map(|rule| name(&rule.path)).collect::<Vec<_>>()
    };
    assert_eq!(all(&|rule| rule.access == READ), ["kept", "rng", "lost"]);
    assert_eq!(
        all(&|rule| rule.access == READ | WRITE),
        ["disk", "/dev/net/tun", "/dev/net/tun", "/dev/vhost-net", "vdpa", "/dev/net/tun", "pmem"]
    );
    let of_socket = |rule: &Rule| *rule == Rule::of_socket(rule.option.clone(), &rule.path.join("s"));
    assert_eq!(all(&of_socket), ["server", "vsock"]);
    assert_eq!(rules.len(), 3 + 7 + 2);
}

#[test]
fn each_device_is_counted_with_its_files_and_threads() {
    let folder = tempfile::tempdir().unwrap();
    let counted = devices(folder.path()).into_iter().map(|plan| {
        let counts = (kind::open_files(&plan), kind::threads(&plan));
        (plan.id, counts)
    });
    let counted: Vec<_> = counted.collect();
    let counted: Vec<_> = counted.iter().map(|(id, counts)| (id.as_str(), *counts)).collect();
    let expected = [
        ("__console", (8, 1)),
        ("d", (6, 1)),
        ("r", (6, 1)),
        ("t", (6, 1)),
        ("k", (13, 2)),
        ("f", (7, 1)),
        ("u", (16, 1)),
        ("s", (16, 1)),
        ("v", (16, 1)),
        // Of a worker 2, of the uplink 3, and of each function its vectors and a doorbell.
        ("x", (2 + 3 + 65 + 63 * 4, 1)),
        ("__rng", (4, 1)),
        ("shared", (14, 2)),
        ("p", (4, 1)),
        ("q", (4, 1)),
        ("vs", (7, 1)),
        ("__watchdog", (3, 1)),
        ("__rtc", (3, 1)),
        ("__pvpanic", (0, 0)),
        ("__channel", (10, 1)),
    ];
    assert_eq!(counted, expected);
}
