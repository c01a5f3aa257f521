//! `--net model=x550` and `model=x540`: its plan, and each key that it refuses.

use std::num::NonZeroU32;

use virtio_devices::{PortVlan, UplinkPolicy, VlanProtocol};
use vmm::config::{DeviceKind, NetConfig, PlannedVm, UplinkPlan, VmConfig, VmPlan, X550Plan};

use crate::vm;

fn planned(net: &str) -> Result<PlannedVm, String> {
    vm(&[net], &[]).and_then(PlannedVm::new).map_err(|error| error.to_string())
}

fn x550(net: &str) -> X550Plan {
    planned(net).unwrap().plan().devices.iter().find_map(|device| device.x550()).unwrap().clone()
}

fn refusal(net: &str) -> String {
    let line = planned(&format!("id=n,model=x550,{net}")).unwrap_err();
    assert!(!line.contains('\n'), "{line}");
    line
}

#[test]
fn the_tap_of_an_x550_is_the_uplink_of_its_switch() {
    let all = x550(
        "id=n,model=x550,tap=up0,ip=10.0.0.1,mask=255.0.0.0,host_mac=02:00:00:00:00:09,mac=02:00:00:00:00:01,\
         sriov_vfs=63,workers=2,uplink_rate=1000,link=up",
    );
    assert_eq!((all.id.as_str(), all.mac.to_string().as_str(), all.total_vfs), ("n", "02:00:00:00:00:01", 63));
    assert_eq!((all.switch.workers, all.switch.uplink_rate.map(|rate| rate.get())), (2, Some(1000)));
    let Some(UplinkPlan::Tap(tap)) = &all.switch.uplink else { panic!("{all:?}") };
    assert_eq!((tap.name.as_deref(), tap.mtu, tap.queue_pairs), (Some("up0"), None, 1));
    assert_eq!((tap.ip, tap.host_mac), (Some("10.0.0.1".parse().unwrap()), Some([2, 0, 0, 0, 0, 9])));
    assert_eq!((all.link_up, all.follows_uplink), (true, false));
    assert_eq!(x550("model=x550,fd=[7]").switch.uplink, Some(UplinkPlan::Fd(7)));
    let alone = x550("model=x550");
    assert_eq!((alone.total_vfs, alone.switch.uplink, alone.switch.workers), (0, None, 1), "its functions alone");
    assert_eq!((alone.link_up, alone.follows_uplink), (true, true));
    assert_eq!(
        (x550("model=x550,link=down").link_up, x550("model=X550,tap=t,link=down").follows_uplink),
        (false, false)
    );
}

#[test]
fn an_x550_is_a_device_among_the_others() {
    let nets = ["id=a,tap=a", "id=n,model=x550,sriov_vfs=2,pci_device_id=9,iommu=on", "id=b,sriov_vfs=1"];
    let vm = PlannedVm::new(vm(&nets, &[]).unwrap()).unwrap();
    let nics: Vec<_> =
        vm.plan().devices.iter().filter(|device| device.flag == "--net").map(|device| device.names()).collect();
    assert_eq!(nics, [vec!["a"], vec!["n", "nv0", "nv1"], vec!["b", "bv0"]]);
    let device = vm.plan().devices.iter().find(|device| device.id == "n").unwrap();
    assert_eq!((device.total_vfs(), device.pci_device_id, device.iommu), (2, Some(9), true));
    assert!(device.is_removable() && !device.needs_shared_memory() && !device.pins_memory());
    assert!(vm.plan().iommu().is_some() && device.net().is_none());
    // Each has its own address in the configuration, which is planned again as it is.
    let macs: Vec<_> = vm.config().net.iter().map(|net| net.mac.unwrap().given().unwrap()).collect();
    let DeviceKind::X550(x550) = &device.kind else { panic!("{device:?}") };
    assert_eq!(macs[1], x550.mac);
    assert!(macs[0] != macs[1] && macs[1] != macs[2] && macs[0] != macs[2]);
    assert_eq!(&PlannedVm::new(vm.config().clone()).unwrap(), &vm);
}

#[test]
fn an_x540_is_planned_and_refused_as_an_x550() {
    let keys = "tap=up0,mac=02:00:00:00:00:01,sriov_vfs=63";
    let [older, newer] = ["x540", "x550"].map(|model| x550(&format!("id=n,model={model},{keys}")));
    assert_eq!([older.model, newer.model].map(|model| model.to_string()), ["X540", "X550"]);
    assert_eq!(older, X550Plan { model: older.model, ..newer });
    for (keys, key, said) in [
        ("sriov_vfs=64", "sriov_vfs=64", "an X540 has at most 63 VFs; reserve fewer"),
        ("mac=any", "mac=any", "an X540 has one permanent address; give that, or leave mac out to have one chosen"),
        (
            "mtu=9000",
            "mtu=9000",
            "the guest's driver sets the MTU of an X540; leave mtu out, and set that of the uplink on the host",
        ),
    ] {
        assert_eq!(planned(&format!("id=n,model=x540,{keys}")).unwrap_err(), format!("--net id=n,{key}: {said}"));
    }
    for keys in
        ["queue_size=512", "switch=veb", "vhost=on", "trust=on", "max_tx_rate=9", "bw_size=9,bw_refill_time=100"]
    {
        let refusals = ["x540", "x550"].map(|model| planned(&format!("id=n,model={model},tap=t,{keys}")).unwrap_err());
        assert!(refusals[0].contains("an X540") && refusals[0] == refusals[1].replace("X550", "X540"), "{refusals:?}");
    }
    let vf = vm(&["id=n,model=x540,sriov_vfs=2"], &["pf=n,index=1,vlan=5"]).and_then(PlannedVm::new).unwrap_err();
    assert!(vf.to_string().contains("the guest owns the VFs of an X540 and configures them"), "{vf}");
}

