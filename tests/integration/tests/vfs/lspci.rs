//! The real `lspci` on the PF and its VFs.

use integration::{Guest, GuestSpec, Kernel, Pf, assert_matches_file, predicted_vf_address, without_what_varies};
use rstest::rstest;

/// G10, G45: lspci shows the counts, the offset and stride, and the page sizes, and VFs as 1af4:1041.
#[rstest]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn lspci_shows_the_pf_and_a_vf_as_expected(#[case] kernel: Kernel) {
    let net = "id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=8";
    let mut guest = Guest::boot(GuestSpec::new(kernel).with_lspci().net(net));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 8);
    let release = kernel.version();
    for (name, address) in [("pf", pf.address.clone()), ("vf", predicted_vf_address(0))] {
        // lspci's error output is only about the guest's kernel modules, which it does not find.
        let shown = guest.ok(&format!("lspci -vvv -s {address} 2>/dev/null"));
        assert_matches_file(&format!("lspci-{name}-{release}.txt"), &without_what_varies(&shown));
    }
    let tree = guest.ok("lspci -tv");
    assert_matches_file(&format!("lspci-tree-{release}.txt"), &without_what_varies(&tree));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
