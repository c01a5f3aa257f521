//! Properties that hold for any ports and frames.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::frames::policy::{PortVlan, Trunk, VlanProtocol, VlanSet};

/// A port and the data that its description refers to.
#[derive(Debug, Clone)]
struct Given {
    role: Role,
    open: bool,
    policy: Policy,
    current: Mac,
    unicast: Vec<Mac>,
    multicast: Vec<Mac>,
    modes: [bool; 3],
    mirror: Option<PortIndex>,
}

impl Given {
    fn spec(&self) -> PortSpec<'_> {
        let Self {
            role,
            open,
            policy,
            current,
            unicast,
            multicast,
            modes: [all_unicast, all_multicast, isolated],
            mirror,
        } = self;
        if *role == Role::Uplink {
            return PortSpec::uplink(*open);
        }
        PortSpec {
            role: *role,
            open: *open,
            policy,
            current: *current,
            unicast,
            multicast,
            all_unicast: *all_unicast,
            all_multicast: *all_multicast,
            isolated: *isolated,
            mirror: *mirror,
        }
    }

    /// By the policy itself.
    fn is_member(&self, head: &Head) -> bool {
        self.role == Role::Uplink || self.policy.egress(head).is_ok()
    }
}

/// A few addresses, so that they collide.
fn unicast_macs() -> impl Strategy<Value = Mac> {
    (0..6_u8).prop_map(|last| [2, 0, 0, 0, 0, last])
}

fn groups() -> impl Strategy<Value = Mac> {
    prop_oneof![(0..3_u8).prop_map(|last| [3, 0, 0, 0, 0, last]), Just([0x01, 0x80, 0xc2, 0, 0, 0x0e]),]
}

fn protocols() -> impl Strategy<Value = VlanProtocol> {
    prop_oneof![3 => Just(VlanProtocol::Customer), 1 => Just(VlanProtocol::Service)]
}

fn policies() -> impl Strategy<Value = Policy> {
    let port_vlan = (1..4_u16, protocols()).prop_map(|(id, protocol)| Policy {
        port_vlan: Some(PortVlan { id, priority: 0, protocol }),
        ..Policy::default()
    });
    let trunk = (prop::collection::vec(0..4_u16, 0..3), protocols()).prop_map(|(ids, protocol)| Policy {
        trunk: Some(Trunk { vlans: VlanSet::of(ids.into_iter().map(|id| id..=id)), protocol }),
        ..Policy::default()
    });
    let policy = prop_oneof![Just(Policy::default()), port_vlan, trunk];
    (policy, prop::option::of(unicast_macs()), any::<bool>()).prop_map(|(policy, address, trusted)| Policy {
        address,
        trusted,
        ..policy
    })
}

fn ports() -> impl Strategy<Value = Vec<Given>> {
    let role = prop_oneof![1 => Just(Role::Uplink), 1 => Just(Role::Pf), 6 => Just(Role::Vf)];
    let port = (
        role,
        prop::bool::weighted(0.8),
        policies(),
        unicast_macs(),
        prop::collection::vec(unicast_macs(), 0..3),
        prop::collection::vec(groups(), 0..3),
        any::<[bool; 3]>(),
        prop::option::of(0..8 as PortIndex),
    )
        .prop_map(|(role, open, policy, current, unicast, multicast, modes, mirror)| Given {
            role,
            open,
            policy,
            current,
            unicast,
            multicast,
            modes,
            mirror,
        });
    prop::collection::vec(port, 0..8).prop_map(|mut ports| {
        let uplinks = ports.iter_mut().filter(|port| port.role == Role::Uplink);
        uplinks.skip(1).for_each(|port| port.role = Role::Vf);
        ports
    })
}

fn frames() -> impl Strategy<Value = Head> {
    let destination = prop_oneof![3 => unicast_macs(), 2 => groups(), 1 => Just(BROADCAST)];
    let tag = (prop_oneof![Just([0x81, 0]), Just([0x88, 0xa8])], 0..4_u8);
    (destination, unicast_macs(), prop::collection::vec(tag, 0..3)).prop_map(|(destination, source, tags)| {
        let tags: Vec<u8> = tags.into_iter().flat_map(|([a, b], id)| [a, b, 0, id]).collect();
        Head::of(&[&destination[..], &source, &tags, &[8, 0, 0, 0]].concat()).unwrap()
    })
}