#[test]
fn the_model_survives_json_and_is_left_out_if_virtio() {
    let config = vm(&["id=n,model=x550,tap=t,sriov_vfs=4", "id=v,model=virtio"], &[]).unwrap();
    assert_eq!(serde_json::to_value("model=x540".parse::<NetConfig>().unwrap()).unwrap()["model"], "x540");
    let json = serde_json::to_value(&config).unwrap();
    assert_eq!((&json["net"][0]["model"], json["net"][1].get("model")), (&"x550".into(), None));
    assert_eq!(serde_json::from_value::<VmConfig>(json).unwrap(), config);
}

#[test]
fn an_x550_with_more_vfs_than_hardware_is_refused() {
    assert_eq!(refusal("sriov_vfs=64"), "--net id=n,sriov_vfs=64: an X550 has at most 63 VFs; reserve fewer");
    assert_eq!(refusal("sriov_vfs=40000"), "--net id=n,sriov_vfs=40000: an X550 has at most 63 VFs; reserve fewer");
    assert!(planned("model=x550,sriov_vfs=63").is_ok() && planned("sriov_vfs=64").is_ok());
    // A bus of VFs for each, as for other PFs.
    assert_eq!(
        refusal("sriov_vfs=1,pci_segment=1"),
        "--net id=n,pci_segment=1: the VM has PCI segment 0 alone; leave pci_segment out, or add --platform \
         num_pci_segments=2"
    );
}

#[test]
fn each_key_that_an_x550_cannot_honour_is_refused_by_name() {
    let driver = |what: &str, key: &str| {
        format!("the guest's driver chooses the {what} of an X550; leave {key} out, or give model=virtio")
    };
    let tap = |key: &str| {
        format!(
            "the uplink of an X550 is a tap whose packets this program carries; leave {key} out, or give model=virtio"
        )
    };
    let policy = |remedy: &str| {
        format!("the guest owns the functions of an X550 and sets their policies; {remedy} (docs/guide/x550.md)")
    };
    let port = |key: &str| policy(&format!("leave {key} out, and restrict the uplink's port on the host"));
    let rate = |key: &str| policy(&format!("give uplink_rate= instead of {key}"));
    let limit = |key: &str| format!("an X550 has a limit of its uplink alone; give uplink_rate= instead of {key}");
    let mtu = "the guest's driver sets the MTU of an X550; leave mtu out, and set that of the uplink on the host";
    let switch = "an X550 always has a switch, and the guest's driver sets its mode (bridge link set dev <PF> hwmode); \
                  leave switch out";
    for (keys, said) in [
        ("mac=any", "an X550 has one permanent address; give that, or leave mac out to have one chosen".to_string()),
        ("mtu=9000", mtu.to_string()),
        ("num_queues=4", driver("queues", "num_queues")),
        ("queue_size=512", driver("queue sizes", "queue_size")),
        ("offload_tso=off", driver("offloads", "offload_tso")),
        ("offload_ufo=off", driver("offloads", "offload_ufo")),
        ("offload_csum=off", driver("offloads", "offload_csum")),
        ("standby=on", "only a virtio NIC can be a standby; leave standby out, or give model=virtio".to_string()),
        ("switch=veb", switch.to_string()),
        ("switch=vepa", switch.to_string()),
        ("vhost=on", tap("vhost")),
        ("vhost=auto", tap("vhost")),
        ("vhost_user=on", tap("vhost_user")),
        ("socket=/s", tap("socket")),
        ("vhost_mode=server", tap("vhost_mode")),
        ("vdpa=/d", tap("vdpa")),
        ("spoofchk=on", port("spoofchk")),
        ("trust=on", port("trust")),
        ("isolated=on", port("isolated")),
        ("mirror=0", port("mirror")),
        ("weight=9", port("weight")),
        ("max_tx_rate=9", rate("max_tx_rate")),
        ("min_tx_rate=9", rate("min_tx_rate")),
        ("bw_size=9,bw_refill_time=100", limit("bw_size")),
        ("ops_size=9,ops_refill_time=100", limit("ops_size")),
    ] {
        let key = keys.split(',').next().unwrap();
        assert_eq!(refusal(&format!("tap=up0,sriov_vfs=4,{keys}")), format!("--net id=n,{key}: {said}"));
    }
    for usual in ["vhost=off", "num_queues=2,queue_size=256,offload_tso=on", "bw_size=0,bw_refill_time=0", "link=auto"]
    {
        assert_eq!(planned(&format!("id=n,model=x550,tap=up0,{usual}")).err(), None, "{usual}");
    }
}

