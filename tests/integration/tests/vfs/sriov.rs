//! A guest enables, uses, resets and disables the VFs of its NIC.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use integration::{
    Guest, GuestSpec, HostTap, Kernel, Output, Pf, Subnet, Usage, Vf, boot_with_vfs, interface_exists,
    predicted_vf_address, spec_with_vfs, vf_mac, vf_taps,
};
use rstest::rstest;

/// The PF's subnet. VF i has subnet i.
const PF_SUBNET: Subnet = Subnet(255);

fn assert_each_is_a_netdev_with_its_mac_at_its_address(vfs: &[Vf], count: usize) {
    assert_eq!(vfs.len(), count);
    for (index, vf) in vfs.iter().enumerate() {
        assert_eq!(vf.index, index);
        assert_eq!(vf.address, predicted_vf_address(index), "VF {index}");
        assert_eq!(vf.mac, vf_mac(index), "VF {index} at {}: {:?}", vf.address, vf.interface);
    }
}

fn assert_refused(output: &Output, wordings: [&str; 2]) {
    assert_ne!(output.status, 0);
    assert!(wordings.iter().any(|wording| output.text.contains(wording)), "{}", output.text);
}

/// G44, G46: sysfs and the boot messages show the configured values. Too many VFs give ERANGE, and another number while
/// some are enabled gives EBUSY.
#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn sysfs_shows_the_configured_vfs_and_refuses_invalid_numbers(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 8);
    assert_eq!(pf.read(&mut guest, "sriov_totalvfs"), "8");
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    assert_eq!(pf.read(&mut guest, "sriov_offset"), (0x100 - pf.devfn()).to_string(), "VF 0 is 01:00.0");
    assert_eq!(pf.read(&mut guest, "sriov_stride"), "1");
    assert_eq!(pf.read(&mut guest, "sriov_vf_device"), "1041");
    for bar in [2, 4] {
        guest.ok(&format!("dmesg | grep -q '{}: VF BAR {bar} .*: contains BAR {bar} for 8 VFs'", pf.address));
    }

    // musl and busybox word these errors differently.
    let out_of_range = ["out of range", "not representable"];
    let busy = ["resource busy", "Resource busy"];
    assert_refused(&pf.write_num_vfs(&mut guest, 9), out_of_range);
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "0");
    pf.set_num_vfs(&mut guest, 2);
    for count in [1, 3] {
        assert_refused(&pf.write_num_vfs(&mut guest, count), busy);
        assert_eq!(pf.vfs(&mut guest).len(), 2);
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G45, B13: 1, N/2 and N VFs appear, are bound, and have the configured MAC addresses. The PF is not affected.
#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn one_four_or_eight_vfs_have_their_macs_and_can_be_disabled(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 8);
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
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn the_pf_and_each_vf_carry_traffic_over_their_own_tap_only(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 8);
    pf.set_num_vfs(&mut guest, 8);
    let taps = vf_taps(8);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let quiet: Vec<_> = taps.iter().map(HostTap::counters).collect();
    HostTap::existing("pf0").join(PF_SUBNET);
    guest.join("eth0", PF_SUBNET);
    guest.ping("eth0", PF_SUBNET);
    assert_eq!(taps.iter().map(HostTap::counters).collect::<Vec<_>>(), quiet, "the PF's frames passed no VF's tap");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    for tap in &taps {
        assert!(!interface_exists(tap.name()), "{} is gone with the VMM that created it", tap.name());
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn sixty_four_vfs_have_their_macs_and_addresses_and_traffic(#[case] kernel: Kernel) {
    // One vCPU has about 200 interrupt vectors, and 64 VFs need 192.
    let mut guest = Guest::boot(spec_with_vfs(kernel, 64).cpus(2));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 64);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 64);
    let taps = vf_taps(64);
    for vf in &vfs {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The usual limit of open files is enough for 64 VFs that are all in use.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_nic_needs_one_thread_and_8_files_so_64_vfs_fit_in_1024(#[case] kernel: Kernel) {
    let without = Guest::boot(GuestSpec::new(kernel).cpus(2));
    let base = Usage::of(without.vmm());
    assert_eq!(without.power_off().code, Some(0));

    let mut guest = Guest::boot(spec_with_vfs(kernel, 64).cpus(2).open_files(1024));
    let limits = fs::read_to_string(format!("/proc/{}/limits", guest.vmm().id())).unwrap();
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    assert_eq!(limit.split_whitespace().collect::<Vec<_>>(), ["1024", "1024", "files"]);
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 64);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 64);
    // IFF_UP | IFF_BROADCAST | IFF_MULTICAST, without a process per NIC.
    let up = "for flags in /sys/class/net/eth*/flags; do echo 0x1003 > $flags || exit 1; done";
    guest.ok_within(up, Duration::from_secs(120));
    let taps = vf_taps(64);
    for index in [0, 31, 63] {
        vfs[index].ping_through(&mut guest, &taps, index, Subnet(index as u8));
    }

    let nics = 65;
    let usage = Usage::of(guest.vmm());
    let (files, threads) = (usage.files - base.files, usage.threads - base.threads);
    println!("{nics} NICs use {files} files and {threads} threads; the VMM uses {usage:?}, and {base:?} without NICs");
    assert!(files <= nics * 8, "{nics} NICs use {files} files");
    assert!(threads <= nics, "{nics} NICs use {threads} threads");
    // All are in use: each has at least a tap, a doorbell and a vector, and one thread.
    assert!(files >= nics * 3 && threads == nics, "{usage:?}, and {base:?} without NICs");
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G22, B15: VF 256 is on the second VF bus.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn vfs_on_both_vf_buses_carry_traffic_when_300_are_enabled(#[case] kernel: Kernel) {
    let mut guest = Guest::boot(GuestSpec::new(kernel).net("id=pf0,tap=pf0,sriov_vfs=300"));
    let pf = Pf::find(&mut guest);
    // With drivers bound, 300 VFs would need more interrupt vectors than the guest has.
    pf.set_num_vfs_without_drivers(&mut guest, 300);
    let vfs = pf.vfs(&mut guest);
    assert_eq!(vfs.len(), 300);
    for vf in &vfs {
        assert_eq!((vf.address.as_str(), &vf.interface), (predicted_vf_address(vf.index).as_str(), &None));
    }
    for (index, address) in [(5, "0000:01:00.5"), (299, "0000:02:05.3")] {
        assert_eq!(predicted_vf_address(index), address);
        guest.bind(address);
    }
    let vfs = pf.vfs(&mut guest);
    let taps = vf_taps(300);
    for (index, subnet) in [(5, Subnet(5)), (299, Subnet(99))] {
        vfs[index].ping_through(&mut guest, &taps, index, subnet);
    }
    pf.set_num_vfs(&mut guest, 0);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G40: a virtio reset of one function does not affect the others.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_vf_whose_driver_is_unbound_and_bound_again_carries_traffic(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 4);
    pf.set_num_vfs(&mut guest, 4);
    let taps = vf_taps(4);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let address = predicted_vf_address(2);
    guest.unbind(&address);
    assert_eq!(pf.vfs(&mut guest)[2].interface, None);
    let neighbour = pf.vfs(&mut guest)[1].interface().to_owned();
    guest.ping(&neighbour, Subnet(1));

    guest.bind(&address);
    let vfs = pf.vfs(&mut guest);
    assert_eq!(vfs[2].mac, vf_mac(2));
    vfs[2].ping_through(&mut guest, &taps, 2, Subnet(2));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G52: the PF works without ARI and without a second attempt at assigning addresses.
#[rstest]
fn all_vfs_carry_traffic_whatever_the_kernel_is_told_about_pci(
    #[values(Kernel::V6_1, Kernel::V6_12)] kernel: Kernel,
    #[values("pci=noari,realloc=on", "pci=realloc=off")] argument: &str,
) {
    let mut guest = Guest::boot(spec_with_vfs(kernel, 3).kernel_argument(argument));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 3);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 3);
    for vf in &vfs {
        vf.ping_through(&mut guest, &vf_taps(3), vf.index, Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G37: a reset of one VF does not affect the others or the PF.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn flr_of_a_vf_leaves_it_and_the_other_vfs_usable(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 4);
    pf.set_num_vfs(&mut guest, 4);
    let taps = vf_taps(4);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let address = predicted_vf_address(1);
    // These kernels' virtio-pci does not handle a reset while it is bound, so it is unbound before and bound
    // afterwards.
    guest.unbind(&address);
    guest.ok(&format!("echo 1 > /sys/bus/pci/devices/{address}/reset"));
    for index in [0, 2, 3] {
        let interface = pf.vfs(&mut guest)[index].interface().to_owned();
        guest.ping(&interface, Subnet(index as u8));
    }
    guest.bind(&address);
    let vfs = pf.vfs(&mut guest);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&vfs, 4);
    vfs[1].ping_through(&mut guest, &taps, 1, Subnet(1));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G38, G50: a reset of the PF removes its VFs, which work again once Linux has restored VF Enable.
#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn flr_of_the_pf_keeps_the_vfs_that_linux_restores(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 4);
    pf.set_num_vfs_without_drivers(&mut guest, 4);
    guest.ok_within(&format!("echo 1 > {}", pf.file("reset")), Duration::from_secs(60));
    // The reset clears VF Enable and Linux sets it again: the VFs must be back as they were.
    assert_eq!(pf.read(&mut guest, "sriov_numvfs"), "4");
    guest.bind(&predicted_vf_address(3));
    let vf = pf.vfs(&mut guest).remove(3);
    assert_eq!(vf.mac, vf_mac(3));
    vf.ping_through(&mut guest, &vf_taps(4), 3, Subnet(3));

    // The PF's driver does not notice the reset. Bound again, it can disable and enable the VFs.
    guest.unbind(&pf.address);
    assert_eq!(pf.vfs(&mut guest), []);
    guest.bind(&pf.address);
    pf.set_num_vfs(&mut guest, 2);
    assert_each_is_a_netdev_with_its_mac_at_its_address(&pf.vfs(&mut guest), 2);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_vf_uses_its_configured_tap_and_leaves_it_in_place() {
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

#[test]
fn a_vf_without_a_configured_mac_has_a_unique_stable_one() {
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
        assert_eq!(leading & 0b11, 0b10, "VF {index}: {mac} is a locally administered unicast address");
        assert!(!first[..index].contains(mac) && mac != "52:54:00:00:00:01", "VF {index}: {mac} is used twice");
    }
    assert_eq!(macs(), first, "the same at every start");
}

/// Resources of the VMM on the host: open files, threads, and KiB of memory that it has allocated, including the
/// guest's.
fn held(guest: &mut Guest) -> (usize, usize, u64) {
    let process = format!("/proc/{}", guest.vmm().id());
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    let anonymous = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    let usage = Usage::of(guest.vmm());
    (usage.files, usage.threads, anonymous)
}

/// G47, B8: enabling and disabling VFs repeatedly leaks no files, threads or memory.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn nothing_piles_up_while_vfs_come_and_go(#[case] kernel: Kernel) {
    let (mut guest, pf) = boot_with_vfs(kernel, 8);
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
        // The allocator may keep memory that threads used, but the sum must not grow with each cycle.
        assert!(off.2 < first_off.2 + 2048, "{off:?} after {first_off:?}");
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
