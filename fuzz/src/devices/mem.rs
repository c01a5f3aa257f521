//! The queue of a virtio-mem device, over rings and chains in guest memory that a driver wrote arbitrarily, while the
//! host changes the requested size.
//!
//! The first byte of the input chooses the features. The device's memory is three pages with buffers, so that requests
//! and replies may lie in blocks that are plugged and unplugged. Some chains leave the device free to do anything; the
//! run ends with the first of those.

use std::ops::Range;

use virtio_devices::MemCounter;
use virtio_devices::testing::{MemSteps, Step};

use crate::guest::{self, BUFFERS, Chain, Driver, Expected, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

/// The memory of the device: three blocks.
const REGION: Range<u64> = 0x2000..0x5000;
const BLOCK: u64 = 0x1000;
const BLOCKS: usize = 3;
/// The feature bit of event indexes.
const EVENT_IDX: u32 = 29;
/// The most chains in one step.
const BATCH: usize = 16;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

const ACK: u16 = 0;
const NACK: u16 = 1;
const ERROR: u16 = 3;

// The kinds of operation, after those of the driver.
const RUN: u8 = guest::KINDS;
const RESIZE: u8 = guest::KINDS + 1;
const KINDS: u8 = guest::KINDS + 2;

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of plugged blocks, of requests handled, and of bad chains.
fn run_to_end(input: &[u8]) -> (u64, u64, u64) {
    let mut input = Input::new(input);
    let features = u64::from(input.u8() & 1) << EVENT_IDX;
    let driver = Driver::new(&mut input, features != 0);
    driver.fill_buffers();
    let steps = MemSteps::new(Driver::memory(), (&REGION, BLOCK), features).expect("an eventfd");
    let mut mem = Mem { driver, steps, plugged: [false; BLOCKS], requested: 0, counts: Counts::default() };
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN if !mem.run() => break,
            RUN => {}
            RESIZE => mem.resize(input.u16()),
            kind => mem.driver.apply(kind, &mut input),
        }
        assert_eq!(mem.steps.region().requested(), mem.requested);
    }
    (mem.steps.region().plugged() / BLOCK, mem.counts.requests, mem.counts.bad_chains)
}

/// The expected counters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    requests: u64,
    plugged: u64,
    unplugged: u64,
    refused: u64,
    bad_requests: u64,
    bad_chains: u64,
}

struct Mem {
    driver: Driver,
    steps: MemSteps,
    plugged: [bool; BLOCKS],
    requested: u64,
    counts: Counts,
}

impl Mem {
    /// Changes the size that the host requests.
    fn resize(&mut self, bytes: u16) {
        let bytes = u64::from(bytes);
        self.steps.region().resize(bytes);
        self.requested = bytes.min(REGION.end - REGION.start) / BLOCK * BLOCK;
    }

    /// Runs a step. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let Some(mut ram) = self.driver.before_step(&mut self.steps) else { return false };
        let expected = self.expect(&mut ram);
        let Some(step) = self.driver.step(&mut self.steps, expected, &ram) else { return false };
        assert_eq!(self.counted(), self.counts);
        let plugged = self.plugged.iter().filter(|plugged| **plugged).count() as u64 * BLOCK;
        assert_eq!(self.steps.region().plugged(), plugged);
        step != Step::Broken
    }

    fn counted(&self) -> Counts {
        let count = |counter| self.steps.count(counter);
        Counts {
            requests: count(MemCounter::Requests),
            plugged: count(MemCounter::PluggedBlocks),
            unplugged: count(MemCounter::UnpluggedBlocks),
            refused: count(MemCounter::RefusedRequests),
            bad_requests: count(MemCounter::BadRequests),
            bad_chains: count(MemCounter::BadChains),
        }
    }

    /// Expected effect of a step, including that on `ram`; `None` if any effect is valid.
    fn expect(&mut self, ram: &mut Snapshot) -> Option<Expected> {
        let mut interrupt = false;
        for _ in 0..BATCH {
            let Some(chains) = self.driver.waiting(ram) else { return Some(Expected::new(Step::Broken, interrupt)) };
            let Some(chain) = chains.first() else { return Some(Expected::new(Step::Doorbell, interrupt)) };
            if chain.verdict == Verdict::Undefined || chain.touches(&self.driver.devices_part()) {
                return None;
            }
            let len = self.request(ram, chain);
            let old = self.driver.given;
            self.driver.taken = self.driver.taken.wrapping_add(1);
            self.driver.expect_used(ram, chain.head, len);
            interrupt |= self.driver.wants_interrupt(ram, old);
        }
        Some(Expected::new(Step::More, interrupt))
    }

    /// Executes the request of a chain. Returns the length of the reply.
    fn request(&mut self, ram: &mut Snapshot, chain: &Chain) -> u32 {
        let bytes = chain.bytes(ram, false);
        if chain.verdict != Verdict::Sound || bytes.len() < 24 || chain.len(true) < 10 {
            self.counts.bad_chains += 1;
            return 0;
        }
        let kind = u16::from_le_bytes([bytes[0], bytes[1]]);
        let address = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
        let count = u16::from_le_bytes([bytes[16], bytes[17]]);
        let (answer, state) = self.perform(ram, kind, address, count);
        self.counts.requests += 1;
        self.counts.refused += u64::from(answer == NACK);
        self.counts.bad_requests += u64::from(answer == ERROR);
        let mut answer = [&answer.to_le_bytes()[..], &[0; 6], &state.to_le_bytes()].concat();
        for segment in chain.segments.iter().filter(|segment| segment.writable) {
            let part: Vec<u8> = answer.drain(..answer.len().min(segment.len as usize)).collect();
            ram.put(segment.address, &part);
        }
        10
    }

    fn perform(&mut self, ram: &mut Snapshot, kind: u16, address: u64, count: u16) -> (u16, u16) {
        let blocks = (0..BLOCKS).map(|block| REGION.start + block as u64 * BLOCK);
        let first = blocks.clone().position(|start| start == address);
        let range = first.map(|first| first..first + usize::from(count));
        let range = range.filter(|range| !range.is_empty() && range.end <= BLOCKS);
        let plugged = |range: &Range<usize>| self.plugged[range.clone()].iter().filter(|plugged| **plugged).count();
        let zero = |ram: &mut Snapshot, range: &Range<usize>| {
            for start in blocks.clone().skip(range.start).take(range.len()) {
                ram.put(start, &[0; BLOCK as usize]);
            }
        };
        match (kind, range) {
            (UNPLUG_ALL, _) => {
                if plugged(&(0..BLOCKS)) > 0 {
                    zero(ram, &(0..BLOCKS));
                }
                self.plugged = [false; BLOCKS];
                (ACK, 0)
            }
            (PLUG, Some(range)) if plugged(&range) == 0 => {
                if (plugged(&(0..BLOCKS)) + range.len()) as u64 * BLOCK > self.requested {
                    return (NACK, 0);
                }
                zero(ram, &range);
                self.counts.plugged += range.len() as u64;
                self.plugged[range].fill(true);
                (ACK, 0)
            }
            (UNPLUG, Some(range)) if plugged(&range) == range.len() => {
                zero(ram, &range);
                self.counts.unplugged += range.len() as u64;
                self.plugged[range].fill(false);
                (ACK, 0)
            }
            (STATE, Some(range)) => match plugged(&range) {
                0 => (ACK, 1),
                all if all == range.len() => (ACK, 0),
                _ => (ACK, 2),
            },
            _ => (ERROR, 0),
        }
    }
}

