//! Every rule about the rest of the machine that a configuration can break.

use vmm::config::{ConsoleConfig, ConsoleMode, MemoryConfig, PayloadConfig, VmPlan};

use crate::{vm, with};

#[test]
fn a_vm_without_vcpus_memory_or_kernel_is_refused() {
    assert_eq!(with(|vm| vm.cpus.boot_vcpus = 0), "--cpus boot=0: a VM needs a vCPU; give 1 or more");
    assert_eq!(with(|vm| vm.cpus.boot_vcpus = 255), "--cpus boot=255: a VM has at most 254 vCPUs; give fewer");
    assert_eq!(
        with(|vm| vm.cpus.max_vcpus = 3),
        "--cpus boot=4,max=3: max is less than boot; give max=4 or more, or leave max out"
    );
    assert_eq!(with(|vm| vm.cpus.max_vcpus = 255), "--cpus max=255: a VM has at most 254 vCPUs; give fewer");
    let mut most = vm(&[], &[]).unwrap();
    most.cpus.max_vcpus = 254;
    assert!(VmPlan::of(&most).is_ok());
    assert_eq!(with(|vm| vm.memory.size = 0), "--memory size=0: a VM needs memory; give a size, such as 512M");
    assert_eq!(
        with(|vm| vm.memory.size = 1 << 46),
        "--memory size=65536G: more than a guest can address; give at most 32768G"
    );
    assert_eq!(
        with(|vm| vm.memory.size += 1),
        "--memory size=536870913: not a multiple of the page size, 4K; round it up"
    );
    let nothing = PayloadConfig::default().check_present().unwrap_err().to_string();
    assert_eq!(nothing, "--kernel: is required; give the path of a bzImage or a vmlinux, or --firmware");
    assert_eq!(
        with(|vm| vm.payload.cmdline = Some("a\0b".to_string())),
        "--cmdline a\\u{0}b: a kernel command line ends at a NUL character; remove it"
    );
}

/// Error for these vCPUs.
fn cpus(text: &str) -> String {
    let cpus = text.parse().unwrap();
    let mut config = vm(&[], &[]).unwrap();
    config.cpus = cpus;
    VmPlan::of(&config).map_or_else(|error| error.to_string(), |_| "fine".to_string())
}

#[test]
fn a_topology_has_all_vcpus_and_apic_ids_of_8_bits() {
    for (max, topology) in
        [(1, "1:1:1:1"), (8, "2:2:1:2"), (254, "1:254:1:1"), (252, "2:1:1:126"), (189, "1:3:1:63"), (8, "4:2:1:1")]
    {
        assert_eq!((cpus(&format!("max={max},topology={topology}")).as_str(), topology), ("fine", topology));
    }
    let end = |text: &str| cpus(text).split_once(": ").unwrap().1.to_string();
    assert_eq!(end("boot=4,topology=0:4:1:1"), "no number of topology can be 0; give 1 or more");
    assert_eq!(end("boot=2,max=4,topology=1:2:1:1"), "topology has 2 vCPUs, and max is 4; make them equal");
    assert_eq!(
        end("boot=1,topology=1:65535:65535:65535"),
        "topology has 281462092005375 vCPUs, and max is 1; make them equal"
    );
    assert_eq!(
        end("boot=1,max=195,topology=1:3:1:65"),
        "topology needs APIC IDs up to 258, and they end at 254; give numbers that are powers of two, or fewer vCPUs"
    );
}

#[test]
fn a_vcpu_is_bound_to_cpus_that_a_host_can_have() {
    assert_eq!(cpus("boot=2,max=4,affinity=[0@[0-3],3@[1023]]"), "fine");
    for (affinity, said) in [
        ("[4@[0]]", "--cpus affinity=[4@...]: the vCPUs are 0 to 3; give one of them"),
        ("[0@[0],0@[1]]", "--cpus affinity=[0@...]: the vCPU is there twice; give all of its CPUs at once"),
        ("[1@[]]", "--cpus affinity=[1@...]: a vCPU needs a CPU of the host to run on; give one, or more"),
        (
            "[1@[0,1024]]",
            "--cpus affinity=[1@...]: CPU 1024 of the host: they are numbered 0 to 1023; give one of these",
        ),
    ] {
        assert_eq!(cpus(&format!("boot=2,max=4,affinity={affinity}")), said);
    }
}

