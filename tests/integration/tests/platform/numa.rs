//! NUMA nodes of a guest.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use integration::{Api, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet};
use serde_json::json;

const MIB: u64 = 1 << 20;
const ZONES: [&str; 3] = ["--memory-zone", "id=a,size=256M", "id=b,size=256M,hotplug_size=256M"];
const NODES: [&str; 3] = [
    "--numa",
    "guest_numa_id=0,cpus=[0],memory_zones=[a],distances=[1@30]",
    "guest_numa_id=1,cpus=[1],memory_zones=[b],pci_segments=[0]",
];

/// The node of the function at this address.
fn node_of(guest: &mut Guest, address: &str) -> String {
    guest.ok(&format!("cat /sys/bus/pci/devices/{address}/numa_node")).trim().to_string()
}

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

/// PFs on two nodes within segment 0: each PF and its VFs are on the node that `numa=` gives, a NIC is added and
/// removed there, and a reboot changes none of it.
#[test]
fn pfs_are_on_two_nodes_of_segment_0_with_their_vfs() {
    const PFS: [(&str, &str); 2] = [("0000:00:01.0", "0"), ("0000:40:01.0", "1")];
    let api = Api::new("numa-nics");
    let spec = GuestSpec::new(Kernel::V6_12).with_modules().cpus(2).topology([1, 1, 1, 2]).memory("size=0");
    let spec = spec
        .arguments(&["--memory-zone", "id=a,size=256M", "id=b,size=256M", "--numa"])
        .arguments(&["guest_numa_id=0,cpus=[0],memory_zones=[a],pci_segments=[0]"])
        .arguments(&["guest_numa_id=1,cpus=[1],memory_zones=[b]"])
        .net("id=na,tap=na,mac=52:54:00:00:01:01,sriov_vfs=2,numa=0")
        .net("id=nb,tap=nb,mac=52:54:00:00:01:02,sriov_vfs=300,numa=1");
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    assert_eq!(api.info()["config"]["net"][1]["numa"], 1);
    assert_eq!(api.info()["device_tree"]["_virtio-pci-nb"]["pci_bdf"], "0000:40:01.0");
    for _ in 0..2 {
        for (address, node) in PFS {
            assert_eq!(node_of(&mut guest, address), node, "{address}");
        }
        for (address, bus, node) in [("0000:00:01.0", "01", "0"), ("0000:40:01.0", "41", "1")] {
            let pf = Pf::at(address);
            pf.set_num_vfs(&mut guest, 2);
            let vfs = pf.vfs(&mut guest);
            let expected = [0, 1].map(|index| format!("0000:{bus}:00.{index}"));
            assert_eq!(vfs.iter().map(|vf| vf.address.clone()).collect::<Vec<_>>(), expected);
            for vf in &vfs {
                assert_eq!(node_of(&mut guest, &vf.address), node, "{}", vf.address);
            }
        }
        let taps = [0, 1].map(|index| HostTap::existing(&format!("nbv{index}")));
        for vf in Pf::at("0000:40:01.0").vfs(&mut guest) {
            vf.ping_through(&mut guest, &taps, vf.index, Subnet(60 + vf.index as u8));
        }

        let hot = json!({ "id": "hot", "tap": "nhot", "numa": 1, "mac": "52:54:00:00:01:09" });
        let answer = api.put_json("vm.add-net", &hot);
        assert_eq!((answer.status, answer.body), (200, json!({ "id": "hot", "bdf": "0000:40:02.0" })));
        guest.wait_for("ls /sys/bus/pci/devices/0000:40:02.0/virtio*/net/*/address");
        assert_eq!(node_of(&mut guest, "0000:40:02.0"), "1");
        let interface = guest.ok("ls /sys/bus/pci/devices/0000:40:02.0/virtio*/net").trim().to_string();
        HostTap::existing("nhot").join(Subnet(63));
        guest.join(&interface, Subnet(63));
        guest.ping(&interface, Subnet(63));
        api.remove_device("hot");
        assert_ne!(guest.run("ls -d /sys/bus/pci/devices/0000:40:02.0").status, 0);
        assert_eq!(Pf::at("0000:40:01.0").vfs(&mut guest).len(), 2, "hot-plug affects no VF");
        guest.assert_kernel_has_no_complaint();
        guest.reboot();
    }
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}
