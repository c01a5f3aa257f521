//! Flow rules, as `ethtool -N` and `tc` of the PF's driver make them, and the frames that they match.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{MAC, PF, effects, nic, peek, read, stored, write};
use x550::{Counter, FlowAction, Key, Model, Nic, NicState, RestoreError};

const FDIRCTRL: u64 = 0xee00;
const FDIRHASH: u64 = 0xee28;
const FDIRCMD: u64 = 0xee2c;
const FDIRFREE: u64 = 0xee38;
const FDIRM: u64 = 0xee70;
/// Perfect filters in 64 KiB, with drop queue 127 and the frame's type as flexible bytes.
const PERFECT: u32 = 1 | 1 << 4 | 127 << 8 | 6 << 16 | 10 << 24 | 4 << 28;
/// Add, with update, last and queue.
const ADD: u32 = 1 | 1 << 3 | 1 << 11 | 1 << 15;
const UDP: u32 = 1 << 5;
const TCP: u32 = 2 << 5;
const SCTP: u32 = 3 << 5;
/// VLAN, priority, pool, flexible bytes and IPv6 destination are not compared.
const ALL_BUT_PROTOCOL: u32 = 0x37;

fn set_up(nic: &mut Nic) {
    write(nic, PF, FDIRCTRL, PERFECT);
    mask(nic, ALL_BUT_PROTOCOL, [0, 0], u32::MAX);
}

fn ready() -> Nic {
    let mut nic = nic();
    set_up(&mut nic);
    nic
}

/// FDIRM, masked bits of both addresses, and of the ports of all protocols.
fn mask(nic: &mut Nic, fields: u32, [source, destination]: [u32; 2], ports: u32) {
    for (offset, value) in [(FDIRM, fields), (0xee40, source), (0xee3c, destination)] {
        write(nic, PF, offset, value);
    }
    for offset in [0xee44, 0xee48, 0xee78] {
        write(nic, PF, offset, ports);
    }
}

/// Addresses, ports and VLAN of a rule. Drivers write addresses in the order of the wire.
#[derive(Clone, Copy)]
struct Match {
    source: [u8; 4],
    destination: [u8; 4],
    ports: [u16; 2],
    vlan: u16,
}

const ANY: Match = Match { source: [10, 0, 0, 1], destination: [10, 0, 0, 2], ports: [1000, 80], vlan: 0 };

fn add(nic: &mut Nic, id: u32, rule: Match, command: u32) {
    let [from, to] = rule.ports.map(u32::from);
    for (offset, value) in [
        (0xee18, u32::from_le_bytes(rule.source)),
        (0xee1c, u32::from_le_bytes(rule.destination)),
        (0xee20, to << 16 | from),
        (0xee24, rule.vlan.into()),
        (FDIRHASH, id << 16 | id & 0x1fff),
    ] {
        write(nic, PF, offset, value);
    }
    assert!(effects(nic, PF, FDIRCMD, command).steering);
    assert_eq!(read(nic, PF, FDIRCMD) & 3, 0, "the command ended");
}

fn queue(queue: u32) -> u32 {
    ADD | queue << 16
}

/// A frame of a protocol, with a tag if `vlan` is not 0.
fn frame(rule: Match, protocol: u8) -> Vec<u8> {
    let mut frame = vec![2; 12];
    if rule.vlan != 0 {
        frame.extend([0x81, 0]);
        frame.extend(rule.vlan.to_be_bytes());
    }
    frame.extend([8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0]);
    frame.extend(rule.source);
    frame.extend(rule.destination);
    frame.extend(rule.ports.into_iter().flat_map(u16::to_be_bytes));
    frame
}

fn action(nic: &Nic, rule: Match, protocol: u8) -> Option<FlowAction> {
    nic.flows().match_frame(&Key::of(&frame(rule, protocol)).unwrap())
}

/// X23: flow director.
#[test]
fn a_rule_sends_its_frames_to_a_queue_or_drops_them() {
    for (command, expected) in [
        (queue(8), Some(FlowAction::Queue(8))),
        (queue(127), Some(FlowAction::Queue(127))),
        (queue(127) | 1 << 9, Some(FlowAction::Drop)),
        (queue(8) & !(1 << 15), None),
    ] {
        let mut nic = ready();
        mask(&mut nic, ALL_BUT_PROTOCOL, [0, 0], 0);
        add(&mut nic, 3, ANY, command | TCP);
        assert_eq!(action(&nic, ANY, 6), expected, "{command:#x}");
        assert_eq!(action(&nic, ANY, 17), None, "another protocol");
        assert!(nic.flows().matched(&Key::of(&frame(ANY, 6)).unwrap()).is_some());
    }
}

