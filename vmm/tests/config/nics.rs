//! Every rule that a NIC or VF can break: a one-line error before anything is opened.

use vmm::config::{BackendPlan, NetConfig, PlannedVm, Vhost, VmConfig, VmPlan};

use crate::{plan, refusal, vm, with};

fn pf(key: &str) -> String {
    refusal(&[&format!("id=pf0,tap=pf0,sriov_vfs=8,{key}")], &[])
}

fn vf(key: &str) -> String {
    refusal(&["id=pf0,tap=pf0,sriov_vfs=8"], &[&format!("pf=pf0,index=3,{key}")])
}

// The index of a VF and the PF that it belongs to.

#[test]
fn a_vf_index_out_of_range_is_refused() {
    assert_eq!(
        refusal(&["id=pf0,sriov_vfs=8"], &["pf=pf0,index=8"]),
        "--net-vf pf=pf0,index=8: pf0 reserves 8 VFs (sriov_vfs=8); index must be 0 to 7"
    );
    assert_eq!(
        refusal(&["id=pf0"], &["pf=pf0,index=0"]),
        "--net-vf pf=pf0,index=0: pf0 reserves no VFs; add sriov_vfs= to its --net"
    );
}

#[test]
fn a_vf_index_used_twice_is_refused() {
    assert_eq!(
        refusal(&["id=pf0,sriov_vfs=8"], &["pf=pf0,index=3,tap=a", "pf=pf0,index=3,tap=b"]),
        "--net-vf pf=pf0,index=3: VF 3 of pf0 is given twice; put all its keys into one"
    );
}

#[test]
fn a_vf_of_no_pf_is_refused() {
    assert_eq!(
        refusal(&["id=pf0,sriov_vfs=8"], &["pf=pf1,index=3"]),
        "--net-vf pf=pf1,index=3: there is no NIC pf1; add --net id=pf1,sriov_vfs=<number>"
    );
    assert_eq!(
        refusal(&["id=pf0,sriov_vfs=8"], &["index=3"]),
        "--net-vf index=3: pf= is required; add the id of the PF"
    );
    assert_eq!(refusal(&["id=pf0,sriov_vfs=8"], &["pf=pf0"]), "--net-vf: index is required; add it");
}

#[test]
fn a_vf_of_a_nic_without_an_id_is_named_by_what_that_is_called() {
    let mut config = vm(&["tap=a", "tap=b,sriov_vfs=2"], &[]).unwrap();
    config.net[1].vfs.push("index=2".parse().unwrap());
    assert_eq!(
        VmPlan::of(&config).unwrap_err().to_string(),
        "--net-vf pf=_net1,index=2: _net1 reserves 2 VFs (sriov_vfs=2); index must be 0 to 1"
    );
}

#[test]
fn a_nic_without_an_id_is_found_by_what_it_is_called() {
    // The number that the user has taken is skipped.
    let vfs = ["pf=_net2,index=1,tap=u", "pf=_net0,index=0,tap=v"];
    let plan = plan(&["id=_net0,tap=a,sriov_vfs=1", "tap=b", "tap=c,sriov_vfs=2"], &vfs).unwrap();
    let tap = |backend: &BackendPlan| match backend {
        BackendPlan::Tap { spec, .. } => spec.name.clone().unwrap(),
        _ => "no tap".to_string(),
    };
    assert_eq!((tap(&plan[2].vfs[1].backend), tap(&plan[0].vfs[0].backend)), ("u".to_string(), "v".to_string()));
    assert_eq!(
        refusal(&["sriov_vfs=2"], &["pf=_net1,index=0"]),
        "--net-vf pf=_net1,index=0: there is no NIC _net1; add --net id=_net1,sriov_vfs=<number>"
    );
}

// MAC addresses that only one function can have.

