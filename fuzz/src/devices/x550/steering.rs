//! Flow rules and RSS, with frames of any bytes.
//!
//! The oracle keeps the rules as a list and compares each with a frame field by field, and computes the hash of RSS bit
//! by bit, both from headers that it parses itself.

use x550::{FlowAction, Key, Model, Nic, Place, Steered};

use super::{MAC, peek, write};
use crate::input::{Input, Seed};

/// Registers of a rule: FDIRHASH, FDIRIPSA, FDIRIPDA, FDIRPORT, FDIRVLAN.
const RULE: [u64; 5] = [0xee28, 0xee18, 0xee1c, 0xee20, 0xee24];
/// FDIRM, FDIRSIP4M, FDIRDIP4M, FDIRTCPM, FDIRUDPM, FDIRSCTPM.
const MASKS: [u64; 6] = [0xee70, 0xee40, 0xee3c, 0xee44, 0xee48, 0xee78];
const PERFECT: u32 = 1 | 1 << 4 | 127 << 8 | 6 << 16;

/// A rule as it was added: identity, command, addresses, ports, tag and flexible bytes.
#[derive(Debug, Clone, Copy)]
struct Rule {
    id: u32,
    command: u32,
    fields: [u32; 4],
}

/// An IP packet: tag, first type, addresses, protocol (1 UDP, 2 TCP, 3 SCTP), ports.
#[derive(Debug)]
struct Packet<'a> {
    tag: u16,
    kind: [u8; 2],
    addresses: &'a [u8],
    protocol: u32,
    ports: &'a [u8],
}

fn parse(frame: &[u8]) -> Option<Packet<'_>> {
    let kind: [u8; 2] = frame.get(12..14)?.try_into().ok()?;
    let (tag, at) =
        if kind == [0x81, 0] { (u16::from_be_bytes(frame.get(14..16)?.try_into().ok()?), 16) } else { (0, 12) };
    let packet = frame.get(at + 2..)?;
    let (addresses, number, len) = match (frame.get(at..at + 2)?, packet.first()? >> 4) {
        ([8, 0], 4) => {
            let len = usize::from(packet[0] & 15) * 4;
            let header = packet.get(..20.max(len)).filter(|_| len >= 20)?;
            let whole = header[6] & 0x3f == 0 && header[7] == 0;
            (&header[12..20], if whole { header[9] } else { 0xff }, len)
        }
        ([0x86, 0xdd], 6) => (packet.get(8..40)?, packet[6], 40),
        _ => return None,
    };
    let protocol = match number {
        17 => 1,
        6 => 2,
        132 => 3,
        _ => 0,
    };
    let ports = if protocol == 0 { &[] } else { packet.get(len..len + 4)? };
    Some(Packet { tag, kind, addresses, protocol, ports })
}

impl Rule {
    fn matches(&self, packet: &Packet<'_>, pool: u32, nic: &Nic) -> bool {
        let get = |offset| peek(nic, Place::Pf, offset);
        let masked = get(MASKS[0]);
        let flex = get(0xee00) >> 16 & 0x1f == 6;
        if packet.addresses.len() != 8 || self.command & 1 << 7 != 0 || masked & 16 == 0 && !flex {
            return false;
        }
        let dword = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
        let [source, destination, ports, tags] = self.fields;
        let protocol = self.command >> 5 & 3;
        // Bit 15 of a port is masked by bit 0 of its half, and so on.
        let port_mask = |of: u32| match of {
            1 => get(MASKS[4]),
            2 => get(MASKS[3]),
            3 if nic.model() == Model::X550 => get(MASKS[5]),
            3 => u32::MAX,
            _ => 0,
        };
        let is_masked = |of: u32, bit: u32| port_mask(of) >> (bit / 16 * 16 + 15 - bit % 16) & 1 == 1;
        let compared =
            |of: u32, value: u32| (0..32).filter(|bit| !is_masked(of, *bit)).fold(0, |all, bit| all | value & 1 << bit);
        let own_ports = match packet.ports {
            [a, b, c, d] => u32::from_be_bytes([*c, *d, *a, *b]),
            _ => 0,
        };
        let tag = (tags ^ u32::from(packet.tag)) & 0xffff;
        let kind = tags >> 16 ^ u32::from(u16::from_le_bytes(packet.kind));
        (source ^ dword(&packet.addresses[..4])) & !get(MASKS[1]) == 0
            && (destination ^ dword(&packet.addresses[4..])) & !get(MASKS[2]) == 0
            && compared(protocol, ports) == compared(packet.protocol, own_ports)
            && (masked & 1 != 0 || tag & 0xfff == 0)
            && (masked & 2 != 0 || tag & 0xe000 == 0)
            && (masked & 4 != 0 || self.command >> 24 & 0x3f == pool)
            && (masked & 8 != 0 || protocol == packet.protocol)
            && (masked & 16 != 0 || kind == 0)
    }

