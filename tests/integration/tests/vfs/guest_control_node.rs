//! A guest as a node of a Kubernetes cluster with virtio VFs: the SR-IOV device plugin offers them, multus gives them
//! to pods, and the CNI plugin sets their policy within the limits of the host. DPDK has one as well.

use std::path::Path;
use std::time::Duration;

use integration::{
    Api, Guest, GuestSpec, GuestTestpmd, Kernel, Output, Pf, cni_programs, guest_tools, in_pod, node_programs,
    ping_from,
};
use serde_json::{Value, json};

use crate::guest_control::on_host;

/// Time that the programs of a step may take. They start slowly under emulation.
const LIMIT: Duration = Duration::from_secs(120);
/// Pods by the index of their VF, and the VLANs of their networks. The host does not allow the last one.
const PODS: [&str; 4] = ["a", "b", "c", "d"];
const VLANS: [u16; 4] = [120, 130, 120, 300];
/// The host's answer to the last VLAN.
const REFUSED: &str = "vlan=300: the host allows 100-199";

/// A guest whose VFs are ports of a switch without an uplink. It may set their VLANs, addresses and rates.
struct Node {
    guest: Guest,
    api: Api,
    /// PCI addresses of the VFs.
    vfs: Vec<String>,
}

/// The IP address of the pod with a VF.
fn ip(vf: usize) -> String {
    format!("10.77.0.{}", vf + 1)
}

impl Node {
    /// Boots the guest of `spec` with the programs of `archives`, and enables its VFs.
    fn boot(spec: GuestSpec, name: &str, archives: &[&Path], first: impl FnOnce(&mut Guest)) -> Node {
        let api = Api::new(name);
        let net =
            "id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=4,guest_control=[vlan:100-199,mac,max_tx_rate:1000]";
        let spec = spec.memory("size=1G").net(net).with_archives(archives);
        let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
        first(&mut guest);
        guest.unpack();
        guest.load("virtio_console");
        guest.wait_for("grep -qx sriov.control /sys/class/virtio-ports/*/name");
        let pf = Pf::find(&mut guest);
        pf.set_num_vfs(&mut guest, PODS.len());
        let vfs = pf.vfs(&mut guest).into_iter().map(|vf| vf.address).collect();
        Node { guest, api, vfs }
    }

    /// The network of the pod with a VF, for the plugin.
    fn network(&self, vf: usize) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": format!("tenant-{}", PODS[vf]), "type": "virtio-sriov-cni",
            "deviceID": self.vfs[vf], "vlan": VLANS[vf],
            "ipam": {"type": "static", "addresses": [{"address": format!("{}/24", ip(vf))}]}
        })
    }

    /// The network of the pod with a VF, for multus, which calls the plugin.
    fn by_multus(&self, vf: usize) -> Value {
        json!({
            "cniVersion": "1.0.0", "name": format!("pod-{}", PODS[vf]), "type": "multus", "binDir": "/tmp/cni",
            "delegates": [self.network(vf)]
        })
    }

    /// True if a pod reaches the pod with a VF.
    fn reaches(&mut self, pod: &str, vf: usize) -> bool {
        self.guest.run(&in_pod(pod, &format!("ping -c 3 -i 0.3 -W 2 {}", ip(vf)))).status == 0
    }

    fn vfctl(&mut self, arguments: &str) -> Output {
        self.guest.run_within(&format!("/tmp/cni/vfctl {arguments}"), LIMIT)
    }

    /// Waits until the interfaces of these VFs are in the guest's own namespace, with the host's policy.
    fn assert_returned(&mut self, vfs: usize) {
        for address in &self.vfs[..vfs] {
            self.guest.wait_for(&format!("ls /sys/bus/pci/devices/{address}/virtio*/net/*/address"));
        }
        assert_eq!(on_host(&self.api, "vlan"), [0; PODS.len()]);
        assert_eq!(on_host(&self.api, "guest_set"), [const { Value::Null }; PODS.len()]);
    }

    fn end(mut self) {
        self.guest.assert_kernel_has_no_complaint();
        assert_eq!(self.guest.power_off().code, Some(0));
    }
}

