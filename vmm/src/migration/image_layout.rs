//! Where the guest's memory is in the file of its image.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use virtio_devices::GuestMap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// The alignment of a region's offset, in bytes: that of huge pages.
const ALIGNMENT: u64 = 2 << 20;
/// The length of what follows the regions and names the snapshot, in bytes.
pub(crate) const TRAILER: u64 = 4096;

/// A region of the guest's memory, and where it is in the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageRegion {
    /// Its first guest address.
    pub address: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Its offset in the file, in bytes.
    pub offset: u64,
}

/// Where all regions are. What is not in the file, its holes, is zero.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageLayout {
    /// The regions, by address.
    pub regions: Vec<ImageRegion>,
    /// The length of the file, in bytes.
    pub file_size: u64,
}

impl ImageLayout {
    /// The layout of regions at these addresses, in ascending order: an offset follows from the addresses alone. `None`
    /// if no file is so long.
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

    /// The layout of the regions that a saved machine names by their first addresses and lengths. `None` if these are
    /// no addresses in ascending order.
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

    /// The layout of `memory`.
    pub(crate) fn of_memory(memory: &GuestMap) -> Option<Self> {
        Self::of(memory.iter().map(|region| {
            let start = region.start_addr().0;
            start..start.saturating_add(region.len())
        }))
    }

    /// The offset of what follows the regions.
    pub(crate) const fn trailer(&self) -> u64 {
        self.file_size.saturating_sub(TRAILER)
    }

    /// The offset of the region with these addresses.
    pub(crate) fn offset(&self, range: &Range<u64>) -> Option<u64> {
        let is_it = |region: &&ImageRegion| region.address == range.start && region.size == range.end - range.start;
        self.regions.iter().find(is_it).map(|region| region.offset)
    }
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
