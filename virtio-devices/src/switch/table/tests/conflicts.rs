//! Two ports with one address.

use super::*;
use crate::frames::policy::{PortVlan, Trunk, VlanProtocol, VlanSet};

const SHARED: Mac = [0x52, 0x54, 0, 0, 9, 9];

/// The owner of the shared address in a VLAN.
fn owner(table: &Table, tags: &[u16]) -> Option<PortIndex> {
    match table.route(UPLINK, &head(FAR, SHARED, tags)) {
        Ok(Route::One(port)) | Err(Miss::Closed(port)) => Some(port),
        _ => None,
    }
}

fn vf(port: PortIndex, policy: &Policy) -> PortSpec<'_> {
    spec(Role::Vf, port, policy)
}

fn table(ports: &[PortSpec<'_>], before: Option<&Table>) -> Table {
    Table::new(SwitchMode::Veb, &[&[PortSpec::uplink(true)], ports].concat(), before)
}

#[test]
fn a_given_address_is_kept_against_every_driver() {
    let given = Policy { address: Some(SHARED), trusted: false, ..Policy::default() };
    let open = Policy::default();
    let further = [SHARED];
    let (taken, thief) = (PortSpec { current: SHARED, ..vf(1, &open) }, PortSpec { unicast: &further, ..vf(2, &open) });
    let before = table(&[taken, thief], None);
    assert_eq!((owner(&before, &[]), before.conflicts(2)), (Some(1), 1));
    let after = table(&[taken, thief, vf(3, &given)], Some(&before));
    assert_eq!(owner(&after, &[]), Some(3), "although others had it before");
    assert_eq!([1, 2, 3].map(|port| after.conflicts(port)), [1, 1, 0]);
    let closed = table(&[taken, PortSpec { open: false, ..vf(2, &given) }], None);
    assert_eq!(owner(&closed, &[]), Some(2), "also while it is closed");
}

#[test]
fn among_drivers_the_first_keeps_an_address() {
    let open = Policy::default();
    let further = [SHARED];
    let (early, late) = (PortSpec { unicast: &further, ..vf(3, &open) }, PortSpec { current: SHARED, ..vf(1, &open) });
    let first = table(&[vf(1, &open), vf(2, &open), early], None);
    assert_eq!(owner(&first, &[]), Some(3));
    let second = table(&[late, vf(2, &open), early], Some(&first));
    let third = table(&[late, vf(2, &open), early], Some(&second));
    assert_eq!((owner(&second, &[]), owner(&third, &[])), (Some(3), Some(3)));
    assert_eq!([1, 2, 3].map(|port| third.conflicts(port)), [1, 0, 0]);
    let given_up = table(&[late, vf(2, &open), vf(3, &open)], Some(&third));
    assert_eq!((owner(&given_up, &[]), given_up.conflicts(1)), (Some(1), 0));
    let back = table(&[late, vf(2, &open), early], Some(&given_up));
    assert_eq!(owner(&back, &[]), Some(1));
}

#[test]
fn own_address_wins_over_a_further_one_set_at_the_same_time() {
    let open = Policy::default();
    let further = [SHARED];
    let table =
        table(&[PortSpec { unicast: &further, ..vf(1, &open) }, PortSpec { current: SHARED, ..vf(2, &open) }], None);
    assert_eq!(owner(&table, &[]), Some(2));
}

#[test]
fn ports_with_one_or_many_vlans_share_an_address_by_one_rule() {
    let open = Policy::default();
    let one = Policy {
        port_vlan: Some(PortVlan { id: 5, priority: 0, protocol: VlanProtocol::Customer }),
        ..Policy::default()
    };
    let tagging = |ids: &[u16]| Policy {
        trunk: Some(Trunk { vlans: VlanSet::of(ids.iter().map(|id| *id..=*id)), protocol: VlanProtocol::Customer }),
        ..Policy::default()
    };
    let (five, six) = (tagging(&[5, 7]), tagging(&[6]));
    let has = |port, policy| PortSpec { current: SHARED, ..vf(port, policy) };
    let all = table(&[has(1, &open), has(2, &one), has(3, &five)], None);
    assert_eq!([&[][..], &[5], &[6]].map(|tags| owner(&all, tags)), [Some(1); 3]);
    assert_eq!([1, 2, 3].map(|port| all.conflicts(port)), [0, 1, 1]);
    let first = table(&[vf(1, &open), has(2, &one)], None);
    let both = table(&[has(1, &open), has(2, &one)], Some(&first));
    let again = table(&[has(1, &open), has(2, &one)], Some(&both));
    for table in [&both, &again] {
        assert_eq!([&[][..], &[5], &[6]].map(|tags| owner(table, tags)), [Some(1), Some(2), Some(1)]);
        assert_eq!([1, 2].map(|port| table.conflicts(port)), [1, 0]);
    }
    let apart = table(&[has(1, &six), has(2, &one), has(3, &six), has(4, &tagging(&[7]))], None);
    assert_eq!([&[][..], &[5], &[6], &[7]].map(|tags| owner(&apart, tags)), [None, Some(2), Some(1), Some(4)]);
    assert_eq!([1, 2, 3, 4].map(|port| apart.conflicts(port)), [0, 0, 1, 0]);
}

#[test]
fn untrusted_driver_is_limited_to_16_further_addresses() {
    let untrusted = Policy { trusted: false, ..Policy::default() };
    let trusted = Policy::default();
    let table_of = |len: usize, open, policy| {
        let unicast: Vec<Mac> = (0..len as u8).map(|last| [2, 0, 0, 0, 1, last]).chain([SHARED]).collect();
        owner(&table(&[PortSpec { unicast: &unicast, open, ..vf(1, policy) }], None), &[])
    };
    assert_eq!([15, 16, 63].map(|len| table_of(len, true, &untrusted)), [Some(1), None, None]);
    assert_eq!([15, 16, 63].map(|len| table_of(len, true, &trusted)), [Some(1); 3]);
    assert_eq!(table_of(0, false, &trusted), None, "a driver that does not run has none");
}

#[test]
fn drivers_own_address_is_ignored_if_the_host_gave_one() {
    let policy = Policy { address: Some(mac(1)), trusted: false, ..Policy::default() };
    let untrusted = table(&[PortSpec { current: SHARED, ..vf(1, &policy) }], None);
    assert_eq!(owner(&untrusted, &[]), None, "its driver has yet to learn of the given one");
    let policy = Policy { trusted: true, ..policy };
    assert_eq!(owner(&table(&[PortSpec { current: SHARED, ..vf(1, &policy) }], None), &[]), Some(1));
}
