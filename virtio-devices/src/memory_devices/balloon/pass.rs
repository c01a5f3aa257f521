//! The pages that the chains of a balloon's queues name.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::Permissions;

use super::counters::{BalloonCounter, Tally};
use super::pages::ranges;
use crate::DmaView;
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::memory::discard::{Discarded, discard};
use crate::queue::iovecs::{IoVecs, MAX_SEGMENTS, Storage};
use crate::queue::ring::Chain;

/// The inflate queue: pages that the driver puts into the balloon (`virtio 1.4 §5.5.2`).
pub(super) const INFLATE: u16 = 0;
/// The deflate queue: pages that the driver takes out.
pub(super) const DEFLATE: u16 = 1;
/// The reporting queue: free pages.
pub(super) const REPORT: u16 = 2;
/// The most page numbers that are handled before checking for a stop. Linux puts as many into a chain.
const PART: usize = 256;
/// The most page numbers handled in a chain; the rest of a longer chain is ignored. Windows sends at most 1,024.
pub(super) const MAX_PAGES: usize = 4096;
/// A page number in bytes.
const PAGE_NUMBER: usize = size_of::<u32>();
/// The result of a chain: nothing is written to it.
const DONE: ChainResult = ChainResult::Used(0);

/// Handles the pages that drivers name.
pub(super) struct Pages;

impl QueueHandler for Pages {
    type Tally = Tally;

    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { queue, memory, stop, storage: [storage, _], tally } = context;
        let mut pass = Pass { memory, stop, storage, tally };
        match queue {
            INFLATE => pass.page_numbers(chain, |pages, tally| {
                tally.add(BalloonCounter::InflatedPages, pages.len() as u64);
                ranges(pages).for_each(|range| give_back(memory, &range, tally));
            }),
            // The driver may be using the pages already: it does not wait for a reply.
            DEFLATE => pass.page_numbers(chain, |pages, tally| {
                tally.add(BalloonCounter::DeflatedPages, pages.len() as u64);
            }),
            REPORT => pass.reported(chain),
            // No other queue exists.
            _ => DONE,
        }
    }
}

/// A chain's pass.
struct Pass<'p> {
    memory: &'p DmaView,
    /// Stops the worker.
    stop: &'p AtomicBool,
    /// For the segments of the chain.
    storage: &'p mut Storage,
    tally: &'p mut Tally,
}

impl Pass<'_> {
    /// Calls `each` with the page numbers in `chain`, a part at a time.
    fn page_numbers(&mut self, chain: Chain<'_>, each: impl Fn(&mut [u32], &mut Tally)) -> ChainResult {
        let mut iovecs = IoVecs::new(self.storage);
        let bytes = iovecs.append(self.memory, chain, Permissions::Read).map_or(0, |extent| extent.bytes);
        if bytes == 0 || !bytes.is_multiple_of(PAGE_NUMBER) || bytes > MAX_PAGES * PAGE_NUMBER {
            self.tally.count(BalloonCounter::BadChains);
            return DONE;
        }
        let mut part = [[0; PAGE_NUMBER]; PART];
        for done in (0..bytes).step_by(part.as_flattened().len()) {
            if self.stop.load(Ordering::Acquire) {
                return ChainResult::Stopped;
            }
            let len = iovecs.read_at(done, part.as_flattened_mut());
            let mut pages = part.map(u32::from_le_bytes);
            each(&mut pages[..len / PAGE_NUMBER], self.tally);
        }
        DONE
    }

    /// Frees the ranges that the driver reports as free in `chain`: its descriptors are the ranges themselves.
    fn reported(&mut self, chain: Chain<'_>) -> ChainResult {
        let mut complete = false;
        for descriptor in chain.take(MAX_SEGMENTS) {
            if self.stop.load(Ordering::Acquire) {
                return ChainResult::Stopped;
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
        DONE
    }
}

/// Returns `range` to the host, as far as it is guest memory.
fn give_back(memory: &DmaView, range: &Range<u64>, tally: &mut Tally) {
    let Discarded { freed, kept, refused, outside } = discard(memory.map(), range);
    tally.add(BalloonCounter::DiscardedBytes, freed);
    tally.add(BalloonCounter::KeptBytes, kept);
    tally.add(BalloonCounter::BackendErrors, (refused > 0).into());
    tally.add(BalloonCounter::BadRanges, (outside > 0).into());
}