#[test]
fn a_cpu_has_36_to_52_address_bits() {
    assert_eq!([36, 46, 52].map(|bits| cpus(&format!("max_phys_bits={bits}"))), ["fine"; 3]);
    for bits in [0, 35, 53, 255] {
        assert_eq!(
            cpus(&format!("max_phys_bits={bits}")),
            format!("--cpus max_phys_bits={bits}: a CPU has 36 to 52 address bits; give such a number")
        );
    }
}

#[test]
fn wrong_huge_pages_are_refused() {
    let page = |size: u64| with(|vm| (vm.memory.hugepages, vm.memory.hugepage_size) = (true, Some(size)));
    assert_eq!(
        with(|vm| vm.memory.hugepage_size = Some(2 << 20)),
        "--memory hugepage_size=2M: needs hugepages=on; add it"
    );
    assert_eq!(page(3 << 20), "--memory hugepage_size=3M: not a huge page size; give 2M or 1G");
    assert_eq!(page(0), "--memory hugepage_size=0: not a huge page size; give 2M or 1G");
    assert_eq!(page(1 << 30), "--memory size=512M: not a multiple of the page size, 1G; round it up");
}

#[test]
fn segments_are_1_to_96() {
    let platform = |segments: u16| Some(format!("num_pci_segments={segments}").parse().unwrap());
    for segments in [0, 97] {
        assert_eq!(
            with(|vm| vm.platform = platform(segments)),
            format!("--platform num_pci_segments={segments}: a VM has 1 to 96 PCI segments; give one of these numbers")
        );
    }
    for segments in [1, 2, 96] {
        let mut config = vm(&[], &[]).unwrap();
        config.platform = platform(segments);
        assert!(VmPlan::of(&config).is_ok());
    }
}

/// A VM of 3 segments with these NICs and shares.
fn on_segments(nets: &[&str], shares: &[&str]) -> Result<VmPlan, String> {
    let mut config = vm(nets, &[]).unwrap();
    config.platform = Some("num_pci_segments=3".parse().unwrap());
    config.pci_segments = shares.iter().map(|share| share.parse().unwrap()).collect();
    VmPlan::of(&config).map_err(|error| error.to_string())
}

#[test]
fn device_needs_an_existing_segment_and_a_pf_one_with_vf_buses() {
    let refused = |net: &str| on_segments(&[net], &[]).unwrap_err();
    assert_eq!(
        refused("id=n,pci_segment=3"),
        "--net id=n,pci_segment=3: the VM has PCI segments 0 to 2; give one of them, or more with --platform"
    );
    assert_eq!(
        refused("id=pf0,sriov_vfs=4,pci_segment=1"),
        "--net id=pf0,pci_segment=1: segment 1 has bus 0 alone, and VFs need buses of their own (sriov_vfs=4); put \
         the PF on segment 0"
    );
    let mut config = vm(&[], &[]).unwrap();
    config.disks.push("path=/d,pci_segment=1".parse().unwrap());
    assert_eq!(
        VmPlan::of(&config).unwrap_err().to_string(),
        "--disk id=_disk0,pci_segment=1: the VM has PCI segment 0 alone; leave pci_segment out, or add --platform \
         num_pci_segments=2"
    );
    let nets = ["id=pf0,sriov_vfs=4", "id=n,pci_segment=2", "id=m,pci_segment=2"];
    let segments: Vec<_> = on_segments(&nets, &[]).unwrap().devices.iter().map(|device| device.pci_segment).collect();
    assert_eq!(segments, [0, 0, 2, 2, 0], "the console is the first");
}

#[test]
fn a_slot_is_taken_on_its_own_segment_alone() {
    let slot = |id: &str, segment: u8| format!("id={id},pci_segment={segment},pci_device_id=5");
    assert!(on_segments(&[&slot("a", 0), &slot("b", 1), &slot("c", 2)], &[]).is_ok());
    assert_eq!(
        on_segments(&[&slot("a", 1), &slot("b", 1)], &[]).unwrap_err(),
        "--net id=b,pci_device_id=5: slot 5 is already in use by a; give another, or leave pci_device_id out"
    );
    let full: Vec<_> = (0..62).map(|n| format!("id=n{n},pci_segment={}", 1 + n % 2)).collect();
    let mut nets: Vec<_> = full.iter().map(String::as_str).collect();
    assert!(on_segments(&nets, &[]).is_ok());
    nets.push("id=more,pci_segment=1");
    assert!(on_segments(&nets, &[]).unwrap_err().starts_with("--net (32 of them): bus 0 has slots for 31 devices"));
}

