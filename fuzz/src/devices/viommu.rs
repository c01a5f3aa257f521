//! The request queue of a virtual IOMMU, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! The first byte of the input chooses the width of I/O addresses. There are three endpoints and room for four
//! mappings. Some chains leave the device free to do anything; the run ends with the first of those.

use std::collections::BTreeMap;

use virtio_devices::IommuCounter;
use virtio_devices::testing::{IommuSteps, Step};

use crate::guest::{self, BUFFERS, Chain, Driver, Expected, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

const PAGE: u64 = 4096;
const ENDPOINTS: usize = 3;
/// The number of the first endpoint.
const FIRST: u32 = 0x100;
const MOST_MAPPINGS: usize = 4;
const LAST_DOMAIN: u32 = 0xffff;
/// The bytes before the status of a PROBE.
const PROPERTIES: u64 = 512;
const TAIL: u64 = 4;

// The kinds of operation, after those of the driver.
const RUN: u8 = guest::KINDS;
const BYPASS: u8 = guest::KINDS + 1;
const RESET: u8 = guest::KINDS + 2;
const KINDS: u8 = guest::KINDS + 3;

// Kinds of request, and statuses.
const ATTACH: u8 = 1;
const DETACH: u8 = 2;
const MAP: u8 = 3;
const UNMAP: u8 = 4;
const PROBE: u8 = 5;
const OK: u8 = 0;
const UNSUPPORTED: u8 = 2;
const INVALID: u8 = 4;
const RANGE: u8 = 5;
const NO_ENTRY: u8 = 6;
const NO_MEMORY: u8 = 8;

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of domains, of mappings, of requests executed and refused, and of bad chains.
fn run_to_end(input: &[u8]) -> [u64; 5] {
    let mut input = Input::new(input);
    let width = if input.u8() & 1 == 0 { 64 } else { 40 };
    let driver = Driver::new(&mut input, false);
    driver.fill_buffers();
    let steps = IommuSteps::new(Driver::memory(), &driver.queue, (width, ENDPOINTS as u8, MOST_MAPPINGS));
    let last_address = if width == 64 { u64::MAX } else { (1 << width) - 1 };
    let model = Model { last_address, bypass: true, ..Model::default() };
    let mut iommu = Iommu { driver, steps, model, done: 0, refused: 0, bad_chains: 0 };
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN if !iommu.run() => break,
            RUN => {}
            BYPASS => {
                let bypass = input.u8() & 1 == 0;
                iommu.steps.set_bypass(bypass);
                iommu.model.bypass = bypass;
            }
            RESET => {
                iommu.steps.reset();
                iommu.model = Model { last_address, bypass: iommu.model.bypass, ..Model::default() };
            }
            kind => iommu.driver.apply(kind, &mut input),
        }
        iommu.check();
    }
    let (domains, mappings) = iommu.steps.counts();
    [domains as u64, mappings as u64, iommu.done, iommu.refused, iommu.bad_chains]
}

/// A mapping: its last address, its target, and its flags.
type Mapping = (u64, u64, u32);

/// Expected state after the requests so far.
#[derive(Default)]
struct Model {
    last_address: u64,
    bypass: bool,
    attached: [Option<u32>; ENDPOINTS],
    /// Mappings by domain; `None` for a bypass domain.
    domains: BTreeMap<u32, Option<BTreeMap<u64, Mapping>>>,
}

impl Model {
    fn mappings(&self) -> usize {
        self.domains.values().flatten().map(BTreeMap::len).sum()
    }

    /// Executes a request, and returns its status.
    fn carry_out(&mut self, bytes: &[u8]) -> u8 {
        let kind = bytes[0];
        let len = match kind {
            ATTACH | DETACH => 20,
            MAP => 36,
            UNMAP => 28,
            PROBE => 72,
            _ => return UNSUPPORTED,
        };
        if bytes.len() < len || bytes[1..4] != [0; 3] {
            return INVALID;
        }
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let address = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let reserved = match kind {
            ATTACH => number(12) > 1 || number(16) != 0,
            DETACH => bytes[12..20] != [0; 8],
            MAP => number(32) > 7,
            UNMAP => number(24) != 0,
            _ => bytes[8..72].iter().any(|byte| *byte != 0),
        };
        if reserved {
            return INVALID;
        }
        match kind {
            ATTACH => self.attach(number(4), number(8), number(12) == 1),
            DETACH => self.detach(number(4), number(8)),
            MAP => self.map(number(4), (address(8), address(16)), address(24), number(32)),
            UNMAP => self.unmap(number(4), (address(8), address(16))),
            _ => index(number(4)).map_or(NO_ENTRY, |_| OK),
        }
    }

