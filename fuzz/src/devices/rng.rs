//! The queue of an entropy device, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! The source is a file with known bytes that ends. Each byte must reach the driver once and in order, and a buffer
//! must wait if there is no data for it. Some chains leave the device free to do anything; the run ends with the first
//! of those.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SeekFrom, memfd_create};
use virtio_devices::RngCounter;
use virtio_devices::testing::{RngSteps, Step};

use crate::guest::{self, BUFFERS, Chain, Driver, Expected, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

/// The feature bit of event indexes.
const EVENT_IDX: u32 = 29;
/// The most chains in one step.
const BATCH: usize = 16;
/// The most bytes for one buffer.
const MAX_READ: usize = 64 << 10;
/// The length of the source: more than one buffer holds.
const SOURCE: usize = 100_000;

// The kinds of operation, after those of the driver.
const RUN: u8 = guest::KINDS;
const KINDS: u8 = guest::KINDS + 1;

thread_local! {
    static FILE: (OwnedFd, Vec<u8>) = {
        let bytes: Vec<u8> = (0..SOURCE).map(|n| (n % 241) as u8).collect();
        let file = memfd_create("source", MemfdFlags::CLOEXEC).expect("the host makes files in memory");
        assert_eq!(rustix::io::pwrite(&file, &bytes, 0), Ok(SOURCE));
        (file, bytes)
    };
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the counters: bytes, buffers, bad chains, failed reads.
fn run_to_end(input: &[u8]) -> [u64; 4] {
    let mut input = Input::new(input);
    let features = u64::from(input.u8() & 1) << EVENT_IDX;
    let driver = Driver::new(&mut input, features != 0);
    let source = FILE.with(|(file, _)| {
        rustix::fs::seek(file, SeekFrom::Start(0)).expect("a file");
        file.try_clone().expect("a descriptor is left")
    });
    let steps = RngSteps::new(Driver::memory(), source, features).expect("an eventfd");
    let mut rng = Rng { driver, steps, counts: [0; 4] };
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN if !rng.run() => break,
            RUN => {}
            kind => rng.driver.apply(kind, &mut input),
        }
    }
    rng.counts
}

struct Rng {
    driver: Driver,
    steps: RngSteps,
    counts: [u64; 4],
}

impl Rng {
    /// Runs a step. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let Some(mut ram) = self.driver.before_step(&mut self.steps) else { return false };
        let expected = self.expect(&mut ram);
        let Some(step) = self.driver.step(&mut self.steps, expected, &ram) else { return false };
        let counters = [RngCounter::Bytes, RngCounter::Requests, RngCounter::BadChains, RngCounter::BackendErrors];
        assert_eq!(counters.map(|counter| self.steps.count(counter)), self.counts);
        step != Step::Broken
    }

    /// Expected effect of a step, including that on `ram`; `None` if any effect is valid.
    fn expect(&mut self, ram: &mut Snapshot) -> Option<Expected> {
        let (mut step, mut interrupt) = (Step::More, false);
        for _ in 0..BATCH {
            let Some(chains) = self.driver.waiting(ram) else { return Some(Expected::new(Step::Broken, interrupt)) };
            let Some(chain) = chains.first() else {
                step = Step::Doorbell;
                break;
            };
            if chain.verdict == Verdict::Undefined || chain.touches(&self.driver.devices_part()) {
                return None;
            }
            let Some(len) = self.receives(ram, chain) else {
                self.counts[3] += 1;
                step = Step::Frame;
                break;
            };
            let old = self.driver.given;
            self.driver.taken = self.driver.taken.wrapping_add(1);
            self.driver.expect_used(ram, chain.head, len);
            interrupt |= self.driver.wants_interrupt(ram, old);
        }
        Some(Expected::new(step, interrupt))
    }

    /// Number of bytes for a chain; `None` if the source has ended.
    fn receives(&mut self, ram: &mut Snapshot, chain: &Chain) -> Option<u32> {
        let room = chain.len(true) as usize;
        if chain.verdict != Verdict::Sound || !chain.is_all(true) || room == 0 {
            self.counts[2] += 1;
            return Some(0);
        }
        let given = self.counts[0] as usize;
        let len = room.min(MAX_READ).min(SOURCE - given);
        if len == 0 {
            return None;
        }
        FILE.with(|(_, bytes)| chain.fill(ram, &bytes[given..given + len]));
        self.counts[0] += len as u64;
        self.counts[1] += 1;
        Some(len as u32)
    }
}

/// A chain of `count` overlapping buffers, as large as memory allows.
fn large(seed: Seed, count: u8) -> Seed {
    let seed = (0..count).fold(seed, |seed, n| {
        let last = n + 1 == count;
        guest::descriptor(seed, n, (BUFFERS, 0x4000, WRITE | if last { 0 } else { NEXT }, n + 1))
    });
    seed.with([OFFER, 0, RUN])
}

/// Seeds: buffers, one that is larger than a single read, the source's end, and invalid chains.
pub fn seeds() -> Vec<Vec<u8>> {
    let start = |event_idx: u8| Seed::new().with([event_idx, 1]);
    let two = guest::descriptor(start(1), 0, (BUFFERS, 100, WRITE, 0)).with([OFFER, 0]);
    let two = guest::descriptor(two, 1, (BUFFERS + 0x200, 4096, WRITE, 0)).with([OFFER, 1, RUN]);
    let much = large(start(0), 8);
    let end = large(large(much.clone(), 8), 1);
    let readable = guest::descriptor(start(0), 0, (BUFFERS, 100, 0, 0)).with([OFFER, 0]);
    let readable = guest::descriptor(readable, 1, (BUFFERS, 0, WRITE, 0)).with([OFFER, 1, RUN]);
    let broken = start(0).with([guest::AVAILABLE_INDEX, 0xff, 0xff, RUN]);
    [two, much, end, readable, broken].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_fill_buffers_and_reach_the_end() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let much = MAX_READ as u64;
        let expected = [[4196, 2, 0, 0], [much, 1, 0, 0], [SOURCE as u64, 2, 0, 1], [0, 0, 2, 0], [0; 4]];
        assert_eq!(done, expected);
    }
}
