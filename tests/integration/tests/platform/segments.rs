//! Devices on further PCI segments.

use integration::{Api, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, spec_with_vfs, vf_taps};
use rstest::rstest;
use serde_json::json;

/// A NIC on the segment with this number, as in `vm.add-net`.
fn hot_nic(segment: u16) -> serde_json::Value {
    json!({ "id": "hot", "tap": "hot", "pci_segment": segment, "mac": "52:54:00:00:09:09" })
}

/// NICs, a disk and the entropy device on segments 0 to 2: the guest finds each in its domain, a NIC there carries
/// traffic, one is added and removed while the guest runs, and the VFs of segment 0 are not affected.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn devices_are_on_every_segment_and_come_and_go_there(#[case] kernel: Kernel) {
    let api = Api::new("segments");
    let spec: GuestSpec = spec_with_vfs(kernel, 2)
        .net("id=other,tap=other,pci_segment=1,mac=52:54:00:00:09:01")
        .arguments(&["--platform", "num_pci_segments=3", "--pci-segment", "pci_segment=1,mmio64_aperture_weight=2"])
        .arguments(&["--rng", "src=/dev/urandom,pci_segment=2,pci_device_id=7", "--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    let devices = guest.ok("ls /sys/bus/pci/devices");
    let devices: Vec<_> = devices.split_whitespace().collect();
    assert_eq!(devices, ["0000:00:00.0", "0000:00:01.0", "0001:00:01.0", "0002:00:07.0"]);
    let info = api.info();
    assert_eq!(info["device_tree"]["_virtio-pci-other"]["pci_bdf"], "0001:00:01.0");
    assert_eq!(info["device_tree"]["_virtio-pci-__rng"]["pci_bdf"], "0002:00:07.0");
    assert_eq!(info["config"]["platform"]["num_pci_segments"], 3);

    let interface = |guest: &mut Guest, address: &str| {
        guest.wait_for(&format!("ls /sys/bus/pci/devices/{address}/virtio*/net/*/address"));
        guest.ok(&format!("ls /sys/bus/pci/devices/{address}/virtio*/net")).trim().to_string()
    };
    let other = interface(&mut guest, "0001:00:01.0");
    HostTap::existing("other").join(Subnet(50));
    guest.join(&other, Subnet(50));
    guest.ping(&other, Subnet(50));

    for segment in [1, 2] {
        let answer = api.put_json("vm.add-net", &hot_nic(segment));
        let address = format!("000{segment}:00:0{}.0", 3 - segment);
        assert_eq!((answer.status, answer.body), (200, json!({ "id": "hot", "bdf": address })));
        let hot = interface(&mut guest, &address);
        HostTap::existing("hot").join(Subnet(51));
        guest.join(&hot, Subnet(51));
        guest.ping(&hot, Subnet(51));
        api.remove_device("hot");
        assert_ne!(guest.run(&format!("ls -d /sys/bus/pci/devices/{address}")).status, 0);
    }

    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    let taps: Vec<_> = vf_taps(2);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    guest.ping(&other, Subnet(50));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