#[test]
fn a_segments_share_is_one_or_more_and_given_once() {
    let refused = |shares: &[&str]| on_segments(&[], shares).unwrap_err();
    assert_eq!(
        refused(&["pci_segment=3"]),
        "--pci-segment pci_segment=3: the VM has PCI segments 0 to 2; give one of them, or more with --platform"
    );
    assert_eq!(
        refused(&["pci_segment=1", "pci_segment=1,mmio32_aperture_weight=2"]),
        "--pci-segment pci_segment=1: this segment is given twice; put all its keys into one"
    );
    assert_eq!(
        refused(&["pci_segment=1,mmio64_aperture_weight=0"]),
        "--pci-segment pci_segment=1,mmio64_aperture_weight=0: a segment without addresses is of no use; give 1 or more"
    );
    let shares = ["pci_segment=2,mmio32_aperture_weight=3,mmio64_aperture_weight=4"];
    let segments = on_segments(&[], &shares).unwrap().segments;
    let weights: Vec<_> = segments.iter().map(|weights| (weights.mem32, weights.mem64)).collect();
    assert_eq!(weights, [(1, 1), (1, 1), (3, 4)]);
}

#[test]
fn room_for_memory_that_cannot_be_is_refused() {
    let room = |size: u64| with(|vm| vm.memory.hotplug_size = Some(size));
    assert_eq!(room(1 << 20), "--memory hotplug_size=1M: memory is added in steps of 128M; give that or more");
    assert_eq!(
        room(1 << 45),
        "--memory hotplug_size=32768G: together with size more than a guest can address; give at most 32768G"
    );
    let mut none = vm(&[], &[]).unwrap();
    none.memory.hotplug_size = Some(0);
    assert!(VmPlan::of(&none).is_ok(), "no room is what there is anyway");
}

