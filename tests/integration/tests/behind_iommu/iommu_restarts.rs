//! VFs behind the virtual IOMMU that a program of the guest holds while the guest restarts.

use std::path::Path;

use integration::{Api, Guest, HostTap, Kernel, Pf, ProgramDisk, Subnet, Userland, Vf, spec_with_vfs, vf_taps};

/// The program holds the first VF, and the kernel the others.
const VFS: usize = 3;
/// The PF's subnet. VF i has subnet i.
const PF_SUBNET: Subnet = Subnet(255);

fn counter(api: &Api, name: &str) -> u64 {
    api.get("vm.counters").body["__iommu"][name].as_u64().unwrap_or_default()
}

/// Enables the VFs, starts a program that holds the first, and pings through the others.
fn hold(guest: &mut Guest, pf: &Pf) -> Vec<Vf> {
    guest.load_vfio();
    guest.take_program("vf_driver");
    pf.set_num_vfs(guest, VFS);
    let vfs = pf.vfs(guest);
    guest.give_to_vfio(&vfs[0].address);
    guest.ok(&format!("/tmp/vf_driver hold {} > /tmp/held 2>&1 &", vfs[0].address));
    guest.wait_for("grep -q holding /tmp/held");
    let taps = vf_taps(VFS);
    vfs[1..].iter().for_each(|vf| vf.ping_through(guest, &taps, vf.index, Subnet(vf.index as u8)));
    vfs
}

/// Panics unless all VFs are disabled, and each works under the kernel when it is enabled, in its own group.
fn assert_nothing_is_left(guest: &mut Guest, pf: &Pf, api: &Api) {
    guest.load("virtio_iommu");
    assert_eq!((pf.read(guest, "sriov_numvfs").as_str(), pf.vfs(guest)), ("0", Vec::new()));
    assert_eq!(guest.ok("ls /sys/kernel/iommu_groups | wc -l"), "0");
    let faults = counter(api, "faults");
    pf.set_num_vfs(guest, VFS);
    assert_eq!(guest.ok("ls /sys/kernel/iommu_groups | wc -l"), VFS.to_string());
    let taps = vf_taps(VFS);
    for vf in pf.vfs(guest) {
        vf.ping_through(guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    assert_eq!((counter(api, "faults"), counter(api, "refused")), (faults, 0));
}

/// G51: a program's mappings for a VF end with the guest's kernel, after a reboot as after kexec.
#[test]
#[ignore = "a longer test: two restarts"]
fn mappings_of_a_program_end_with_the_guests_kernel() {
    let api = Api::new("iommu-restarts");
    let disk = ProgramDisk::of(Path::new(env!("CARGO_BIN_EXE_vf_driver")));
    let spec = disk.add_to(spec_with_vfs(Kernel::V6_12, VFS).with_modules()).memory("size=512M");
    let mut guest = Guest::boot(spec.arguments(&["--platform", "iommu=on", "--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    hold(&mut guest, &pf);
    guest.reboot();
    assert_nothing_is_left(&mut guest, &pf, &api);

    // The program's VFs are disabled, and their mappings with them.
    pf.set_num_vfs(&mut guest, 0);
    assert_eq!(guest.ok("ls /sys/kernel/iommu_groups | wc -l"), "0");
    hold(&mut guest, &pf);
    HostTap::existing("pf0").join(PF_SUBNET);
    guest.join("eth0", PF_SUBNET);
    guest.kexec_with(Path::new(env!("CARGO_BIN_EXE_kexec")), Kernel::V6_12, Userland::Modules, PF_SUBNET);
    assert_nothing_is_left(&mut guest, &pf, &api);

    // A program that is killed releases its VF.
    pf.set_num_vfs(&mut guest, 0);
    let vfs = hold(&mut guest, &pf);
    guest.ok("killall -9 vf_driver");
    guest.take_from_vfio(&vfs[0].address);
    pf.vfs(&mut guest)[0].ping_through(&mut guest, &vf_taps(VFS), 0, Subnet(0));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
