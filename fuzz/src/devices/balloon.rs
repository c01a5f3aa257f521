//! The queues of a balloon, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! The first byte of the input chooses the queue, the next one the features. A driver may inflate the pages with its
//! own rings in them: the oracle zeroes them at the same time. Some chains leave the device free to do anything; the
//! run ends with the first of those.

use std::collections::BTreeSet;
use std::ops::Range;

use virtio_devices::BalloonCounter;
use virtio_devices::testing::{BalloonSteps, Step};

use crate::guest::{self, BUFFERS, Chain, Driver, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

const PAGE: u64 = 4096;
/// The feature bit of event indexes.
const EVENT_IDX: u32 = 29;
/// The most page numbers in a chain.
const MAX_PAGES: u64 = 4096;
/// The page numbers that are handled at once, in bytes.
const PART: usize = 1024;
/// The most chains in one step.
const BATCH: usize = 16;

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const REPORT: u16 = 2;

// The kinds of operation, after those of the driver.
const RUN: u8 = guest::KINDS;
const KINDS: u8 = guest::KINDS + 1;

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of pages returned to the host, and of bad chains.
fn run_to_end(input: &[u8]) -> (u64, u64) {
    let mut input = Input::new(input);
    let (queue, features) = (u16::from(input.u8() % 3), u64::from(input.u8() & 1) << EVENT_IDX);
    let driver = Driver::new(&mut input, features != 0);
    driver.fill_buffers();
    let steps = BalloonSteps::new(Driver::memory(), features).expect("an eventfd");
    let mut balloon = Balloon { driver, steps, queue, counts: Counts::default() };
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN if !balloon.run() => break,
            RUN => {}
            kind => balloon.driver.apply(kind, &mut input),
        }
    }
    let count = |counter| balloon.steps.count(counter);
    (count(BalloonCounter::DiscardedBytes) / PAGE, count(BalloonCounter::BadChains))
}

/// The expected counters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    inflated: u64,
    deflated: u64,
    reported: u64,
    discarded: u64,
    kept: u64,
    bad_chains: u64,
    bad_ranges: u64,
}

struct Balloon {
    driver: Driver,
    steps: BalloonSteps,
    queue: u16,
    counts: Counts,
}

impl Balloon {
    /// Runs a step. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let shared = self.driver.queue.clone();
        let Some(mut queue) = self.steps.queue(self.queue, &shared) else {
            assert!(!self.driver.usual_place);
            return false;
        };
        if !self.driver.usual_place {
            Driver::run_anyhow(|| self.steps.step(&mut queue));
            return true;
        }
        let (before, mut ram) = (Snapshot::take(), Snapshot::take());
        let Some((step, interrupt)) = self.expect(&mut ram) else {
            self.steps.step(&mut queue);
            let gone = |page: &u64| before.get(*page, PAGE).is_some();
            let (after, used) = (Snapshot::take(), self.driver.devices_part());
            // The used ring may lie in a page that was freed, and be written afterwards.
            let zero = (0..7 * PAGE).step_by(PAGE as usize).filter(gone).filter(|page| is_zero(&after, *page, &used));
            // Only rings and freed pages change.
            let allowed: Vec<_> = zero.map(|page| page..page + PAGE).chain([used.clone()]).collect();
            assert_eq!(after.differs_from(&before, &allowed), None, "the device wrote where it must not");
            return false;
        };
        assert_eq!(self.steps.step(&mut queue), step);
        let after = Snapshot::take();
        let used = self.driver.devices_part();
        // The device may choose whether it wants doorbells, and rewrites the used index when it returns nothing.
        let free = [used.start..used.start + 4, used.end - 2..used.end];
        assert_eq!(after.differs_from(&ram, &free), None, "the device wrote where it must not, or kept a page");
        assert_eq!(self.counted(), self.counts);
        assert_eq!(self.steps.take_interrupt(), interrupt);
        if step == Step::Doorbell {
            assert!(self.driver.wants_doorbell(&after, self.driver.taken), "the device would not be woken");
        }
        step != Step::Broken
    }

    fn counted(&self) -> Counts {
        let count = |counter| self.steps.count(counter);
        assert_eq!(count(BalloonCounter::BackendErrors), 0);
        Counts {
            inflated: count(BalloonCounter::InflatedPages),
            deflated: count(BalloonCounter::DeflatedPages),
            reported: count(BalloonCounter::ReportedBytes),
            discarded: count(BalloonCounter::DiscardedBytes),
            kept: count(BalloonCounter::KeptBytes),
            bad_chains: count(BalloonCounter::BadChains),
            bad_ranges: count(BalloonCounter::BadRanges),
        }
    }

    /// Expected effect of a step on `ram`, its end, and true if it interrupts the driver; `None` if any effect is
    /// valid.
    fn expect(&mut self, ram: &mut Snapshot) -> Option<(Step, bool)> {
        let mut interrupt = false;
        for _ in 0..BATCH {
            let Some(chains) = self.driver.waiting(ram) else { return Some((Step::Broken, interrupt)) };
            let Some(chain) = chains.first() else { return Some((Step::Doorbell, interrupt)) };
            let unclear = chain.verdict == Verdict::Undefined || chain.touches(&self.driver.devices_part());
            if unclear || self.queue == REPORT && chain.verdict != Verdict::Sound {
                return None;
            }
            match self.queue {
                INFLATE | DEFLATE => self.page_numbers(ram, chain),
                _ => self.reported(ram, chain),
            }
            let old = self.driver.given;
            self.driver.taken = self.driver.taken.wrapping_add(1);
            self.driver.expect_used(ram, chain.head, 0);
            interrupt |= self.driver.wants_interrupt(ram, old);
        }
        Some((Step::More, interrupt))
    }

    fn page_numbers(&mut self, ram: &mut Snapshot, chain: &Chain) {
        let len = chain.len(false);
        let sound = chain.verdict == Verdict::Sound && chain.is_all(false);
        if !sound || len == 0 || !len.is_multiple_of(4) || len > 4 * MAX_PAGES {
            self.counts.bad_chains += 1;
            return;
        }
        for done in (0..len as usize).step_by(PART) {
            // Pages freed until now read as zero, including page numbers.
            let bytes = chain.bytes(ram, false);
            let part = &bytes[done..bytes.len().min(done + PART)];
            let pages = part.chunks_exact(4).map(|page| u32::from_le_bytes(page.try_into().expect("4 bytes")));
            if self.queue == DEFLATE {
                self.counts.deflated += part.len() as u64 / 4;
                continue;
            }
            self.counts.inflated += part.len() as u64 / 4;
            let mut last_bad = None;
            let mut bad_run = false;
            for page in pages.collect::<BTreeSet<_>>() {
                if last_bad != page.checked_sub(1) || page == 0 {
                    bad_run = false;
                }
                last_bad = Some(page);
                if !self.give(ram, u64::from(page) * PAGE) && !bad_run {
                    bad_run = true;
                    self.counts.bad_ranges += 1;
                }
            }
        }
    }

    fn reported(&mut self, ram: &mut Snapshot, chain: &Chain) {
        if !chain.is_all(true) {
            self.counts.bad_chains += 1;
            return;
        }
        for segment in &chain.segments {
            self.counts.reported += segment.len;
            let (start, end) = (segment.address.div_ceil(PAGE), (segment.address + segment.len) / PAGE);
            let pages = (start..end).filter(|page| self.give(ram, page * PAGE)).count() as u64;
            self.counts.kept += segment.len - pages * PAGE;
        }
    }

    /// Frees a page, if it is memory.
    fn give(&mut self, ram: &mut Snapshot, page: u64) -> bool {
        let there = ram.get(page, PAGE).is_some();
        if there {
            ram.put(page, &[0; PAGE as usize]);
            self.counts.discarded += PAGE;
        }
        there
    }
}

