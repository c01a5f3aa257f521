//! VFs of Linux guests behind the virtual IOMMU.

#![expect(clippy::panic, reason = "a test fails by panicking")]

use integration::{Api, Backend, Backends, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Vf, spec_with_vfs};
use rstest::rstest;
use serde_json::json;

/// Number of VFs of each of two PFs, each with its own VF bus.
const VFS: usize = 8;
/// The backends of the first PF's VFs.
const KINDS: [Backend; VFS] = {
    use Backend::{Tap, Vdpa, VhostNet, VhostUser};
    [Tap, Tap, Tap, Tap, VhostNet, Vdpa, VhostUser, Tap]
};
/// The vhost-user backend supports translation.
const TRANSLATES: &[&str] = &["--translate"];
/// Number of bytes that pass in each direction through VFs whose frames other programs move.
const BYTES: usize = 256 << 10;

/// A guest with two PFs in a VM with an IOMMU for their VFs only.
fn spec(kernel: Kernel, backends: &Backends, api: &Api) -> GuestSpec {
    let pf = format!("id=pf1,tap=pf1,mac=52:54:00:00:00:02,sriov_vfs={VFS}");
    let spec = backends.spec(kernel).net(&pf);
    let spec = if has_driver(kernel) { spec.with_modules() } else { spec };
    spec.arguments(&["--platform", "iommu=on", "--api-socket", &api.argument()])
}

/// A booted guest of [`spec`], with the driver of the IOMMU if it has one.
fn boot(kernel: Kernel, backends: &Backends, api: &Api) -> Guest {
    let mut guest = Guest::boot(spec(kernel, backends, api).kernel_argument("iommu.strict=1"));
    if has_driver(kernel) {
        guest.load("virtio_iommu");
    }
    guest
}

fn has_driver(kernel: Kernel) -> bool {
    kernel != Kernel::V6_1
}