    fn action(&self) -> Option<FlowAction> {
        match (self.command & 1 << 9 != 0, self.command & 1 << 15 != 0) {
            (true, _) => Some(FlowAction::Drop),
            (false, true) => Some(FlowAction::Queue((self.command >> 16 & 0x7f) as u16)),
            (false, false) => None,
        }
    }
}

/// The result of RSS, from the registers alone.
fn rss(nic: &Nic, pool: u64, frame: &[u8]) -> Steered {
    let get = |offset| peek(nic, Place::Pf, offset);
    let (mode, is_x550) = (get(0x5818), nic.model() == Model::X550);
    let alone = get(0x51b0) & 1 == 0;
    let own = !alone && is_x550 && mode & 1 << 13 != 0;
    let (entries, mask) = match (alone, mode & 15, get(0x11050) & 3) {
        (true, 1, _) if is_x550 => (512, 63),
        (true, 1 | 4 | 5, _) => (128, 15),
        (false, 10, 2) => (128, 3),
        (false, 11, 3) => (128, 1),
        _ => return Steered::default(),
    };
    let (command, key, entries) =
        if own { (get(0x3400 + 4 * pool), 0x1_8000 + 0x40 * pool, 64) } else { (mode, 0x5c80, entries) };
    let Some(packet) = parse(frame).filter(|_| !own || command & 1 != 0) else { return Steered::default() };
    let v4 = packet.addresses.len() == 8;
    let choices = match (v4, packet.protocol) {
        (true, 2) => vec![(16, 1), (17, 2)],
        (true, 1) => vec![(22, 7), (17, 2)],
        (true, _) => vec![(17, 2)],
        (false, 2) => vec![(21, 3), (20, 5)],
        (false, 1) => vec![(23, 8), (20, 5)],
        (false, _) => vec![(20, 5)],
    };
    let Some((_, kind)) = choices.into_iter().find(|(bit, _)| command >> bit & 1 == 1) else {
        return Steered::default();
    };
    let ports = if [2, 5].contains(&kind) { &[] } else { packet.ports };
    let key: Vec<u8> = (0..10).flat_map(|n| get(key + 4 * n).to_le_bytes()).collect();
    let key_bit = |at: usize| u32::from(key.get(at / 8).is_some_and(|byte| byte >> (7 - at % 8) & 1 == 1));
    let input: Vec<u8> = [packet.addresses, ports].concat();
    let set = (0..8 * input.len()).filter(|at| input[at / 8] >> (7 - at % 8) & 1 == 1);
    let hash = set.fold(0, |hash, at| hash ^ (0..32).fold(0, |window, n| window << 1 | key_bit(at + n)));
    let entry = u64::from(hash) % entries;
    let register = match entry {
        _ if own => 0x1_9000 + 0x40 * pool + entry / 4 * 4,
        0..128 => 0x5c00 + entry / 4 * 4,
        _ => 0xee80 + (entry - 128) / 4 * 4,
    };
    let queue = get(register).to_le_bytes()[entry as usize % 4] & mask;
    Steered { queue: queue.into(), hash, kind }
}