/// X23: flow director.
/// Field that differs: masked or not, x matches.
#[test]
fn each_mask_removes_its_field_from_the_comparison() {
    let other = |change: fn(&mut Match)| {
        let mut rule = Match { vlan: 0x2007, ..ANY };
        change(&mut rule);
        rule
    };
    let none = (0x34, [0, 0], 0);
    for (what, differs, masked) in [
        ("source", other(|rule| rule.source = [10, 0, 1, 1]), (0x34, [0x00ff_0000, 0], 0)),
        ("destination", other(|rule| rule.destination = [10, 0, 0, 7]), (0x34, [0, 0xff00_0000], 0)),
        ("source port", other(|rule| rule.ports = [1001, 80]), (0x34, [0, 0], 0x0000_8000)),
        ("destination port", other(|rule| rule.ports = [1000, 81]), (0x34, [0, 0], 0x8000_0000)),
        ("VLAN", other(|rule| rule.vlan = 0x2008), (0x35, [0, 0], 0)),
        ("priority", other(|rule| rule.vlan = 0x4007), (0x36, [0, 0], 0)),
    ] {
        for (protocol, command) in [(6, TCP), (17, UDP), (132, SCTP)] {
            for ((fields, addresses, ports), expected) in [(none, None), (masked, Some(FlowAction::Queue(4)))] {
                let mut nic = ready();
                mask(&mut nic, fields, addresses, ports);
                add(&mut nic, 0, Match { vlan: 0x2007, ..ANY }, queue(4) | command);
                assert_eq!(action(&nic, differs, protocol), expected, "{what} {protocol}");
                assert!(action(&nic, Match { vlan: 0x2007, ..ANY }, protocol).is_some(), "{what} {protocol}");
                assert!(action(&nic, Match { vlan: 0x3007, ..ANY }, protocol).is_some(), "DEI is never compared");
            }
        }
    }
}

#[test]
fn the_protocol_is_compared_unless_it_is_masked() {
    for (fields, expected) in [(0x37, None), (0x3f, Some(FlowAction::Queue(4)))] {
        let mut nic = ready();
        mask(&mut nic, fields, [0, 0], u32::MAX);
        add(&mut nic, 0, ANY, queue(4) | UDP);
        assert_eq!([6, 132, 1].map(|protocol| action(&nic, ANY, protocol)), [expected; 3], "{fields:#x}");
        assert!(action(&nic, ANY, 17).is_some());
    }
}

#[test]
fn flexible_bytes_are_the_type_of_the_frame() {
    for (bytes, offset, expected) in
        [([8, 0], 6, Some(FlowAction::Queue(4))), ([8, 6], 6, None), ([8, 0], 7, None), ([0, 0], 0, None)]
    {
        let mut nic = nic();
        write(&mut nic, PF, FDIRCTRL, PERFECT & !(0x1f << 16) | offset << 16);
        mask(&mut nic, 0x27, [0, 0], u32::MAX);
        write(&mut nic, PF, 0xee24, u32::from(u16::from_le_bytes(bytes)) << 16);
        for (offset, value) in [(0xee18, 0x0100_000a), (0xee1c, 0x0200_000a), (FDIRCMD, queue(4) | TCP)] {
            write(&mut nic, PF, offset, value);
        }
        assert_eq!(action(&nic, ANY, 6), expected, "{bytes:?} {offset}");
    }
}

#[test]
fn a_pool_is_compared_unless_it_is_masked() {
    let mut nic = ready();
    mask(&mut nic, ALL_BUT_PROTOCOL & !4, [0, 0], u32::MAX);
    add(&mut nic, 0, ANY, queue(4) | TCP | 5 << 24);
    let key = Key::of(&frame(ANY, 6)).unwrap();
    let of = |nic: &Nic| [0, 4, 5, 63].map(|pool| nic.flows().match_frame(&key.in_pool(pool)).is_some());
    assert_eq!(of(&nic), [false, false, true, false]);
    write(&mut nic, PF, FDIRM, ALL_BUT_PROTOCOL);
    assert_eq!(of(&nic), [true; 4]);
}

