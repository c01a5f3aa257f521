//! Devices added to and removed from a running guest.

use std::time::Duration;

use integration::{Api, Flood, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Usage, spec_with_vfs, vf_mac, vf_taps};
use rstest::rstest;
use serde_json::{Value, json};

/// Number of times that a PF is added and removed.
const ROUNDS: usize = 2;

/// A guest whose PF `pf0` reserves `vfs` VFs, and a client for its API.
fn boot_with_api(kernel: Kernel, vfs: usize) -> (Guest, Api) {
    let api = Api::new("hotplug");
    let guest = Guest::boot(spec_with_vfs(kernel, vfs).arguments(&["--api-socket", &api.argument()]));
    (guest, api)
}

fn hot_pf(vfs: usize) -> Value {
    json!({ "id": "hp0", "tap": "hp0", "sriov_vfs": vfs, "pci_device_id": 9 })
}

/// Adds a PF at slot 9. Panics unless the API confirms it and the guest has its netdev.
fn add_hot_pf(guest: &mut Guest, api: &Api, vfs: usize) -> Pf {
    let answer = api.put_json("vm.add-net", &hot_pf(vfs));
    assert_eq!((answer.status, answer.body), (200, json!({ "id": "hp0", "bdf": "0000:00:09.0" })));
    let pf = Pf::at("0000:00:09.0");
    // The netdev appears last.
    guest.wait_for(&format!("ls {}", pf.file("virtio*/net/*/address")));
    pf
}

/// G48, G49, B11: the VFs of the first PF stay as they are and carry traffic. A PF that is removed with its VFs enabled
/// and bound removes them as well, and can be added again under the same id.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_pf_is_plugged_and_unplugged_while_other_vfs_carry_traffic(#[case] kernel: Kernel) {
    let (mut guest, api) = boot_with_api(kernel, 2);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    let floods = Flood::through(&mut guest, &vfs, &vf_taps(2));
    let mut usages = Vec::new();
    for _ in 0..ROUNDS {
        let hot = add_hot_pf(&mut guest, &api, 4);
        assert_eq!(pf.vfs(&mut guest), vfs, "the first PF's VFs are unchanged");
        hot.set_num_vfs(&mut guest, 4);
        let hot_vfs = hot.vfs(&mut guest);
        let taps: Vec<_> = (0..4).map(|index| HostTap::existing(&format!("hp0v{index}"))).collect();
        assert_eq!(
            hot_vfs.iter().map(|vf| vf.address.as_str()).collect::<Vec<_>>(),
            ["0000:02:00.0", "0000:02:00.1", "0000:02:00.2", "0000:02:00.3"]
        );
        for vf in &hot_vfs {
            vf.ping_through(&mut guest, &taps, vf.index, Subnet(100 + vf.index as u8));
        }
        assert_eq!(api.info()["sriov"][1]["vfs"][3]["state"], "Running");
        api.remove_device("hp0");
        assert!(!integration::interface_exists("hp0") && !integration::interface_exists("hp0v3"));
        assert_ne!(guest.run("ls -d /sys/bus/pci/devices/0000:00:09.0 /sys/bus/pci/devices/0000:02:*").status, 0);
        usages.push(Usage::of(guest.vmm()));
    }
    assert!(usages.windows(2).all(|pair| pair[0] == pair[1]), "{usages:?}");
    drop(floods);
    assert_eq!(pf.vfs(&mut guest), vfs, "the first PF's VFs are unchanged");
    for vf in &vfs {
        assert_eq!(vf.mac, vf_mac(vf.index));
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// After a reboot, a device whose removal the guest never completed is removed, and an added device is still there. A
/// guest that was paused when it was rebooted runs, and so do its devices' queues.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_reboot_keeps_an_added_device_and_completes_a_removal(#[case] kernel: Kernel) {
    let (mut guest, api) = boot_with_api(kernel, 2);
    let hot = add_hot_pf(&mut guest, &api, 2);
    guest.reboot();
    hot.set_num_vfs(&mut guest, 2);
    assert_eq!(hot.vfs(&mut guest).len(), 2);
    // A paused guest cannot release a device.
    assert_eq!(api.put("vm.pause").status, 204);
    assert_eq!(api.put_json("vm.remove-device", &json!({ "id": "hp0" })).status, 204);
    let again = api.put_json("vm.add-net", &hot_pf(2));
    assert_eq!(again.status, 409, "its id is in use until it is gone: {}", again.body);
    assert_eq!(api.put("vm.reboot").status, 204);
    assert!(!api.has_device("hp0") && !integration::interface_exists("hp0"));
    add_hot_pf_after_reboot(&mut guest, &api);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    pf.vfs(&mut guest)[1].ping_through(&mut guest, &vf_taps(2), 1, Subnet(1));
    assert_eq!(guest.power_off().code, Some(0));
}

