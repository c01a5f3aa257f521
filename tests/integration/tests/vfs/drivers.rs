//! Drivers and functions are removed and return under traffic, through themselves and their neighbours.

use std::time::Duration;

use integration::{Flood, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Vf, boot_with_vfs, vf_mac, vf_taps};
use rstest::rstest;

/// The PF's subnet. VF i has subnet i.
const PF_SUBNET: Subnet = Subnet(255);
/// The limit for commands that take seconds even outside the lab.
const SLOW: Duration = Duration::from_secs(100);

fn ping_each(guest: &mut Guest, vfs: &[Vf]) {
    for vf in vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
}

/// Panics unless `count` VFs can be enabled, and each carries traffic over its own tap.
fn assert_vfs_can_be_enabled(guest: &mut Guest, pf: &Pf, count: usize) {
    pf.set_num_vfs(guest, count);
    let vfs = pf.vfs(guest);
    assert_eq!(vfs.len(), count);
    for vf in &vfs {
        assert_eq!(vf.mac, vf_mac(vf.index));
        vf.ping_through(guest, &vf_taps(count), vf.index, Subnet(vf.index as u8));
    }
}

fn rescan(guest: &mut Guest) {
    guest.ok_within("echo 1 > /sys/bus/pci/rescan", SLOW);
}