#[test]
fn a_mac_that_no_nic_can_have_is_refused() {
    assert_eq!(
        pf("mac=01:00:5e:00:00:01"),
        "--net id=pf0,mac=01:00:5e:00:00:01: a multicast address; give one with an even first byte, \
         such as 52:54:00:12:34:56"
    );
    assert_eq!(
        vf("host_mac=00:00:00:00:00:00"),
        "--net-vf pf=pf0,index=3,host_mac=00:00:00:00:00:00: not the address of a NIC; \
         leave host_mac out to have one chosen"
    );
    assert_eq!(pf("mac=52:54:00"), "--net mac=52:54:00: not a MAC address; write it as 52:54:00:12:34:56");
}

#[test]
fn standby_nic_needs_a_mac_and_its_vfs_are_not_in_standby() {
    assert_eq!(
        pf("standby=on"),
        "--net id=pf0,standby=on: add mac=, that of the NIC that the guest uses while it has it"
    );
    let plan = plan(&["mac=52:54:00:00:00:01,standby=on,sriov_vfs=1"], &[]).unwrap();
    assert_eq!(plan[0].functions().map(|nic| nic.spec.standby).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn a_tap_used_twice_is_refused() {
    assert_eq!(
        refusal(&["id=a,tap=t", "id=b,tap=t"], &[]),
        "--net id=b,tap=t: tap t is already in use by a; give each NIC and each VF its own"
    );
    assert_eq!(
        refusal(&["id=a,tap=t,sriov_vfs=2"], &["pf=a,index=0,tap=u", "pf=a,index=1,tap=u"]),
        "--net-vf pf=a,index=1,tap=u: tap u is already in use by VF 0 of a; give each NIC and each VF its own"
    );
    assert_eq!(
        refusal(&["id=a,tap=t,sriov_vfs=2", "id=b,tap=tv1"], &[]),
        "--net id=a,sriov_vfs=2: tap tv1 of VF 1 is already in use by b; give the VF another by --net-vf"
    );
}

#[test]
fn a_tap_name_longer_than_15_characters_is_refused() {
    assert_eq!(
        refusal(&["tap=abcdefghijklmnop"], &[]),
        "--net tap=abcdefghijklmnop: 16 characters; the name of an interface has at most 15, take a shorter one"
    );
    assert_eq!(
        refusal(&["tap=abcdefghijklm,sriov_vfs=11"], &[]),
        "--net tap=abcdefghijklm,sriov_vfs=11: the tap of VF 10 would be abcdefghijklmv10, longer than the \
         15 characters of an interface name; shorten the tap's name, or name the VF's tap by --net-vf"
    );
    assert!(plan(&["id=a,tap=abcdefghijklm,sriov_vfs=11"], &["pf=a,index=10,tap=short"]).is_ok());
}

#[test]
fn a_tap_name_that_linux_does_not_take_is_refused() {
    for (name, what) in [("a/b", "'/'"), ("tap%d", "'%'"), ("a b", "' '"), ("a:1", "':'")] {
        let expected = format!("--net tap={name}: {what} cannot be part of the name of an interface; leave it out");
        assert_eq!(refusal(&[&format!("tap={name}")], &[]), expected);
    }
    assert_eq!(refusal(&["tap=.."], &[]), "--net tap=..: not the name of an interface");
}

/// B23: the user's ids, and ids of unnamed VFs.
#[test]
fn an_id_used_twice_is_refused() {
    assert_eq!(
        refusal(&["id=a", "id=a"], &[]),
        "--net id=a: this id is already in use by another NIC; give each NIC its own"
    );
    assert_eq!(
        refusal(&["id=a,sriov_vfs=8", "id=av3"], &[]),
        "--net id=av3: this id is already in use by VF 3 of a; give the NIC another"
    );
}

#[test]
fn overlong_id_is_refused_in_a_short_line() {
    let id = |length: usize| format!("id={}", "x".repeat(length));
    plan(&[&id(255)], &[]).unwrap();
    let refused = refusal(&[&id(1 << 20)], &[]);
    assert!(refused.ends_with("...: a name of 1048576 characters; give at most 255"), "{refused}");
    assert!(refused.len() < 1000, "{}", refused.len());
}

#[test]
fn an_id_that_is_kept_for_the_vm_is_refused() {
    let what = "not a device name; use printable characters, and do not start with two underscores";
    assert_eq!(refusal(&["id=__net"], &[]), format!("--net id=__net: {what}"));
    let json = |id: &str| NetConfig { id: Some(id.to_string()), ..NetConfig::default() };
    assert_eq!(with(|vm| vm.net.push(json(""))), format!("--net id=: {what}"));
    assert_eq!(with(|vm| vm.net.push(json("a\n\0"))), format!("--net id=a\\n\\u{{0}}: {what}"));
}

#[test]
fn a_descriptor_used_twice_is_refused() {
    assert_eq!(
        refusal(&["id=a,fd=[7]", "id=b,fd=[7]"], &[]),
        "--net id=b,fd=7: this descriptor is already in use by a; open the tap once for each queue pair"
    );
    assert_eq!(
        refusal(&["id=a,fd=[7,7],num_queues=4"], &[]),
        "--net id=a,fd=7: this descriptor is already in use by a; open the tap once for each queue pair"
    );
}

#[test]
fn a_slot_that_is_not_free_is_refused() {
    assert_eq!(
        refusal(&["id=a,pci_device_id=5", "id=b,pci_device_id=5"], &[]),
        "--net id=b,pci_device_id=5: slot 5 is already in use by a; give another, or leave pci_device_id out"
    );
    for slot in [0, 32] {
        assert_eq!(
            refusal(&[&format!("pci_device_id={slot}")], &[]),
            format!("--net pci_device_id={slot}: bus 0 has slots 1 to 31 for devices; give one of them")
        );
    }
    assert_eq!(
        refusal(&[""; 32], &[]),
        "--net (32 of them): bus 0 has slots for 31 devices; use VFs (sriov_vfs=) instead of more NICs"
    );
    assert_eq!(plan(&[""; 31], &[]).unwrap().len(), 31);
}

// More VFs than buses, and VFs of different shape.

/// G22, B20, B21: VFs whose routing IDs would be beyond the last bus.
#[test]
fn more_vfs_than_buses_are_refused() {
    assert_eq!(
        refusal(&["id=a,sriov_vfs=32513"], &[]),
        "--net id=a,sriov_vfs=32513: a VM has buses for 32512 VFs; reserve fewer"
    );
    // 126 buses and 1 more, of 127; then one more.
    let big = "id=a,tap=a,sriov_vfs=32001";
    assert!(plan(&[big, "id=b,tap=b,sriov_vfs=256"], &[]).is_ok());
    assert_eq!(
        refusal(&[big, "id=b,tap=b,sriov_vfs=257"], &[]),
        "--net id=b,sriov_vfs=257: takes 2 of the VM's 127 buses for VFs, but 1 are free; reserve fewer"
    );
    assert!(plan(&["tap=a,sriov_vfs=32512"], &[]).is_ok());
}

/// The peak memory use of this process, in KiB.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn too_many_vfs_or_nics_are_refused_before_allocating_memory() {
    let before = peak_memory();
    let nets = vec!["sriov_vfs=65535"; 100];
    assert_eq!(
        refusal(&nets, &[]),
        "--net (100 of them): bus 0 has slots for 31 devices; use VFs (sriov_vfs=) instead of more NICs"
    );
    let limit = "--net number 1, sriov_vfs=65535: a VM has buses for 32512 VFs; reserve fewer";
    assert_eq!(refusal(&nets[..31], &[]), limit);
    // 6.5 million VFs would take more than a gigabyte.
    assert!(peak_memory() < before + 512 * 1024, "{} KiB, before: {before}", peak_memory());
}

/// B20: VFs that one PF cannot describe.
#[test]
fn vfs_of_different_shape_are_refused() {
    assert_eq!(
        refusal(
            &["id=pf0,sriov_vfs=8"],
            &["pf=pf0,index=0,num_queues=4", "pf=pf0,index=1", "pf=pf0,index=2,num_queues=2"]
        ),
        "--net-vf pf=pf0,index=2,num_queues=2: all VFs of a PF have the same number of queues, and VF 0 has 4; \
         make them equal"
    );
}

// Queues, link and backend.

#[test]
fn wrong_queue_counts_are_refused() {
    for count in [0, 1] {
        assert_eq!(
            pf(&format!("num_queues={count}")),
            format!("--net id=pf0,num_queues={count}: a NIC has one pair of queues or more; give 2 or more")
        );
    }
    assert_eq!(
        vf("num_queues=10"),
        "--net-vf pf=pf0,index=3,num_queues=10: 5 queue pairs, but the VM was created with or resized to 4 vCPUs; \
         give at most 8, or more vCPUs"
    );
}

/// Ubicloud gives 2N + 1 for N pairs.
#[test]
fn an_odd_number_of_queues_counts_the_control_queue() {
    let mut config = VmConfig { net: vec!["id=a,num_queues=5".parse().unwrap()], ..VmConfig::default() };
    (config.cpus.boot_vcpus, config.cpus.max_vcpus) = (2, 2);
    let pairs = |config: &VmConfig| VmPlan::of(config).unwrap().nets().next().unwrap().pf.spec.queue_pairs;
    assert_eq!(pairs(&config), 2);
    config.net = vec!["id=a,num_queues=3".parse().unwrap()];
    assert_eq!(pairs(&config), 1);
    config.net = vec!["id=a,num_queues=7".parse().unwrap()];
    let refused = VmPlan::of(&config).unwrap_err().to_string();
    assert!(refused.starts_with("--net id=a,num_queues=7: 3 queue pairs, but the VM was created"), "{refused}");
}

#[test]
fn a_queue_size_that_cannot_be_is_refused() {
    for size in [0, 1, 3, 257, 65535] {
        assert_eq!(
            pf(&format!("queue_size={size}")),
            format!("--net id=pf0,queue_size={size}: not a power of two from 2 to 32768; 256 is usual")
        );
    }
    for size in [2, 32768] {
        assert!(plan(&[&format!("queue_size={size}")], &[]).is_ok(), "{size}");
    }
}

#[test]
fn an_mtu_out_of_range_is_refused() {
    for mtu in [0, 1279, 65522, 65535] {
        assert_eq!(pf(&format!("mtu={mtu}")), format!("--net id=pf0,mtu={mtu}: not a valid MTU; give 1280 to 65521"));
    }
    assert!(plan(&["mtu=1280", "mtu=65521"], &[]).is_ok());
    assert_eq!(vf("mtu=65536"), "--net-vf mtu=65536: give a whole number of bytes from 1280 to 65521");
}

#[test]
fn an_address_without_a_mask_is_refused() {
    assert_eq!(pf("ip=10.0.0.1"), "--net id=pf0,ip=10.0.0.1: needs a network mask; add mask=");
    assert_eq!(vf("mask=255.0.0.0"), "--net-vf pf=pf0,index=3,mask=255.0.0.0: needs an address; add ip=");
    assert_eq!(
        pf("ip=10.0.0.1,mask=255.0.255.0"),
        "--net id=pf0,mask=255.0.255.0: not a network mask; write it as 255.255.255.0"
    );
    assert_eq!(
        pf("ip=10.0.0.1,mask=ffff::"),
        "--net id=pf0,mask=ffff::: not a mask for 10.0.0.1; give one of the same address family"
    );
}

#[test]
fn segmentation_without_checksums_is_refused() {
    let what = "segmentation needs checksum offload; add offload_tso=off,offload_ufo=off";
    assert_eq!(pf("offload_csum=off"), format!("--net id=pf0,offload_csum=off: {what}"));
    assert_eq!(vf("offload_csum=off,offload_ufo=off"), format!("--net-vf pf=pf0,index=3,offload_csum=off: {what}"));
    assert!(plan(&["offload_csum=off,offload_tso=off,offload_ufo=off"], &[]).is_ok());
}

#[test]
fn descriptors_that_cannot_be_taps_are_refused() {
    let said = "--net id=pf0,fd=[2]: 2 is a standard stream, not a tap; open the tap as 3 or above";
    assert_eq!(refusal(&["id=pf0,fd=[2]"], &[]), said);
    assert_eq!(
        vf("fd=[5-7]"),
        "--net-vf pf=pf0,index=3,num_queues=2: each queue pair needs a file descriptor (fd=); pass 1 \
         instead of 3"
    );
    assert_eq!(
        vf("fd=[5],tap=x"),
        "--net-vf pf=pf0,index=3,tap=x: the tap behind a file descriptor (fd=) is already set up; leave tap out"
    );
}

// Backends.

#[test]
fn a_backend_that_is_not_asked_for_may_be_given_as_off() {
    let off = "vhost=off,vhost_user=off,vhost_mode=client";
    assert!(plan(&[&format!("id=a,sriov_vfs=1,{off},socket=,vdpa=")], &[&format!("pf=a,index=0,{off}")]).is_ok());
}

#[test]
fn a_tap_with_another_backend_is_refused() {
    let vdpa = "--net-vf pf=pf0,index=3,vdpa=/d:";
    for (key, setting) in [
        ("tap", "tap=x"),
        ("fd", "fd=7"),
        ("vhost", "vhost=on"),
        ("vhost", "vhost=auto"),
        ("host_mac", "host_mac=52:54:00:00:00:01"),
        ("vhost_user", "vhost_user=on,socket=/s"),
    ] {
        assert_eq!(
            vf(&format!("vdpa=/d,{setting}")),
            format!("{vdpa} {key} cannot be combined with a vDPA device; leave {key} out, or vdpa")
        );
        if !key.starts_with("vhost_user") && key != "host_mac" {
            assert_eq!(
                refusal(&[&format!("id=a,vhost_user=on,socket=/s,{setting}")], &[]),
                format!(
                    "--net id=a,vhost_user=on: {key} cannot be combined with a vhost-user backend; \
                     leave {key} out, or vhost_user"
                )
            );
        }
    }
    assert!(plan(&["fd=7,vhost=on", "tap=t,ip=10.0.0.1,mask=255.0.0.0,vhost=auto"], &[]).is_ok());
}

/// Cloud Hypervisor's own tests have this.
#[test]
fn a_host_mac_has_no_effect_with_a_vhost_user_backend() {
    let vhost_user = "vhost_user=true,socket=/s,mac=52:54:00:00:00:01";
    let nic = |rest: &str| plan(&[&format!("{vhost_user}{rest}")], &[]).unwrap();
    assert_eq!(nic(",host_mac=52:54:00:00:00:09"), nic(""));
    let vf = |rest: &str| {
        plan(
            &["id=a,tap=t,mac=52:54:00:00:00:01,sriov_vfs=1"],
            &[&format!("pf=a,index=0,vhost_user=on,socket=/s{rest}")],
        )
    };
    assert_eq!(vf(",host_mac=52:54:00:00:00:09").unwrap(), vf("").unwrap());
}

/// Kata sends these two with every NIC, and libvirt does for `<ip>`.
#[test]
fn tap_address_is_kept_without_effect_on_other_backends() {
    let address = "ip=192.168.249.1,mask=255.255.255.0";
    for backend in ["fd=7", "vhost_user=on,socket=/s", "vdpa=/d"] {
        let (with, without) = (format!("id=a,mac=52:54:00:00:00:01,{backend}"), "ip=,mask=");
        let pf = |rest: &str| plan(&[&format!("{with},{rest}")], &[]).unwrap();
        assert_eq!(pf(address), pf(without), "{backend}");
        let vf = |rest: &str| {
            let vf = format!("pf=a,index=0,{backend}{rest}");
            plan(&["id=a,mac=52:54:00:00:00:01,sriov_vfs=1"], &[&vf]).unwrap()
        };
        assert_eq!(vf(&format!(",{address}")), vf(""), "{backend}");
        let kept = PlannedVm::new(vm(&[&format!("{with},{address}")], &[]).unwrap()).unwrap();
        assert_eq!(kept.config().net[0].backend.ip, Some("192.168.249.1".parse().unwrap()));
        assert_eq!(kept.config().net[0].backend.mask, Some("255.255.255.0".parse().unwrap()));
    }
    assert_eq!(
        refusal(&["id=a,fd=7,ip=192.168.249.1"], &[]),
        "--net id=a,ip=192.168.249.1: needs a network mask; add mask="
    );
    // This program's own tap gets the address, like any other.
    let nets = plan(&[address], &[]).unwrap();
    let BackendPlan::Tap { spec, .. } = &nets[0].pf.backend else { panic!("{nets:?}") };
    assert_eq!(spec.ip, Some("192.168.249.1".parse().unwrap()));
}

#[test]
fn half_a_vhost_user_backend_is_refused() {
    assert_eq!(
        pf("vhost_user=on"),
        "--net id=pf0,vhost_user=on: tap cannot be combined with a vhost-user backend; leave tap out, or vhost_user"
    );
    assert_eq!(
        vf("vhost_user=on"),
        "--net-vf pf=pf0,index=3,vhost_user=on: needs the backend's socket; add socket=<path>"
    );
    assert_eq!(
        vf("socket=/s"),
        "--net-vf pf=pf0,index=3,socket=/s: only a vhost-user backend has a socket; add vhost_user=on, or leave \
         socket out"
    );
    assert_eq!(
        vf("vhost_mode=server"),
        "--net-vf pf=pf0,index=3,vhost_mode=server: only a vhost-user backend has a mode; add \
         vhost_user=on,socket=<path>, or leave vhost_mode out"
    );
}

#[test]
fn paths_that_cannot_be_are_refused() {
    let long = format!("/{}", "s".repeat(107));
    assert_eq!(
        vf(&format!("vhost_user=on,socket={long}")),
        format!(
            "--net-vf pf=pf0,index=3,socket={long}: 108 bytes; the path of a Unix socket has at most 107, \
             shorten it"
        )
    );
    assert!(plan(&[&format!("vhost_user=on,socket={}", &long[1..])], &[]).is_ok());
    let empty = |json: &str| with(|vm| vm.net.push(serde_json::from_str(json).unwrap()));
    assert_eq!(empty(r#"{"vdpa":""}"#), "--net vdpa=: the path is empty; give the device, such as /dev/vhost-vdpa-0");
    assert_eq!(
        empty(r#"{"vhost_user":true,"vhost_socket":""}"#),
        "--net socket=: the path is empty; give the backend's socket"
    );
}

#[test]
fn a_device_or_socket_used_twice_is_refused() {
    let remedy = "give each NIC and each VF its own";
    assert_eq!(
        refusal(&["id=a,sriov_vfs=4"], &["pf=a,index=1,vdpa=/d", "pf=a,index=3,vdpa=/d"]),
        format!("--net-vf pf=a,index=3,vdpa=/d: this device is already in use by VF 1 of a; {remedy}")
    );
    assert_eq!(
        refusal(&["id=a,vhost_user=on,socket=/s", "id=b,sriov_vfs=1"], &["pf=b,index=0,vhost_user=on,socket=/s"]),
        format!("--net-vf pf=b,index=0,socket=/s: this socket is already in use by a; {remedy}")
    );
    assert_eq!(
        with(|vm| {
            vm.net.push("id=a,vdpa=/d".parse().unwrap());
            vm.vdpa.push("path=/d".parse().unwrap());
        }),
        format!("--vdpa path=/d: this device is already in use by a; {remedy}")
    );
}

#[test]
fn a_vdpa_device_that_cannot_be_is_refused() {
    let vdpa = |text: &str| with(|vm| vm.vdpa.push(text.parse().unwrap()));
    assert_eq!(
        vdpa("id=v,path=/d,num_queues=0"),
        "--vdpa id=v,num_queues=0: a NIC needs queues; give 1 or more, or leave num_queues out"
    );
    assert_eq!(
        with(|vm| vm.vdpa.push(serde_json::from_str(r#"{"path":""}"#).unwrap())),
        "--vdpa path=: the path is empty; give the device, such as /dev/vhost-vdpa-0"
    );
    assert_eq!(
        vdpa("path=/d,pci_device_id=32"),
        "--vdpa pci_device_id=32: bus 0 has slots 1 to 31 for devices; give one of them"
    );
    assert_eq!(
        vdpa("path=/d,id=__v"),
        "--vdpa id=__v: not a device name; use printable characters, and do not start with two underscores"
    );
    assert_eq!(
        with(|vm| {
            vm.net.push("id=a".parse().unwrap());
            vm.vdpa.push("id=a,path=/d".parse().unwrap());
        }),
        "--vdpa id=a: this id is already in use by another NIC; give each NIC its own"
    );
}

#[test]
fn a_nic_on_a_segment_that_is_not_there_is_refused() {
    assert_eq!(
        pf("pci_segment=1"),
        "--net id=pf0,pci_segment=1: the VM has PCI segment 0 alone; leave pci_segment out, or add --platform \
         num_pci_segments=2"
    );
}

#[test]
fn keys_that_ask_for_nothing_may_be_given() {
    assert!(plan(&["id=a,iommu=off,pci_segment=0,bw_size="], &[]).is_ok());
}

// Rate limits.

#[test]
fn packets_that_pass_this_program_by_are_not_limited() {
    let lift = "lift the limit: ops_size=0,ops_refill_time=0";
    for (backend, moves, key) in [
        ("vhost=on", "the host's kernel (vhost=on) moves", "vhost"),
        ("vhost_user=on,socket=/s", "another process (vhost_user=on) moves", "vhost_user"),
        ("vdpa=/d", "a vDPA device moves", "vdpa"),
    ] {
        let text = format!("id=a,{backend},ops_size=5,ops_refill_time=10");
        let reason =
            format!("{moves} the packets, and not this program, which could limit them; leave {key} out, or {lift}");
        assert_eq!(refusal(&[&text], &[]), format!("--net id=a,ops_size=5: {reason}"));
        // A VF has its PF's limits unless it lifts them.
        let pf = "id=a,sriov_vfs=2,ops_size=5,ops_refill_time=10";
        let vf = format!("pf=a,index=1,{backend}");
        assert_eq!(refusal(&[pf], &[&vf]), format!("--net-vf pf=a,index=1,ops_size=5: {reason}"));
        assert!(plan(&[pf], &[&format!("{vf},ops_size=0,ops_refill_time=0")]).is_ok());
    }
    assert_eq!(
        pf("bw_size=0,bw_refill_time=1"),
        "--net id=pf0,bw_size=0: nothing could pass; give 1 or more, or 0 for bw_refill_time too"
    );
    assert_eq!(pf("bw_size=5"), "--net bw_size=5: needs bw_refill_time= too; give it, or leave bw_size out");
    let json = r#"{"rate_limiter_config":{"ops":{"size":1,"refill_time":0}}}"#;
    assert_eq!(
        with(|vm| vm.net.push(serde_json::from_str(json).unwrap())),
        "--net ops_refill_time=0: needs a time; give 1 or more, or 0 for ops_size too"
    );
}

#[test]
fn each_function_has_its_own_limits_or_the_numbers_of_its_pf() {
    let pf = "id=a,sriov_vfs=3,bw_size=100,bw_one_time_burst=7,bw_refill_time=10,vhost=auto";
    let vfs = ["pf=a,index=1,ops_size=5,ops_refill_time=1000", "pf=a,index=2,bw_size=0,bw_refill_time=0,vhost=auto"];
    let plan = &plan(&[pf], &vfs).unwrap()[0];
    let limits: Vec<_> = plan
        .functions()
        .map(|nic| nic.spec.limits)
        .map(|limits| [limits.bandwidth.map(|limit| limit.size), limits.ops.map(|limit| limit.size)])
        .collect();
    assert_eq!(limits, [[Some(100), None], [Some(100), None], [None, Some(5)], [None, None]]);
    // vhost=auto uses the kernel if nothing is limited.
    let vhost: Vec<_> = plan
        .functions()
        .map(|nic| match nic.backend {
            BackendPlan::Tap { vhost, .. } => vhost,
            ref other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(vhost, [Vhost::Off, Vhost::Off, Vhost::Off, Vhost::Auto]);
}