#[test]
fn rules_for_ipv6_match_nothing() {
    let mut nic = ready();
    add(&mut nic, 0, ANY, queue(4) | TCP | 1 << 7);
    assert_eq!((action(&nic, ANY, 6), nic.flow_rules()), (None, 1));
}

#[test]
fn a_query_says_whether_a_rule_exists() {
    let mut nic = ready();
    add(&mut nic, 7, ANY, queue(4) | TCP);
    write(&mut nic, PF, FDIRHASH, 7 << 16 | 7);
    assert_eq!(stored(&mut nic, PF, FDIRCMD, 3) & 0x007f_0007, 4 << 16 | 4, "valid, with its queue");
    for hash in [8 << 16 | 7, 7 << 16 | 8] {
        write(&mut nic, PF, FDIRHASH, hash);
        assert_eq!(stored(&mut nic, PF, FDIRCMD, 3) & 7, 0, "{hash:#x}");
    }
    assert!(effects(&mut nic, PF, FDIRCMD, 3).is_none());
}

#[test]
fn a_removed_rule_matches_no_more() {
    let mut nic = ready();
    add(&mut nic, 7, ANY, queue(4) | TCP);
    let before = nic.flows();
    write(&mut nic, PF, FDIRHASH, 7 << 16 | 7);
    assert!(effects(&mut nic, PF, FDIRCMD, 2).steering);
    assert_eq!((action(&nic, ANY, 6), nic.flow_rules()), (None, 0));
    assert!(before.match_frame(&Key::of(&frame(ANY, 6)).unwrap()).is_some(), "a value stays as it is");
    assert_eq!(read(&mut nic, PF, 0xee50), 1 << 16 | 1, "FDIRUSTAT: added, removed");
    assert_eq!(read(&mut nic, PF, 0xee50), 0, "cleared by the read");
    write(&mut nic, PF, FDIRCMD, 2);
    assert_eq!(read(&mut nic, PF, 0xee54), 1 << 8, "FDIRFSTAT: not removed");
}

#[test]
fn the_lowest_index_wins_among_equal_rules() {
    let mut nic = ready();
    for (id, to) in [(5, 50), (3, 30), (9, 90)] {
        add(&mut nic, id, ANY, queue(to) | TCP);
    }
    for (id, expected) in [(9, 30), (3, 50)] {
        write(&mut nic, PF, FDIRHASH, id << 16 | id);
        write(&mut nic, PF, FDIRCMD, 2);
        assert_eq!(action(&nic, ANY, 6), Some(FlowAction::Queue(expected)), "without {id}");
    }
    add(&mut nic, 5, ANY, queue(51) | TCP);
    assert_eq!((action(&nic, ANY, 6), nic.flow_rules()), (Some(FlowAction::Queue(51)), 1), "updated");
}

/// X23: flow director.
#[test]
fn at_most_2048_rules_have_room() {
    let mut nic = ready();
    assert_eq!(read(&mut nic, PF, FDIRFREE), 2048);
    for id in 0..2049 {
        add(&mut nic, id, Match { ports: [u16::try_from(id).unwrap(), 0], ..ANY }, queue(4) | TCP);
    }
    assert_eq!((nic.flow_rules(), read(&mut nic, PF, FDIRFREE)), (2048, 0));
    assert_eq!((read(&mut nic, PF, 0xee54), read(&mut nic, PF, 0xee50)), (1, 2048), "one failed");
    add(&mut nic, 2047, ANY, queue(9) | TCP);
    assert_eq!(nic.flow_rules(), 2048, "replaced");
    assert_eq!(read(&mut nic, PF, 0xee4c), 1, "FDIRLEN: one rule in bucket 0");
    let state = nic.save();
    let mut other = Nic::new(MAC);
    other.restore(&state).unwrap();
    assert_eq!((other.save(), other.flows()), (state.clone(), nic.flows()));
    let mut more = state.clone();
    more.rules.push([0x0900_0000, 0, 0, 0, 0, 0]);
    assert_eq!(other.restore(&more), Err(RestoreError::Value("flow rules")));
}

#[test]
fn the_longest_list_has_its_length_and_bucket() {
    let mut nic = ready();
    for id in 0..70u32 {
        write(&mut nic, PF, FDIRHASH, id << 16 | 5);
        write(&mut nic, PF, FDIRCMD, queue(1) | TCP);
        assert_eq!(peek(&nic, PF, 0xee4c), 5 << 16 | (id + 1).min(63));
    }
}