/// G40, G46: VFs survive a reset of the PF by its driver. Without DRIVER_OK in the PF, `sriov_numvfs` returns EBUSY.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn virtio_net_reloads_under_traffic_and_finds_its_vfs_again(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 3);
    pf.set_num_vfs(&mut guest, 3);
    let vfs = pf.vfs(&mut guest);
    let mut floods = Flood::through(&mut guest, &vfs, &vf_taps(3));
    floods.push(Flood::start(&mut guest, "eth0", &HostTap::existing("pf0"), PF_SUBNET));
    guest.ok_within("rmmod virtio_net", SLOW);
    let left: Vec<_> = pf.vfs(&mut guest).into_iter().map(|vf| (vf.address, vf.interface)).collect();
    assert_eq!(left, vfs.iter().map(|vf| (vf.address.clone(), None)).collect::<Vec<_>>());
    let refused = pf.write_num_vfs(&mut guest, 0);
    assert!(refused.status != 0 && refused.text.to_lowercase().contains("resource busy"), "{}", refused.text);
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "3");

    guest.ok_within("insmod /modules/*-virtio_net.ko", SLOW);
    drop(floods);
    let vfs = pf.vfs(&mut guest);
    for vf in &vfs {
        assert_eq!(vf.mac, vf_mac(vf.index));
        vf.ping_through(&mut guest, &vf_taps(3), vf.index, Subnet(vf.index as u8));
    }
    pf.set_num_vfs(&mut guest, 0);
    assert_vfs_can_be_enabled(&mut guest, &pf, 3);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G21, G46: two PFs have VFs at disjoint addresses. Unbinding one PF removes its VFs, and the other's stay.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_pf_unbound_under_traffic_takes_its_own_vfs_and_no_others(#[case] kernel: Kernel) {
    let nets = ["id=pf0,tap=pf0,sriov_vfs=3", "id=pf1,tap=pf1,sriov_vfs=2"];
    let mut guest = Guest::boot(nets.iter().fold(GuestSpec::new(kernel), |spec, net| spec.net(net)));
    let taps = ["pf0v0", "pf0v1", "pf0v2", "pf1v0", "pf1v1"].map(HostTap::existing);
    let pfs = ["0000:00:01.0", "0000:00:02.0"].map(Pf::at);
    // The first VF of each PF in `taps`.
    let first = [0, 3];
    let subnet = |number: usize, vf: &Vf| Subnet((first[number] + vf.index) as u8);
    for (pf, count) in pfs.iter().zip([3, 2]) {
        pf.set_num_vfs(&mut guest, count);
    }
    let vfs: Vec<Vec<Vf>> = pfs.iter().map(|pf| pf.vfs(&mut guest)).collect();
    for (number, vf) in vfs.iter().enumerate().flat_map(|(number, vfs)| vfs.iter().map(move |vf| (number, vf))) {
        assert_eq!(vf.address, format!("0000:{:02x}:00.{}", number + 1, vf.index));
        vf.ping_through(&mut guest, &taps, first[number] + vf.index, subnet(number, vf));
    }

    let floods: Vec<Flood> = [(0, &vfs[0][2]), (1, &vfs[1][0])]
        .map(|(number, vf)| {
            Flood::start(&mut guest, vf.interface(), &taps[first[number] + vf.index], subnet(number, vf))
        })
        .into();
    guest.unbind(&pfs[0].address);
    assert_eq!(pfs[0].vfs(&mut guest), []);
    let refused = pfs[0].write_num_vfs(&mut guest, 1);
    assert!(refused.status != 0 && refused.text.contains("No such file"), "without a driver: {}", refused.text);
    assert_eq!(pfs[1].vfs(&mut guest), vfs[1]);
    for vf in &vfs[1] {
        guest.ping(vf.interface(), subnet(1, vf));
    }
    drop(floods);
    guest.bind(&pfs[0].address);
    pfs[0].set_num_vfs(&mut guest, 2);
    for vf in pfs[0].vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps[..3], vf.index, subnet(0, &vf));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G50: a rescan changes nothing while VFs are enabled, and restores a removed PF, whose VFs then work.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_pf_removed_under_traffic_with_its_vfs_returns_by_a_rescan(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 3);
    pf.set_num_vfs(&mut guest, 3);
    let mut vfs = pf.vfs(&mut guest);
    let floods = Flood::through(&mut guest, &vfs, &vf_taps(3));
    rescan(&mut guest);
    assert_eq!(pf.vfs(&mut guest), vfs, "a rescan changes no VF");
    // Linux cannot `remove` a VF, but it can unbind the driver.
    guest.unbind(&vfs[1].address);
    rescan(&mut guest);
    vfs[1] = Vf { interface: None, mac: String::new(), ..vfs[1].clone() };
    assert_eq!(pf.vfs(&mut guest), vfs);
    ping_each(&mut guest, &[vfs[0].clone(), vfs[2].clone()]);

    guest.ok_within(&format!("echo 1 > {}", pf.file("remove")), SLOW);
    // The remaining devices: the host bridge and the entropy device.
    let left = "0000:00:00.0 0000:00:02.0";
    assert_eq!(guest.ok("cd /sys/bus/pci/devices && echo *"), left, "the VFs are gone with their PF");
    assert_eq!(guest.ok("ls /sys/class/net"), "lo");
    drop(floods);
    rescan(&mut guest);
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    assert_vfs_can_be_enabled(&mut guest, &pf, 3);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G24, G25: VFs that are enabled right after others were disabled are new, however often that happens.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn racing_writes_of_sriov_numvfs_leave_vfs_that_can_be_enabled(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 4);
    let _flood = Flood::start(&mut guest, "eth0", &HostTap::existing("pf0"), PF_SUBNET);
    let file = pf.file("sriov_numvfs");
    // The writes conflict, and many are refused, which is fine.
    let shell = |counts: &str| {
        format!("(for round in 1 2; do for count in {counts}; do echo $count > {file} && echo took $count; done; done)")
    };
    let printed = guest.run_within(&format!("{} & {} & wait", shell("4 1 0 2 0"), shell("3 0 1 4 0")), SLOW).text;
    let enabled = printed.lines().filter(|line| line.starts_with("took ") && *line != "took 0").count();
    assert!(enabled >= 2, "each round enables VFs: {printed}");
    pf.set_num_vfs(&mut guest, 0);
    assert_eq!(pf.vfs(&mut guest), []);
    assert_vfs_can_be_enabled(&mut guest, &pf, 4);
    guest.ping("eth0", PF_SUBNET);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