/// Numbers of what happened.
#[derive(Debug, Default)]
struct Done {
    rules: usize,
    matched: usize,
    hashed: usize,
}

/// Runs the commands and frames of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

fn run_to_end(input: &[u8]) -> Done {
    let mut input = Input::new(input);
    let mut nic = Nic::with_model(if input.u8() & 1 == 0 { Model::X550 } else { Model::X540 }, MAC);
    let (mut rules, mut done) = (Vec::<Rule>::new(), Done::default());
    while !input.is_empty() {
        let set = |nic: &mut Nic, offset: u64, value: u32| write(nic, Place::Pf, offset, value);
        let [operation, at] = input.array();
        let place = usize::from(at);
        match operation % 12 {
            0 => {
                let control = if at == 0 { PERFECT } else { input.u32() };
                let _ = set(&mut nic, 0xee00, control);
                rules.clear();
            }
            1 => drop(set(&mut nic, MASKS[place % 6], input.u32())),
            2..=4 => {
                let values = [u32::from(at) << 16 | 3, input.u32(), input.u32(), input.u32(), input.u32()];
                for (offset, value) in RULE.into_iter().zip(values) {
                    let _ = set(&mut nic, offset, value);
                }
                let command = input.u32() & !(1 << 8 | 3) | 1;
                let _ = set(&mut nic, 0xee2c, command);
                let [hash, fields @ ..] = values;
                if nic.flows().is_active() {
                    rules.retain(|rule| rule.id != hash);
                    rules.push(Rule { id: hash, command, fields });
                }
            }
            5 => {
                let hash = u32::from(at) << 16 | 3;
                let _ = set(&mut nic, 0xee28, hash);
                let _ = set(&mut nic, 0xee2c, 3);
                let is_rule = rules.iter().any(|rule| rule.id == hash);
                assert_eq!(peek(&nic, Place::Pf, 0xee2c) & 7, u32::from(is_rule) << 2);
                let _ = set(&mut nic, 0xee2c, 2);
                rules.retain(|rule| rule.id != hash);
            }
            6 => drop(set(&mut nic, [0x5818, 0x51b0, 0x11050, 0x3400][place % 4], input.u32())),
            7 => {
                let first = [0x5c00, 0x5c80, 0xee80, 0x1_8000, 0x1_9000][place % 5];
                let value = input.u32();
                (0..u64::from(at) / 2).for_each(|n| drop(set(&mut nic, first + 4 * n, value.rotate_left(n as u32))));
            }
            8 => {
                let state = nic.save();
                let mut other = Nic::with_model(nic.model(), MAC);
                other.restore(&state).expect("a saved state");
                assert!(other == nic, "restored as another NIC");
                nic = other;
            }
            _ => {
                let frame = frame(&mut input, at);
                check(&nic, &rules, &frame, u16::from(at) % 64, &mut done);
            }
        }
        assert_eq!(nic.flow_rules(), rules.len());
        let free = if nic.flows().is_active() { 2048 - rules.len() } else { 0 };
        assert_eq!(peek(&nic, Place::Pf, 0xee38), free as u32);
    }
    done.rules = rules.len();
    done
}

fn check(nic: &Nic, rules: &[Rule], frame: &[u8], pool: u16, done: &mut Done) {
    let packet = parse(frame);
    let key = Key::of(frame);
    assert_eq!(key.is_some(), packet.as_ref().is_some_and(|packet| packet.addresses.len() == 8), "{frame:x?}");
    if let Some((key, packet)) = key.zip(packet) {
        let matching = rules.iter().filter(|rule| rule.matches(&packet, pool.into(), nic));
        let expected = matching.min_by_key(|rule| rule.id).map(Rule::action);
        assert_eq!(nic.flows().matched(&key.in_pool(pool)), expected, "{packet:?}");
        done.matched += usize::from(expected.is_some());
    }
    let steered = nic.rss(pool).queue_of(frame);
    assert_eq!(steered, rss(nic, pool.into(), frame), "{frame:x?}");
    done.hashed += usize::from(steered.kind != 0);
}