/// A queue of 8 descriptors, with a requested size of `blocks`.
fn start(event_idx: bool, blocks: u16) -> Seed {
    Seed::new().with([event_idx.into(), 1]).with([RESIZE]).with((blocks * BLOCK as u16).to_le_bytes())
}

/// Makes a request available, with its bytes at `at`.
fn ask(seed: Seed, index: u8, at: u32, (kind, address, count): (u16, u64, u16)) -> Seed {
    let mut bytes = [0; 24];
    bytes[..2].copy_from_slice(&kind.to_le_bytes());
    bytes[8..16].copy_from_slice(&address.to_le_bytes());
    bytes[16..18].copy_from_slice(&count.to_le_bytes());
    let seed = guest::descriptor(guest::memory(seed, at, &bytes), index, (at, 24, NEXT, index + 1));
    guest::descriptor(seed, index + 1, (at + 24, 10, WRITE, 0)).with([OFFER, index])
}

/// Seeds: blocks plugged and unplugged, one by one and all; requests in blocks that are unplugged; more than the
/// requested size; no blocks; invalid chains and rings.
pub fn seeds() -> Vec<Vec<u8>> {
    let (first, last) = (REGION.start, REGION.end - BLOCK);
    let at = |n: u32| BUFFERS + 0x40 * n;
    let both = ask(ask(start(true, 3), 0, at(0), (PLUG, first, 3)), 2, at(1), (UNPLUG, last, 1)).with([RUN]);
    let all = ask(ask(start(false, 2), 0, at(0), (PLUG, first, 2)), 2, at(1), (UNPLUG_ALL, 0, 0)).with([RUN]);
    let state = ask(ask(start(true, 1), 0, at(0), (PLUG, last, 1)), 2, at(1), (STATE, first, 3)).with([RUN]);
    let inside = ask(start(true, 3), 0, 0x2800, (PLUG, first, 1)).with([RUN]);
    let more = ask(start(false, 1), 0, at(0), (PLUG, first, 2)).with([RUN, RESIZE, 0, 0x20]);
    let more = ask(more, 2, at(1), (PLUG, first, 2)).with([RUN]);
    let nothing = ask(ask(start(true, 3), 0, at(0), (PLUG, first + 1, 1)), 2, at(1), (PLUG, first, 4)).with([RUN]);
    let unknown = ask(ask(start(true, 3), 0, at(0), (4, first, 1)), 2, at(1), (UNPLUG, first, 1)).with([RUN]);
    let short = guest::descriptor(start(false, 3), 0, (BUFFERS, 23, NEXT, 1));
    let short = guest::descriptor(short, 1, (BUFFERS + 64, 10, WRITE, 0)).with([OFFER, 0, RUN]);
    let deaf = guest::descriptor(start(false, 3), 0, (BUFFERS, 24, 0, 0)).with([OFFER, 0, RUN]);
    let broken = start(false, 3).with([guest::AVAILABLE_INDEX, 0xff, 0xff, RUN]);
    let seeds = [both, all, state, inside, more, nothing, unknown, short, deaf, broken];
    seeds.into_iter().map(Seed::done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_plug_and_unplug_and_break_rules() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let expected = [
            (2, 2, 0),
            (0, 2, 0),
            (1, 2, 0),
            (1, 1, 0),
            (2, 2, 0),
            (0, 2, 0),
            (0, 2, 0),
            (0, 0, 1),
            (0, 0, 1),
            (0, 0, 0),
        ];
        assert_eq!(done, expected);
    }
}
