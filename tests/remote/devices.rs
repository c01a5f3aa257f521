//! Devices of a running VM, whose guest drives none of them.

use std::fs;

use serde_json::Value;

use crate::files::Files;
use crate::vmm::Vmm;

#[test]
fn a_disk_and_a_vsock_are_added_and_a_disk_is_resized() {
    let (vmm, files) = (Vmm::start(&[]), Files::new());
    let disk = files.sparse("disk", 1 << 20);
    vmm.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M", "--console", "off"]);
    vmm.done(&["boot"]);
    let added: Value = serde_json::from_str(&vmm.done(&["add-disk", &format!("path={disk},id=d")])).unwrap();
    assert_eq!(added["id"], "d");
    let vsock = files.path("vsock");
    vmm.done(&["add-vsock", &format!("cid=3,socket={}", vsock.display())]);
    assert!(vsock.exists());
    vmm.done(&["resize-disk", "--disk", "d", "--size", "2M"]);
    assert_eq!(fs::metadata(&disk).unwrap().len(), 2 << 20);
    assert!(vmm.refused(&["resize-disk", "--disk", "e", "--size", "2M"]).contains("there is no device e"));
    vmm.done(&["power-button"]);
}

#[test]
fn invalid_devices_and_requests_on_no_migration_are_refused() {
    let (vmm, files) = (Vmm::start(&[]), Files::new());
    vmm.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M", "--console", "off"]);
    vmm.done(&["boot"]);
    let refused = vmm.refused(&["add-device", "path=/nowhere,id=v"]);
    assert!(refused.contains("--device id=v,path=/nowhere"), "{refused}");
    assert!(vmm.refused(&["cancel-migration"]).contains("(status 409)"));
    assert!(vmm.refused(&["migration-progress"]).contains("(status 404)"));
}

#[test]
fn a_vfs_mac_changes_and_rates_are_measured_over_an_interval() {
    let (vmm, files) = (Vmm::start(&[]), Files::new());
    let net = "id=pf0,tap=rmd0,sriov_vfs=1";
    vmm.done(&["create", "--kernel", &files.idle_kernel(), "--memory", "size=64M", "--console", "off", "--net", net]);
    vmm.done(&["boot"]);
    vmm.done(&["set-vf", "pf0", "0", "--mac", "02:00:00:00:00:77"]);
    let rows: Value = serde_json::from_str(&vmm.done(&["vfs", "--interval", "1"])).unwrap();
    assert!(rows.to_string().contains("02:00:00:00:00:77"), "{rows}");
}
