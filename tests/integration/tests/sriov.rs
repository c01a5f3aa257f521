//! A guest enables the VFs of its NIC, uses them, takes them away, and resets them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use integration::{Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Vf, interface_exists, predicted_vf_address};
use rstest::rstest;

/// The subnet of the PF; VF i has the subnet i.
const PF_SUBNET: Subnet = Subnet(255);

/// A guest whose PF `pf0` reserves `vfs` VFs, VF i with the MAC of [`mac`].
fn spec(kernel: Kernel, vfs: usize) -> GuestSpec {
    let spec = GuestSpec::new(kernel).net(&format!("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs={vfs}"));
    (0..vfs).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", mac(index))))
}

fn boot(kernel: Kernel, vfs: usize) -> (Guest, Pf) {
    let mut guest = Guest::boot(spec(kernel, vfs));
    let pf = Pf::find(&mut guest);
    (guest, pf)
}

fn mac(index: usize) -> String {
    format!("52:54:00:00:01:{index:02x}")
}

/// The taps of the VFs, by index.
fn taps(vfs: usize) -> Vec<HostTap> {
    (0..vfs).map(|index| HostTap::existing(&format!("pf0v{index}"))).collect()
}

fn assert_each_is_a_netdev_with_its_mac_at_its_address(vfs: &[Vf], count: usize) {
    assert_eq!(vfs.len(), count);
    for (index, vf) in vfs.iter().enumerate() {
        assert_eq!(vf.index, index);
        assert_eq!(vf.address, predicted_vf_address(index), "VF {index}");
        assert_eq!(vf.mac, mac(index), "VF {index} at {}: {:?}", vf.address, vf.interface);
    }
}

/// Binds the driver to, or unbinds it from, the function at `address`.
fn driver(guest: &mut Guest, verb: &str, address: &str) {
    guest.ok(&format!("echo {address} > /sys/bus/pci/drivers/virtio-pci/{verb}"));
}

