//! The control queue of a NIC: any commands, in chains of any descriptors.
//!
//! Every command must be executed or refused according to the standard. The reply, the MAC address, the filter and the
//! number of queue pairs are predicted from the bytes in guest memory, and the device may write only its reply and the
//! used ring. Some chains leave the device free to do anything; the run ends with the first of those.

use std::collections::BTreeSet;
use std::fs::File;

use virtio_devices::Counter;
use virtio_devices::testing::{NetSteps, Step};

use crate::guest::{self, Chain, Driver, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const PAIRS: u16 = 4;
/// The most addresses of one kind; with more, all addresses of that kind are received.
const TABLE: usize = 64;
/// The longest command.
const MAX_COMMAND: u64 = 64 * 1024;
/// Commands that the device executes in one step.
const BATCH: usize = 16;

// Feature bits (`virtio 1.4 §5.1.3`).
const CTRL_RX: u32 = 18;
const CTRL_VLAN: u32 = 19;
const CTRL_RX_EXTRA: u32 = 20;
const GUEST_ANNOUNCE: u32 = 21;
const MQ: u32 = 22;
const CTRL_MAC_ADDR: u32 = 23;
const EVENT_IDX: u32 = 29;

// The kinds of operation, after those of the driver.
const COMMAND: u8 = guest::KINDS;
const RUN: u8 = guest::KINDS + 1;
const KINDS: u8 = guest::KINDS + 2;

/// The state of the NIC as set by its driver.
struct Rules {
    features: u64,
    mac: [u8; 6],
    pairs: u16,
    /// By the numbers of their commands: promiscuous, all multicast, all unicast, no multicast, no unicast, no
    /// broadcast.
    modes: [bool; 6],
    unicast: Vec<[u8; 6]>,
    multicast: Vec<[u8; 6]>,
    vlans: BTreeSet<u16>,
    /// The VLAN of the last command.
    vlan: u16,
    carried_out: u64,
    refused: u64,
}

impl Rules {
    fn has(&self, bit: u32) -> bool {
        self.features >> bit & 1 == 1
    }

    /// Executes a command. Returns `None` if it must be refused.
    fn command(&mut self, command: &[u8]) -> Option<()> {
        let (&[class, number], data) = command.split_first_chunk()?;
        let feature = match (class, number) {
            (0, 0 | 1) | (1, 0) => CTRL_RX,
            (0, 2..=5) => CTRL_RX_EXTRA,
            (1, 1) => CTRL_MAC_ADDR,
            (2, 0 | 1) => CTRL_VLAN,
            (3, 0) => GUEST_ANNOUNCE,
            (4, 0) => MQ,
            // Offloads need a tap, which this NIC lacks.
            _ => return None,
        };
        self.has(feature).then_some(())?;
        match class {
            0 => self.modes[usize::from(number)] = *data.first()? != 0,
            1 if number == 0 => {
                let (unicast, rest) = table(data)?;
                let (multicast, _) = table(rest)?;
                (self.unicast, self.multicast) = (unicast, multicast);
            }
            1 => {
                let (&mac, _) = data.split_first_chunk()?;
                (mac[0] & 1 == 0 && mac != [0; 6]).then_some(())?;
                self.mac = mac;
            }
            2 => {
                let (&id, _) = data.split_first_chunk()?;
                let id = Some(u16::from_le_bytes(id)).filter(|id| *id < 4096)?;
                self.vlan = id;
                if number == 0 {
                    self.vlans.insert(id)
                } else {
                    self.vlans.remove(&id)
                };
            }
            // No announcement was requested, so its acknowledgement changes nothing.
            3 => {}
            _ => {
                let (&pairs, _) = data.split_first_chunk()?;
                self.pairs = Some(u16::from_le_bytes(pairs)).filter(|pairs| (1..=PAIRS).contains(pairs))?;
            }
        }
        Some(())
    }

    fn wants(&self, head: &[u8; 16]) -> bool {
        let [promiscuous, all_multicast, all_unicast, no_multicast, no_unicast, no_broadcast] = self.modes;
        let mac: [u8; 6] = head[..6].try_into().expect("6 bytes");
        let tag = u16::from_be_bytes([head[14], head[15]]) & 0xfff;
        let tagged = [head[12], head[13]] == [0x81, 0] && tag != 0;
        let listed = |table: &[[u8; 6]]| table.len() > TABLE || table.contains(&mac);
        let address = match mac {
            [0xff, 0xff, 0xff, 0xff, 0xff, 0xff] => !no_broadcast,
            [first, ..] if first & 1 == 1 => !no_multicast && (all_multicast || listed(&self.multicast)),
            _ => !no_unicast && (all_unicast || mac == self.mac || listed(&self.unicast)),
        };
        promiscuous || (address && (!self.has(CTRL_VLAN) || !tagged || self.vlans.contains(&tag)))
    }
}

/// A table of addresses, and the data after it.
fn table(data: &[u8]) -> Option<(Vec<[u8; 6]>, &[u8])> {
    let (&count, data) = data.split_first_chunk()?;
    let len = usize::try_from(u32::from_le_bytes(count)).ok()?.checked_mul(6)?;
    let (table, rest) = data.split_at_checked(len)?;
    Some((table.chunks_exact(6).map(|mac| mac.try_into().expect("6 bytes")).collect(), rest))
}

struct Pair {
    driver: Driver,
    rules: Rules,
    steps: NetSteps,
}

/// The required result of a step.
enum Expected {
    Step(Step, Snapshot),
    /// A chain that leaves the device free to do anything.
    Anything,
}

impl Pair {
    /// Applies the expected changes of one step to `ram`.
    fn predict(&mut self, mut ram: Snapshot) -> Expected {
        for _ in 0..BATCH {
            let Some(chains) = self.driver.waiting(&ram) else { return Expected::Step(Step::Broken, ram) };
            let Some(chain) = chains.first() else { return Expected::Step(Step::Doorbell, ram) };
            self.driver.taken = self.driver.taken.wrapping_add(1);
            if !self.answer(chain, &mut ram) {
                return Expected::Anything;
            }
        }
        Expected::Step(Step::More, ram)
    }

    /// Executes the command in a chain. Returns false if the standard leaves the result undefined.
    fn answer(&mut self, chain: &Chain, ram: &mut Snapshot) -> bool {
        let answer = chain.segments.iter().find(|segment| segment.writable && segment.len > 0);
        let [descriptors, available] = self.driver.drivers_part();
        let parts = [descriptors, available, self.driver.devices_part()];
        let unclear = parts.iter().any(|part| chain.touches(part));
        if chain.verdict == Verdict::Undefined || unclear {
            return false;
        }
        let whole = chain.verdict == Verdict::Sound && answer.is_some() && chain.len(false) <= MAX_COMMAND;
        let done = whole && self.rules.command(&chain.bytes(ram, false)).is_some();
        *(if done { &mut self.rules.carried_out } else { &mut self.rules.refused }) += 1;
        if let Some(segment) = answer {
            ram.put(segment.address, &[u8::from(!done)]);
        }
        self.driver.expect_used(ram, chain.head, answer.is_some().into());
        true
    }

    /// Runs the queue. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let shared = self.driver.queue.clone();
        let Some(mut queue) = self.steps.control(&shared, PAIRS) else {
            assert!(!self.driver.usual_place);
            return false;
        };
        if !self.driver.usual_place {
            Driver::run_anyhow(|| self.steps.step(&mut queue));
            return true;
        }
        loop {
            let old = self.driver.given;
            let before = Snapshot::take();
            let expected = self.predict(before);
            let step = self.steps.step(&mut queue);
            let Expected::Step(expected, wanted) = expected else { return false };
            assert_eq!(step, expected);
            let after = Snapshot::take();
            self.compare(&wanted, &after);
            if step == Step::Broken {
                return false;
            }
            assert_eq!(self.steps.take_interrupt(), self.driver.wants_interrupt(&after, old));
            if step == Step::Doorbell {
                assert!(self.driver.wants_doorbell(&after, self.driver.taken), "the device would not be woken");
                return true;
            }
        }
    }

    fn compare(&self, wanted: &Snapshot, after: &Snapshot) {
        // The device may choose whether it wants doorbells, with a field at either end of the used ring.
        let used = self.driver.devices_part();
        let free = [used.start..used.start + 2, used.end - 2..used.end];
        assert_eq!(after.differs_from(wanted, &free), None, "the device wrote where it must not");
        let Rules { mac, pairs, carried_out, refused, .. } = self.rules;
        assert_eq!((self.steps.mac(), self.steps.active_pairs()), (mac, pairs));
        let counted = [Counter::ControlCommands, Counter::ControlRefused].map(|counter| self.steps.count(counter));
        assert_eq!(counted, [carried_out, refused]);
        let listed = [self.rules.unicast.last(), self.rules.multicast.last()];
        let some = [[0xff; 6], MAC, mac, [2, 0, 0, 0, 0, 9], [1, 0, 0x5e, 0, 0, 9]];
        let vlan = self.rules.vlan;
        for mac in some.iter().chain(listed.into_iter().flatten()) {
            for rest in [[8, 0, 0x45, 0], [0x81, 0, (vlan >> 8) as u8 | 0x20, vlan as u8], [0x88, 0xa8, 0, 7]] {
                let mut head = [0; 16];
                head[..6].copy_from_slice(mac);
                head[12..].copy_from_slice(&rest);
                assert_eq!(self.steps.wants(&head), self.rules.wants(&head), "{head:x?}");
            }
        }
    }

    fn apply(&mut self, input: &mut Input<'_>) -> bool {
        match input.u8() % KINDS {
            // A well-formed command: its bytes, split into pieces, and a byte for the reply.
            COMMAND => {
                let (at, len, pieces) =
                    (guest::BUFFERS, usize::from(input.u16() % 1024), usize::from(input.u8() % 3) + 1);
                let command = input.slice(len);
                self.driver.store(at.into(), command);
                let mut start = 0;
                for n in 0..pieces {
                    let end = command.len() * (n + 1) / pieces;
                    let piece = (u64::from(at) + start as u64, (end - start) as u32, NEXT, n as u16 + 1);
                    self.driver.set(n as u16, piece);
                    start = end;
                }
                self.driver.set(pieces as u16, (0xf00, 1, WRITE, 0));
                self.driver.offer(0);
                self.run()
            }
            RUN => self.run(),
            kind => {
                self.driver.apply(kind, input);
                true
            }
        }
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the numbers of executed and refused commands.
fn run_to_end(input: &[u8]) -> (u64, u64) {
    let mut input = Input::new(input);
    let [a, b, c, d] = input.array();
    let features = u64::from(u32::from_le_bytes([a, b, c, d]));
    let null = File::options().read(true).write(true).open("/dev/null").expect("/dev/null");
    let mut modes = [false; 6];
    modes[0] = true;
    let rules = Rules {
        features,
        mac: MAC,
        pairs: 1,
        modes,
        unicast: Vec::new(),
        multicast: Vec::new(),
        vlans: BTreeSet::new(),
        vlan: 5,
        carried_out: 0,
        refused: 0,
    };
    let driver = Driver::new(&mut input, rules.has(EVENT_IDX));
    let mut pair = Pair { driver, rules, steps: NetSteps::new(Driver::memory(), null.into(), MAC, features) };
    while !input.is_empty() && pair.apply(&mut input) {}
    (pair.rules.carried_out, pair.rules.refused)
}

fn start(features: &[u32]) -> Seed {
    let features = features.iter().fold(0u32, |features, bit| features | 1 << bit);
    Seed::new().with(features.to_le_bytes()).with([1])
}

fn command(seed: Seed, pieces: u8, command: &[u8]) -> Seed {
    seed.with([COMMAND]).with((command.len() as u16).to_le_bytes()).with([pieces - 1]).with(command)
}

/// Seeds: every command, whole and in pieces; each without its feature; full tables; and chains made by hand.
pub fn seeds() -> Vec<Vec<u8>> {
    const ALL: &[u32] = &[CTRL_RX, CTRL_VLAN, CTRL_RX_EXTRA, GUEST_ANNOUNCE, MQ, CTRL_MAC_ADDR];
    let tables =
        [&[1, 0, 2, 0, 0, 0][..], &[2, 0, 0, 0, 0, 7, 2, 0, 0, 0, 0, 8], &[1, 0, 0, 0, 1, 0, 0x5e, 0, 0, 3]].concat();
    let full = [&[1, 0, 65, 0, 0, 0][..], &[2; 6 * 65], &[0, 0, 0, 0]].concat();
    let commands: [&[u8]; 13] = [
        &[0, 0, 0],
        &[0, 1, 1],
        &[0, 2, 1],
        &[0, 3, 1],
        &[0, 4, 1],
        &[0, 5, 1],
        &tables,
        &[1, 1, 2, 3, 4, 5, 6, 7],
        &[2, 0, 5, 0],
        &[2, 1, 5, 0],
        &[3, 0],
        &[4, 0, 2, 0],
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    let all = |seed: Seed, pieces| commands.iter().fold(seed, |seed, bytes| command(seed, pieces, bytes));
    let event_idx = all(start(&[ALL, &[EVENT_IDX]].concat()), 2);
    let (at, answer) = (guest::BUFFERS, guest::BUFFERS + 0x800);
    // A command in an indirect table, one that loops, and one without room for its reply.
    let indirect = guest::memory(start(ALL), at, &[0, 0, 1]);
    let mut entries = Vec::new();
    for (address, len, flags, next) in [(u64::from(at), 3u32, NEXT, 1u16), (answer.into(), 1, WRITE, 0)] {
        entries.extend(address.to_le_bytes());
        entries.extend(len.to_le_bytes());
        entries.extend(flags.to_le_bytes());
        entries.extend(next.to_le_bytes());
    }
    let indirect =
        guest::descriptor(guest::memory(indirect, at + 0x100, &entries), 0, (at + 0x100, 32, guest::INDIRECT, 0));
    let endless = guest::descriptor(start(ALL), 0, (at, 8, NEXT, 0));
    let nowhere = guest::descriptor(guest::descriptor(start(ALL), 2, (at, 3, NEXT, 3)), 3, (0x5000, 1, WRITE, 0));
    let far = start(ALL).with([3, 0xff, 0xff]).with([RUN]);
    let vlans = [&[0, 0, 0][..], &[2, 0, 0x23, 1], &[2, 0, 1, 0], &[2, 1, 0x23, 1]];
    let vlans = vlans.into_iter().fold(start(ALL), |seed, bytes| command(seed, 1, bytes));
    vec![
        all(start(ALL), 1).done(),
        all(start(ALL), 3).done(),
        all(start(&[]), 1).done(),
        event_idx.done(),
        command(command(start(ALL), 1, &full), 1, &[0, 0, 0]).done(),
        indirect.with([OFFER, 0, RUN]).done(),
        endless.with([OFFER, 0, RUN]).done(),
        nowhere.with([OFFER, 2, OFFER, 9, RUN]).done(),
        far.done(),
        vlans.done(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_carried_out_or_refused() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(done, [(12, 1), (12, 1), (0, 13), (12, 1), (2, 0), (1, 0), (0, 1), (0, 2), (0, 0), (4, 0)]);
    }
}
