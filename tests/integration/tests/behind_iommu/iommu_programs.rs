//! VFs behind the virtual IOMMU that misbehaving programs of the guest drive.

use std::path::Path;
use std::time::Duration;

use integration::{Api, Guest, GuestSpec, Kernel, Pf, ProgramDisk, Subnet, Vf, spec_with_vfs, vf_taps};

/// The first VF is the program's, the second its neighbour's, the last one the kernel's.
const VFS: usize = 3;
/// Number of times that a page is unmapped from a VF while it receives.
const ROUNDS: u32 = 2_000;

fn spec(api: &Api, disk: &ProgramDisk) -> GuestSpec {
    let spec = disk.add_to(spec_with_vfs(Kernel::V6_12, VFS).with_modules());
    spec.arguments(&["--platform", "iommu=on", "--api-socket", &api.argument()])
}

fn program() -> ProgramDisk {
    ProgramDisk::of(Path::new(env!("CARGO_BIN_EXE_vf_driver")))
}

/// Loads the modules, enables the VFs, and passes `count` of them to programs.
fn prepare(guest: &mut Guest, pf: &Pf, count: usize) -> Vec<Vf> {
    guest.load_vfio();
    guest.take_program("vf_driver");
    pf.set_num_vfs(guest, VFS);
    let vfs = pf.vfs(guest);
    vfs[..count].iter().for_each(|vf| guest.give_to_vfio(&vf.address));
    vfs
}

fn counter(api: &Api, name: &str) -> u64 {
    api.get("vm.counters").body["__iommu"][name].as_u64().unwrap_or_default()
}

/// A VF reads and writes what is mapped for it, with the mapping's permissions. All else is out of its reach, including
/// its neighbour's memory and what was just unmapped. The kernel gets the faults, and other VFs continue.
#[test]
fn a_vf_reaches_what_is_mapped_for_it_and_nothing_else() {
    let api = Api::new("isolation");
    let disk = program();
    let mut guest = Guest::boot(spec(&api, &disk));
    let pf = Pf::find(&mut guest);
    let vfs = prepare(&mut guest, &pf, 2);
    let taps = vf_taps(VFS);
    taps[0].join(Subnet(0));
    let (own, host) = (Subnet(0).guest(), Subnet(0).host());
    let [first, second, third] = vfs.as_slice() else { panic!("{vfs:?}") };

    let done = guest.ok(&format!("/tmp/vf_driver isolation {} {} {own} {host}", first.address, second.address));
    assert!(done.starts_with("isolated"), "{done}");
    assert!(counter(&api, "faults") >= 6);
    let told = guest.ok("dmesg | grep 'page fault'");
    for fault in [
        "from EP 256 at 0x50000000 [W]",
        "from EP 256 at 0x60000000 [W]",
        "from EP 256 at 0x70000000 [W]",
        "from EP 256 at 0x58000000 [R]",
        "from EP 256 at 0x60000000 [R]",
        "from EP 256 at 0x70000000 [R]",
    ] {
        assert!(told.contains(fault), "{fault} is not reported: {told}");
    }
    third.ping_through(&mut guest, &taps, 2, Subnet(2));

    let (unmap, limit) = (format!("/tmp/vf_driver unmap {} {ROUNDS} {own} {host}", first.address), 120);
    println!("{}", guest.ok_within(&unmap, Duration::from_secs(limit)));
    guest.take_from_vfio(&first.address);
    pf.vfs(&mut guest)[0].ping_through(&mut guest, &taps, 0, Subnet(0));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