#[test]
fn rules_end_with_their_table() {
    for (offset, value) in [(FDIRCTRL, PERFECT), (FDIRCMD, 1 << 8), (0, 1 << 26), (0, 1 << 3)] {
        let mut nic = ready();
        add(&mut nic, 7, ANY, queue(4) | TCP);
        assert!(effects(&mut nic, PF, offset, value).steering);
        assert_eq!((action(&nic, ANY, 6), nic.flow_rules()), (None, 0), "{offset:#x}");
    }
    let mut nic = ready();
    add(&mut nic, 7, ANY, queue(4) | TCP);
    assert!(nic.reset().steering && nic.flow_rules() == 0);
}

#[test]
fn only_perfect_filters_with_memory_are_rules() {
    for (control, active) in [
        (PERFECT, true),
        (PERFECT & !(1 << 4), false),
        (PERFECT & !3, false),
        (PERFECT | 1 << 21, false),
        (PERFECT | 2 << 21, false),
        (PERFECT | 3, true),
    ] {
        let mut nic = nic();
        write(&mut nic, PF, FDIRCTRL, control);
        add(&mut nic, 7, ANY, queue(4) | TCP);
        assert_eq!((nic.flows().is_active(), nic.flow_rules() == 1), (active, active), "{control:#x}");
        assert_eq!(nic.flows().is_empty(), !active);
        assert_eq!(peek(&nic, PF, FDIRFREE), if active { 2047 } else { 0 });
    }
}

#[test]
fn a_signature_of_8_bytes_is_a_command_that_ends() {
    let mut nic = nic();
    write(&mut nic, PF, FDIRCTRL, PERFECT & !(1 << 4));
    let pair = u64::from(ADD | TCP | 3 << 16) << 32 | 0x1234_0567;
    let _ = nic.write(PF, FDIRHASH, &pair.to_le_bytes());
    assert_eq!((peek(&nic, PF, FDIRHASH), peek(&nic, PF, FDIRCMD) & 3), (0x1234_0567, 0));
    assert_eq!(nic.flow_rules(), 0);
}

#[test]
fn an_x540_does_not_compare_ports_of_sctp() {
    for (model, expected) in [(Model::X550, None), (Model::X540, Some(FlowAction::Queue(4)))] {
        let mut nic = Nic::with_model(model, MAC);
        set_up(&mut nic);
        mask(&mut nic, ALL_BUT_PROTOCOL, [0, 0], 0);
        add(&mut nic, 0, ANY, queue(4) | SCTP);
        assert_eq!(action(&nic, Match { ports: [1, 2], ..ANY }, 132), expected, "{model}");
    }
}

#[test]
fn matches_and_misses_are_counted_for_the_guest() {
    let mut nic = ready();
    nic.count(Counter::FlowMatched, 3);
    nic.count(Counter::FlowMissed, 4);
    for (offset, value) in [(0xee58, 3), (0xee5c, 4)] {
        assert_eq!([value, 0], [0; 2].map(|_| read(&mut nic, PF, offset)));
    }
}

#[test]
fn saved_rules_are_those_that_a_guest_could_have_added() {
    let mut nic = ready();
    add(&mut nic, 7, ANY, queue(4) | TCP);
    let state = nic.save();
    assert_eq!(state.rules, [[0x7_0007, 0x4_8040, 0x0100_000a, 0x0200_000a, 80 << 16 | 1000, 0]]);
    let rule = *state.rules.first().unwrap();
    let [hash, command, rest @ ..] = rule;
    let with = |hash, command| {
        let [a, b, c, d] = rest;
        [hash, command, a, b, c, d]
    };
    for rules in [
        vec![with(hash, command | 1)],
        vec![with(hash | 1 << 15, command)],
        vec![with(hash | 1 << 31, command)],
        vec![rule, rule],
        vec![rule, with(0, command)],
    ] {
        assert!(Nic::new(MAC).restore(&NicState { rules, ..state.clone() }).is_err());
    }
    let inactive = NicState { rules: state.rules.clone(), ..Nic::new(MAC).save() };
    assert_eq!(Nic::new(MAC).restore(&inactive), Err(RestoreError::Value("flow rules")));
}
