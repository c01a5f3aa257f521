//! Layout of guest memory in its image file.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use virtio_devices::{GuestMap, GuestRegion};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// Alignment of a region's offset, in bytes: the size of a huge page.
const ALIGNMENT: u64 = 2 << 20;
/// Length in bytes of the trailer, which identifies the snapshot.
pub(crate) const TRAILER: u64 = 4096;

/// A memory region and its offset in the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageRegion {
    /// First guest address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
}

/// Offsets of all regions. Holes of the file are zero memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageLayout {
    /// Regions, by address.
    pub regions: Vec<ImageRegion>,
    /// Length of the file, in bytes.
    pub file_size: u64,
}

impl ImageLayout {
    /// Creates the layout of regions at ascending addresses. Offsets follow from the addresses alone. Returns `None` if
    /// the file would be too long.
    pub(crate) fn of(regions: impl Iterator<Item = Range<u64>>) -> Option<Self> {
        let (mut end, mut placed) = (0u64, Vec::new());
        for Range { start: address, end: last } in regions {
            let size = last.checked_sub(address)?;
            let offset = end.checked_next_multiple_of(ALIGNMENT)?;
            end = offset.checked_add(size)?;
            placed.push(ImageRegion { address, size, offset });
        }
        let file_size = end.checked_next_multiple_of(TRAILER)?.checked_add(TRAILER)?;
        (file_size <= i64::MAX.unsigned_abs()).then_some(Self { regions: placed, file_size })
    }

    /// Creates the layout of a saved machine's regions: first address and length. Returns `None` if they are not
    /// ascending.
    pub(crate) fn of_saved(regions: &[(u64, u64)]) -> Option<Self> {
        let mut last = 0;
        let range = |(start, len): &(u64, u64)| {
            let end = start.checked_add(*len)?;
            let is_next = *start >= last && *len > 0;
            last = end;
            is_next.then_some(*start..end)
        };
        let ranges: Option<Vec<_>> = regions.iter().map(range).collect();
        Self::of(ranges?.into_iter())
    }

    /// Creates the layout of `memory`, without regions that named files keep.
    pub(crate) fn of_memory(memory: &GuestMap) -> Option<Self> {
        Self::of(memory.iter().filter(|region| !is_kept_by_its_file(region)).map(range))
    }

    /// True if this is the layout of a subset of a saved machine's regions.
    pub(crate) fn is_of_some(&self, regions: &[(u64, u64)]) -> bool {
        let own: Vec<_> = self.regions.iter().map(|region| (region.address, region.size)).collect();
        own.iter().all(|region| regions.contains(region)) && Self::of_saved(&own).as_ref() == Some(self)
    }

    /// Returns the offset of the trailer.
    pub(crate) const fn trailer(&self) -> u64 {
        self.file_size.saturating_sub(TRAILER)
    }

    /// Returns the offset of the region with these addresses.
    pub(crate) fn offset(&self, range: &Range<u64>) -> Option<u64> {
        let is_it = |region: &&ImageRegion| region.address == range.start && region.size == range.end - range.start;
        self.regions.iter().find(is_it).map(|region| region.offset)
    }
}

/// Returns the guest addresses of a region.
pub(crate) fn range(region: &GuestRegion) -> Range<u64> {
    let start = region.start_addr().0;
    start..start.saturating_add(region.len())
}

/// True if a named file backs the region, which may have contents from elsewhere.
pub(crate) fn has_named_file(region: &GuestRegion) -> bool {
    // Files created for the guest are unlinked.
    let found = region.file_offset().and_then(|file| rustix::fs::fstat(file.file()).ok());
    found.is_some_and(|found| found.st_nlink > 0)
}

/// True if a named file receives all writes to the region.
pub(crate) fn is_kept_by_its_file(region: &GuestRegion) -> bool {
    region.flags() & libc::MAP_SHARED != 0 && has_named_file(region)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn an_offset_follows_from_the_addresses_and_is_aligned() {
        let ranges = [0..3 * MIB + 4096, 16 * MIB..17 * MIB];
        let layout = ImageLayout::of(ranges.iter().cloned()).unwrap();
        assert_eq!(ranges.each_ref().map(|range| layout.offset(range)), [Some(0), Some(4 * MIB)]);
        assert_eq!((layout.trailer(), layout.file_size), (5 * MIB, 5 * MIB + TRAILER));
        assert_eq!(layout.offset(&(0..MIB)), None);
        assert_eq!(ImageLayout::of(std::iter::once(0..u64::MAX)), None);
    }

    #[test]
    fn a_layout_of_some_regions_has_no_others_and_no_other_order() {
        let machine = [(0, MIB), (4 * MIB, MIB), (8 * MIB, MIB)];
        let layout = |regions: &[(u64, u64)]| ImageLayout::of_saved(regions).unwrap();
        for some in [&machine[..], &machine[1..2], &[machine[0], machine[2]], &[]] {
            assert!(layout(some).is_of_some(&machine), "{some:?}");
        }
        assert!(!layout(&[(0, 2 * MIB)]).is_of_some(&machine));
        let mut moved = layout(&machine);
        moved.regions[1].offset += ALIGNMENT;
        assert!(!moved.is_of_some(&machine));
        moved = layout(&machine);
        moved.regions.swap(0, 1);
        assert!(!moved.is_of_some(&machine));
    }

    #[test]
    fn memory_that_a_named_file_keeps_is_not_in_the_layout() {
        let named = tempfile::NamedTempFile::new().unwrap();
        named.as_file().set_len(2 * MIB).unwrap();
        let unnamed = tempfile::tempfile().unwrap();
        unnamed.set_len(2 * MIB).unwrap();
        let part = |address, file: std::fs::File| {
            (vm_memory::GuestAddress(address), MIB as usize, Some(vm_memory::FileOffset::new(file, 0)))
        };
        let parts = [part(0, named.reopen().unwrap()), part(4 * MIB, unnamed)];
        let memory = GuestMap::from_ranges_with_files(parts).unwrap();
        assert_eq!(ImageLayout::of_memory(&memory), ImageLayout::of_saved(&[(4 * MIB, MIB)]));
    }

    proptest! {
        #[test]
        fn regions_never_overlap_in_the_file(sizes in prop::collection::vec(1u64..1 << 30, 0..20)) {
            let mut next = 0;
            let ranges: Vec<_> = sizes.iter().map(|size| { next += size; next - size..next }).collect();
            let layout = ImageLayout::of(ranges.into_iter()).unwrap();
            for pair in layout.regions.windows(2) {
                prop_assert!(pair[0].offset + pair[0].size <= pair[1].offset);
            }
            prop_assert!(layout.regions.iter().all(|region| region.offset + region.size <= layout.trailer()));
        }
    }
}
