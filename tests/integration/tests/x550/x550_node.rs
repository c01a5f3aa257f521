//! A guest as a node of a Kubernetes cluster whose VFs are those of an X550: sriov-cni, multus, the SR-IOV device
//! plugin, and the config daemon of the SR-IOV operator, as their projects publish them.

use std::path::Path;
use std::time::Duration;

use integration::{IP, Kernel, X550, cni_programs, in_pod, node_programs, ping_from};
use rstest::rstest;
use serde_json::{Value, json};

/// Time that the programs of a step may take. Go's start slowly under emulation.
const LIMIT: Duration = Duration::from_secs(120);

/// Programs, networks and pods of a guest.
struct Node(X550);

/// The address of the VF with an index.
fn address(vf: usize) -> String {
    format!("0000:01:00.{vf}")
}

/// The configuration of sriov-cni for a VF. It knows CNI up to 0.3.1.
fn sriov(vf: usize, vlan: u16) -> Value {
    json!({
        "cniVersion": "0.3.1", "name": format!("net{vf}"), "type": "sriov", "deviceID": address(vf), "vlan": vlan,
        "ipam": {"type": "static", "addresses": [{"address": format!("10.88.0.{}/24", vf + 1)}]}
    })
}

impl Node {
    /// A guest with an X550 whose VFs are not enabled, and the programs of `archives` in `/tmp/cni`.
    fn boot(kernel: Kernel, archives: &[&Path]) -> Node {
        let nic = X550::boot_with(kernel, 4, |spec| spec.memory("size=1G").with_archives(archives));
        let mut node = Node(nic);
        node.0.guest.unpack();
        node
    }

    /// Waits until a VF's interface is in the guest's own namespace.
    fn await_return(&mut self, vf: usize) {
        self.0.guest.wait_for(&format!("ls /sys/bus/pci/devices/{}/net/*/address", address(vf)));
    }

    fn end(mut self) {
        self.0.guest.assert_x550_has_no_complaint();
        assert_eq!(self.0.guest.power_off().code, Some(0));
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::Generic6_1)]
#[case::linux_6_12(Kernel::Generic)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::GenericBackports)]
fn sriov_cni_puts_two_pods_into_a_vlan(#[case] kernel: Kernel) {
    let mut node = Node::boot(kernel, &[&cni_programs()]);
    node.0.enable(2);
    for vf in 0..2 {
        let pod = format!("pod{vf}");
        node.0.guest.add_pod(&pod, &sriov(vf, 7));
        let result = node.0.guest.cni_ok("add", &format!("net{vf}"), &pod);
        assert!(result.contains(&format!("10.88.0.{}/24", vf + 1)), "{result}");
        assert_eq!(node.0.vf(vf)["vlan_list"][0]["vlan"], 7);
    }
    node.0.guest.wait_for(&ping_from("pod0", "10.88.0.2"));
    let uplink = ping_from("pod0", &X550::UPLINK.to_string());
    assert_ne!(node.0.guest.run(&uplink).status, 0, "a pod in VLAN 7 reaches the untagged uplink");
    for vf in 0..2 {
        node.0.guest.cni_ok("del", &format!("net{vf}"), &format!("pod{vf}"));
        node.await_return(vf);
        assert_eq!(node.0.vf(vf)["vlan_list"][0]["vlan"], Value::Null);
    }
    node.end();
}

#[test]
#[ignore = "a longer test: programs that take minutes to build"]
fn multus_gives_a_pod_two_vfs_by_two_plugins() {
    let mut node = Node::boot(Kernel::Generic, &[&cni_programs(), &node_programs()]);
    node.0.enable(2);
    let device = json!({
        "cniVersion": "0.3.1", "name": "first", "type": "host-device", "pciBusID": address(1),
        "ipam": {"type": "static", "addresses": [{"address": "10.88.0.2/24"}]}
    });
    let pod = json!({
        "cniVersion": "0.3.1", "name": "pod", "type": "multus", "binDir": "/tmp/cni", "delegates": [device, sriov(0, 7)]
    });
    node.0.guest.add_pod("pod", &pod);
    node.0.guest.cni_ok("add", "pod", "pod");
    let shown = node.0.guest.ok(&in_pod("pod", &format!("{IP} -o -4 addr")));
    assert!(shown.contains("eth0    inet 10.88.0.2/24") && shown.contains("net1    inet 10.88.0.1/24"), "{shown}");
    assert_eq!(node.0.vf(0)["vlan_list"][0]["vlan"], 7);
    node.0.guest.ok(&in_pod("pod", &format!("{IP} link set net1 down")));
    node.0.guest.wait_for(&ping_from("pod", &X550::UPLINK.to_string()));
    node.0.guest.cni_ok("del", "pod", "pod");
    node.await_return(0);
    node.await_return(1);
    node.end();
}

