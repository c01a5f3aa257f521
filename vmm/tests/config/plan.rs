//! Values for settings that a configuration leaves out.

use virtio_devices::{TapSpec, VdpaSpec};
use vmm::config::{BackendPlan, MacAddress, NetConfig, NicPlan, PlannedVm, Vhost, VhostMode, VmConfig, VmPlan};

use crate::{plan, vm};

/// A tap with one pair of queues.
fn tap_spec(name: Option<&str>) -> TapSpec {
    TapSpec { name: name.map(str::to_string), ip: None, mask: None, host_mac: None, mtu: None, queue_pairs: 1 }
}

fn tap(name: &str) -> BackendPlan {
    BackendPlan::Tap { spec: tap_spec(Some(name)), vhost: Vhost::Off }
}

fn fds(fds: &[i32]) -> BackendPlan {
    BackendPlan::Fds { fds: fds.to_vec(), vhost: Vhost::Off }
}

#[test]
fn vfs_have_names_addresses_and_taps_that_follow_from_their_pf() {
    let plan =
        plan(&["id=pf0,tap=t,mac=52:54:00:00:00:01,mtu=9000,queue_size=64,num_queues=4,sriov_vfs=8"], &[]).unwrap();
    let [device] = &plan[..] else { panic!("one device") };
    assert_eq!((device.id(), device.pf.spec.id.as_str(), device.vfs.len()), ("pf0", "pf0", 8));
    let tap = |name, queue_pairs| {
        let spec = TapSpec { mtu: Some(9000), queue_pairs, ..tap_spec(Some(name)) };
        BackendPlan::Tap { spec, vhost: Vhost::Off }
    };
    assert_eq!((device.pf.spec.queue_pairs, &device.pf.backend), (2, &tap("t", 2)));
    let NicPlan { spec: vf, backend, .. } = &device.vfs[3];
    assert_eq!((vf.id.as_str(), vf.mac, backend), ("pf0v3", [6, 0, 0, 1, 0, 3], &tap("tv3", 1)));
    assert_eq!((vf.queue_pairs, vf.queue_size, vf.mtu), (1, 64, Some(9000)));
}

#[test]
fn a_vf_is_as_configured() {
    let vf = "pf=pf0,index=1,tap=u,mac=52:54:00:00:01:00,mtu=1400,queue_size=16,num_queues=4,offload_tso=off,\
              ip=10.0.0.1,mask=255.255.255.0,host_mac=52:54:00:00:02:00";
    let plan = plan(&["id=pf0,tap=t,sriov_vfs=2,offload_ufo=off"], &[vf]).unwrap();
    let NicPlan { spec: vf, backend, .. } = &plan[0].vfs[1];
    assert_eq!((vf.mac, vf.mtu, vf.queue_size), ([0x52, 0x54, 0, 0, 1, 0], Some(1400), 16));
    assert_eq!((vf.offload_tso, vf.offload_ufo, vf.offload_csum), (false, false, true));
    let spec = TapSpec {
        ip: Some("10.0.0.1".parse().unwrap()),
        mask: Some("255.255.255.0".parse().unwrap()),
        host_mac: Some([0x52, 0x54, 0, 0, 2, 0]),
        mtu: Some(1400),
        queue_pairs: 2,
        ..tap_spec(Some("u"))
    };
    assert_eq!(*backend, BackendPlan::Tap { spec, vhost: Vhost::Off });
    // The queues given for one VF apply to all.
    assert_eq!(plan[0].vfs[0].spec.queue_pairs, 2);
}

