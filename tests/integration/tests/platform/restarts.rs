//! The guest reboots, replaces its kernel, or suspends, while VFs are enabled and carry traffic.

use std::path::Path;

use integration::{
    Flood, Guest, HostTap, Kernel, Pf, Subnet, Vf, boot_with_vfs, predicted_vf_address, vf_mac, vf_taps,
};
use rstest::rstest;

/// The PF's subnet. VF i has subnet i.
const PF_SUBNET: Subnet = Subnet(255);
const VFS: usize = 4;
/// The PF's Power Management Control/Status register (`docs/sriov.md`), and its PowerState field.
const PMCSR: u32 = 0x88 + 4;
const D0: u8 = 0;
const D3HOT: u8 = 3;

/// A guest with all VFs enabled, and traffic through the PF, the first VF and the last VF.
fn boot_with_traffic(kernel: Kernel) -> (Guest, Pf, Vec<Flood>) {
    let (mut guest, pf) = boot_with_vfs(kernel, VFS);
    pf.set_num_vfs(&mut guest, VFS);
    let vfs = pf.vfs(&mut guest);
    let mut floods = Flood::through(&mut guest, &[vfs[0].clone(), vfs[VFS - 1].clone()], &vf_taps(VFS));
    floods.push(Flood::start(&mut guest, "eth0", &HostTap::existing("pf0"), PF_SUBNET));
    (guest, pf, floods)
}

/// Panics unless all VFs are disabled, can be enabled, and each carries traffic over its own tap.
fn assert_vfs_are_off_and_can_be_enabled(guest: &mut Guest, pf: &Pf) {
    assert_eq!(pf.read(guest, "sriov_numvfs"), "0");
    assert_eq!(pf.vfs(guest), []);
    pf.set_num_vfs(guest, VFS);
    for vf in pf.vfs(guest) {
        assert_eq!((vf.address.as_str(), &vf.mac), (predicted_vf_address(vf.index).as_str(), &vf_mac(vf.index)));
        vf.ping_through(guest, &vf_taps(VFS), vf.index, Subnet(vf.index as u8));
    }
}

/// Panics unless the VFs are still `vfs`, and the first, the last and the PF carry traffic.
fn assert_continue(guest: &mut Guest, pf: &Pf, vfs: &[Vf]) {
    assert_eq!(pf.vfs(guest), vfs);
    for vf in [&vfs[0], &vfs[VFS - 1]] {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    guest.ping("eth0", PF_SUBNET);
}

fn set_power_state(guest: &mut Guest, pf: &Pf, state: u8) {
    let config = pf.file("config");
    guest.ok(&format!("printf '\\{state:03o}' | dd of={config} bs=1 seek={PMCSR} conv=notrunc 2> /dev/null"));
    assert_eq!(
        guest.ok(&format!("od -An -tu1 -j{PMCSR} -N1 {config}")).trim(),
        (8 | state).to_string(),
        "No_Soft_Reset"
    );
}

/// G39, B7: a reboot resets the SR-IOV capability and all VFs, whatever they were doing.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_reboot_turns_vfs_under_traffic_off_and_they_can_be_enabled(#[case] kernel: Kernel) {
    let (mut guest, pf, floods) = boot_with_traffic(kernel);
    guest.reboot();
    // Until here the host keeps sending to the taps of disabled VFs.
    drop(floods);
    assert_vfs_are_off_and_can_be_enabled(&mut guest, &pf);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G42: a kernel that finds VF Enable set clears it, and the VFs that it enables later are new.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_kexec_kernel_finds_vfs_under_traffic_and_enables_them_anew(#[case] kernel: Kernel) {
    let (mut guest, pf, floods) = boot_with_traffic(kernel);
    guest.kexec(Path::new(env!("CARGO_BIN_EXE_kexec")), kernel, PF_SUBNET);
    drop(floods);
    assert_vfs_are_off_and_can_be_enabled(&mut guest, &pf);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// G43: with No_Soft_Reset, the PF keeps its SR-IOV state through D3hot, and VFs without power management follow it.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn vfs_stop_while_their_pf_is_in_d3hot_and_need_no_rebind(#[case] kernel: Kernel) {
    let (mut guest, pf, floods) = boot_with_traffic(kernel);
    let vfs = pf.vfs(&mut guest);
    let taps = vf_taps(VFS);
    set_power_state(&mut guest, &pf, D3HOT);
    let quiet: Vec<_> = taps.iter().map(HostTap::counters).collect();
    let lost = guest.run(&format!("ping -c 1 -W 1 -I {} {}", vfs[0].interface(), Subnet(0).host()));
    assert_ne!(lost.status, 0, "{}", lost.text);
    assert_eq!(taps.iter().map(HostTap::counters).collect::<Vec<_>>(), quiet, "no frame passes in D3hot");
    set_power_state(&mut guest, &pf, D0);
    assert_continue(&mut guest, &pf, &vfs);

    // Linux's own suspend does the same through the drivers.
    guest.suspend_and_wake();
    assert_continue(&mut guest, &pf, &vfs);
    drop(floods);
    pf.set_num_vfs(&mut guest, 0);
    assert_vfs_are_off_and_can_be_enabled(&mut guest, &pf);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