fn modes() -> impl Strategy<Value = SwitchMode> {
    prop_oneof![Just(SwitchMode::Veb), Just(SwitchMode::Vepa)]
}

fn build(mode: SwitchMode, ports: &[Given], before: Option<&Table>) -> Table {
    let specs: Vec<_> = ports.iter().map(Given::spec).collect();
    Table::new(mode, &specs, before)
}

proptest! {
    #[test]
    fn frames_go_only_where_they_may(
        mode in modes(), before in ports(), ports in ports(), from in 0..8 as PortIndex, head in frames(),
    ) {
        let before = build(mode, &before, None);
        let table = build(mode, &ports, Some(&before));
        // Only a frame in a VLAN of its sender passes its policy.
        let Some(sender) = ports.get(usize::from(from)).filter(|sender| sender.is_member(&head)) else { return Ok(()) };
        let Ok(routed) = route(&table, from, &head) else { return Ok(()) };
        prop_assert_eq!(routed.iter().collect::<HashSet<_>>().len(), routed.len(), "none twice");
        let first_uplink = ports.iter().position(|port| port.role == Role::Uplink);
        for to in routed {
            let port = &ports[usize::from(to)];
            prop_assert!(to != from, "back to its sender");
            prop_assert!(port.open, "to a closed port");
            prop_assert!(port.is_member(&head), "out of its VLAN");
            let isolated = sender.spec().isolated || port.spec().isolated;
            prop_assert!(!isolated || sender.role != Role::Vf || port.role != Role::Vf);
            let is_first = first_uplink == Some(usize::from(to));
            prop_assert!(port.role != Role::Uplink || sender.role != Role::Uplink && is_first);
            prop_assert!(mode == SwitchMode::Veb || sender.role == Role::Uplink || port.role == Role::Uplink);
            prop_assert!(port.role != Role::Vf || !is_reserved(&head.destination()));
            let takes_all = port.policy.trusted && port.modes[0];
            if port.role != Role::Uplink && !is_multicast(&head.destination()) && !takes_all {
                let has = port.spec().addresses().any(|(mac, _)| mac == head.destination());
                prop_assert!(has, "an address that it does not have");
            }
        }
        if let Some(copy) = table.mirror(from, &head) {
            let port = &ports[usize::from(copy)];
            prop_assert!(copy != from && port.open && port.is_member(&head) && sender.mirror == Some(copy));
        }
    }

    /// Every function that has an address gets its frames, or another function does and a conflict is counted.
    #[test]
    fn an_address_is_never_lost(ports in ports(), head in frames()) {
        let ports: Vec<_> = [Given { role: Role::Uplink, open: true, ..uplink() }].into_iter()
            .chain(ports.into_iter().filter(|port| port.role != Role::Uplink)).collect();
        let table = build(SwitchMode::Veb, &ports, None);
        let claims: Vec<_> = (0..).zip(&ports).skip(1).filter(|(_, port)| {
            port.is_member(&head) && port.spec().addresses().any(|(mac, _)| mac == head.destination())
        }).map(|(number, _): (PortIndex, _)| number).collect();
        if is_multicast(&head.destination()) {
            return Ok(());
        }
        let owner = match table.route(0, &head) {
            Ok(Route::One(port)) | Err(Miss::Closed(port)) => Some(port),
            _ => None,
        };
        prop_assert_eq!(owner.is_some(), !claims.is_empty());
        prop_assert!(owner.is_none_or(|owner| claims.contains(&owner)));
        for loser in claims.into_iter().filter(|claim| Some(*claim) != owner) {
            prop_assert!(table.conflicts(loser) > 0);
        }
    }

    /// The same ports have the same owners again, however often the table is rebuilt.
    #[test]
    fn a_table_of_the_same_ports_is_the_same(first in ports(), ports in ports(), head in frames()) {
        let first = build(SwitchMode::Veb, &first, None);
        let second = build(SwitchMode::Veb, &ports, Some(&first));
        let third = build(SwitchMode::Veb, &ports, Some(&second));
        for from in 0..8 {
            prop_assert_eq!(route(&second, from, &head), route(&third, from, &head));
            prop_assert_eq!(second.conflicts(from), third.conflicts(from));
        }
    }
}

fn uplink() -> Given {
    Given {
        role: Role::Uplink,
        open: true,
        policy: Policy::default(),
        current: [0; 6],
        unicast: Vec::new(),
        multicast: Vec::new(),
        modes: [false; 3],
        mirror: None,
    }
}
