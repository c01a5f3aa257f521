//! The CNI plugin for virtio VFs in a guest, which `cnitool` calls as a container runtime does.

use std::time::Duration;

use integration::{Api, Guest, GuestSpec, Kernel, Output, Pf, cni_programs, guest_tools};
use serde_json::{Value, json};

/// Time that the programs of a step may take. Go's start slowly under emulation.
const LIMIT: Duration = Duration::from_secs(120);
/// MAC address that the plugin gives to VF 0.
const MAC: &str = "52:54:00:00:01:aa";

/// The network of a VF in a VLAN, with more keys of sriov-cni.
fn network(vf: usize, vlan: u16, keys: &Value) -> String {
    let mut plugin = json!({
        "type": "virtio-sriov-cni", "deviceID": format!("0000:01:00.{vf}"), "vlan": vlan,
        "ipam": {"type": "static", "addresses": [{"address": format!("10.77.0.{}/24", vf + 1)}]}
    });
    for (key, value) in keys.as_object().into_iter().flatten() {
        plugin[key] = value.clone();
    }
    json!({"cniVersion": "1.1.0", "name": format!("net{vf}"), "plugins": [plugin]}).to_string()
}

/// Runs a command of `cnitool` for the pod of a VF.
fn cni(guest: &mut Guest, command: &str, vf: usize) -> Output {
    let tool = "CNI_PATH=/tmp/cni NETCONFPATH=/tmp/conf /tmp/cni/cnitool";
    guest.run_within(&format!("{tool} {command} net{vf} /run/netns/pod{vf}"), LIMIT)
}

/// A value of the policy of each VF, as the host shows it.
fn on_host(api: &Api, key: &str) -> Vec<Value> {
    let vfs = api.info()["sriov"][0]["vfs"].as_array().cloned().unwrap_or_default();
    vfs.into_iter().map(|vf| vf["policy"][key].clone()).collect()
}

#[test]
fn pods_get_vlans_and_addresses_by_the_plugin() {
    let api = Api::new("guest-control-cni");
    let net = "id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=3,guest_control=[vlan:100-199,mac,max_tx_rate:1000]";
    let disk = |path: &str, slot| format!("path={path},readonly=on,pci_device_id={slot}");
    let spec = GuestSpec::new(Kernel::Generic).with_nic_tools().memory("size=512M").net(net);
    let spec = spec.disk(&disk(&guest_tools().display().to_string(), 9));
    let spec = spec.disk(&disk(&cni_programs().display().to_string(), 10));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_blk");
    guest.load("virtio_console");
    guest.ok("mkdir -p /tmp/cni /tmp/conf /var/lib && ln -s /run /var/run");
    for disk in ["vda", "vdb"] {
        guest.ok_within(&format!("tar -xf /dev/{disk} -C /tmp/cni"), LIMIT);
    }
    guest.wait_for("grep -qx sriov.control /sys/class/virtio-ports/*/name");
    Pf::at("0000:00:01.0").set_num_vfs(&mut guest, 3);
    for (vf, vlan, keys) in
        [(0, 120, json!({"mac": MAC, "max_tx_rate": 200})), (1, 120, json!({})), (2, 300, json!({}))]
    {
        guest.ok(&format!("echo '{}' > /tmp/conf/{vf}.conflist", network(vf, vlan, &keys)));
        guest.ok(&format!("/usr/bin/ip netns add pod{vf}"));
    }

    for vf in [0, 1] {
        let said = cni(&mut guest, "add", vf);
        assert_eq!(said.status, 0, "{}", said.text);
        assert!(said.text.contains(&format!("10.77.0.{}/24", vf + 1)), "{}", said.text);
        assert_eq!(cni(&mut guest, "check", vf).status, 0);
    }
    assert_eq!(
        (on_host(&api, "vlan"), on_host(&api, "max_tx_rate")[0].clone()),
        (vec![120.into(), 120.into(), 0.into()], 200.into())
    );
    assert_eq!(guest.ok("/usr/bin/ip netns exec pod0 cat /sys/class/net/eth0/address").trim(), MAC);
    guest.wait_for("/usr/bin/ip netns exec pod0 ping -c 1 -W 1 10.77.0.2");
    let refused = cni(&mut guest, "add", 2);
    assert!(refused.status != 0 && refused.text.contains("vlan=300: the host allows 100-199"), "{}", refused.text);

    for vf in 0..3 {
        assert_eq!(cni(&mut guest, "del", vf).status, 0);
        guest.wait_for(&format!("ls /sys/bus/pci/devices/0000:01:00.{vf}/virtio*/net/*/address"));
    }
    assert_eq!((on_host(&api, "vlan"), on_host(&api, "guest_set")), (vec![json!(0); 3], vec![Value::Null; 3]));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