#[test]
fn devices_have_the_slots_and_ids_of_cloud_hypervisor() {
    let mut config = vm(&["tap=a", "id=pf,sriov_vfs=2"], &[]).unwrap();
    config.disks = ["path=/a", "path=/b"].map(|disk| disk.parse().unwrap()).to_vec();
    config.fs.push("tag=t,socket=/s".parse().unwrap());
    config.pmem.push("file=/p".parse().unwrap());
    config.vsock = Some("cid=3,socket=/v".parse().unwrap());
    config.memory = "size=1G,shared=on,hotplug_method=virtio-mem,hotplug_size=1G".parse().unwrap();
    (config.watchdog, config.pvpanic, config.iommu) = (true, true, true);
    let order = [
        "__console",
        "_disk0",
        "_disk1",
        "_net2",
        "pf",
        "__rng",
        "_fs3",
        "_pmem4",
        "_vsock5",
        "_mem0",
        "__balloon",
        "__watchdog",
        "_vdpa6",
        "__iommu",
        "__pvpanic",
    ];
    // A VM cannot have both a balloon and vDPA devices.
    for (without, added) in [("__balloon", "_net7"), ("_vdpa6", "_net6")] {
        let mut config = config.clone();
        match without {
            "__balloon" => config.vdpa.push("path=/d".parse().unwrap()),
            _ => config.balloon = Some("size=0".parse().unwrap()),
        }
        let planned = PlannedVm::new(config).unwrap();
        let ids: Vec<_> = planned.plan().devices.iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids, order.into_iter().filter(|id| *id != without).collect::<Vec<_>>());
        // The numbers of added devices continue.
        let mut grown = planned.config().clone();
        grown.net.push("tap=b".parse().unwrap());
        let grown = PlannedVm::new(grown).unwrap();
        assert_eq!(grown.added_to(planned.plan()).unwrap().id, added);
    }
}

#[test]
fn nics_without_an_id_are_counted() {
    let plan = plan(&["", "id=_net0", "", "id=x"], &[]).unwrap();
    let ids: Vec<_> = plan.iter().map(|device| device.id()).collect();
    assert_eq!(ids, ["_net1", "_net0", "_net2", "x"]);
}