#[test]
#[ignore = "a longer test: programs that take minutes to build"]
fn a_node_gives_pods_vlans_within_the_limits_of_its_host() {
    let (tools, cni, node) = (guest_tools(), cni_programs(), node_programs());
    let spec = GuestSpec::new(Kernel::V6_12).with_modules();
    let mut node = Node::boot(spec, "guest-control-node", &[&tools, &cni, &node], |_| ());

    let selectors = json!({"vendors": ["1af4"], "devices": ["1041"], "drivers": ["virtio-pci"]});
    let pool = json!({"resourceName": "vf", "resourcePrefix": "example.com", "selectors": selectors});
    let offered = node.guest.offered_by_device_plugin(&json!({"resourceList": [pool]}), 1);
    let of_container = json!({"PCIDEVICE_EXAMPLE_COM_VF": node.vfs[0]});
    assert_eq!(offered, [json!({"resource": "example.com/vf", "devices": node.vfs, "env": of_container})]);

    for (vf, pod) in PODS.iter().enumerate() {
        node.guest.add_pod(pod, &node.by_multus(vf));
    }
    for (vf, pod) in PODS.iter().enumerate().take(3) {
        let result = node.guest.cni_ok("add", &format!("pod-{pod}"), pod);
        assert!(result.contains(&format!("{}/24", ip(vf))), "{result}");
    }
    let refused = node.guest.cni("add", "pod-d", "d");
    assert!(refused.status != 0 && refused.text.contains(REFUSED), "{}", refused.text);
    assert_eq!(on_host(&node.api, "vlan"), [120, 130, 120, 0]);

    node.guest.wait_for(&ping_from("a", &ip(2)));
    assert!(!node.reaches("a", 1) && !node.reaches("b", 0) && !node.reaches("b", 2), "a pod reaches another VLAN");
    // The VLAN alone is between them.
    let set = node.vfctl("set eth0/1 vlan=120");
    assert_eq!(set.status, 0, "{}", set.text);
    node.guest.wait_for(&ping_from("b", &ip(0)));
    let refused = node.vfctl("set eth0/1 vlan=300");
    assert_eq!((refused.status, refused.text.trim_end()), (1, format!("vfctl: eth0/1: {REFUSED}").as_str()));
    assert_eq!(on_host(&node.api, "vlan"), [120, 120, 120, 0]);

    for pod in PODS {
        node.guest.cni_ok("del", &format!("pod-{pod}"), pod);
    }
    node.assert_returned(PODS.len());
    node.end();
}

#[test]
#[ignore = "a longer test: DPDK, in a pod"]
fn dpdk_has_a_vf_in_the_vlan_of_a_pod() {
    const OF_DPDK: usize = 2;
    let (tools, cni) = (guest_tools(), cni_programs());
    let spec = GuestSpec::new(Kernel::V6_12).with_dpdk().arguments(&["--platform", "iommu=on"]);
    let mut node = Node::boot(spec, "guest-control-dpdk", &[&tools, &cni], Guest::load_vfio);
    let address = node.vfs[OF_DPDK].clone();
    node.guest.give_to_vfio(&address);
    for (vf, pod) in PODS.iter().enumerate().take(3) {
        node.guest.add_pod(pod, &node.network(vf));
        let result = node.guest.cni_ok("add", &format!("tenant-{pod}"), pod);
        assert!(result.contains(&format!("{}/24", ip(vf))), "{result}");
    }
    assert_eq!(on_host(&node.api, "vlan"), [120, 130, 120, 0]);

    // testpmd answers for any address.
    let mut testpmd = GuestTestpmd::start(&mut node.guest, &[&address]);
    testpmd.command(&mut node.guest, "set fwd icmpecho");
    testpmd.command(&mut node.guest, "start");
    node.guest.wait_for(&ping_from("a", &ip(OF_DPDK)));
    assert!(!node.reaches("b", OF_DPDK), "a pod reaches DPDK in another VLAN");
    // The VLAN ends with the pod, while DPDK has the VF.
    node.guest.cni_ok("del", "tenant-c", "c");
    assert_eq!(on_host(&node.api, "vlan"), [120, 130, 0, 0]);
    assert!(!node.reaches("a", OF_DPDK), "DPDK is in the VLAN of a pod that has ended");
    testpmd.command(&mut node.guest, "stop");
    let log = testpmd.end(&mut node.guest);
    // A request for its address, and the ping.
    assert!(GuestTestpmd::received(&log, 0) >= 2, "{log}");

    node.guest.take_from_vfio(&address);
    for pod in ["a", "b"] {
        node.guest.cni_ok("del", &format!("tenant-{pod}"), pod);
    }
    node.assert_returned(3);
    node.end();
}