fn add_hot_pf_after_reboot(guest: &mut Guest, api: &Api) {
    guest.wait_for_restart();
    let hot = add_hot_pf(guest, api, 2);
    hot.set_num_vfs(guest, 2);
    assert_eq!(hot.vfs(guest).len(), 2);
}

/// A paused guest makes no progress, and continues after the resume; its VFs still work.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_paused_guest_resumes_with_its_vfs(#[case] kernel: Kernel) {
    let (mut guest, api) = boot_with_api(kernel, 2);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    let taps = vf_taps(2);
    let floods = Flood::through(&mut guest, &vfs, &taps);
    for _ in 0..3 {
        assert_eq!(api.put("vm.pause").status, 204);
        assert_eq!(api.info()["state"], "Paused");
        let before: Vec<_> = taps.iter().map(|tap| tap.counters().from_guest).collect();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(taps.iter().map(|tap| tap.counters().from_guest).collect::<Vec<_>>(), before);
        assert_eq!(api.put("vm.resume").status, 204);
        guest.ok("true");
    }
    drop(floods);
    for vf in &vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    // Linux's watchdog now complains after 8 s without progress, unless it is notified of the pause.
    guest.ok("echo 4 > /proc/sys/kernel/watchdog_thresh");
    assert_eq!(api.put("vm.pause").status, 204);
    std::thread::sleep(Duration::from_secs(12));
    assert_eq!(api.put("vm.resume").status, 204);
    guest.ok("sleep 2");
    assert_eq!(guest.run("dmesg | grep -i lockup").text, "");
    assert_eq!(guest.power_off().code, Some(0));
}

/// A removal that is requested before the guest's drivers are up completes once they are.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_removal_requested_during_boot_completes_after_the_boot(#[case] kernel: Kernel) {
    let api = Api::new("early");
    let early = api.clone();
    let asked = std::thread::spawn(move || {
        let status = early.put_json("vm.remove-device", &json!({ "id": "late" })).status;
        (status, early.has_device("late"))
    });
    let spec = GuestSpec::new(kernel).net("id=late,tap=late").arguments(&["--api-socket", &api.argument()]);
    let guest = Guest::boot(spec);
    assert_eq!(asked.join().unwrap(), (204, true));
    api.await_removal("late");
    assert_eq!(guest.power_off().code, Some(0));
}

/// A VF whose link the host takes down loses its carrier and works again afterwards; the other VFs are not affected.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn the_host_takes_the_link_of_one_vf_down_and_up(#[case] kernel: Kernel) {
    let (mut guest, api) = boot_with_api(kernel, 2);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    let taps = vf_taps(2);
    vfs.iter().for_each(|vf| vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8)));
    let set = |change: Value| api.put_json("vm.set-vf", &change).status;
    let carrier = |vf: usize| format!("/sys/class/net/{}/carrier", vfs[vf].interface());
    assert_eq!(set(json!({ "pf": "pf0", "index": 1, "link": "down" })), 204);
    guest.wait_for(&format!("grep -q 0 {}", carrier(1)));
    guest.ok(&format!("grep -q 1 {}", carrier(0)));
    guest.ping(vfs[0].interface(), Subnet(0));
    assert_eq!(api.info()["sriov"][0]["vfs"][1]["link"], "down");
    assert_eq!(set(json!({ "pf": "pf0", "index": 1, "link": "up" })), 204);
    guest.wait_for(&format!("grep -q 1 {}", carrier(1)));
    guest.ping(vfs[1].interface(), Subnet(1));

    // VF 1's driver has read its MAC address already, so a new one is refused until the next driver.
    let mac = "52:54:00:77:77:77";
    assert_eq!(set(json!({ "pf": "pf0", "index": 1, "mac": mac })), 409);
    pf.set_num_vfs(&mut guest, 0);
    assert_eq!(set(json!({ "pf": "pf0", "index": 1, "mac": mac })), 204);
    assert_eq!(set(json!({ "pf": "pf0", "index": 0, "mac": mac })), 409, "VF 1 has this MAC address");
    pf.set_num_vfs(&mut guest, 2);
    let vf = &pf.vfs(&mut guest)[1];
    assert_eq!(vf.mac, mac);

    // A driver reads the MAC address when it starts, long before its queues run.
    guest.unbind(&vf.address);
    let status = format!("$(($(sed -n '3s/ .*//p' /sys/bus/pci/devices/{}/resource) + 0x14))", vf.address);
    let other = json!({ "pf": "pf0", "index": 1, "mac": "52:54:00:77:77:78" });
    guest.ok(&format!("devmem {status} 8 3"));
    assert_eq!(set(other.clone()), 409);
    guest.ok(&format!("devmem {status} 8 0"));
    assert_eq!(set(other), 204);
    assert_eq!(guest.power_off().code, Some(0));
}
