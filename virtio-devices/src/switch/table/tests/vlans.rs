//! VLANs on the switch.

use super::*;
use crate::frames::policy::{PortVlan, Trunk, VlanProtocol, VlanSet};

fn port_vlan(id: u16, protocol: VlanProtocol) -> Policy {
    Policy { port_vlan: Some(PortVlan { id, priority: 0, protocol }), ..Policy::default() }
}

fn trunk(ids: &[u16]) -> Policy {
    let vlans = VlanSet::of(ids.iter().map(|id| *id..=*id));
    Policy { trunk: Some(Trunk { vlans, protocol: VlanProtocol::Customer }), ..Policy::default() }
}

#[test]
fn tenants_reach_their_own_vlan_only() {
    let (a, b, tagging, open) = (
        port_vlan(100, VlanProtocol::Customer),
        port_vlan(200, VlanProtocol::Customer),
        trunk(&[0, 100]),
        Policy::default(),
    );
    let vf = |port, policy| spec(Role::Vf, port, policy);
    let ports = [
        PortSpec::uplink(true),
        spec(Role::Pf, PF, &open),
        vf(2, &a),
        vf(3, &a),
        vf(4, &b),
        vf(5, &b),
        vf(6, &tagging),
    ];
    let table = Table::new(SwitchMode::Veb, &ports, None);
    let from = |from, to, tags: &[u16]| route(&table, from, &head(mac(from), to, tags));
    assert_eq!(from(2, mac(3), &[0x6064]), Ok(vec![3]));
    assert_eq!(from(2, mac(4), &[100]), Ok(vec![UPLINK]), "another's VLAN is unknown");
    assert_eq!(from(4, mac(5), &[200]), Ok(vec![5]));
    assert_eq!(from(2, BROADCAST, &[100]), Ok(vec![0, 1, 3, 6]));
    assert_eq!(from(4, BROADCAST, &[200]), Ok(vec![0, 1, 5]));
    assert_eq!(from(6, BROADCAST, &[]), Ok(vec![0, 1]));
    assert_eq!(from(UPLINK, BROADCAST, &[0]), Ok(vec![1, 6]), "a priority is no VLAN");
    assert_eq!(from(UPLINK, mac(2), &[]), Err(Miss::Unknown));
    assert_eq!(from(UPLINK, mac(2), &[100, 7]), Ok(vec![2]), "the outer tag counts");
}

#[test]
fn a_providers_vlan_is_not_a_customers_of_the_same_number() {
    let (c, s) = (port_vlan(5, VlanProtocol::Customer), port_vlan(5, VlanProtocol::Service));
    let ports = [PortSpec::uplink(true), spec(Role::Vf, 1, &c), spec(Role::Vf, 2, &s)];
    let table = Table::new(SwitchMode::Veb, &ports, None);
    let tagged = |kind: u8| {
        Head::of(&[&BROADCAST[..], &FAR, &[kind, if kind == 0x81 { 0 } else { 0xa8 }, 0, 5, 8, 0]].concat()).unwrap()
    };
    assert_eq!(route(&table, UPLINK, &tagged(0x81)), Ok(vec![1]));
    assert_eq!(route(&table, UPLINK, &tagged(0x88)), Ok(vec![2]));
}

#[test]
fn groups_and_modes_end_at_a_vlan() {
    let (a, b) = (port_vlan(100, VlanProtocol::Customer), port_vlan(200, VlanProtocol::Customer));
    let groups = [GROUP];
    let ports = [
        PortSpec::uplink(true),
        PortSpec { multicast: &groups, ..spec(Role::Vf, 1, &a) },
        PortSpec { multicast: &groups, ..spec(Role::Vf, 2, &b) },
        PortSpec { all_unicast: true, all_multicast: true, ..spec(Role::Vf, 3, &a) },
    ];
    let table = Table::new(SwitchMode::Veb, &ports, None);
    let from = |to, id| route(&table, UPLINK, &head(FAR, to, &[id]));
    assert_eq!((from(GROUP, 100), from(GROUP, 200)), (Ok(vec![1, 3]), Ok(vec![2])));
    assert_eq!((from(FAR, 100), from(FAR, 200)), (Ok(vec![3]), Err(Miss::Unknown)));
}

#[test]
fn a_mirror_does_not_leave_the_vlan() {
    let (a, b) = (port_vlan(100, VlanProtocol::Customer), port_vlan(200, VlanProtocol::Customer));
    let copies = |policy| {
        let ports = [PortSpec { mirror: Some(1), ..spec(Role::Vf, 0, &a) }, spec(Role::Vf, 1, policy)];
        Table::new(SwitchMode::Veb, &ports, None).mirror(0, &head(mac(0), FAR, &[100]))
    };
    assert_eq!((copies(&a), copies(&b)), (Some(1), None));
}

#[test]
fn one_address_may_be_in_several_vlans() {
    let (a, b) = (port_vlan(100, VlanProtocol::Customer), port_vlan(200, VlanProtocol::Customer));
    let virtual_mac = [0, 0, 0x5e, 0, 1, 1];
    let vf = |port, policy| PortSpec { current: virtual_mac, ..spec(Role::Vf, port, policy) };
    let ports = [PortSpec::uplink(true), vf(1, &a), vf(2, &b)];
    let table = Table::new(SwitchMode::Veb, &ports, None);
    let from = |id| route(&table, UPLINK, &head(FAR, virtual_mac, &[id]));
    assert_eq!((from(100), from(200), from(300)), (Ok(vec![1]), Ok(vec![2]), Err(Miss::Unknown)));
    assert_eq!((table.conflicts(1), table.conflicts(2)), (0, 0));
}