fn counter(api: &Api, name: &str) -> u64 {
    let counters = api.get("vm.counters").body;
    counters["__iommu"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {counters}"))
}

/// The groups by number, with the devices in each.
fn groups(guest: &mut Guest) -> Vec<Vec<String>> {
    let listed =
        guest.ok("for group in /sys/kernel/iommu_groups/*/devices; do [ ! -e $group ] || echo $(ls $group); done");
    listed.lines().map(|line| line.split_whitespace().map(str::to_string).collect()).collect()
}

/// A subnet of its own for each tap.
fn subnet(vf: &Vf) -> Subnet {
    Subnet(60 + u8::try_from(vf.index).unwrap_or_default())
}

fn ping(guest: &mut Guest, backends: &Backends, vf: &Vf) {
    vf.ping_through(guest, &backends.taps(), vf.index, subnet(vf));
}

/// G51: each VF has its own group, and no other device has one; a VF reaches only what the kernel maps for it, and its
/// frames pass.
#[rstest]
#[case::linux_6_12(Kernel::V6_12)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::Backports)]
fn every_vf_is_behind_the_iommu_in_a_group_of_its_own(#[case] kernel: Kernel) {
    let (api, backends) = (Api::new("iommu"), Backends::start_with(&KINDS, TRANSLATES, &[]));
    let mut guest = boot(kernel, &backends, &api);
    let pfs = [Pf::at("0000:00:01.0"), Pf::at("0000:00:02.0")];
    pfs.iter().for_each(|pf| pf.set_num_vfs(&mut guest, VFS));
    let expected: Vec<_> = (1..=2).flat_map(|bus| (0..VFS).map(move |vf| format!("0000:0{bus}:00.{vf}"))).collect();
    let mut found = groups(&mut guest);
    found.sort();
    assert_eq!(found, expected.iter().map(|vf| vec![vf.clone()]).collect::<Vec<_>>());
    let regions = guest.ok("cat /sys/kernel/iommu_groups/*/reserved_regions | sort | uniq -c");
    assert_eq!(
        regions.split_whitespace().collect::<Vec<_>>(),
        ["16", "0x00000000fee00000", "0x00000000feefffff", "msi"]
    );
    assert_eq!(counter(&api, "attaches"), 16);

    // In strict mode the kernel maps each buffer, and unmaps it right after its use.
    let vf = pfs[0].vfs(&mut guest).remove(3);
    let before = counter(&api, "maps");
    ping(&mut guest, &backends, &vf);
    assert!(counter(&api, "maps") > before);
    for vf in pfs[0].vfs(&mut guest).drain(4..7) {
        ping(&mut guest, &backends, &vf);
        guest.transfer(subnet(&vf), BYTES);
    }

    // An identity domain needs no mapping for a frame.
    let device = format!("/sys/bus/pci/devices/{}", vf.address);
    let driver = "/sys/bus/pci/drivers/virtio-pci";
    guest.ok(&format!("echo {} > {driver}/unbind && echo identity > {device}/iommu_group/type", vf.address));
    guest.ok(&format!("echo {} > {driver}/bind", vf.address));
    let vf = pfs[0].vfs(&mut guest).remove(3);
    let before = counter(&api, "maps");
    ping(&mut guest, &backends, &vf);
    assert_eq!(counter(&api, "maps"), before);

    // VFs that are enabled again, and a guest that restarts, have no earlier mappings.
    pfs[0].set_num_vfs(&mut guest, 0);
    assert_eq!(groups(&mut guest).len(), VFS);
    assert_eq!((counter(&api, "faults"), counter(&api, "refused")), (0, 0));
    guest.reboot();
    guest.load("virtio_iommu");
    assert_eq!(groups(&mut guest), Vec::<Vec<String>>::new());
    pfs[0].set_num_vfs(&mut guest, VFS);
    let vf = pfs[0].vfs(&mut guest).remove(0);
    ping(&mut guest, &backends, &vf);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// A guest that only uses the IOMMU to pass VFs through maps nothing. The VFs of a PF that is plugged later are behind
/// the IOMMU as well.
#[test]
#[ignore = "a longer test: a command line of its own"]
fn a_passthrough_guest_maps_nothing_even_for_vfs_added_later() {
    let (api, backends) = (Api::new("iommu-passthrough"), Backends::start_with(&KINDS, TRANSLATES, &[]));
    let mut guest = Guest::boot(spec(Kernel::V6_12, &backends, &api).kernel_argument("iommu.passthrough=1"));
    guest.load("virtio_iommu");
    let plugged = json!({ "id": "hp0", "tap": "hp0", "sriov_vfs": 2, "pci_device_id": 9 });
    assert_eq!(api.put_json("vm.add-net", &plugged).status, 200);
    let hot = Pf::at("0000:00:09.0");
    guest.wait_for(&format!("ls {}", hot.file("virtio*/net/*/address")));
    let first = Pf::at("0000:00:01.0");
    first.set_num_vfs(&mut guest, VFS);
    hot.set_num_vfs(&mut guest, 2);
    let mut found: Vec<_> = groups(&mut guest).concat();
    found.sort();
    let of_bus = |bus: usize, count: usize| (0..count).map(move |vf| format!("0000:0{bus}:00.{vf}"));
    assert_eq!(found, of_bus(1, VFS).chain(of_bus(3, 2)).collect::<Vec<_>>());
    assert_eq!(groups(&mut guest).len(), VFS + 2, "one in each group");
    assert_eq!(guest.ok("cat /sys/kernel/iommu_groups/*/type | sort -u"), "identity");
    let vf = first.vfs(&mut guest).remove(3);
    ping(&mut guest, &backends, &vf);
    let taps: Vec<_> = (0..2).map(|index| HostTap::existing(&format!("hp0v{index}"))).collect();
    hot.vfs(&mut guest)[1].ping_through(&mut guest, &taps, 1, Subnet(101));
    assert_eq!(["attaches", "maps", "faults"].map(|name| counter(&api, name)), [VFS as u64 + 2, 0, 0]);
    // The added PF can be removed, with its VFs, and added again.
    api.remove_device("hp0");
    assert_eq!(groups(&mut guest).len(), VFS);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// A machine without the option has no IOMMU and does not describe one.
#[test]
#[ignore = "a longer test: what is not there"]
fn without_an_iommu_a_guest_finds_none() {
    let mut guest = Guest::boot(spec_with_vfs(Kernel::V6_12, 1).with_modules());
    guest.load("virtio_iommu");
    Pf::find(&mut guest).set_num_vfs(&mut guest, 1);
    assert_ne!(guest.run("ls /sys/firmware/acpi/tables/VIOT").status, 0);
    assert_eq!(groups(&mut guest), Vec::<Vec<String>>::new());
    // Bit 33 of the features of each NIC: VIRTIO_F_ACCESS_PLATFORM.
    assert_eq!(guest.ok("cut -c 34 /sys/bus/virtio/drivers/virtio_net/virtio*/features | sort -u"), "0");
    assert_eq!(guest.power_off().code, Some(0));
}

/// Debian's Linux 6.1 has no driver for the IOMMU.
#[test]
fn vfs_work_in_bypass_without_an_iommu_driver_linux_6_1() {
    let (api, backends) = (Api::new("iommu-bypass"), Backends::start_with(&KINDS, TRANSLATES, &[]));
    let mut guest = boot(Kernel::V6_1, &backends, &api);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, VFS);
    for vf in pf.vfs(&mut guest).drain(3..7) {
        ping(&mut guest, &backends, &vf);
    }
    assert_eq!(["attaches", "maps", "faults"].map(|name| counter(&api, name)), [0; 3]);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