#[test]
fn memory_devices_that_cannot_be_are_refused() {
    let memory = |text: &str| with(|vm| vm.memory = text.parse().unwrap());
    let zones = |text: &str, zones: &[&str]| {
        with(|vm| {
            vm.memory = text.parse().unwrap();
            vm.memory.zones = zones.iter().map(|zone| zone.parse().unwrap()).collect();
        })
    };
    assert_eq!(
        memory("hotplug_size=1G,hotplugged_size=1G"),
        "--memory hotplugged_size=1G: only with hotplug_method=virtio-mem; add that, or make size larger"
    );
    assert_eq!(
        memory("hotplug_method=virtio-mem,hotplug_size=3M"),
        "--memory hotplug_size=3M: memory is added in steps of 2M; give a multiple of that"
    );
    assert_eq!(
        memory("hugepages=on,hugepage_size=1G,size=1G,hotplug_method=virtio-mem,hotplug_size=2G,hotplugged_size=2M"),
        "--memory hotplugged_size=2M: memory is added in steps of 1G; give a multiple of that"
    );
    assert_eq!(
        memory("hotplug_method=virtio-mem,hotplug_size=2M,hotplugged_size=4M"),
        "--memory hotplugged_size=4M: there is room for 2M (hotplug_size); give less, or more room"
    );
    assert_eq!(
        memory("hotplug_method=virtio-mem,hotplug_size=32768G"),
        "--memory hotplug_size=32768G: together with size more than a guest can address; give at most 32768G"
    );
    let grows = "size=0,hotplug_method=virtio-mem";
    assert_eq!(
        zones("size=0", &["id=a,size=1G,hotplug_size=1G"]),
        "--memory-zone id=a,hotplug_size=1G: memory is added to zones by virtio-mem alone; give --memory \
         size=0,hotplug_method=virtio-mem"
    );
    assert_eq!(
        zones("size=0,hotplug_method=virtio-mem,hotplug_size=1G", &["id=a,size=1G"]),
        "--memory hotplug_size=1G: memory is added to each zone by itself; give it to a --memory-zone"
    );
    assert_eq!(
        zones(grows, &["id=a,size=1G,hotplug_size=1G,file=/f"]),
        "--memory-zone id=a,hotplug_size=1G: a zone with the contents of a file keeps its size; leave one out"
    );
    let many: Vec<_> = (0..4).map(|n| format!("id={n},size=1G,hotplug_size=1G")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    assert_eq!(zones(grows, &many), "--memory-zone: 4 zones, 4 with hotplug_size: together at most 7; give fewer");
    let mut some = vm(&[], &[]).unwrap();
    some.memory = "hotplug_method=virtio-mem,hotplug_size=1G,hotplugged_size=2M".parse().unwrap();
    let plan = VmPlan::of(&some).unwrap();
    assert_eq!(plan.devices.last().map(|device| device.option()).as_deref(), Some("--memory id=_mem0"));
    some.memory = grows.parse().unwrap();
    some.memory.zones = vec!["id=a,size=1G,hotplug_size=2M,hotplugged_size=2M".parse().unwrap()];
    VmPlan::of(&some).unwrap();
}

#[test]
fn zones_that_cannot_be_are_refused() {
    let zones = |zones: &[&str]| {
        with(|vm| {
            vm.memory.size = 0;
            vm.memory.zones = zones.iter().map(|zone| zone.parse().unwrap()).collect();
        })
    };
    let with_zone = |change: fn(&mut MemoryConfig)| {
        with(|vm| {
            (vm.memory.size, vm.memory.zones) = (0, vec!["id=a,size=1G".parse().unwrap()]);
            change(&mut vm.memory);
        })
    };
    let mut some = vm(&[], &[]).unwrap();
    (some.memory.size, some.memory.zones) = (0, vec!["id=a,size=1G,host_numa_node=1,file=/f".parse().unwrap()]);
    assert!(VmPlan::of(&some).is_ok());
    assert_eq!(
        with_zone(|memory| memory.size = 1 << 30),
        "--memory size=1G: the zones (--memory-zone) have all of the memory; give size=0"
    );
    assert!(with_zone(|memory| memory.hotplug_size = Some(1 << 30)).contains("cannot be added to"));
    assert_eq!(
        zones(&["id=a,size=1G", "id=a,size=1G"]),
        "--memory-zone id=a: another zone has this name; give each its own"
    );
    assert_eq!(zones(&["id=a,size=0"]), "--memory-zone id=a,size=0: a VM needs memory; give a size, such as 512M");
    assert!(
        zones(&["id=a,size=1G,hugepage_size=2M"]).starts_with("--memory-zone id=a,hugepage_size=2M: needs hugepages")
    );
    assert!(zones(&["id=a,size=1G,hugepages=on,file=/f"]).contains("a file has its own pages"));
    assert!(zones(&["id=a,size=1G,host_numa_node=1024"]).contains("at most 1024 NUMA nodes"));
    assert_eq!(
        with_zone(|memory| memory.zones.iter_mut().for_each(|zone| zone.id.clear())),
        "--memory-zone id=: a zone needs a name; give one"
    );
    assert!(zones(&["id=a,size=20000G", "id=b,size=20000G"]).contains("together more than a guest can address"));
    let many: Vec<_> = (0..8).map(|n| format!("id={n},size=1G")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    assert_eq!(zones(&many), "--memory-zone: 8 zones: a VM has at most 7 memory zones; give fewer");
}

/// Kata's VM templates, Cloud Hypervisor's NUMA tests and its guide to OVS with DPDK give both.
#[test]
fn memory_options_besides_zones_are_ignored_except_mergeable() {
    for text in
        ["shared=on", "hugepages=on", "hugepage_size=2M", "prefault=on", "reserve=on", "thp=off", "mergeable=on"]
    {
        let mut config = vm(&[], &[]).unwrap();
        config.memory = format!("size=0,{text}").parse().unwrap();
        config.memory.zones = ["id=a,size=1G", "id=b,size=1G,prefault=on"].map(|zone| zone.parse().unwrap()).into();
        assert_eq!(VmPlan::of(&config).unwrap().warnings, [""; 0], "{text}");
        let mut expected = config.memory.zones.clone();
        expected.iter_mut().for_each(|zone| zone.mergeable = text == "mergeable=on");
        assert_eq!(config.memory.parts(), expected, "{text}");
    }
    let json = r#"{"payload": {}, "memory": {"size": 0, "shared": true, "zones": [
        {"id": "mem0", "size": 268435456, "shared": true, "file": "/dev/shm/template"}]}}"#;
    let config = vmm::config::VmConfig::from_json(json.as_bytes()).unwrap();
    assert!(VmPlan::of(&config).is_ok() && config.memory.parts()[0].shared);
}

