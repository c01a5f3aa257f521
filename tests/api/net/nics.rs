//! NICs as requested by other clients of Cloud Hypervisor.

use std::fs;
use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use crate::net::tap::{self, Kept, Queues};
use crate::rig::client::{Answer, Client};
use crate::rig::vmm::{Vmm, taps};

/// The request of Kata's Go runtime for a NIC.
fn kata_nic(mac: &str) -> Value {
    json!({
        "iommu": false, "ip": "192.168.249.1", "mac": mac, "mask": "255.255.255.0", "num_queues": 2,
        "offload_csum": true, "offload_tso": true, "offload_ufo": true, "queue_size": 256, "vhost_mode": "Client",
        "vhost_user": false,
    })
}

fn add(client: &mut Client, mac: &str, fd: &OwnedFd) -> Answer {
    client.ask("PUT", "vm.add-net", Some(&kata_nic(mac)), &[fd.try_clone().unwrap()])
}

fn nics(client: &mut Client) -> usize {
    client.get("vm.info").expect(200)["config"]["net"].as_array().unwrap().len()
}

/// With a second NIC, Kata sends the first again, with descriptors of the same tap.
#[test]
fn a_nic_that_is_there_already_is_the_answer() {
    let [first, second] = ["02:00:00:00:00:01", "02:00:00:00:00:02"];
    let kept = ["anic0", "anic1", "anic2"].map(Kept::new);
    let [one, two, other] = [0, 1, 2].map(|at: usize| tap::queue(kept[at].name(), Queues::One));
    let vmm = Vmm::start();
    let mut client = vmm.client();
    client.put_json("vm.create", &vmm.config(json!([]))).expect(204);
    for _ in 0..2 {
        add(&mut client, first, &one).expect(204);
        assert_eq!(nics(&mut client), 1);
    }
    client.put("vm.boot").expect(204);
    let known = add(&mut client, first, &one).expect(200);
    let info = client.get("vm.info").expect(200);
    let id = info["config"]["net"][0]["id"].as_str().unwrap();
    assert_eq!(known["id"], id);
    assert_eq!(known["bdf"], info["device_tree"][format!("_virtio-pci-{id}")]["pci_bdf"]);
    let added = add(&mut client, second, &two).expect(200);
    assert_ne!(added["id"], known["id"]);
    let files = vmm.open_files();
    for _ in 0..5 {
        assert_eq!(add(&mut client, first, &one).expect(200), known);
        assert_eq!(add(&mut client, second, &two).expect(200), added);
    }
    assert_eq!((nics(&mut client), vmm.open_files()), (2, files), "what came again was closed");
    // The address alone is not enough.
    assert_ne!(add(&mut client, first, &other).expect(200)["id"], known["id"]);
    assert_eq!(nics(&mut client), 3);
}

#[test]
fn two_nics_with_one_mac_address_are_taken_with_a_warning() {
    let vmm = Vmm::start();
    let mac = "52:54:00:00:00:01";
    let mut client = vmm.boot(json!([{"id": "a", "tap": "anim0", "mac": mac}]));
    client.put_json("vm.add-net", &json!({"id": "b", "tap": "anim1", "mac": mac})).expect(200);
    assert_eq!((nics(&mut client), taps("anim").len()), (2, 2));
    let log = fs::read_to_string(vmm.files.path("log")).unwrap();
    let warning =
        "a and b both have the MAC address 52:54:00:00:00:01; on one network, packets for it reach either of them";
    assert!(log.contains(warning), "{log}");
    // Ports of one switch are distinguished by their addresses.
    let vfs = json!([{"index": 0, "mac": "52:54:00:00:00:02"}, {"index": 1, "mac": "52:54:00:00:00:02"}]);
    let switch = json!({"id": "s", "switch": "veb", "sriov_vfs": 2, "vfs": vfs});
    assert_eq!(client.put_json("vm.add-net", &switch).status, 409);
}

/// Ubicloud sends 2N + 1 for N pairs.
#[test]
fn an_odd_number_of_queues_counts_the_control_queue() {
    let vmm = Vmm::start();
    let mut client = vmm.boot(json!([{"id": "a", "tap": "aniq0", "num_queues": 5}]));
    assert_eq!(client.get("vm.info").expect(200)["config"]["net"][0]["num_queues"], 5);
    let refused = client.put_json("vm.add-net", &json!({"id": "b", "tap": "aniq1", "num_queues": 7}));
    assert_eq!(refused.status, 400, "three pairs for 2 vCPUs");
}
