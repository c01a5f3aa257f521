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
fn a_port_vlan_is_put_on_what_is_sent_and_taken_off_what_is_received() {
    let policy = port_vlan(100, 3, VlanProtocol::Customer);
    let tagged = frame(OWN, &[(C, 0x6064)]);
    assert_eq!(ingress(&policy, &frame(OWN, &[])), Ok(tagged.clone()));
    assert_eq!(ingress(&policy, &frame(OWN, &[(C, 0xe000)])), Ok(tagged.clone()), "a priority is replaced");
    assert_eq!(egress(&policy, &tagged), Ok(frame(OWN, &[])));
    assert_eq!(egress(&policy, &frame(OWN, &[(C, 100), (C, 7)])), Ok(frame(OWN, &[(C, 7)])));
    for sent in [&[(C, 100)][..], &[(C, 5)], &[(S, 0)], &[(S, 100)], &[(C, 0), (C, 5)], &[(C, 0), (S, 0)]] {
        assert_eq!(ingress(&policy, &frame(OWN, sent)), Err(Cause::BadVlan), "{sent:?}");
    }
    for received in [&[][..], &[(C, 0)], &[(C, 101)], &[(S, 100)], &[(S, 100), (C, 100)]] {
        assert_eq!(egress(&policy, &frame(OWN, received)), Err(Cause::OtherVlan), "{received:?}");
    }
}

#[test]
fn a_providers_vlan_goes_before_any_tag() {
    let policy = port_vlan(100, 0, VlanProtocol::Service);
    for tags in [&[][..], &[(C, 5)], &[(C, 0)], &[(S, 7)], &[(S, 7), (C, 5)]] {
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
    assert_eq!(Head::of(&whole).map(|head| (head.tags(), head.header_len())), Ok((2, 22)));
}

mod offloads {
    use super::*;
    use crate::net_protocol::header::BadHeader;

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
        let pop = Head::of(&frame(OWN, &[(C, 5)])).unwrap().popped();
        assert_eq!(changed(header(CSUM, 1, 58, 38), &pop), Ok(header(CSUM, 1, 54, 34)));
        let same = Head::of(&frame(OWN, &[])).unwrap().unchanged();
        assert_eq!(changed(header(CSUM, 1, 54, 34), &same), Ok(header(CSUM, 1, 54, 34)));
        // What was not asked for means nothing.
        assert_eq!(changed(header(0, 0, 54, 34), &push(&[])), Ok(header(0, 0, 54, 34)));
        assert_eq!(changed(header(0, 1, 0, 0), &push(&[])), Ok(header(0, 1, 0, 0)), "no hint");
        assert_eq!(push(&[]).new_len(60), 64);
        assert_eq!((pop.new_len(64), same.new_len(60)), (60, 60));
    }

    /// Linux writes the checksum at `csum_start` + `csum_offset` after the policy has seen the frame.
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
    let tag = (prop_oneof![Just(C), Just(S)], prop_oneof![0..20_u16, any::<u16>()]);
    let made = (source, prop::collection::vec(tag, 0..4)).prop_map(|(source, tags)| frame(source, &tags));
    prop_oneof![4 => made, 1 => prop::collection::vec(any::<u8>(), 0..40)]
}

proptest! {
    /// What passes is what was checked: the same addresses, and but for one tag the same bytes.
    #[test]
    fn only_a_tag_changes(policy in policies(), frame in frames()) {
        for result in [ingress(&policy, &frame), egress(&policy, &frame)].into_iter().flatten() {
            prop_assert_eq!(&result[..12], &frame[..12]);
            let difference = result.len().abs_diff(frame.len());
            prop_assert!(difference == 0 || difference == 4);
            let cut = |bytes: &[u8], tag: usize| bytes.get(12 + tag..).unwrap_or_default().to_vec();
            let len = frame.len();
            match result.len() {
                more if more > len => prop_assert_eq!(cut(&result, 4), cut(&frame, 0)),
                less if less < len => prop_assert_eq!(cut(&result, 0), cut(&frame, 4)),
                _ => prop_assert_eq!(cut(&result, 4), cut(&frame, 4)),
            }
        }
    }

    /// A frame that one function sends into its VLAN reaches another in this VLAN as it was, but for a priority.
    #[test]
    fn what_is_put_into_a_vlan_comes_out_as_it_was(policy in policies(), frame in frames()) {
        if let (Some(vlan), Ok(sent)) = (policy.port_vlan, ingress(&policy, &frame)) {
            let received = egress(&policy, &sent);
            let replaced = sent.len() == frame.len();
            let expected = if replaced { [&frame[..12], &frame[16..]].concat() } else { frame };
            prop_assert_eq!(received, Ok(expected));
            let other = Policy { port_vlan: Some(PortVlan { id: vlan.id % MAX_VLAN + 1, ..vlan }), ..policy };
            prop_assert_eq!(egress(&other, &sent), Err(Cause::OtherVlan));
        }
    }

    /// No frame of an untrusted function with a spoof check has any source but the one that it was given.
    #[test]
    fn nothing_is_sent_from_an_address_that_was_not_given(policy in policies(), frame in frames()) {
        let policy = Policy { spoof_check: true, trusted: false, address: Some(FURTHER), ..policy };
        if let Ok(sent) = ingress(&policy, &frame) {
            prop_assert_eq!(&sent[6..12], &FURTHER[..]);
        }
    }
}
