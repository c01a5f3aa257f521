//! NUMA nodes of a guest.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use integration::{Api, Guest, GuestSpec, Kernel};
use serde_json::json;

const MIB: u64 = 1 << 20;
const ZONES: [&str; 3] = ["--memory-zone", "id=a,size=256M", "id=b,size=256M,hotplug_size=256M"];
const NODES: [&str; 3] = [
    "--numa",
    "guest_numa_id=0,cpus=[0],memory_zones=[a],distances=[1@30]",
    "guest_numa_id=1,cpus=[1],memory_zones=[b],pci_segments=[0]",
];

/// The memory of a node in MiB, as counted by Linux.
fn total(guest: &mut Guest, node: u32) -> u64 {
    let line = guest.ok(&format!("grep MemTotal /sys/devices/system/node/node{node}/meminfo"));
    line.split_whitespace().rev().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

#[test]
fn numa_nodes_are_as_configured_and_get_their_plugged_memory() {
    let api = Api::new("numa");
    // CPUs of a package share their last cache, and Linux complains if a package spans two nodes.
    let spec = GuestSpec::new(Kernel::V6_12)
        .with_modules()
        .cpus(2)
        .topology([1, 1, 1, 2])
        .memory("size=0,hotplug_method=virtio-mem");
    let spec = spec.kernel_argument("memhp_default_state=online_movable").net("tap=numa0");
    let mut guest = Guest::boot(spec.arguments(&ZONES).arguments(&NODES).arguments(&["--api-socket", &api.argument()]));
    let read = |guest: &mut Guest, file: &str| guest.ok(&format!("cat /sys/{file}")).trim().to_string();
    assert_eq!(read(&mut guest, "devices/system/node/online"), "0-1");
    for (node, distances) in [(0, "10 30"), (1, "30 10")] {
        let folder = format!("devices/system/node/node{node}");
        assert_eq!(read(&mut guest, &format!("{folder}/cpulist")), node.to_string());
        assert_eq!(read(&mut guest, &format!("{folder}/distance")), distances);
        assert!((128..=256).contains(&total(&mut guest, node)), "node {node}");
    }
    assert_eq!(read(&mut guest, "class/net/eth0/device/../numa_node"), "1", "the node of PCI segment 0");

    guest.load("virtio_mem");
    let (first, second) = (total(&mut guest, 0), total(&mut guest, 1));
    let answer = api.put_json("vm.resize-zone", &json!({ "id": "b", "desired_ram": 512 * MIB }));
    assert_eq!(answer.status, 204, "{}", answer.body);
    assert_eq!(api.info()["config"]["memory"]["zones"][1]["hotplugged_size"], json!(256 * MIB));
    guest.wait_for(&format!(
        "[ $(grep MemTotal /sys/devices/system/node/node1/meminfo | tr -dc '0-9 ' | awk '{{print $2}}') -ge {} ]",
        (second + 250) * 1024
    ));
    assert_eq!(api.info()["memory_actual_size"], json!(768 * MIB));
    assert_eq!((total(&mut guest, 0), total(&mut guest, 1)), (first, second + 256));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}
