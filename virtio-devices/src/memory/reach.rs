//! The blocks of a region of guest memory that devices can reach.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks in a word.
const WORD: usize = u64::BITS as usize;

/// The plugged blocks of a region of guest memory. All others are outside guest memory: a descriptor that points there
/// is as invalid as one that points to no region. A block becomes reachable after it is plugged, and unreachable before
/// it is unplugged.
#[derive(Debug)]
pub struct Reach {
    /// The size of a block in bytes.
    block: u64,
    /// The number of blocks.
    count: usize,
    /// A bit for each block, the lowest of the first word for the first block.
    words: Box<[AtomicU64]>,
    /// Number of times that blocks were removed. Incremented afterwards, so that a reader that reads it before the
    /// blocks detects each removal.
    generation: AtomicU64,
}

impl Reach {
    /// Creates a region of `count` blocks of `block` bytes, none of them reachable.
    pub fn new(block: u64, count: usize) -> Self {
        let words = (0..count.div_ceil(WORD)).map(|_| AtomicU64::new(0)).collect();
        Self { block: block.max(1), count, words, generation: AtomicU64::new(0) }
    }

    /// Adds or removes the blocks in `range`.
    pub fn set(&self, range: Range<usize>, reached: bool) {
        for block in range.start..range.end.min(self.count) {
            if let Some(word) = self.words.get(block / WORD) {
                let bit = 1 << (block % WORD);
                let _ =
                    if reached { word.fetch_or(bit, Ordering::AcqRel) } else { word.fetch_and(!bit, Ordering::AcqRel) };
            }
        }
        if !reached {
            self.generation.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A number that changes after blocks are removed.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// True if the block is reachable.
    pub fn has(&self, block: usize) -> bool {
        let word = self.words.get(block / WORD).map_or(0, |word| word.load(Ordering::Acquire));
        block < self.count && word >> (block % WORD) & 1 != 0
    }

    /// The first run of blocks at or after `from` that are reachable, or that are not; `None` if there is none.
    pub fn run(&self, from: usize, reached: bool) -> Option<Range<usize>> {
        let start = self.next(from, reached).filter(|start| *start < self.count)?;
        let end = self.next(start, !reached).unwrap_or(self.count);
        // The first may have changed in between.
        (start < end).then_some(start..end)
    }

    /// Offsets of the contiguous reachable blocks around the offset `offset` in the region.
    pub(super) fn around(&self, offset: u64) -> Option<Range<u64>> {
        let block = usize::try_from(offset / self.block).ok()?;
        // Both searches include the block itself: if it is unplugged in between, the range does not contain it.
        let range = self.before(block)..self.next(block, false).unwrap_or(self.count);
        range.contains(&block).then(|| range.start as u64 * self.block..range.end as u64 * self.block)
    }

    /// The first block at or after `from` that is reachable, or that is not.
    fn next(&self, from: usize, reached: bool) -> Option<usize> {
        let flip = if reached { 0 } else { u64::MAX };
        let mut mask = u64::MAX << (from % WORD);
        for (index, word) in self.words.iter().enumerate().skip(from / WORD) {
            let bits = (word.load(Ordering::Acquire) ^ flip) & mask;
            if bits != 0 {
                return Some(index * WORD + bits.trailing_zeros() as usize).filter(|block| *block < self.count);
            }
            mask = u64::MAX;
        }
        None
    }

    /// The first of the contiguous reachable blocks that end with `block`; a later one if `block` is not reachable.
    fn before(&self, block: usize) -> usize {
        let mut mask = u64::MAX >> (WORD - 1 - block % WORD);
        for (index, word) in self.words.iter().enumerate().take(block / WORD + 1).rev() {
            let gaps = !word.load(Ordering::Acquire) & mask;
            if gaps != 0 {
                return index * WORD + WORD - gaps.leading_zeros() as usize;
            }
            mask = u64::MAX;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// Blocks change while a device searches: in one word, and across words.
    #[test]
    fn a_range_around_an_offset_contains_it_during_unplugs() {
        const BLOCK: u64 = 4096;
        const COUNT: usize = 150;
        let (reach, stop) = (Reach::new(BLOCK, COUNT), AtomicBool::new(false));
        let looks = |block: u64| {
            let (offset, mut found) = (block * BLOCK + 7, [0_u32; 2]);
            // Until both results have occurred often.
            while found.iter().any(|count| *count < 20_000) {
                let range = reach.around(offset);
                let is_good = |range: &Range<u64>| range.contains(&offset) && range.end <= COUNT as u64 * BLOCK;
                assert!(range.as_ref().is_none_or(is_good), "{offset:#x} {range:x?}");
                found[usize::from(range.is_some())] += 1;
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    reach.set(60..COUNT, true);
                    reach.set(100..101, false);
                    reach.set(63..140, false);
                }
            });
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| [63, 100, 139].map(looks)));
            stop.store(true, Ordering::Relaxed);
            result.unwrap();
        });
    }

    proptest! {
        #[test]
        fn runs_are_those_of_a_list(
            changes in prop::collection::vec((0..200usize, 0..200usize, any::<bool>()), 0..12)
        ) {
            let reach = Reach::new(4096, 200);
            let mut list = [false; 200];
            for (start, end, reached) in changes {
                reach.set(start..end, reached);
                list.get_mut(start..end).into_iter().for_each(|part| part.fill(reached));
            }
            for block in 0..200 {
                prop_assert_eq!(reach.has(block), list[block]);
                let start = list[..block].iter().rposition(|reached| !reached).map_or(0, |gap| gap + 1);
                let end = list[block..].iter().position(|reached| !reached).map_or(200, |gap| block + gap);
                let expected = list[block].then_some(start as u64 * 4096..end as u64 * 4096);
                prop_assert_eq!(reach.around(block as u64 * 4096 + 7), expected);
                for wanted in [false, true] {
                    let first = list[block..].iter().position(|reached| *reached == wanted).map(|at| block + at);
                    let last = |first: usize| list[first..].iter().position(|reached| *reached != wanted);
                    let expected = first.map(|first| first..last(first).map_or(200, |at| first + at));
                    prop_assert_eq!(reach.run(block, wanted), expected);
                }
            }
            prop_assert!(!reach.has(200) && reach.around(200 * 4096).is_none() && reach.run(200, false).is_none());
        }
    }
}
