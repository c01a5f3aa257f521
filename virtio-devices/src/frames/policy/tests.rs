use std::ops::RangeInclusive;

use proptest::prelude::*;

use super::*;

const OWN: Mac = [0x52, 0x54, 0, 0, 0, 1];
const OTHER: Mac = [0x52, 0x54, 0, 0, 0, 2];
const FURTHER: Mac = [0x52, 0x54, 0, 0, 0, 3];
const GROUP: Mac = [0x01, 0, 0x5e, 0, 0, 1];
const C: [u8; 2] = [0x81, 0];
const S: [u8; 2] = [0x88, 0xa8];

/// The beginning of a frame from `source` with these tags, and an IPv4 packet.
fn frame(source: Mac, tags: &[([u8; 2], u16)]) -> Vec<u8> {
    let mut bytes = [OTHER, source].concat();
    for (kind, tag) in tags {
        bytes.extend(kind);
        bytes.extend(tag.to_be_bytes());
    }
    bytes.extend([8, 0, 0x45, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    bytes
}

fn ingress(policy: &Policy, frame: &[u8]) -> Result<Vec<u8>, Cause> {
    let head = Head::of(frame)?;
    let new = policy.ingress(&head, OWN, |mac| *mac == FURTHER)?;
    Ok([new.bytes(), frame.get(HEAD..).unwrap_or_default()].concat())
}

fn egress(policy: &Policy, frame: &[u8]) -> Result<Vec<u8>, Cause> {
    let new = policy.egress(&Head::of(frame)?)?;
    Ok([new.bytes(), frame.get(HEAD..).unwrap_or_default()].concat())
}

fn port_vlan(id: u16, priority: u8, protocol: VlanProtocol) -> Policy {
    Policy { port_vlan: Some(PortVlan { id, priority, protocol }), ..Policy::default() }
}

fn trunk(ranges: &[RangeInclusive<u16>], protocol: VlanProtocol) -> Policy {
    Policy { trunk: Some(Trunk { vlans: VlanSet::of(ranges.iter().cloned()), protocol }), ..Policy::default() }
}

#[test]
fn without_a_policy_nothing_is_looked_at() {
    let open = Policy::default();
    assert!(open.is_open() && !open.checks_sent() && !open.checks_received());
    let closed: [Policy; 6] = [
        Policy { trusted: false, ..open.clone() },
        Policy { spoof_check: true, ..open.clone() },
        Policy { storm: NonZeroU32::new(1), ..open.clone() },
        Policy { max_tx_rate: NonZeroU32::new(1), ..open.clone() },
        port_vlan(1, 0, VlanProtocol::Customer),
        trunk(&[1..=1], VlanProtocol::Customer),
    ];
    assert!(closed.iter().all(|policy| !policy.is_open()));
    assert!(Policy { address: Some(OWN), ..open }.is_open(), "an address by itself asks for nothing");
}

#[test]
fn a_source_must_be_the_functions_own_and_never_a_group() {
    let fixed = Policy { spoof_check: true, trusted: false, address: Some(FURTHER), ..Policy::default() };
    let current = Policy { address: None, ..fixed.clone() };
    let trusted = Policy { trusted: true, ..fixed.clone() };
    let off = Policy { trusted: false, ..Policy::default() };
    let passes = |policy: &Policy, source| ingress(policy, &frame(source, &[])).is_ok();
    let sources = [OWN, OTHER, FURTHER, GROUP, [0xff; 6]];
    for (policy, expected) in [
        (&fixed, [false, false, true, false, false]),
        (&current, [true, false, false, false, false]),
        (&trusted, [true, false, true, false, false]),
        (&off, [true, true, true, false, false]),
    ] {
        assert_eq!(sources.map(|source| passes(policy, source)), expected, "{policy:?}");
    }
    assert_eq!(ingress(&fixed, &frame(OTHER, &[])), Err(Cause::SpoofedAddress));
}

#[test]
fn groups_of_bridges_are_closed_to_who_is_not_trusted() {
    let untrusted = Policy { trusted: false, ..Policy::default() };
    let to = |last: u8| {
        let mut bytes = frame(OWN, &[]);
        bytes[..6].copy_from_slice(&[0x01, 0x80, 0xc2, 0, 0, last]);
        bytes
    };
    for (last, passes) in [(0x00, false), (0x03, false), (0x0e, false), (0x0f, false), (0x10, true), (0x21, true)] {
        assert_eq!(ingress(&untrusted, &to(last)).is_ok(), passes, "{last:#x}");
        assert!(ingress(&Policy::default(), &to(last)).is_ok());
    }
    assert_eq!(ingress(&untrusted, &to(0)), Err(Cause::ReservedGroup));
}

#[test]
fn port_vlan_is_added_on_ingress_and_removed_on_egress() {
    let policy = port_vlan(100, 3, VlanProtocol::Customer);
    let tagged = frame(OWN, &[(C, 0x6064)]);
    assert_eq!(ingress(&policy, &frame(OWN, &[])), Ok(tagged.clone()));
    assert_eq!(ingress(&policy, &frame(OWN, &[(C, 0xe000)])), Ok(tagged.clone()), "a priority is replaced");
    assert_eq!(egress(&policy, &tagged), Ok(frame(OWN, &[])));
    assert_eq!(egress(&policy, &frame(OWN, &[(C, 100), (C, 7)])), Ok(frame(OWN, &[(C, 7)])));
    for priorities in [&[(S, 0)][..], &[(C, 0), (S, 0xe000)], &[(S, 0), (C, 0), (C, 0)]] {
        assert_eq!(ingress(&policy, &frame(OWN, priorities)), Ok(tagged.clone()), "{priorities:?}");
    }
    for sent in [&[(C, 100)][..], &[(C, 5)], &[(S, 100)], &[(C, 0), (C, 5)], &[(C, 0), (S, 0), (C, 100)]] {
        assert_eq!(ingress(&policy, &frame(OWN, sent)), Err(Cause::BadVlan), "{sent:?}");
    }
    assert_eq!(egress(&policy, &frame(OWN, &[(C, 0), (C, 100)])), Ok(frame(OWN, &[])));
    assert_eq!(egress(&policy, &frame(OWN, &[(S, 0), (C, 0), (C, 100), (C, 7)])), Ok(frame(OWN, &[(C, 7)])));
    for received in [&[][..], &[(C, 0)], &[(C, 101)], &[(S, 100)], &[(S, 100), (C, 100)], &[(C, 0), (C, 101)]] {
        assert_eq!(egress(&policy, &frame(OWN, received)), Err(Cause::OtherVlan), "{received:?}");
    }
}

#[test]
fn a_providers_vlan_goes_before_any_tag() {
    let policy = port_vlan(100, 0, VlanProtocol::Service);
    for tags in [&[][..], &[(C, 5)], &[(C, 0)], &[(C, 0), (C, 5)], &[(S, 7)], &[(S, 7), (C, 5)], &[(C, 0); 5]] {
        let outer: Vec<_> = [(S, 100)].iter().chain(tags).copied().collect();
        assert_eq!(ingress(&policy, &frame(OWN, tags)), Ok(frame(OWN, &outer)), "{tags:?}");
        assert_eq!(egress(&policy, &frame(OWN, &outer)), Ok(frame(OWN, tags)), "{tags:?}");
    }
    assert_eq!(egress(&policy, &frame(OWN, &[(C, 100)])), Err(Cause::OtherVlan));
}

#[test]
fn a_trunk_lets_its_vlans_through_in_both_directions() {
    let policy = trunk(&[10..=10, 20..=29], VlanProtocol::Customer);
    let cases = [
        (&[(C, 10)][..], true),
        (&[(C, 0xe014)], true),
        (&[(C, 29), (C, 99)], true),
        (&[(C, 30)], false),
        (&[], false),
        (&[(C, 0)], false),
        (&[(S, 10)], false),
        (&[(S, 0)], false),
    ];
    for (tags, passes) in cases {
        let frame = frame(OWN, tags);
        assert_eq!(ingress(&policy, &frame), if passes { Ok(frame.clone()) } else { Err(Cause::BadVlan) }, "{tags:?}");
        assert_eq!(egress(&policy, &frame), if passes { Ok(frame.clone()) } else { Err(Cause::OtherVlan) });
    }
    let native = trunk(&[0..=0], VlanProtocol::Customer);
    assert!(ingress(&native, &frame(OWN, &[])).is_ok() && ingress(&native, &frame(OWN, &[(C, 0xe000)])).is_ok());
    assert!(ingress(&native, &frame(OWN, &[(C, 1)])).is_err() && ingress(&native, &frame(OWN, &[(S, 1)])).is_err());
    let service = trunk(&[10..=10], VlanProtocol::Service);
    assert!(ingress(&service, &frame(OWN, &[(S, 10)])).is_ok() && ingress(&service, &frame(OWN, &[(C, 10)])).is_err());
}

/// Every stack of one, two and three tags of both kinds: a priority (0), a VLAN that the function has (10), and one
/// that it lacks (11).
fn stacks() -> Vec<Vec<([u8; 2], u16)>> {
    let tags: Vec<_> = [C, S].into_iter().flat_map(|kind| [0xe000, 10, 11].map(|tag| (kind, tag))).collect();
    let one: Vec<_> = tags.iter().map(|tag| vec![*tag]).collect();
    let longer = |stacks: &[Vec<([u8; 2], u16)>]| -> Vec<_> {
        stacks.iter().flat_map(|stack| tags.iter().map(|tag| [&stack[..], &[*tag]].concat())).collect()
    };
    let two = longer(&one);
    let three = longer(&two);
    [one, two, three].concat()
}

#[test]
fn the_first_tag_that_is_no_priority_decides() {
    assert_eq!(stacks().len(), 6 + 36 + 216);
    let (native, own) = (trunk(&[0..=0], VlanProtocol::Customer), trunk(&[10..=10], VlanProtocol::Customer));
    let provider = trunk(&[0..=0, 10..=10], VlanProtocol::Service);
    for stack in stacks() {
        let sent = frame(OWN, &stack);
        let vlan = stack.iter().position(|(_, tag)| tag & 0xfff != 0);
        let plain = frame(OWN, &stack[vlan.unwrap_or(0)..]);
        let found = vlan.map(|at| stack[at]);
        let expect = |policy: &Policy, passes: bool| {
            assert_eq!(ingress(policy, &sent), passes.then(|| plain.clone()).ok_or(Cause::BadVlan), "{stack:?}");
            assert_eq!(egress(policy, &sent), passes.then(|| plain.clone()).ok_or(Cause::OtherVlan), "{stack:?}");
        };
        expect(&native, found.is_none());
        expect(&own, found == Some((C, 10)));
        expect(&provider, found.is_none_or(|found| found == (S, 10)));
        let head = Head::of(&sent).unwrap();
        assert_eq!(head.vlan().map(|(_, id)| id), found.map(|(_, id)| id), "{stack:?}");
        assert_eq!(Policy::default().ingress(&head, OWN, |_| false).unwrap().bytes(), &sent[..HEAD.min(sent.len())]);
    }
}

/// A stack with more priority tags than are inspected may hide any VLAN.
#[test]
fn a_vlan_beyond_the_tags_that_are_read_is_in_none() {
    for hidden in [&[][..], &[(C, 10)]] {
        for priorities in 0..=TAGS + 2 {
            let stack = [&vec![(C, 0); priorities][..], hidden].concat();
            let passes = stack.len() <= TAGS;
            let sent = frame(OWN, &stack);
            for policy in [trunk(&[0..=MAX_VLAN], VlanProtocol::Customer), port_vlan(10, 0, VlanProtocol::Customer)] {
                let sends = passes && (policy.trunk.is_some() || hidden.is_empty());
                assert_eq!(ingress(&policy, &sent).is_ok(), sends, "{stack:?}");
                let receives = passes && (policy.trunk.is_some() || !hidden.is_empty());
                assert_eq!(egress(&policy, &sent).is_ok(), receives, "{stack:?}");
            }
            assert_eq!(ingress(&Policy { spoof_check: true, ..Policy::default() }, &sent), Ok(sent), "no VLAN rule");
        }
    }
}

#[test]
fn tags_of_old_types_are_in_no_vlan_that_a_policy_lets_through() {
    for kind in [[0x91, 0], [0x92, 0], [0x93, 0]] {
        for stack in [&[(kind, 10)][..], &[(C, 0), (kind, 10)]] {
            let sent = frame(OWN, stack);
            for policy in [trunk(&[0..=MAX_VLAN], VlanProtocol::Customer), port_vlan(10, 0, VlanProtocol::Customer)] {
                assert_eq!(ingress(&policy, &sent), Err(Cause::BadVlan), "{stack:x?}");
                assert_eq!(egress(&policy, &sent), Err(Cause::OtherVlan), "{stack:x?}");
            }
            assert_eq!(ingress(&Policy::default(), &sent), Ok(sent));
        }
        let inside = frame(OWN, &[(C, 10), (kind, 10)]);
        assert_eq!(ingress(&trunk(&[10..=10], VlanProtocol::Customer), &inside), Ok(inside), "within a VLAN");
    }
}

#[test]
fn a_set_has_no_id_that_no_frame_can_have() {
    let all = VlanSet::of([0..=u16::MAX]);
    assert!((0..=MAX_VLAN).all(|id| all.contains(id)));
    assert!(!all.contains(4095) && !all.contains(4096) && !all.contains(u16::MAX));
    assert!(!VlanSet::of([]).contains(0));
}

#[test]
fn a_tag_that_is_cut_off_is_no_tag() {
    let whole = frame(OWN, &[(C, 5), (C, 6)]);
    for (len, ok) in [(0, false), (13, false), (14, false), (17, false), (18, false), (21, false), (22, true)] {
        assert_eq!(Head::of(&whole[..len]).is_ok(), ok, "{len}");
    }
    assert_eq!(Head::of(&frame(OWN, &[])[..14]).map(|head| head.header_len()), Ok(14));
    assert_eq!(Head::of(&whole).map(|head| head.header_len()), Ok(22));
}

mod offloads {
    use super::*;
    use crate::frames::net_protocol::header::BadHeader;

    const CSUM: u8 = 1;

    fn header(flags: u8, gso: u8, hdr_len: u16, csum_start: u16) -> [u8; 12] {
        let ([a, b], [c, d]) = (hdr_len.to_le_bytes(), csum_start.to_le_bytes());
        [flags, gso, a, b, 100, 0, c, d, 16, 0, 0, 0]
    }

    fn push(tags: &[([u8; 2], u16)]) -> NewHead {
        Head::of(&frame(OWN, tags)).unwrap().pushed([0x88, 0xa8, 0, 5])
    }

    #[test]
    fn offsets_move_with_the_tags() {
        assert_eq!(changed(header(CSUM, 1, 54, 34), &push(&[])), Ok(header(CSUM, 1, 58, 38)));
        let pop = Head::of(&frame(OWN, &[(C, 5)])).unwrap().taken_out();
        assert_eq!(changed(header(CSUM, 1, 58, 38), &pop), Ok(header(CSUM, 1, 54, 34)));
        let same = Head::of(&frame(OWN, &[])).unwrap().unchanged();
        assert_eq!(changed(header(CSUM, 1, 54, 34), &same), Ok(header(CSUM, 1, 54, 34)));
        // Fields of unused offloads are ignored.
        assert_eq!(changed(header(0, 0, 54, 34), &push(&[])), Ok(header(0, 0, 54, 34)));
        assert_eq!(changed(header(0, 1, 0, 0), &push(&[])), Ok(header(0, 1, 0, 0)), "no hint");
        assert_eq!(push(&[]).new_len(60), 64);
        assert_eq!((pop.new_len(64), same.new_len(60)), (60, 60));
        let two = Head::of(&frame(OWN, &[(S, 0), (C, 5)])).unwrap().taken_out();
        assert_eq!(changed(header(CSUM, 1, 62, 42), &two), Ok(header(CSUM, 1, 54, 34)));
        assert_eq!(two.new_len(68), 60);
    }

    /// Linux writes the checksum at `csum_start` + `csum_offset` after the policy has inspected the frame.
    #[test]
    fn a_checksum_does_not_reach_what_was_checked() {
        for (tags, least) in [(&[][..], 14), (&[(C, 5)], 18), (&[(C, 5), (C, 6)], 22)] {
            let head = Head::of(&frame(OWN, tags)).unwrap().unchanged();
            for start in 0..least {
                assert_eq!(changed(header(CSUM, 0, 0, start), &head), Err(BadHeader), "{tags:?} {start}");
            }
            assert!(changed(header(CSUM, 0, 0, least), &head).is_ok());
        }
        assert_eq!(changed(header(CSUM, 0, 0, 65_532), &push(&[])), Err(BadHeader), "beyond any frame");
        assert_eq!(changed(header(0, 1, 65_535, 0), &push(&[])), Err(BadHeader));
        let popped = Head::of(&frame(OWN, &[(C, 0), (C, 5)])).unwrap().taken_out();
        assert_eq!(changed(header(CSUM, 0, 0, 21), &popped), Err(BadHeader), "among the tags");
    }
}

fn protocols() -> impl Strategy<Value = VlanProtocol> {
    prop_oneof![Just(VlanProtocol::Customer), Just(VlanProtocol::Service)]
}

fn policies() -> impl Strategy<Value = Policy> {
    let vlan =
        (1..=MAX_VLAN, 0..8_u8, protocols()).prop_map(|(id, priority, protocol)| PortVlan { id, priority, protocol });
    let vlans = prop::collection::vec((0..20_u16, 0..20_u16), 0..4);
    let trunk = (vlans, protocols())
        .prop_map(|(ranges, protocol)| Trunk { vlans: VlanSet::of(ranges.into_iter().map(|(a, b)| a..=b)), protocol });
    (prop::option::of(vlan), prop::option::of(trunk), any::<[bool; 3]>()).prop_map(
        |(port_vlan, trunk, [spoof_check, trusted, given])| Policy {
            address: given.then_some(FURTHER),
            port_vlan,
            trunk,
            spoof_check,
            trusted,
            ..Policy::default()
        },
    )
}

/// Frames that often have tags and known addresses.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let source = prop_oneof![Just(OWN), Just(OTHER), Just(FURTHER), Just(GROUP), any::<Mac>()];
    let tag = (prop_oneof![Just(C), Just(S)], prop_oneof![Just(0), 0..20_u16, any::<u16>()]);
    let made = (source, prop::collection::vec(tag, 0..7)).prop_map(|(source, tags)| frame(source, &tags));
    prop_oneof![4 => made, 1 => prop::collection::vec(any::<u8>(), 0..40)]
}

proptest! {
    /// A frame passes as it was checked: with the same addresses, and except for tags the same bytes.
    #[test]
    fn only_tags_change(policy in policies(), frame in frames()) {
        for result in [ingress(&policy, &frame), egress(&policy, &frame)].into_iter().flatten() {
            prop_assert_eq!(&result[..12], &frame[..12]);
            let removed = 4 * (frame.len() + 4).saturating_sub(result.len()).div_ceil(4);
            prop_assert!(result.len() <= frame.len() + 4 && removed <= 4 + 4 * TAGS);
            let rest = |bytes: &[u8], tags: usize| bytes.get(12 + tags..).unwrap_or_default().to_vec();
            let same = rest(&result, 4) == rest(&frame, removed)
                || removed >= 4 && rest(&result, 0) == rest(&frame, removed - 4);
            prop_assert!(same, "{frame:x?} {result:x?}");
        }
    }

    /// A frame that one function sends into its VLAN reaches another in this VLAN unchanged, except for priorities.
    #[test]
    fn a_frame_put_into_a_vlan_comes_out_as_it_was(policy in policies(), frame in frames()) {
        if let (Some(vlan), Ok(sent)) = (policy.port_vlan, ingress(&policy, &frame)) {
            let received = egress(&policy, &sent);
            let replaced = frame.len() + 4 - sent.len();
            prop_assert_eq!(received, Ok([&frame[..12], &frame[12 + replaced..]].concat()));
            let other = Policy { port_vlan: Some(PortVlan { id: vlan.id % MAX_VLAN + 1, ..vlan }), ..policy };
            prop_assert_eq!(egress(&other, &sent), Err(Cause::OtherVlan));
        }
    }

    /// No frame of an untrusted function with a spoof check has any source except the address that the host has set.
    #[test]
    fn nothing_is_sent_from_an_address_that_was_not_given(policy in policies(), frame in frames()) {
        let policy = Policy { spoof_check: true, trusted: false, address: Some(FURTHER), ..policy };
        if let Ok(sent) = ingress(&policy, &frame) {
            prop_assert_eq!(&sent[6..12], &FURTHER[..]);
        }
    }
}