/// A frame: any bytes, or headers with bytes of the input in them.
fn frame(input: &mut Input<'_>, choice: u8) -> Vec<u8> {
    let [shape, number, len] = input.array();
    let mut frame = vec![choice; 12];
    if shape & 1 != 0 {
        frame.extend([0x81, 0]);
        frame.extend(input.array::<2>());
    }
    let protocol = [6, 17, 132, 1, number][usize::from(number) % 5];
    if shape & 2 == 0 {
        frame.extend([8, 0, 0x45 + (shape >> 2 & 1), 0, 0, 0, 0, 0, shape & 0x20, 0, 64, protocol, 0, 0]);
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
    }
    frame.extend(input.slice(usize::from(len) % 64));
    if shape & 0x40 != 0 {
        frame.truncate(usize::from(number));
    }
    frame
}

/// Seeds: rules with each field masked and not, RSS in each mode, and frames for them.
pub fn seeds() -> Vec<Vec<u8>> {
    let packet = [10, 0, 0, 1, 10, 0, 0, 2, 3, 0xe8, 0, 80];
    let frames = |seed: Seed| {
        [0, 1, 2, 3].into_iter().fold(seed, |seed, number| {
            let plain = seed.with([9, 1, 0, number, 12]).with(packet);
            let tagged = plain.with([9, 1, 1, number, 12, 0x20, 7]).with(packet);
            tagged.with([9, 1, 2, number, 40]).with(packet).with([7; 28])
        })
    };
    let rule = |seed: Seed, id: u8, command: u32| {
        let fields = [0x0100_000a, 0x0200_000a, 80 << 16 | 1000, 0];
        let seed = fields.iter().fold(seed.with([2, id]), |seed, field: &u32| seed.with(field.to_le_bytes()));
        seed.with(command.to_le_bytes())
    };
    let rules = |masked: u32, ports: u32| {
        let seed = Seed::new().with([0, 0, 0]).with([1, 0]).with(masked.to_le_bytes());
        let seed = (3..6).fold(seed, |seed, mask| seed.with([1, mask]).with(ports.to_le_bytes()));
        let seed = rule(rule(rule(seed, 3, 0x8008 | 2 << 5), 2, 0x5_8008 | 1 << 5), 1, 1 << 9 | 3 << 5);
        frames(frames(rule(seed, 4, 2 << 5)).with([5, 3, 5, 9, 8, 0])).done()
    };
    let modes = |model: u8, writes: &[(u8, u32)]| {
        let seed = writes.iter().fold(Seed::new().with([model]), |seed, (register, value)| {
            seed.with([6, *register]).with(value.to_le_bytes())
        });
        let seed = (0..5).fold(seed, |seed, array| seed.with([7, 200 + array]).with(0x6d5a_56dau32.to_le_bytes()));
        frames(seed.with([8, 0])).done()
    };
    let fields = 0xf3 << 16;
    vec![
        rules(0x37, u32::MAX),
        rules(0x30, 0),
        rules(0x27, 0),
        rules(0x3f, u32::MAX),
        modes(0, &[(0, 1 | fields)]),
        modes(1, &[(0, 1 | fields)]),
        modes(0, &[(0, 10 | fields), (1, 1), (2, 2)]),
        modes(0, &[(0, 11 | fields), (1, 1), (2, 3)]),
        modes(0, &[(0, 10 | 1 << 13), (1, 1), (2, 2), (3, 1 | fields)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_match_rules_and_hash_frames() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert!(done[..4].iter().all(|done| done.rules == 3) && done[0].matched > 0, "{done:?}");
        assert!(done[3].matched > done[0].matched, "{done:?}");
        assert!(done[4..8].iter().all(|done| done.hashed >= 8), "{done:?}");
    }
}
