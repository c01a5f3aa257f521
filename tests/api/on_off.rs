//! Optional devices of a VM: the watchdog and the pvpanic device.

use serde_json::json;

use crate::rig::vmm::{Vmm, reasons};

#[test]
fn watchdog_and_pvpanic_exist_if_configured_and_stay() {
    let vmm = Vmm::start();
    let mut config = vmm.config(json!([{"id": "n", "tap": "aoo0"}]));
    config["watchdog"] = json!(true);
    config["pvpanic"] = json!(true);
    let mut client = vmm.boot_config(&config);
    let info = client.get("vm.info").expect(200);
    assert_eq!((&info["config"]["watchdog"], &info["config"]["pvpanic"]), (&json!(true), &json!(true)));
    let tree = &info["device_tree"];
    // After the NIC and the entropy device.
    assert_eq!(tree["_virtio-pci-__watchdog"]["pci_bdf"], "0000:00:03.0");
    assert_eq!((&tree["__pvpanic"]["pci_bdf"], &tree["__pvpanic"]["parent"]), (&json!("0000:00:04.0"), &json!(null)));
    let counters = client.get("vm.counters").expect(200);
    assert_eq!((&counters["__watchdog"]["pings"], &counters["__pvpanic"]["panics"]), (&json!(0), &json!(0)));
    // The transmitter is empty, and nothing was received.
    let serial = &counters["__serial"];
    assert_eq!((&serial["line_status"], &serial["unread_bytes"]), (&json!(0x60), &json!(0)));
    for id in ["__watchdog", "__pvpanic"] {
        let refused = client.put_json("vm.remove-device", &json!({"id": id}));
        let said = format!("{id} stays as long as its VM and cannot be removed");
        assert_eq!((refused.status, reasons(&refused)), (400, vec![said.as_str()]));
    }
    // The NIC frees the first slot, and the devices keep theirs when planned again.
    client.put_json("vm.remove-device", &json!({"id": "n"})).expect(204);
    client.put("vm.reboot").expect(204);
    client.put_json("vm.add-net", &json!({"id": "m", "tap": "aoo1", "pci_device_id": 9})).expect(200);
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    let again = client.get("vm.info").expect(200);
    for id in ["_virtio-pci-__watchdog", "__pvpanic"] {
        assert_eq!(again["device_tree"][id]["pci_bdf"], info["device_tree"][id]["pci_bdf"]);
    }
}

#[test]
fn a_vm_has_neither_by_default() {
    let vmm = Vmm::start();
    for default in [json!(false), json!(null)] {
        let mut config = vmm.config(json!([]));
        config["watchdog"] = default.clone();
        config["pvpanic"] = default;
        let mut client = vmm.client();
        client.put_json("vm.create", &config).expect(204);
        client.put("vm.boot").expect(204);
        let info = client.get("vm.info").expect(200);
        assert_eq!((&info["config"]["watchdog"], &info["config"]["pvpanic"]), (&json!(false), &json!(false)));
        assert!(info["device_tree"]["__watchdog"].is_null() && info["device_tree"]["__pvpanic"].is_null());
        client.put("vm.delete").expect(204);
    }
}