    fn attach(&mut self, domain: u32, endpoint: u32, bypass: bool) -> u8 {
        let Some(endpoint) = index(endpoint) else { return NO_ENTRY };
        if domain > LAST_DOMAIN {
            return RANGE;
        }
        if self.domains.get(&domain).is_some_and(|mappings| mappings.is_none() != bypass) {
            return INVALID;
        }
        self.domains.entry(domain).or_insert((!bypass).then(BTreeMap::new));
        self.attached[endpoint] = Some(domain);
        self.forget_empty();
        OK
    }

    fn detach(&mut self, domain: u32, endpoint: u32) -> u8 {
        let Some(endpoint) = index(endpoint) else { return NO_ENTRY };
        if self.attached[endpoint] != Some(domain) {
            return INVALID;
        }
        self.attached[endpoint] = None;
        self.forget_empty();
        OK
    }

    fn forget_empty(&mut self) {
        let attached = self.attached;
        self.domains.retain(|domain, _| attached.contains(&Some(*domain)));
    }

    fn map(&mut self, domain: u32, (first, last): (u64, u64), target: u64, flags: u32) -> u8 {
        if first > last {
            return RANGE;
        }
        let count = self.mappings();
        let last_address = self.last_address;
        let mappings = match self.domains.get_mut(&domain) {
            None => return NO_ENTRY,
            Some(None) => return INVALID,
            Some(Some(mappings)) => mappings,
        };
        let unaligned = !first.is_multiple_of(PAGE) || last % PAGE != PAGE - 1 || !target.is_multiple_of(PAGE);
        if unaligned || last > last_address || target.checked_add(last - first).is_none() {
            return RANGE;
        }
        if count >= MOST_MAPPINGS {
            return NO_MEMORY;
        }
        if mappings.iter().any(|(other, mapping)| *other <= last && mapping.0 >= first) {
            return INVALID;
        }
        mappings.insert(first, (last, target, flags));
        OK
    }

    fn unmap(&mut self, domain: u32, (first, last): (u64, u64)) -> u8 {
        if first > last {
            return RANGE;
        }
        let mappings = match self.domains.get_mut(&domain) {
            None => return NO_ENTRY,
            Some(None) => return INVALID,
            Some(Some(mappings)) => mappings,
        };
        let touched = |other: u64, mapping: &Mapping| other <= last && mapping.0 >= first;
        let inside = |other: u64, mapping: &Mapping| other >= first && mapping.0 <= last;
        if mappings.iter().any(|(other, mapping)| touched(*other, mapping) && !inside(*other, mapping)) {
            return RANGE;
        }
        mappings.retain(|other, mapping| !inside(*other, mapping));
        OK
    }

    fn translate(&self, endpoint: usize, address: u64, flags: u32) -> Option<u64> {
        match self.attached[endpoint].map(|domain| &self.domains[&domain]) {
            None => self.bypass.then_some(address),
            Some(None) => Some(address),
            Some(Some(mappings)) => {
                let (first, mapping) =
                    mappings.iter().find(|(first, mapping)| **first <= address && address <= mapping.0)?;
                (mapping.2 & flags == flags).then(|| mapping.1 + (address - first))
            }
        }
    }
}

/// The index of an endpoint.
fn index(endpoint: u32) -> Option<usize> {
    let index = usize::try_from(endpoint.checked_sub(FIRST)?).ok()?;
    (index < ENDPOINTS).then_some(index)
}

struct Iommu {
    driver: Driver,
    steps: IommuSteps,
    model: Model,
    done: u64,
    refused: u64,
    bad_chains: u64,
}