#[test]
fn landlock_rules_without_landlock_are_taken_with_a_warning() {
    let mut config = vm(&[], &[]).unwrap();
    config.landlock_rules = vec!["path=/srv,access=rw".parse().unwrap()];
    let said = "--landlock-rules path=/srv,access=rw: has no effect without --landlock (landlock_enable)";
    assert_eq!(VmPlan::of(&config).unwrap().warnings, [said]);
    config.landlock_enable = true;
    assert_eq!(VmPlan::of(&config).unwrap().warnings, [""; 0]);
}

#[test]
fn slot_0_is_a_devices_on_every_segment_but_the_first() {
    let plan = on_segments(&["id=a,pci_segment=1,pci_device_id=0", "id=b,pci_segment=2,pci_device_id=0"], &[]).unwrap();
    let nics = plan.devices.iter().filter(|device| ["a", "b"].contains(&device.id.as_str()));
    assert_eq!(nics.map(|device| device.pci_device_id).collect::<Vec<_>>(), [Some(0); 2]);
    assert_eq!(
        on_segments(&["id=a,pci_segment=0,pci_device_id=0"], &[]).unwrap_err(),
        "--net id=a,pci_device_id=0: bus 0 has slots 1 to 31 for devices; give one of them"
    );
    assert!(on_segments(&["id=a,pci_segment=1,pci_device_id=32"], &[]).unwrap_err().contains("slots 0 to 31"));
    let mut config = vm(&[], &[]).unwrap();
    config.platform = Some("num_pci_segments=2".parse().unwrap());
    config.disks.push("path=/d,pci_segment=1,pci_device_id=0".parse().unwrap());
    assert!(VmPlan::of(&config).is_ok());
}

#[test]
fn a_console_that_cannot_be_is_refused() {
    assert_eq!(
        with(|vm| vm.serial = "null,id=c".parse().unwrap()),
        "--serial null,id=c: the serial port is not a PCI device; leave id out"
    );
    let both = |text: &str| (text.parse::<ConsoleConfig>().unwrap(), text.parse().unwrap());
    assert_eq!(
        with(|vm| (vm.console, vm.serial) = both("file=/tmp/f")),
        "--console file=/tmp/f: the serial port has this file (--serial file=/tmp/f); give one of them another path"
    );
    assert_eq!(
        with(|vm| (vm.console, vm.serial) = both("socket=/tmp/s")),
        "--console socket=/tmp/s: the serial port has this socket (--serial socket=/tmp/s); give one of them another \
         path"
    );
    assert_eq!(
        with(|vm| vm.serial.file = Some("x".into())),
        "--serial null: only mode File has a file; leave file out"
    );
    let json = |text: &str| serde_json::from_str(text).unwrap();
    assert_eq!(with(|vm| vm.serial = json(r#"{"mode":"File"}"#)), "--serial file=: mode File needs a file; give one");
    assert_eq!(
        with(|vm| vm.serial = json(r#"{"mode":"Pty","socket":"/tmp/s"}"#)),
        "--serial pty: only mode Socket has a socket; leave socket out"
    );
}

#[test]
fn consoles_may_share_an_end_if_neither_takes_from_the_other() {
    let each = [
        ("file=/dev/null", "file=/dev/null"),
        ("null", "null"),
        ("tty", "tty"),
        ("off,id=c,iommu=on", "off"),
        ("pty", "pty"),
        ("file=/tmp/x", "socket=/tmp/x"),
    ];
    for (console, serial) in
        each.into_iter().chain([("file=/tmp/f", "file=/tmp/g"), ("socket=/tmp/s", "socket=/tmp/t")])
    {
        let mut config = vm(&[], &[]).unwrap();
        (config.console, config.serial) = (console.parse().unwrap(), serial.parse().unwrap());
        assert!(VmPlan::of(&config).is_ok(), "{console} {serial}");
    }
}

#[test]
fn a_serial_port_may_be_any_console() {
    for mode in ["off", "null", "tty", "pty", "file=/tmp/f", "socket=/tmp/s"] {
        let mut config = vm(&[], &[]).unwrap();
        config.serial = mode.parse().unwrap();
        assert!(VmPlan::of(&config).is_ok(), "{mode}");
    }
    // A client sends back the path of the pseudo-terminal that it has read.
    let mut config = vm(&[], &[]).unwrap();
    config.serial = ConsoleConfig { file: Some("/dev/pts/7".into()), ..ConsoleConfig::new(ConsoleMode::Pty) };
    assert!(VmPlan::of(&config).is_ok());
}