/// True if the page is zero, except for the addresses in `written`.
fn is_zero(ram: &Snapshot, page: u64, written: &Range<u64>) -> bool {
    let zero = |(address, byte): (u64, &u8)| *byte == 0 || written.contains(&address);
    ram.get(page, PAGE).is_some_and(|bytes| (page..).zip(bytes).all(zero))
}

fn start(queue: u16, event_idx: bool) -> Seed {
    // A queue of 8 descriptors.
    Seed::new().with([queue as u8, event_idx.into(), 1])
}

/// Makes a chain of one descriptor with `pages` available.
fn send(seed: Seed, index: u8, pages: &[u32]) -> Seed {
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    let at = BUFFERS + 0x100 * u32::from(index);
    guest::descriptor(guest::memory(seed, at, &bytes), index, (at, bytes.len() as u16, 0, 0)).with([OFFER, index])
}

/// Seeds: pages freed one by one, in runs, with the rings and the page numbers in them, and outside memory; free memory
/// reported; invalid chains.
pub fn seeds() -> Vec<Vec<u8>> {
    let pages = send(send(start(INFLATE, true), 0, &[4, 2, 3]).with([RUN]), 1, &[6]).with([RUN]);
    let outside = send(start(INFLATE, false), 0, &[5, 4, 7, 8, u32::MAX]).with([RUN]);
    let numbers = send(send(start(INFLATE, false), 0, &[1]), 1, &[2, 2]).with([RUN]);
    let rings = send(start(INFLATE, false), 0, &[0]).with([RUN, RUN]);
    let odd = guest::descriptor(start(INFLATE, false), 0, (BUFFERS, 6, 0, 0)).with([OFFER, 0, RUN]);
    // All page numbers lie in pages that the first of them frees.
    let long = guest::memory(start(INFLATE, false), 0x2000, &[2, 0, 0, 0, 3, 0, 0, 0]);
    let long = guest::descriptor(long, 0, (0x2000, 0x2000, 0, 0)).with([OFFER, 0, RUN]);
    let deflate = send(start(DEFLATE, true), 0, &[4, 2, 3]).with([RUN]);
    let report = guest::descriptor(start(REPORT, true), 0, (0x2000, 0x2000, WRITE | NEXT, 1));
    let report = guest::descriptor(report, 1, (0x4800, 0x800, WRITE, 0)).with([OFFER, 0, RUN]);
    let readable = guest::descriptor(start(REPORT, false), 0, (0x2000, 0x1000, 0, 0)).with([OFFER, 0, RUN]);
    let hole = guest::descriptor(start(REPORT, false), 0, (0x4000, 0x3000, WRITE, 0)).with([OFFER, 0, RUN]);
    let broken = start(INFLATE, false).with([guest::AVAILABLE_INDEX, 0xff, 0xff, RUN]);
    let seeds = [pages, outside, numbers, rings, odd, long, deflate, report, readable, hole, broken];
    seeds.into_iter().map(Seed::done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_give_pages_away_and_break_rules() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let expected = [(4, 0), (1, 0), (2, 0), (1, 0), (0, 1), (9, 0), (0, 0), (2, 0), (0, 1), (2, 0), (0, 0)];
        assert_eq!(done, expected);
    }
}
