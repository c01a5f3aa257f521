//! The parts of a device's BARs that the guest reaches without an exit.

use std::ops::Range;

use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
};

use crate::vfio::kernel::info::RegionInfo;

/// The page size, in bytes.
const PAGE: u64 = 4096;
/// Flags that a region must have.
const ALL: u32 = VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
/// The most areas of one BAR: each takes a memory slot.
const MOST: usize = 64;

/// The areas of a BAR that the guest can access directly: whole pages that do not overlap `kept`, the parts that this
/// program emulates (the MSI-X table and its pending bits).
pub(crate) fn areas(region: &RegionInfo, kept: &[Range<u64>]) -> Vec<Range<u64>> {
    // The kernel does not map pages that it handles itself.
    if region.flags & ALL != ALL || (region.sparse.is_none() && !kept.is_empty() && !region.msix_mappable) {
        return Vec::new();
    }
    let whole = region.sparse.is_none().then_some(0..region.size);
    let all = region.sparse.iter().flatten().cloned().chain(whole);
    let mut areas: Vec<_> = all.map(|area| area.start..area.end.min(region.size)).collect();
    for hole in kept {
        let pages = hole.start / PAGE * PAGE..hole.end.saturating_add(PAGE - 1) / PAGE * PAGE;
        areas = areas.into_iter().flat_map(|area| without(area, &pages)).collect();
    }
    let whole = |area: Range<u64>| area.start.saturating_add(PAGE - 1) / PAGE * PAGE..area.end / PAGE * PAGE;
    areas.into_iter().map(whole).filter(|area| area.start < area.end).take(MOST).collect()
}

/// The rest of `area` without `hole`.
fn without(area: Range<u64>, hole: &Range<u64>) -> [Range<u64>; 2] {
    let before = area.start..area.end.min(hole.start).max(area.start);
    let after = area.start.max(hole.end).min(area.end)..area.end;
    [before, after]
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "some BARs have one area, and some one hole")]
mod tests {
    use super::*;

    fn region(size: u64, sparse: Option<Vec<Range<u64>>>, msix_mappable: bool) -> RegionInfo {
        RegionInfo { flags: ALL, size, offset: 0, sparse, msix_mappable }
    }

    #[test]
    fn bar_is_mapped_except_for_the_msix_table_and_pba_pages() {
        let bar = region(0x4000, None, true);
        assert_eq!(areas(&bar, &[]), [0..0x4000]);
        assert_eq!(areas(&bar, &[0..0x30, 0x2000..0x2008]), [0x1000..0x2000, 0x3000..0x4000]);
        assert_eq!(areas(&bar, &[0x1ff0..0x2010]), [0..0x1000, 0x3000..0x4000]);
        assert_eq!(areas(&bar, &[0..0x4000]), []);
    }

    #[test]
    fn areas_that_the_kernel_does_not_map_are_left_to_exits() {
        assert_eq!(areas(&RegionInfo { flags: 0, ..region(0x4000, None, true) }, &[]), []);
        assert_eq!(areas(&region(0x4000, None, false), &[0..0x30]), [], "a kernel before 4.16");
        assert_eq!(areas(&region(0x800, None, true), &[]), [], "less than a page");
    }

    #[test]
    fn the_areas_of_the_kernel_win_over_everything() {
        let sparse = Some(vec![0x1000..0x2000, 0x2800..0x9000]);
        assert_eq!(
            areas(&region(0x8000, sparse, false), &[0x4000..0x4010]),
            [0x1000..0x2000, 0x3000..0x4000, 0x5000..0x8000]
        );
    }
}
