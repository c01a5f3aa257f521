//! A part of guest memory that a view has looked up.

use std::ops::Range;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::dirty::DirtyBitmap;
use super::map::{GuestMap, GuestRegion};
use super::reach::Reach;

/// The part of a region of the map that devices can reach around an address, in the form that accesses need.
#[derive(Clone, Copy)]
pub(super) struct Known {
    /// First guest physical address.
    pub start: u64,
    /// Length in bytes; 0 for an empty range.
    pub len: u64,
    /// Address at which it is mapped.
    pub host: *mut u8,
    /// The bitmap of the region, which lives as long as the map.
    pub bitmap: *const DirtyBitmap,
    /// Offset in the region of the bitmap.
    pub offset: usize,
    /// The reachable blocks of the region, which live as long as the map; null if devices can reach all of it.
    reach: *const Reach,
    /// Their generation, read before the blocks.
    generation: u64,
}

impl Known {
    pub(super) const NONE: Self = Self {
        start: 0,
        len: 0,
        host: std::ptr::null_mut(),
        bitmap: std::ptr::null(),
        offset: 0,
        reach: std::ptr::null(),
        generation: 0,
    };

    /// The region of `map` at the guest physical `address`, limited to the part around it that devices can reach.
    pub(super) fn of(map: &GuestMap, address: u64) -> Option<Self> {
        let region = map.find_region(GuestAddress(address))?;
        let at = address.checked_sub(region.start_addr().0)?;
        let Some(reach) = region.bitmap().whole().reach() else { return Self::part(region, &(0..region.len()), at) };
        let generation = reach.generation();
        let known = Self::part(region, &reach.around(at)?, at)?;
        Some(Self { reach, generation, ..known })
    }

    /// The `part` of a region, offsets, clamped to the region; `None` if the offset `at` is outside.
    fn part(region: &GuestRegion, part: &Range<u64>, at: u64) -> Option<Self> {
        let part = part.start..part.end.min(region.len());
        let len = part.end.checked_sub(part.start).filter(|_| part.contains(&at))?;
        let start = region.start_addr().0.checked_add(part.start)?;
        let offset = usize::try_from(part.start).ok()?;
        let host = region.as_ptr().wrapping_add(offset);
        Some(Self { start, len, host, bitmap: region.bitmap().whole(), offset, ..Self::NONE })
    }

    /// True if it contains all `len` bytes at `address`, and `len` is at least 1.
    #[inline]
    pub(super) fn contains(&self, address: u64, len: usize) -> bool {
        let offset = address.wrapping_sub(self.start);
        offset < self.len && len != 0 && len as u64 <= self.len - offset
    }

    /// True if blocks of the region were unplugged since the look-up, so that devices may no longer reach all of it.
    ///
    /// # Safety
    ///
    /// The map used for the look-up is alive.
    #[inline]
    pub(super) unsafe fn is_stale(&self) -> bool {
        // SAFETY: the map keeps its regions, and they keep their reach: the pointer is null or valid.
        unsafe { self.reach.as_ref() }.is_some_and(|reach| reach.generation() != self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_lacks_the_address_is_not_known() {
        let map = GuestMap::from_ranges(&[(GuestAddress(0x10000), 0x8000)]).unwrap();
        let region = map.iter().next().unwrap();
        let found = |part: Range<u64>, at| Known::part(region, &part, at).map(|known| (known.start, known.len));
        #[expect(clippy::reversed_empty_ranges, reason = "what unplugs could make of a part")]
        let none = [
            (0x4000..0x3000, 0x3000),
            (0x4000..0x3000, 0x4000),
            (0x4000..0x3000, 0x3fff),
            (u64::MAX..0, 0),
            (0x9000..0x1_0000, 0x9000),
            (0x3000..0x3000, 0x3000),
            (0x3000..0x4000, 0x4000),
            (0x3000..0x4000, 0x2fff),
        ];
        for (part, at) in none {
            assert_eq!(found(part.clone(), at), None, "{part:x?} {at:#x}");
        }
        assert_eq!(found(0x3000..0x4000, 0x3fff), Some((0x13000, 0x1000)));
        assert_eq!(found(0x7000..0x9000, 0x7000), Some((0x17000, 0x1000)), "no further than the region");
        for address in [0, 0xffff, 0x18000, u64::MAX] {
            assert!(Known::of(&map, address).is_none());
        }
    }
}