impl Iommu {
    /// Runs a step. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let Some(mut ram) = self.driver.before_step(&mut self.steps) else { return false };
        let expected = self.expect(&mut ram);
        let Some(step) = self.driver.step(&mut self.steps, expected, &ram) else { return false };
        let count = |counters: &[IommuCounter]| counters.iter().map(|counter| self.steps.count(*counter)).sum::<u64>();
        let done = [
            IommuCounter::Attaches,
            IommuCounter::Detaches,
            IommuCounter::Maps,
            IommuCounter::Unmaps,
            IommuCounter::Probes,
        ];
        assert_eq!(count(&done), self.done);
        assert_eq!(count(&[IommuCounter::Refused]), self.refused);
        assert_eq!(count(&[IommuCounter::BadChains]), self.bad_chains);
        step != Step::Broken
    }

    /// Checks each endpoint's translations against the model, at the ends of all mappings and beyond.
    fn check(&self) {
        assert_eq!(self.steps.counts(), (self.model.domains.len(), self.model.mappings()));
        let mappings = self.model.domains.values().flatten().flatten();
        let ends =
            mappings.flat_map(|(first, (last, ..))| [*first, *last, first.wrapping_sub(1), last.wrapping_add(1)]);
        for address in ends.chain([0, self.model.last_address]) {
            for endpoint in 0..ENDPOINTS {
                for flags in 1..=3 {
                    let found = self.steps.translate(endpoint, address, flags & 1 != 0, flags & 2 != 0);
                    assert_eq!(
                        found,
                        self.model.translate(endpoint, address, flags),
                        "{endpoint} {address:#x} {flags}"
                    );
                }
            }
        }
    }

    /// Expected effect of a step, including that on `ram`; `None` if any effect is valid.
    fn expect(&mut self, ram: &mut Snapshot) -> Option<Expected> {
        let old = self.driver.given;
        // The device does not change the flags, so it wants a doorbell unless the driver itself has overwritten them.
        let doorbell = self.driver.wants_doorbell(ram, self.driver.taken);
        for _ in 0..self.driver.size {
            let Some(chains) = self.driver.waiting(ram) else { return Some(Expected::new(Step::Broken, false)) };
            let Some(chain) = chains.first() else { break };
            if chain.verdict == Verdict::Undefined || chain.touches(&self.driver.devices_part()) {
                return None;
            }
            let len = self.request(ram, chain);
            self.driver.taken = self.driver.taken.wrapping_add(1);
            self.driver.expect_used(ram, chain.head, len);
        }
        Some(Expected { step: Step::Doorbell, interrupt: self.driver.wants_interrupt(ram, old), doorbell })
    }

    /// Executes the request of a chain. Returns the length of the reply.
    fn request(&mut self, ram: &mut Snapshot, chain: &Chain) -> u32 {
        let bytes = chain.bytes(ram, false);
        let is_probe = bytes.first() == Some(&PROBE);
        let len = TAIL + if is_probe { PROPERTIES } else { 0 };
        if chain.verdict != Verdict::Sound || bytes.is_empty() || chain.len(true) < len {
            self.bad_chains += 1;
            return 0;
        }
        let status = self.model.carry_out(&bytes);
        *(if status == OK { &mut self.done } else { &mut self.refused }) += 1;
        let mut answer = vec![0; len as usize];
        answer[(len - TAIL) as usize] = status;
        if is_probe && status == OK {
            // Reserved memory of type 1 (interrupts), 20 bytes long: its first and last address.
            answer[..8].copy_from_slice(&[1, 0, 20, 0, 1, 0, 0, 0]);
            answer[8..16].copy_from_slice(&0xfee0_0000u64.to_le_bytes());
            answer[16..24].copy_from_slice(&0xfeef_ffffu64.to_le_bytes());
        }
        chain.fill(ram, &answer);
        len as u32
    }
}

