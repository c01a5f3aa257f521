//! What is decided where a configuration says nothing.

use vmm::config::BackendPlan;

use crate::{plan, vm};

fn tap(name: &str) -> BackendPlan {
    BackendPlan::Tap { name: Some(name.to_string()), ip: None, mask: None, host_mac: None }
}

#[test]
fn vfs_have_names_addresses_and_taps_that_follow_from_their_pf() {
    let plan =
        plan(&["id=pf0,tap=t,mac=52:54:00:00:00:01,mtu=9000,queue_size=64,num_queues=4,sriov_vfs=8"], &[]).unwrap();
    let [device] = &plan[..] else { panic!("one device") };
    assert_eq!((device.id.as_str(), device.pf.id.as_str(), device.vfs.len()), ("pf0", "pf0", 8));
    assert_eq!((device.pf.queue_pairs, &device.pf.backend), (2, &tap("t")));
    let vf = &device.vfs[3];
    assert_eq!((vf.id.as_str(), vf.mac, &vf.backend), ("pf0v3", [6, 0, 0, 1, 0, 3], &tap("tv3")));
    assert_eq!((vf.queue_pairs, vf.queue_size, vf.mtu), (1, 64, Some(9000)));
}

#[test]
fn a_vf_is_as_it_is_told_to_be() {
    let vf = "pf=pf0,index=1,tap=u,mac=52:54:00:00:01:00,mtu=1400,queue_size=16,num_queues=4,offload_tso=off,\
              ip=10.0.0.1,mask=255.255.255.0,host_mac=52:54:00:00:02:00";
    let plan = plan(&["id=pf0,tap=t,sriov_vfs=2,offload_ufo=off"], &[vf]).unwrap();
    let vf = &plan[0].vfs[1];
    assert_eq!((vf.mac, vf.mtu, vf.queue_size), ([0x52, 0x54, 0, 0, 1, 0], Some(1400), 16));
    assert_eq!((vf.offload_tso, vf.offload_ufo, vf.offload_csum), (false, false, true));
    let backend = BackendPlan::Tap {
        name: Some("u".to_string()),
        ip: Some("10.0.0.1".parse().unwrap()),
        mask: Some("255.255.255.0".parse().unwrap()),
        host_mac: Some([0x52, 0x54, 0, 0, 2, 0]),
    };
    assert_eq!(vf.backend, backend);
    // What one VF says of its queues holds for all.
    assert_eq!(plan[0].vfs[0].queue_pairs, 2);
}

#[test]
fn nics_without_an_id_are_counted() {
    let plan = plan(&["", "id=_net0", "", "id=x"], &[]).unwrap();
    let ids: Vec<_> = plan.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["_net1", "_net0", "_net2", "x"]);
}

#[test]
fn a_nic_without_a_mac_gets_another_local_one_each_time() {
    let config = vm(&["", "sriov_vfs=2"], &[]).unwrap();
    let macs = || {
        let plan = config.plan().unwrap().nets;
        plan.iter()
            .flat_map(|device| std::iter::once(&device.pf).chain(&device.vfs))
            .map(|nic| nic.mac)
            .collect::<Vec<_>>()
    };
    let (first, second) = (macs(), macs());
    assert!(first.iter().all(|mac| mac[0] & 3 == 2), "{first:x?}");
    let all: std::collections::HashSet<_> = first.iter().chain(&second).collect();
    assert_eq!(all.len(), 8);
}

#[test]
fn a_nic_without_a_tap_name_takes_any() {
    let plan = plan(&[""], &[]).unwrap();
    assert_eq!(plan[0].pf.backend, BackendPlan::Tap { name: None, ip: None, mask: None, host_mac: None });
}

#[test]
fn a_pf_without_a_tap_name_gets_one_that_its_vfs_follow() {
    let plan = plan(&["", "sriov_vfs=2", "sriov_vfs=2,fd=[5]"], &[]).unwrap();
    let pid = std::process::id();
    assert_eq!(plan[1].pf.backend, tap(&format!("vm{pid:x}b")));
    assert_eq!(plan[1].vfs[1].backend, tap(&format!("vm{pid:x}bv1")));
    assert_eq!(plan[2].pf.backend, BackendPlan::Fds(vec![5]));
    assert_eq!(plan[2].vfs[0].backend, tap(&format!("vm{pid:x}cv0")));
}

#[test]
fn descriptors_are_handed_on() {
    let plan = plan(&["id=a,fd=[5-6],num_queues=4,sriov_vfs=2"], &["pf=a,index=1,fd=9"]).unwrap();
    assert_eq!(plan[0].pf.backend, BackendPlan::Fds(vec![5, 6]));
    assert_eq!(plan[0].vfs[1].backend, BackendPlan::Fds(vec![9]));
}