#[test]
fn the_hosts_policy_of_an_x550_is_that_of_its_uplink() {
    let planned = |keys: &str| x550(&format!("model=x550,tap=up0,sriov_vfs=2,{keys}")).uplink_policy;
    let vlan = planned("vlan=100,vlan_qos=3,vlan_proto=802.1ad,storm=50");
    let port_vlan = PortVlan { id: 100, priority: 3, protocol: VlanProtocol::Service };
    let expected = UplinkPolicy { port_vlan: Some(port_vlan), trunk: None, storm: NonZeroU32::new(50) };
    assert_eq!(vlan, expected);
    let trunk = planned("trunk=[0,10-12]").trunk.unwrap();
    assert!([0, 10, 12].iter().all(|id| trunk.vlans.contains(*id)) && !trunk.vlans.contains(13));
    assert!(planned("vlan=0,trunk=[],storm=0").is_open() && x550("model=x550,tap=up0").uplink_policy.is_open());
}

#[test]
fn a_policy_that_no_uplink_can_have_is_refused() {
    let none = |key: &str| format!("a rule for the uplink of an X550, which has none; add tap=, or leave {key} out");
    for (keys, said) in [
        ("vlan=5", format!("vlan=5: {}", none("vlan"))),
        ("trunk=[5]", format!("trunk=[5]: {}", none("trunk"))),
        ("storm=9", format!("storm=9: {}", none("storm"))),
        ("tap=up0,vlan=4095", "vlan=4095: not a VLAN; give 1 to 4094, or 0 for none".to_string()),
        ("tap=up0,vlan_qos=1", "vlan_qos=1: has no effect without a VLAN; add vlan=".to_string()),
        ("tap=up0,vlan=5,trunk=[5]", "trunk=[5]: cannot be combined with vlan=5; give vlan=0 or trunk=[]".to_string()),
    ] {
        assert_eq!(refusal(keys), format!("--net id=n,{said}"), "{keys}");
    }
    assert!(planned("model=x550,vlan=0,trunk=[],storm=0").is_ok());
}

#[test]
fn a_wrong_uplink_is_refused_as_that_of_a_switch() {
    for (keys, said) in [
        ("uplink_rate=9", "uplink_rate=9: the switch has no uplink; add tap=, or leave uplink_rate out"),
        (
            "ip=10.0.0.1,mask=255.0.0.0",
            "ip=10.0.0.1: the switch has no uplink, so that there is no tap; add tap=, or leave ip out",
        ),
        ("tap=up0,ip=10.0.0.1", "ip=10.0.0.1: needs a network mask; add mask="),
        ("tap=up0,workers=9", "workers=9: at most one for each of the VM's 4 vCPUs, and 64; give 1 to 4"),
        ("fd=[7,8]", "num_queues=2: the uplink of a switch has one queue; pass 1 file descriptor (fd=) instead of 2"),
        ("fd=[7],tap=up0", "tap=up0: the tap behind a file descriptor (fd=) is already set up; leave tap out"),
    ] {
        assert_eq!(refusal(keys), format!("--net id=n,{said}"), "{keys}");
    }
    assert_eq!(
        VmPlan::of(&vm(&["id=a,tap=up0", "id=n,model=x550,tap=up0"], &[]).unwrap()).unwrap_err().to_string(),
        "--net id=n,tap=up0: tap up0 is already in use by a; give each NIC and each VF its own"
    );
}

#[test]
fn vfs_of_an_x550_take_no_setting_of_the_host() {
    let said = |net: &str, vf: &str| vm(&[net], &[vf]).and_then(PlannedVm::new).unwrap_err().to_string();
    let what = "the guest owns the VFs of an X550 and configures them (ip link set <PF> vf); leave this out, or give \
                the NIC model=virtio";
    for vf in ["index=0,tap=t", "index=1,vlan=5", "index=*,spoofchk=off", "index=0-1", "index=9"] {
        let index = vf.split(',').next().unwrap();
        assert_eq!(
            said("id=n,model=x550,sriov_vfs=2", &format!("pf=n,{vf}")),
            format!("--net-vf pf=n,{index}: {what}")
        );
    }
    let json = r#"{"net": [{"id": "n", "model": "x550", "sriov_vfs": 2, "vfs": [{"index": 1, "vlan": 5}]}]}"#;
    let error = PlannedVm::of_document(serde_json::from_str(json).unwrap()).unwrap_err().to_string();
    assert_eq!(error, format!("net[0].vfs[0]: {what}"));
}
