//! Page numbers as ranges of addresses.

use std::ops::Range;

use crate::memory::discard::PAGE;

/// The guest address ranges of the pages numbered `pages`, which are sorted first: adjacent pages make one range, and
/// duplicates count once.
pub(super) fn ranges(pages: &mut [u32]) -> impl Iterator<Item = Range<u64>> {
    pages.sort_unstable();
    pages.chunk_by(|low, high| high - low <= 1).filter_map(|run| {
        let (first, last) = (run.first()?, run.last()?);
        Some(u64::from(*first) * PAGE..(u64::from(*last) + 1) * PAGE)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn adjacent_pages_in_any_order_are_one_range() {
        let mut pages = [7, 5, 6, 9, 6, u32::MAX, 0];
        let expected = [0..PAGE, 5 * PAGE..8 * PAGE, 9 * PAGE..10 * PAGE, (1 << 44) - PAGE..1 << 44];
        assert_eq!(ranges(&mut pages).collect::<Vec<_>>(), expected);
        assert_eq!(ranges(&mut []).count(), 0);
    }

    proptest! {
        #[test]
        fn ranges_hold_each_page_once_and_do_not_touch(pages in prop::collection::vec(0..64u32, 0..64)) {
            let ranges: Vec<_> = ranges(&mut pages.clone()).collect();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            let found: Vec<_> = ranges.into_iter().flat_map(|range| range.step_by(PAGE as usize)).collect();
            let expected: BTreeSet<_> = pages.iter().map(|page| u64::from(*page) * PAGE).collect();
            prop_assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
        }
    }
}
