//! Functions that may have the same MAC address, and addresses that count as given.

use crate::{plan, refusal};

#[test]
fn a_mac_used_twice_in_one_device_is_refused() {
    let mac = "52:54:00:00:00:01";
    let both = ["mac=52:54:00:00:00:02,pf=a,index=0", "mac=52:54:00:00:00:02,pf=a,index=1"];
    assert_eq!(
        refusal(&["id=a,sriov_vfs=2,switch=veb"], &both),
        "--net-vf pf=a,index=1,mac=52:54:00:00:00:02: MAC address 52:54:00:00:00:02 is already in use by VF 0 of a; \
         give each NIC and each VF its own"
    );
    assert_eq!(
        refusal(&[&format!("id=a,sriov_vfs=2,mac={mac}")], &[&format!("pf=a,index=1,mac={mac}")]),
        "--net-vf pf=a,index=1,mac=52:54:00:00:00:01: MAC address 52:54:00:00:00:01 is already in use by a; \
         give each NIC and each VF its own"
    );
}

/// Cloud Hypervisor has no rule for them, and clients such as Kata rely on that.
#[test]
fn two_nics_may_have_one_mac() {
    let mac = "52:54:00:00:00:01";
    let plan = |nets: &[&str]| plan(nets, &[]).unwrap();
    let nics = plan(&[&format!("id=a,mac={mac}"), &format!("id=b,mac={mac}")]);
    assert!(nics.iter().all(|nic| nic.pf.spec.mac == [0x52, 0x54, 0, 0, 0, 1]));
    let derived = plan(&[&format!("id=a,sriov_vfs=4,mac={mac}"), "id=b,mac=06:00:00:01:00:03"]);
    assert_eq!(derived[0].vfs[3].spec.mac, derived[1].pf.spec.mac);
    assert_eq!(plan(&[&format!("id=a,sriov_vfs=1,mac={mac}"), &format!("id=b,sriov_vfs=1,mac={mac}")]).len(), 2);
}

#[test]
fn vf_mac_derived_from_the_pf_that_collides_is_refused() {
    assert_eq!(
        refusal(&["id=a,sriov_vfs=4,mac=52:54:00:00:00:01"], &["pf=a,index=0,mac=06:00:00:01:00:03"]),
        "--net-vf pf=a,index=0,mac=06:00:00:01:00:03: MAC address 06:00:00:01:00:03 is already in use by VF 3 of a, \
         whose address follows from its PF's; give each NIC and each VF its own"
    );
}

#[test]
fn on_a_switch_a_derived_mac_counts_as_given_unless_any_is() {
    let vfs = ["pf=a,index=1,mac=any", "pf=a,index=2,mac=52:54:00:00:01:02", "pf=a,index=3,tap=own"];
    let plan = plan(&["id=a,switch=veb,sriov_vfs=4,mac=52:54:00:00:00:01"], &vfs).unwrap();
    let derived = |index| Some([6, 0, 0, 1, 0, index]);
    let given: Vec<_> = plan[0].functions().map(|nic| nic.spec.policy.address).collect();
    let pf = Some([0x52, 0x54, 0, 0, 0, 1]);
    assert_eq!(given, [pf, derived(0), None, Some([0x52, 0x54, 0, 0, 1, 2]), None]);
    let macs: Vec<_> = plan[0].functions().map(|nic| Some(nic.spec.mac)).collect();
    assert_eq!(macs, [pf, derived(0), derived(1), given[3], derived(3)]);
    assert!(plan[0].vfs[..3].iter().all(|vf| !vf.spec.policy.trusted));
}

#[test]
fn any_mac_is_refused_where_there_is_no_vf_on_a_switch() {
    let what = "only a VF on a switch may have any; elsewhere the guest may change an address with trust=on; leave mac \
                out to have one chosen";
    assert_eq!(refusal(&["id=pf0,sriov_vfs=8,mac=any"], &[]), format!("--net id=pf0,mac=any: {what}"));
    assert_eq!(
        refusal(&["id=pf0,sriov_vfs=8"], &["pf=pf0,index=3,mac=any"]),
        format!("--net-vf pf=pf0,index=3,mac=any: {what}")
    );
    let of_pf = refusal(&["id=a,switch=veb,sriov_vfs=1,mac=any"], &[]);
    assert_eq!(of_pf, format!("--net id=a,mac=any: {what}"));
}
