//! DPDK's drivers of an X550's VFs, in a guest with a virtual IOMMU.

use std::process::Command;

use integration::{GuestTestpmd, Kernel, X550};
use serde_json::json;

/// Number of VFs.
const VFS: usize = 2;
/// Addresses that no function has. testpmd answers for each.
const ANY: [&str; VFS] = ["10.88.0.150", "10.88.0.151"];

#[test]
#[ignore = "a longer test: DPDK, for the VFs of an X550"]
fn dpdk_answers_on_vfs_of_an_x550_behind_the_iommu() {
    let mut nic = X550::boot_with(Kernel::Generic, VFS, |spec| spec.with_dpdk().arguments(&["--platform", "iommu=on"]));
    nic.guest.load_vfio();
    let vfs = nic.enable(VFS);
    let addresses: Vec<_> = vfs.iter().map(|vf| vf.address.as_str()).collect();
    addresses.iter().for_each(|address| nic.guest.give_to_vfio(address));
    let mut testpmd = GuestTestpmd::start(&mut nic.guest, &addresses);
    testpmd.command(&mut nic.guest, "set fwd icmpecho");
    testpmd.command(&mut nic.guest, "start");
    for address in ANY {
        let pings = Command::new("ping").args(["-c", "6", "-i", "0.2", "-W", "20", address]).output();
        let text = String::from_utf8_lossy(&pings.unwrap().stdout).into_owned();
        assert!(text.contains(" 0% packet loss"), "{text}");
    }
    assert!(nic.reaches(&X550::UPLINK.to_string()), "the PF next to them");
    testpmd.command(&mut nic.guest, "stop");
    let log = testpmd.end(&mut nic.guest);
    assert!(!log.contains("Error"), "{log}");
    let counters = nic.api.get("vm.counters").body;
    assert_eq!((&counters["__iommu"]["faults"], &counters["__iommu"]["refused"]), (&json!(0), &json!(0)));
    for address in addresses {
        nic.guest.return_to("ixgbevf", address);
    }
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