/// Makes a request available as the chain of two descriptors from `n`, with its bytes at `at`.
fn ask(seed: Seed, n: u8, at: u32, request: &[u8], room: u16) -> Seed {
    let seed = guest::descriptor(guest::memory(seed, at, request), n, (at, request.len() as u16, NEXT, n + 1));
    guest::descriptor(seed, n + 1, (at + 0x80, room, WRITE, 0)).with([OFFER, n])
}

fn attach(domain: u32, endpoint: u32, flags: u32) -> Vec<u8> {
    [[ATTACH, 0, 0, 0], domain.to_le_bytes(), endpoint.to_le_bytes(), flags.to_le_bytes(), [0; 4]].concat()
}

fn detach(domain: u32, endpoint: u32) -> Vec<u8> {
    [[DETACH, 0, 0, 0], domain.to_le_bytes(), endpoint.to_le_bytes(), [0; 4], [0; 4]].concat()
}

fn map(domain: u32, first: u64, last: u64, target: u64) -> Vec<u8> {
    let addresses = [first, last, target].map(u64::to_le_bytes).concat();
    [&[MAP, 0, 0, 0], &domain.to_le_bytes()[..], &addresses, &3u32.to_le_bytes()].concat()
}

fn unmap(domain: u32, first: u64, last: u64) -> Vec<u8> {
    let addresses = [first, last].map(u64::to_le_bytes).concat();
    [&[UNMAP, 0, 0, 0], &domain.to_le_bytes()[..], &addresses, &[0; 4]].concat()
}

/// Seeds: domains created and removed; mappings added, overlapped, split and removed, and more than fit; probed
/// endpoints; bypass; a reset; invalid requests, chains and rings.
pub fn seeds() -> Vec<Vec<u8>> {
    let start = |width: u8| Seed::new().with([width, 1]);
    let at = |n: u32| BUFFERS + 0x100 * n;
    let all = |seed: Seed, requests: &[Vec<u8>]| {
        requests.chunks(3).fold(seed, |seed, chunk| {
            let seed = (0..).zip(chunk).fold(seed, |seed, (n, request)| ask(seed, 2 * n, at(n.into()), request, 4));
            seed.with([RUN])
        })
    };
    let used = all(
        start(0),
        &[
            attach(1, FIRST, 0),
            map(1, 0x1000, 0x1fff, 0x8000),
            map(1, 0x2000, u64::MAX, 0x2000),
            unmap(1, 0x1000, 0x2fff),
            unmap(1, 0x1000, 0x1fff),
            attach(2, FIRST, 0),
        ],
    );
    let full: Vec<_> = (0..5).map(|n| map(1, n * PAGE, n * PAGE + 0xfff, 0)).collect();
    let full = all(start(1), &[vec![attach(1, FIRST, 0)], full, vec![map(1, 1 << 40, (1 << 40) + 0xfff, 0)]].concat());
    let bypassed = all(start(0), &[attach(3, FIRST + 1, 1), attach(3, FIRST + 2, 0), detach(3, FIRST)]);
    let bypassed = bypassed.with([BYPASS, 1, RESET, BYPASS, 0]);
    let probe = [&[PROBE, 0, 0, 0], &FIRST.to_le_bytes()[..], &[0; 64]].concat();
    let probed = ask(start(0), 0, at(0), &probe, 516).with([RUN]);
    let deaf = ask(start(0), 0, at(0), &probe, 515).with([RUN]);
    let wrong = all(start(0), &[vec![9, 0, 0, 0], vec![ATTACH, 1, 0, 0], attach(1, 7, 0)]);
    let broken = start(0).with([guest::AVAILABLE_INDEX, 0xff, 0xff, RUN]);
    let quiet = guest::memory(ask(start(0), 0, at(0), &probe, 516), guest::USED as u32, &[1, 0]).with([RUN]);
    [used, full, bypassed, probed, deaf, wrong, broken, quiet].into_iter().map(Seed::done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_make_domains_and_mappings_and_break_rules() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let expected = [
            [1, 0, 5, 1, 0],
            [1, 4, 5, 2, 0],
            [0, 0, 1, 2, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1],
            [0, 0, 0, 3, 0],
            [0, 0, 0, 0, 0],
            [0, 0, 1, 0, 0],
        ];
        assert_eq!(done, expected);
    }
}
