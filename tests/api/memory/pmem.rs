//! Persistent memory of a VM, through the API.

use std::fs;

use serde_json::{Value, json};

use crate::rig::vmm::{Vmm, reasons};

const UNIT: u64 = 2 << 20;

/// The devices of this kind in `vm.info`.
fn all(info: &Value) -> Vec<Value> {
    info["config"]["pmem"].as_array().cloned().unwrap_or_default()
}

#[test]
fn persistent_memory_is_added_and_removed_while_the_vm_runs() {
    let vmm = Vmm::start();
    let file = vmm.files.sparse("pmem", 2 * UNIT);
    let mut client = vmm.boot(json!([]));
    let files = vmm.open_files();
    let add = json!({"file": file, "size": null, "iommu": false, "discard_writes": false, "id": null});
    let added = client.put_json("vm.add-pmem", &add).expect(200);
    assert_eq!(added["id"], "_pmem0");
    let expected = json!({
        "file": file, "discard_writes": false, "iommu": false, "id": "_pmem0", "pci_segment": 0, "pci_device_id": 2,
    });
    assert_eq!(all(&client.get("vm.info").expect(200)), [expected]);
    assert_eq!(client.get("vm.counters").expect(200)["_pmem0"]["flushes"], 0);
    // A temporary file, and a part of a read-only file.
    let temporary = client.put_json("vm.add-pmem", &json!({"file": vmm.files.path(""), "size": 4 * UNIT})).expect(200);
    assert_eq!(temporary["id"], "_pmem1");
    let part = json!({"file": file, "size": UNIT, "discard_writes": true, "id": "part"});
    client.put_json("vm.add-pmem", &part).expect(200);
    assert_eq!(all(&client.get("vm.info").expect(200)).len(), 3);
    for id in ["_pmem0", "_pmem1", "part"] {
        client.put_json("vm.remove-device", &json!({"id": id})).expect(204);
    }
    client.put("vm.reboot").expect(204);
    assert_eq!((vmm.open_files(), all(&client.get("vm.info").expect(200))), (files, Vec::new()));
    let maps = fs::read_to_string(format!("/proc/{}/maps", vmm.pid())).unwrap();
    assert!(!maps.contains(&file), "{maps}");
}

#[test]
fn configured_pmem_is_opened_when_the_vm_boots() {
    let vmm = Vmm::start();
    let file = vmm.files.path("pmem");
    let mut config = vmm.config(json!([]));
    config["pmem"] = json!([{"file": &file}]);
    let mut client = vmm.client();
    client.put_json("vm.create", &config).expect(204);
    assert_eq!(all(&client.get("vm.info").expect(200))[0]["id"], "_pmem0");
    let refused = client.put("vm.boot");
    assert!(refused.status == 400 && reasons(&refused)[1].starts_with("--pmem id=_pmem0: file="), "{refused:?}");
    vmm.files.sparse("pmem", UNIT);
    for _ in 0..2 {
        client.put("vm.boot").expect(204);
        client.put("vm.reboot").expect(204);
        client.put("vm.shutdown").expect(204);
    }
    for wrong in [json!({}), json!({"file": ""}), json!({"file": &file, "size": 1}), json!({"file": &file, "size": 0})]
    {
        assert_eq!(client.put_json("vm.add-pmem", &wrong).status, 400, "{wrong}");
    }
}
