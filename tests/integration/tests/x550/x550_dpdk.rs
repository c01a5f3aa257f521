//! DPDK's drivers of an X550 and of its VFs, in a guest with a virtual IOMMU.

use std::process::Command;

use integration::{GuestTestpmd, Kernel, X550};
use serde_json::json;

/// Number of VFs.
const VFS: usize = 2;
/// Addresses that no function has. testpmd answers for each.
const ANY: [&str; 2] = ["10.88.0.150", "10.88.0.151"];

/// testpmd on the functions at `addresses`, which answers pings.
fn start(nic: &mut X550, addresses: &[&str]) -> GuestTestpmd {
    addresses.iter().for_each(|address| nic.guest.give_to_vfio(address));
    let mut testpmd = GuestTestpmd::start(&mut nic.guest, addresses);
    testpmd.command(&mut nic.guest, "set fwd icmpecho");
    testpmd.command(&mut nic.guest, "start");
    testpmd
}

/// The host pings testpmd, which then ends. Each of its ports has received frames, and the IOMMU has refused nothing.
fn ping_and_end(nic: &mut X550, mut testpmd: GuestTestpmd, ports: usize) {
    let pings = ANY.map(|address| {
        let pings = Command::new("ping").args(["-c", "6", "-i", "0.2", "-W", "20", address]).output();
        pings.map_or_else(|error| error.to_string(), |pings| String::from_utf8_lossy(&pings.stdout).into_owned())
    });
    testpmd.command(&mut nic.guest, "stop");
    let log = testpmd.end(&mut nic.guest);
    for text in pings {
        assert!(text.contains(" 0% packet loss"), "{text}{log}");
    }
    for port in 0..ports {
        // All ports answer requests for an address, and one gets the pings that follow.
        assert!(GuestTestpmd::received(&log, port) >= 2, "{log}");
    }
    let counters = nic.api.get("vm.counters").body;
    assert_eq!((&counters["__iommu"]["faults"], &counters["__iommu"]["refused"]), (&json!(0), &json!(0)));
}

#[test]
#[ignore = "a longer test: DPDK, for the VFs of an X550"]
fn dpdk_answers_on_vfs_of_an_x550_behind_the_iommu() {
    let mut nic = X550::boot_with_dpdk(Kernel::Generic, VFS, false);
    let vfs = nic.enable(VFS);
    let addresses: Vec<_> = vfs.iter().map(|vf| vf.address.as_str()).collect();
    let testpmd = start(&mut nic, &addresses);
    assert!(nic.reaches(&X550::UPLINK.to_string()), "the PF next to them");
    ping_and_end(&mut nic, testpmd, VFS);
    for address in addresses {
        nic.guest.return_to("ixgbevf", address);
    }
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

#[test]
#[ignore = "a longer test: DPDK, for the PF of an X550"]
fn dpdk_answers_on_the_pf_of_an_x550_behind_the_iommu() {
    let mut nic = X550::boot_with_dpdk(Kernel::Generic, VFS, true);
    let address = nic.pf.address.clone();
    let testpmd = start(&mut nic, &[&address]);
    ping_and_end(&mut nic, testpmd, 1);
    // The kernel's driver finds the NIC as it left it.
    nic.guest.return_to("ixgbe", &address);
    nic.guest.join_x550();
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
