//! A guest saves itself to a disk, powers off, and continues under another VMM.

use std::fs::File;
use std::net::Ipv4Addr;
use std::time::Duration;

use integration::{Guest, HostTap, Kernel, Pf, Subnet, Tenant, spec_with_vfs};

/// The PF's subnet. VF 0 has subnet 0.
const PF_SUBNET: Subnet = Subnet(255);
/// The host's address in the network of the tenant.
const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 200);
/// The size of the disk, which has room for all of the guest's memory. The file is sparse.
const SWAP: u64 = 320 << 20;
/// The time limit for the guest to write its memory, or to read it.
const TRANSFER: Duration = Duration::from_secs(120);
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

/// With both VFs enabled, and one of them in a network namespace. The taps persist, like those that a host manages.
#[test]
fn a_hibernated_guest_and_its_vfs_continue_under_another_vmm() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("swap");
    File::create(&disk).unwrap().set_len(SWAP).unwrap();
    let spec = || {
        let spec = spec_with_vfs(Kernel::V6_12, 2).with_modules();
        spec.disk(&format!("path={},image_type=raw", disk.display()))
    };
    let taps = ["pf0", "pf0v0", "pf0v1"].map(HostTap::persistent);
    let mut guest = Guest::boot(spec());
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    taps[0].join(PF_SUBNET);
    guest.join("eth0", PF_SUBNET);
    guest.ping("eth0", PF_SUBNET);
    vfs[0].ping_through(&mut guest, &taps[1..], 0, Subnet(0));
    taps[2].join_at(NEIGHBOUR);
    let tenant = Tenant::with(&mut guest, &vfs[1]);
    assert!(tenant.reaches(&mut guest, &NEIGHBOUR.to_string()));
    let boot = guest.ok(BOOT_ID);
    guest.load("virtio_blk");
    guest.ok("mkswap /dev/vda && swapon /dev/vda && echo shutdown > /sys/power/disk");
    let (exit, left_by) = guest.leave_by("echo disk > /sys/power/state", TRANSFER);
    assert_eq!(exit.code, Some(0), "{}", exit.errors);

    let mut guest = Guest::boot(spec());
    assert_ne!(guest.ok(BOOT_ID), boot);
    guest.load("virtio_blk");
    guest.continue_by("cat /sys/block/vda/dev > /sys/power/resume", left_by, TRANSFER);
    assert_eq!(guest.ok(BOOT_ID), boot, "it is the guest that left");
    guest.ping("eth0", PF_SUBNET);
    guest.ping(vfs[0].interface(), Subnet(0));
    assert!(tenant.reaches(&mut guest, &NEIGHBOUR.to_string()), "the VF in a namespace");
    assert_eq!(pf.vfs(&mut guest)[0], vfs[0]);
    pf.set_num_vfs(&mut guest, 0);
    tenant.end(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps[1..], vf.index, Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