#[test]
fn a_nic_without_a_mac_gets_another_local_one_each_time() {
    let config = vm(&["", "sriov_vfs=2"], &[]).unwrap();
    let macs = || {
        let plan = VmPlan::of(&config).unwrap();
        plan.nets()
            .flat_map(|device| std::iter::once(&device.pf).chain(&device.vfs))
            .map(|nic| nic.spec.mac)
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
    assert_eq!(plan[0].pf.backend, BackendPlan::Tap { spec: tap_spec(None), vhost: Vhost::Off });
}

#[test]
fn a_pf_without_a_tap_name_gets_one_that_its_vfs_follow() {
    let plan = plan(&["", "sriov_vfs=2", "sriov_vfs=2,fd=[5]"], &[]).unwrap();
    let pid = std::process::id();
    assert_eq!(plan[1].pf.backend, tap(&format!("vm{pid:x}b")));
    assert_eq!(plan[1].vfs[1].backend, tap(&format!("vm{pid:x}bv1")));
    assert_eq!(plan[2].pf.backend, fds(&[5]));
    assert_eq!(plan[2].vfs[0].backend, tap(&format!("vm{pid:x}cv0")));
}

#[test]
fn descriptors_are_handed_on() {
    let plan = plan(&["id=a,fd=[5-6],num_queues=4,sriov_vfs=2"], &["pf=a,index=1,fd=9"]).unwrap();
    assert_eq!(plan[0].pf.backend, fds(&[5, 6]));
    assert_eq!(plan[0].vfs[1].backend, fds(&[9]));
}

#[test]
fn each_function_has_the_backend_that_it_names_and_else_a_tap() {
    let vfs = [
        "pf=pf0,index=1,vhost=on",
        "pf=pf0,index=2,vhost_user=on,socket=/run/s",
        "pf=pf0,index=3,vhost_user=on,socket=/run/t,vhost_mode=server",
        "pf=pf0,index=4,vdpa=/dev/vhost-vdpa-0",
        "pf=pf0,index=5,vdpa=/dev/vhost-vdpa-1,mac=52:54:00:00:01:00",
        "pf=pf0,index=6,fd=9,vhost=auto",
    ];
    let plan = plan(&["id=pf0,tap=t,vhost=auto,sriov_vfs=8"], &vfs).unwrap();
    let carried = |name: &str, vhost| BackendPlan::Tap { spec: tap_spec(Some(name)), vhost };
    let vhost_user = |socket: &str, mode| BackendPlan::VhostUser { socket: socket.into(), mode };
    let vdpa = |path: &str, mac| BackendPlan::Vdpa(VdpaSpec { path: path.into(), mac, queue_pairs: 1 });
    let backends: Vec<_> = plan[0].functions().map(|function| function.backend.clone()).collect();
    assert_eq!(
        backends,
        [
            carried("t", Vhost::Auto),
            tap("tv0"),
            carried("tv1", Vhost::On),
            vhost_user("/run/s", VhostMode::Client),
            vhost_user("/run/t", VhostMode::Server),
            vdpa("/dev/vhost-vdpa-0", None),
            vdpa("/dev/vhost-vdpa-1", Some([0x52, 0x54, 0, 0, 1, 0])),
            BackendPlan::Fds { fds: vec![9], vhost: Vhost::Auto },
            tap("tv7"),
        ]
    );
    assert!(plan[0].vfs.iter().all(|vf| vf.spec.queue_pairs == 1));
}

#[test]
fn memory_is_shared_if_a_backend_of_any_function_has_to_map_it() {
    let shared = |nets: &[&str], vfs: &[&str]| VmPlan::of(&vm(nets, vfs).unwrap()).unwrap().needs_shared_memory();
    assert!(!shared(&["vhost=on", "id=pf,sriov_vfs=2"], &["pf=pf,index=1,vhost=auto"]));
    assert!(shared(&["vhost_user=on,socket=/s"], &[]));
    assert!(shared(&["id=pf,sriov_vfs=2"], &["pf=pf,index=1,vdpa=/d"]));
    let mut config = vm(&[], &[]).unwrap();
    config.vdpa.push("path=/d".parse().unwrap());
    assert!(VmPlan::of(&config).unwrap().needs_shared_memory());
}

#[test]
fn a_vdpa_device_is_a_plain_nic_after_the_others() {
    let mut config = vm(&["id=a", "tap=b"], &[]).unwrap();
    for vdpa in ["path=/d0", "path=/d1,num_queues=3,id=v", "path=/d2,num_queues=16,pci_device_id=9"] {
        config.vdpa.push(vdpa.parse().unwrap());
    }
    let plan = VmPlan::of(&config).unwrap();
    let ids: Vec<_> =
        plan.devices.iter().filter(|device| device.net().is_some()).map(|device| device.option()).collect();
    assert_eq!(ids, ["--net id=a", "--net id=_net0", "--vdpa id=_vdpa1", "--vdpa id=v", "--vdpa id=_vdpa2"]);
    // The device determines the queues, with or without its control queue; there may be more than vCPUs can use.
    let pairs: Vec<_> = plan.nets().skip(2).map(|vdpa| vdpa.pf.spec.queue_pairs).collect();
    assert_eq!(pairs, [1, 1, 8]);
    assert!(plan.nets().skip(2).all(|vdpa| vdpa.vfs.is_empty() && vdpa.pf.backend.has_own_mac()));
    let mut vm = PlannedVm::new(config).unwrap();
    vm.set_slot("_vdpa1", 4);
    let vdpa = &vm.config().vdpa;
    assert_eq!((vdpa[0].id.as_deref(), vdpa[0].pci_device_id), (Some("_vdpa1"), Some(4)));
    vm.remove("v");
    assert_eq!((vm.config().vdpa.len(), vm.plan().nets().count()), (2, 4));
    assert_eq!(VmPlan::of(vm.config()).unwrap().nets().last().unwrap().id(), "_vdpa2");
}

#[test]
fn mac_known_to_a_device_is_not_generated_and_vfs_keep_theirs() {
    let vm = PlannedVm::new(vm(&["id=a,vdpa=/d,sriov_vfs=3"], &["pf=a,index=1,vdpa=/e"]).unwrap()).unwrap();
    let (config, first) = (vm.config(), vm.plan());
    let second = VmPlan::of(config).unwrap();
    let pf = |plan: &VmPlan| plan.nets().next().unwrap().clone();
    assert_eq!(config.net[0].mac, None);
    let (before, after) = (&pf(first).vfs, &pf(&second).vfs);
    assert_eq!((&before[0], &before[2]), (&after[0], &after[2]));
    assert_eq!(config.net[0].vfs.iter().map(|vf| vf.mac.is_some()).collect::<Vec<_>>(), [false, true, true]);
    assert!(after[1].backend.has_own_mac());
    // A given MAC address is set in the device.
    let net = NetConfig { mac: Some(MacAddress([2, 0, 0, 0, 0, 1]).into()), ..config.net[0].clone() };
    let given = VmPlan::of(&VmConfig { net: vec![net], ..VmConfig::default() }).unwrap();
    let mac = Some([2, 0, 0, 0, 0, 1]);
    assert_eq!(pf(&given).pf.backend, BackendPlan::Vdpa(VdpaSpec { path: "/d".into(), mac, queue_pairs: 1 }));
}
