//! Return of the pages that a queue's chains name.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::Permissions;

use super::counters::{BalloonCounter, Tally};
use super::pages::ranges;
use crate::discard::{Discarded, discard};
use crate::iovecs::{IoVecs, MAX_SEGMENTS, Storage};
use crate::ring::{BrokenRing, Chain, Ring, Used};
use crate::{DmaView, Interrupts};

/// The queue of pages that the driver puts into the balloon (`virtio 1.4 §5.5.2`).
pub(super) const INFLATE: u16 = 0;
/// The queue of pages that the driver takes out.
pub(super) const DEFLATE: u16 = 1;
/// The queue of free pages that the driver reports.
pub(super) const REPORT: u16 = 2;
/// The most page numbers that are worked on before a stop is looked at. Linux has as many in a chain.
const PART: usize = 256;
/// The most page numbers in a chain; those of a longer one are not looked at. Windows has at most 1,024.
pub(super) const MAX_PAGES: usize = 4096;
/// A page number in bytes.
const PAGE_NUMBER: usize = size_of::<u32>();
/// The most chains of one queue that are looked at before the others are.
const BATCH: usize = 16;

/// Progress of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// It was.
    Done,
    /// The worker is to stop: the chain waits for the next one.
    Stopped,
}

/// A turn of the worker's loop.
pub(super) struct Pass<'p> {
    /// The guest's memory.
    pub memory: &'p DmaView,
    /// Stops it.
    pub stop: &'p AtomicBool,
    /// Interrupts of the device.
    pub interrupts: &'p Interrupts,
    /// For the segments of a chain.
    pub storage: &'p mut Storage,
    /// The counters.
    pub tally: &'p mut Tally,
}

impl Pass<'_> {
    /// Works on up to [`BATCH`] chains. Returns whether there are no more, and a doorbell will come for the next one.
    pub(super) fn serve(&mut self, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = self.memory;
        ring.suppress_doorbells(memory)?;
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else { return Ok(!ring.expect_doorbell(memory)?) };
            let head = chain.head_index();
            let work = match ring.index() {
                INFLATE => self.page_numbers(chain, |pages, tally| {
                    tally.add(BalloonCounter::InflatedPages, pages.len() as u64);
                    ranges(pages).for_each(|range| give_back(memory, &range, tally));
                }),
                // The driver may have used them already: it does not wait for the answer.
                DEFLATE => self.page_numbers(chain, |pages, tally| {
                    tally.add(BalloonCounter::DeflatedPages, pages.len() as u64);
                }),
                REPORT => self.reported(chain),
                // There is no other.
                _ => Work::Done,
            };
            if work == Work::Stopped {
                ring.put_back(1);
                break;
            }
            ring.give_back(memory, &[Used { head, len: 0 }])?;
            // The driver waits for each.
            if ring.wants_interrupt(memory)? {
                self.interrupts.signal_queue(ring.index());
                self.tally.count(BalloonCounter::Interrupts);
            }
        }
        Ok(false)
    }

    /// Calls `each` with the page numbers in `chain`, some at a time.
    fn page_numbers(&mut self, chain: Chain<'_>, each: impl Fn(&mut [u32], &mut Tally)) -> Work {
        let mut iovecs = IoVecs::new(self.storage);
        let bytes = iovecs.append(self.memory, chain, Permissions::Read).map_or(0, |extent| extent.bytes);
        if bytes == 0 || !bytes.is_multiple_of(PAGE_NUMBER) || bytes > MAX_PAGES * PAGE_NUMBER {
            self.tally.count(BalloonCounter::BadChains);
            return Work::Done;
        }
        let mut part = [[0; PAGE_NUMBER]; PART];
        for done in (0..bytes).step_by(part.as_flattened().len()) {
            if self.stop.load(Ordering::Acquire) {
                return Work::Stopped;
            }
            let len = iovecs.read_at(done, part.as_flattened_mut());
            let mut pages = part.map(u32::from_le_bytes);
            each(&mut pages[..len / PAGE_NUMBER], self.tally);
        }
        Work::Done
    }

    /// Gives the host what the driver reports as free in `chain`, whose descriptors are the free ranges themselves.
    fn reported(&mut self, chain: Chain<'_>) -> Work {
        let mut complete = false;
        for descriptor in chain.take(MAX_SEGMENTS) {
            if self.stop.load(Ordering::Acquire) {
                return Work::Stopped;
            }
            complete = descriptor.is_write_only() && !descriptor.has_next();
            if !descriptor.is_write_only() {
                break;
            }
            let (start, len) = (descriptor.address(), u64::from(descriptor.len()));
            self.tally.add(BalloonCounter::ReportedBytes, len);
            give_back(self.memory, &(start..start.saturating_add(len)), self.tally);
        }
        self.tally.add(BalloonCounter::BadChains, (!complete).into());
        Work::Done
    }
}

/// Gives `range` back to the host, as far as it is guest memory.
fn give_back(memory: &DmaView, range: &Range<u64>, tally: &mut Tally) {
    let Discarded { freed, kept, refused, outside } = discard(memory.map(), range);
    tally.add(BalloonCounter::DiscardedBytes, freed);
    tally.add(BalloonCounter::KeptBytes, kept);
    tally.add(BalloonCounter::BackendErrors, (refused > 0).into());
    tally.add(BalloonCounter::BadRanges, (outside > 0).into());
}