#[test]
#[ignore = "a longer test: programs that take minutes to build"]
fn the_device_plugin_offers_vfs_by_the_name_of_their_pf() {
    let mut node = Node::boot(Kernel::Generic, &[&cni_programs(), &node_programs()]);
    node.0.enable(4);
    let pools = json!({"resourceList": [
        {"resourceName": "low", "selectors": {"pfNames": ["eth0#0-1"]}},
        {"resourceName": "high", "selectors": {"pfNames": ["eth0#2-3"], "drivers": ["ixgbevf"]}},
        {"resourceName": "none", "selectors": {"drivers": ["iavf"]}},
    ]});
    let mut found = node.0.guest.offered_by_device_plugin(&pools, 2);
    found.sort_by_key(|resource| resource["devices"].to_string());
    let expected = [("low", [0, 1]), ("high", [2, 3])].map(|(name, vfs)| {
        let devices = vfs.map(address);
        let variable = format!("PCIDEVICE_INTEL_COM_{}", name.to_uppercase());
        (json!(format!("intel.com/{name}")), json!(devices), variable, json!(devices[0]))
    });
    for (resource, (name, devices, variable, first)) in found.iter().zip(expected) {
        assert_eq!((&resource["resource"], &resource["devices"]), (&name, &devices));
        assert_eq!(resource["env"][&variable], first, "{resource}");
    }
    node.end();
}

#[test]
#[ignore = "a longer test: programs that take minutes to build"]
fn the_operators_daemon_makes_and_configures_vfs() {
    let mut node = Node::boot(Kernel::Generic, &[&cni_programs(), &node_programs()]);
    node.0.guest.write("/etc/sriov-operator/sriov-supported-nics-ids.yaml", "8086 1563 1565");
    let wanted = json!({
        "platformtype": 0, "unsupportednics": false, "spec": {"interfaces": [{
            "pciaddress": "0000:00:01.0", "name": "eth0", "numvfs": 4, "mtu": 1500,
            "vfgroups": [{"resourcename": "low", "devicetype": "netdevice", "vfrange": "0-3", "policyname": "low"}]
        }]}
    });
    node.0.guest.write("/etc/sriov-operator/sriov-interface-config.yaml", &wanted.to_string());
    node.0.guest.write("/usr/share/misc/pci.ids", "8086  Intel Corporation");
    // The daemon waits for udev, which this guest does not have. It edits the kernel's arguments by grubby or ostree,
    // and continues without either.
    node.0.guest.write("/usr/bin/udevadm", "#!/bin/sh");
    node.0.guest.write("/bindata/scripts/kargs.sh", "exit 127");
    let guest = &mut node.0.guest;
    guest.ok("chmod +x /usr/bin/udevadm && mkdir -p /etc/udev/rules.d");
    for phase in ["pre", "post"] {
        let daemon = "cd / && /tmp/cni/sriov-network-config-daemon service --phase";
        guest.run_within(&format!("{daemon} {phase} > /tmp/{phase}.log 2>&1"), LIMIT);
    }
    let logs = guest.ok("cat /tmp/pre.log /tmp/post.log");
    let result = guest.ok("cat /etc/sriov-operator/sriov-interface-result.yaml");
    assert!(result.contains("Succeeded"), "{result}\n{logs}");
    assert_eq!(node.0.pf.read(&mut node.0.guest, "sriov_numvfs"), "4", "{logs}");
    for vf in 0..4 {
        node.await_return(vf);
        let set = node.0.vf(vf)["address"].clone();
        let own = node.0.guest.ok(&format!("cat /sys/bus/pci/devices/{}/net/*/address", address(vf)));
        assert_eq!(set, own.trim(), "the PF has no address for VF {vf}");
    }
    node.end();
}