/// Enables VFs that get no driver by themselves, but may be given one.
fn enable_without_drivers(guest: &mut Guest, pf: &Pf, count: usize) {
    let autoprobe = pf.file("sriov_drivers_autoprobe");
    guest.ok(&format!("echo 0 > {autoprobe}"));
    pf.set_num_vfs(guest, count);
    // While it is 0, Linux refuses to bind a driver by hand too.
    guest.ok(&format!("echo 1 > {autoprobe}"));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn the_guest_reads_what_was_configured_and_cannot_enable_more(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 8);
    assert_eq!(pf.read(&mut guest, "sriov_totalvfs"), "8");
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    assert_eq!(pf.read(&mut guest, "sriov_offset"), (0x100 - pf.devfn()).to_string(), "VF 0 is 01:00.0");
    assert_eq!(pf.read(&mut guest, "sriov_stride"), "1");
    assert_eq!(pf.read(&mut guest, "sriov_vf_device"), "1041");

    let refused = pf.write_num_vfs(&mut guest, 9);
    assert_ne!(refused.status, 0);
    // musl and busybox word ERANGE differently.
    assert!(refused.text.contains("out of range") || refused.text.contains("not representable"), "{}", refused.text);
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn one_four_or_eight_vfs_come_with_their_mac_and_address_and_go_again(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 8);
    for count in [8, 1, 4] {
        pf.set_num_vfs(&mut guest, count);
        assert_each_is_a_netdev_with_its_mac_at_its_address(&pf.vfs(&mut guest), count);
        pf.set_num_vfs(&mut guest, 0);
        assert_eq!(pf.vfs(&mut guest), []);
        assert_eq!(guest.ok("ls /sys/class/net"), "eth0\nlo", "only the PF's netdev is left");
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn the_pf_and_each_vf_carry_traffic_over_their_own_tap_and_none_other(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 8);
    pf.set_num_vfs(&mut guest, 8);
    let taps = taps(8);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let quiet: Vec<_> = taps.iter().map(HostTap::counters).collect();
    HostTap::existing("pf0").join(PF_SUBNET);
    guest.join("eth0", PF_SUBNET);
    guest.ping("eth0", PF_SUBNET);
    assert_eq!(taps.iter().map(HostTap::counters).collect::<Vec<_>>(), quiet, "the PF leaves the VFs' taps alone");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    for tap in &taps {
        assert!(!interface_exists(tap.name()), "{} went with the VMM that made it", tap.name());
    }
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn sixty_four_vfs_come_with_their_mac_and_address_and_carry_traffic(#[case] kernel: Kernel) {
    // One vCPU has about 200 interrupt vectors, and 64 VFs want 192.
    let mut guest = Guest::boot(spec(kernel, 64).cpus(2));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 64);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 64);
    let taps = taps(64);
    for vf in &vfs {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn vfs_on_both_of_their_buses_carry_traffic_when_300_are_enabled(#[case] kernel: Kernel) {
    let mut guest = Guest::boot(GuestSpec::new(kernel).net("id=pf0,tap=pf0,sriov_vfs=300"));
    let pf = Pf::find(&mut guest);
    // 300 VFs with their drivers would need more interrupt vectors than the guest has.
    enable_without_drivers(&mut guest, &pf, 300);
    let vfs = pf.vfs(&mut guest);
    assert_eq!(vfs.len(), 300);
    for vf in &vfs {
        assert_eq!((vf.address.as_str(), &vf.interface), (predicted_vf_address(vf.index).as_str(), &None));
    }
    for (index, address) in [(5, "0000:01:00.5"), (299, "0000:02:05.3")] {
        assert_eq!(predicted_vf_address(index), address);
        driver(&mut guest, "bind", address);
    }
    let vfs = pf.vfs(&mut guest);
    let taps = taps(300);
    for (index, subnet) in [(5, Subnet(5)), (299, Subnet(99))] {
        vfs[index].ping_through(&mut guest, &taps, index, subnet);
    }
    pf.set_num_vfs(&mut guest, 0);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn vfs_that_were_on_at_a_reboot_are_off_after_it_and_can_be_enabled_again(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 4);
    pf.set_num_vfs(&mut guest, 4);
    guest.reboot();
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    assert_eq!(pf.vfs(&mut guest), []);
    pf.set_num_vfs(&mut guest, 4);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 4);
    vfs[3].ping_through(&mut guest, &taps(4), 3, Subnet(3));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_vf_whose_driver_is_unbound_and_bound_again_carries_traffic(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 4);
    pf.set_num_vfs(&mut guest, 4);
    let taps = taps(4);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let address = predicted_vf_address(2);
    driver(&mut guest, "unbind", &address);
    assert_eq!(pf.vfs(&mut guest)[2].interface, None);
    let neighbour = pf.vfs(&mut guest)[1].interface().to_owned();
    guest.ping(&neighbour, Subnet(1));

    driver(&mut guest, "bind", &address);
    let vfs = pf.vfs(&mut guest);
    assert_eq!(vfs[2].mac, mac(2));
    vfs[2].ping_through(&mut guest, &taps, 2, Subnet(2));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_function_level_reset_of_a_vf_leaves_the_others_and_the_vf_usable(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 4);
    pf.set_num_vfs(&mut guest, 4);
    let taps = taps(4);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let address = predicted_vf_address(1);
    // virtio-pci of these kernels does not know of a reset under it: it is bound anew around it.
    driver(&mut guest, "unbind", &address);
    guest.ok(&format!("echo 1 > /sys/bus/pci/devices/{address}/reset"));
    for index in [0, 2, 3] {
        let interface = pf.vfs(&mut guest)[index].interface().to_owned();
        guest.ping(&interface, Subnet(index as u8));
    }
    driver(&mut guest, "bind", &address);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 4);
    vfs[1].ping_through(&mut guest, &taps, 1, Subnet(1));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_function_level_reset_of_the_pf_keeps_the_vfs_that_linux_restores(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 4);
    enable_without_drivers(&mut guest, &pf, 4);
    guest.ok_within(&format!("echo 1 > {}", pf.file("reset")), Duration::from_secs(60));
    // The reset clears VF Enable; Linux writes it back, and the VFs must be there as after the first time.
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "4");
    driver(&mut guest, "bind", &predicted_vf_address(3));
    let vf = pf.vfs(&mut guest).remove(3);
    assert_eq!(vf.mac, mac(3));
    vf.ping_through(&mut guest, &taps(4), 3, Subnet(3));

    // The PF's driver does not know of the reset. Bound anew, it takes the VFs away and can enable them again.
    driver(&mut guest, "unbind", &pf.address);
    assert_eq!(pf.vfs(&mut guest), []);
    driver(&mut guest, "bind", &pf.address);
    pf.set_num_vfs(&mut guest, 2);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&pf.vfs(&mut guest), 2);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_vf_uses_the_tap_that_its_configuration_names_and_leaves_it_in_place() {
    let tenant = HostTap::persistent("tenant-a");
    let net = "id=pf0,tap=pf0,sriov_vfs=2";
    let spec = GuestSpec::new(Kernel::V6_12).net(net).net_vf("pf=pf0,index=1,tap=tenant-a,mac=52:54:00:00:01:01");
    let mut guest = Guest::boot(spec);
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let taps = [HostTap::existing("pf0v0"), HostTap::existing(tenant.name())];
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    assert!(!interface_exists("pf0v1"), "no tap is made for a VF that has one");
    assert_eq!(guest.power_off().code, Some(0));
    assert!(interface_exists(tenant.name()));
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_second_pf_has_vf_buses_of_its_own(#[case] kernel: Kernel) {
    let nets = ["id=pf0,tap=pf0,sriov_vfs=2", "id=pf1,tap=pf1,sriov_vfs=2"];
    let mut guest = Guest::boot(nets.iter().fold(GuestSpec::new(kernel), |spec, net| spec.net(net)));
    let taps = ["pf0v0", "pf0v1", "pf1v0", "pf1v1"].map(HostTap::existing);
    for (number, address) in ["0000:00:01.0", "0000:00:02.0"].into_iter().enumerate() {
        let pf = Pf::at(address);
        pf.set_num_vfs(&mut guest, 2);
        for vf in pf.vfs(&mut guest) {
            assert_eq!(vf.address, format!("0000:{:02x}:00.{}", number + 1, vf.index));
            let own = 2 * number + vf.index;
            vf.ping_through(&mut guest, &taps, own, Subnet(own as u8));
        }
    }
    Pf::at("0000:00:01.0").set_num_vfs(&mut guest, 0);
    assert_eq!(Pf::at("0000:00:02.0").vfs(&mut guest).len(), 2, "the other PF's VFs stay");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_vf_without_a_configured_mac_has_one_of_its_own_that_stays_the_same() {
    let macs = || {
        let net = "id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=4";
        let mut guest = Guest::boot(GuestSpec::new(Kernel::V6_12).net(net));
        let pf = Pf::find(&mut guest);
        pf.set_num_vfs(&mut guest, 4);
        let macs: Vec<String> = pf.vfs(&mut guest).into_iter().map(|vf| vf.mac).collect();
        guest.power_off();
        macs
    };
    let first = macs();
    for (index, mac) in first.iter().enumerate() {
        let leading = u8::from_str_radix(&mac[..2], 16).unwrap();
        assert_eq!(leading & 0b11, 0b10, "VF {index}: {mac} is locally administered and no group's");
        assert!(!first[..index].contains(mac) && mac != "52:54:00:00:00:01", "VF {index}: {mac} is used twice");
    }
    assert_eq!(macs(), first, "the same at every start");
}

/// What the VMM has of its host: open files, threads, and KiB of memory that it has asked for, the guest's included.
fn held(guest: &mut Guest) -> (usize, usize, u64) {
    let process = format!("/proc/{}", guest.vmm().id());
    let count = |folder: &str| fs::read_dir(format!("{process}/{folder}")).unwrap().count();
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    let anonymous = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    (count("fd"), count("task"), anonymous)
}

#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn g47_b8_nothing_piles_up_while_vfs_come_and_go(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot(kernel, 8);
    let cycle = |guest: &mut Guest| {
        pf.set_num_vfs(guest, 8);
        let on = held(guest);
        pf.set_num_vfs(guest, 0);
        (on, held(guest))
    };
    let (first_on, first_off) = cycle(&mut guest);
    // A VF whose driver is up has one thread, one kick and three vectors.
    assert_eq!((first_on.0 - first_off.0, first_on.1 - first_off.1), (8 * 4, 8), "{first_on:?} {first_off:?}");
    for _ in 0..15 {
        let (on, off) = cycle(&mut guest);
        assert_eq!((on.0, on.1, off.0, off.1), (first_on.0, first_on.1, first_off.0, first_off.1));
        // The allocator may keep what threads had; it must not grow with each cycle.
        assert!(off.2 < first_off.2 + 2048, "{off:?} after {first_off:?}");
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
