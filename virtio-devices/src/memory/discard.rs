//! Returning pages of guest memory to the host.
//!
//! The guest can use the pages again at any time: they then read as zero. All ranges come from the guest, so they are
//! clamped to guest memory, and to whole pages of the host.

use std::io;
use std::ops::Range;

use rustix::fs::FallocateFlags;
use rustix::mm::Advice;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::memory::zeros::{fill_with_zeros, next_data, zero_what_the_file_has};
use crate::{GuestMap, GuestRegion};

/// The size of a page in bytes, of the guest and, except for huge pages, of the host.
pub(crate) const PAGE: u64 = 4096;
/// The default size of a huge page in bytes, if the host does not report one.
const HUGE_PAGE: u64 = 2 << 20;

/// Result for a range, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Discarded {
    /// Returned to the host.
    pub freed: u64,
    /// Bytes kept: only a part of a host page, or memory that cannot be freed.
    pub kept: u64,
    /// Bytes kept, because the host failed to free them.
    pub refused: u64,
    /// Not guest memory.
    pub outside: u64,
}

/// Returns the pages in `range`, guest addresses, to the host.
pub(crate) fn discard(memory: &GuestMap, range: &Range<u64>) -> Discarded {
    let mut discarded = Discarded { outside: range.end.saturating_sub(range.start), ..Discarded::default() };
    for region in memory.iter() {
        let base = region.start_addr().0;
        let begin = range.start.max(base);
        let end = range.end.min(base.saturating_add(region.len()));
        let Some(len) = end.checked_sub(begin).filter(|len| *len > 0) else { continue };
        discarded.outside -= len;
        let whole = whole_pages(&(begin - base..end - base), page_size(region));
        let bytes = whole.end - whole.start;
        discarded.kept += len - bytes;
        if bytes == 0 {
            continue;
        }
        let released = release(region, &whole);
        if let (Ok(start), Ok(len)) = (usize::try_from(whole.start), usize::try_from(bytes)) {
            // Copies of the memory elsewhere must be updated with the zeros.
            region.bitmap().mark_dirty(start, len);
        }
        match released {
            Ok(true) => discarded.freed += bytes,
            Ok(false) => discarded.kept += bytes,
            Err(_) => discarded.refused += bytes,
        }
    }
    discarded
}

/// Frees private copies of a file's pages in `range`, guest addresses. They read as the file's pages afterwards, which
/// must not be visible before [`clear_copies`]. Returns the number of bytes.
pub(crate) fn drop_copies(memory: &GuestMap, range: &Range<u64>) -> u64 {
    let mut dropped = 0;
    for (region, part) in copies(memory, range) {
        let whole = whole_pages(&part, page_size(region));
        if forget(region, &whole).is_ok() {
            dropped += whole.end - whole.start;
        }
    }
    dropped
}

/// Makes `range`, guest addresses, read as zero where it is a private copy of a file. Allocates only pages that the
/// file has.
pub(crate) fn clear_copies(memory: &GuestMap, range: &Range<u64>) {
    for (region, part) in copies(memory, range) {
        let whole = whole_pages(&part, page_size(region));
        if forget(region, &whole).and_then(|()| zero_what_the_file_has(region, &part)).is_err() {
            // The host's files do not report their holes.
            let _ = fill_with_zeros(region, &part);
        }
    }
}

/// The regions of `memory` that are private copies of a file, and their parts of `range`, as offsets.
fn copies<'m>(memory: &'m GuestMap, range: &Range<u64>) -> impl Iterator<Item = (&'m GuestRegion, Range<u64>)> {
    parts(memory, range).filter(|(region, _)| is_copy(region))
}

/// True if `region` is a private copy of a file.
fn is_copy(region: &GuestRegion) -> bool {
    region.file_offset().is_some() && region.flags() & libc::MAP_SHARED == 0
}

/// The first of the guest addresses in `range` that may have a page to [reclaim]; `None` if none has.
pub(crate) fn first_page(memory: &GuestMap, range: &Range<u64>) -> Option<u64> {
    parts(memory, range).find_map(|(region, part)| {
        let first = if is_copy(region) { Some(part.start) } else { next_in(region, &part) };
        first.map(|offset| region.start_addr().0.saturating_add(offset))
    })
}

/// The first offset in `range` at which `region` has a page, or may have one.
fn next_in(region: &GuestRegion, range: &Range<u64>) -> Option<u64> {
    // If the host's files do not report their holes, any page may exist.
    next_data(region, range).map_or(Some(range.start), |data| data.map(|data| data.start))
}

/// Returns the existing pages in `range`, guest addresses that no guest uses, to the host: one call for each region.
/// Not marked as written: no copy needs their contents.
pub(crate) fn reclaim(memory: &GuestMap, range: &Range<u64>) {
    for (region, part) in parts(memory, range) {
        let whole = whole_pages(&part, page_size(region));
        // If the host fails to free them, they stay.
        let _ = if is_copy(region) { forget(region, &whole) } else { release(region, &whole).map(|_| ()) };
    }
}

/// The regions of `memory`, and their parts of `range`, as offsets.
fn parts<'m>(memory: &'m GuestMap, range: &Range<u64>) -> impl Iterator<Item = (&'m GuestRegion, Range<u64>)> {
    let range = range.clone();
    memory.iter().filter_map(move |region| {
        let base = region.start_addr().0;
        let begin = range.start.max(base);
        let end = range.end.min(base.saturating_add(region.len()));
        (begin < end).then(|| (region, begin - base..end - base))
    })
}

/// Writes zeros to `range`, guest addresses, as far as it is guest memory. Keeps its pages, and allocates no others.
pub(crate) fn clear(memory: &GuestMap, range: &Range<u64>) {
    for (region, part) in parts(memory, range) {
        // If the host's files do not report their holes, the contents stay.
        let _ = fill_with_zeros(region, &part);
    }
}

/// The whole pages in `range`, or an empty range.
fn whole_pages(range: &Range<u64>, page: u64) -> Range<u64> {
    let start = range.start.div_ceil(page).saturating_mul(page);
    start..(range.end / page * page).max(start)
}

/// The size of the host pages that back `region`.
fn page_size(region: &GuestRegion) -> u64 {
    if region.is_hugetlbfs() != Some(true) {
        return PAGE;
    }
    // A file of huge pages has blocks of their size.
    let stat = region.file_offset().and_then(|file| rustix::fs::fstat(file.file()).ok());
    let block = stat.and_then(|stat| u64::try_from(stat.st_blksize).ok()).filter(|block| block.is_power_of_two());
    block.unwrap_or(HUGE_PAGE)
}

/// Returns the whole pages in `range`, offsets in `region`, to the host; `false` if they would not read as zero
/// afterwards.
fn release(region: &GuestRegion, range: &Range<u64>) -> io::Result<bool> {
    let (offset, len) = (range.start, range.end - range.start);
    let shared = region.flags() & libc::MAP_SHARED != 0;
    match region.file_offset() {
        Some(file) if shared => {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(rustix::fs::fallocate(file.file(), punch, file.start() + offset, len).map(|()| true)?)
        }
        // A private copy of a file's page would read as the file's page again.
        Some(_) => Ok(false),
        None => Ok(forget(region, range).map(|()| true)?),
    }
}

/// Drops the pages in `range`, offsets in `region`, from this mapping: they then read as zero, or as the file's.
fn forget(region: &GuestRegion, range: &Range<u64>) -> io::Result<()> {
    let at = |offset| usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput);
    let (offset, len) = (at(range.start)?, at(range.end.saturating_sub(range.start))?);
    let start = region.as_ptr().wrapping_add(offset);
    // SAFETY: the range lies in a mapping of guest memory, which `region` keeps. No Rust reference points into it, and
    // this advice only makes its pages read as zero, or as the file of which it is a private copy.
    Ok(unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxDontNeed) }?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use proptest::prelude::*;
    use vm_memory::{Bytes, FileOffset, GuestAddress, MmapRegion};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Two regions of 1 MiB with a hole between them: private, or parts of one file.
    fn memory(shared: bool) -> GuestMap {
        let file = shared.then(|| {
            let file = File::from(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            file.set_len(2 * MIB).unwrap();
            file
        });
        let part = |address, offset| {
            let file = file.as_ref().map(|file| FileOffset::new(file.try_clone().unwrap(), offset));
            (GuestAddress(address), MIB as usize, file)
        };
        GuestMap::from_ranges_with_files([part(0, 0), part(2 * MIB, MIB)]).unwrap()
    }

    fn fill(memory: &GuestMap) {
        for address in (0..MIB).chain(2 * MIB..3 * MIB).step_by(PAGE as usize) {
            memory.write_obj(u64::MAX, GuestAddress(address)).unwrap();
        }
    }

    fn is_zero(memory: &GuestMap, address: u64) -> bool {
        memory.read_obj::<u64>(GuestAddress(address)).unwrap() == 0
    }

    #[test]
    fn pages_read_as_zero_afterwards_and_their_neighbours_stay() {
        for shared in [false, true] {
            let memory = memory(shared);
            fill(&memory);
            let discarded = discard(&memory, &(PAGE..3 * PAGE));
            assert_eq!(discarded, Discarded { freed: 2 * PAGE, ..Discarded::default() });
            let zero = [0, 1, 2, 3].map(|page| is_zero(&memory, page * PAGE));
            assert_eq!(zero, [false, true, true, false]);
        }
    }

    #[test]
    fn the_host_gets_the_pages_of_a_file_back() {
        let memory = memory(true);
        fill(&memory);
        let region = memory.iter().next().unwrap();
        let blocks = || rustix::fs::fstat(region.file_offset().unwrap().file()).unwrap().st_blocks;
        let before = blocks();
        discard(&memory, &(2 * MIB..3 * MIB));
        assert_eq!(blocks(), before / 2);
        assert!(!is_zero(&memory, 0) && is_zero(&memory, 2 * MIB));
    }

    #[test]
    fn addresses_without_memory_are_left_out() {
        let memory = memory(false);
        fill(&memory);
        assert_eq!(discard(&memory, &(MIB - PAGE..2 * MIB + PAGE)).outside, MIB);
        assert_eq!(discard(&memory, &(u64::MAX - PAGE..u64::MAX)).outside, PAGE);
        assert_eq!(discard(&memory, &(0..u64::MAX)).freed, 2 * MIB);
        assert_eq!(discard(&memory, &(5..5)), Discarded::default());
    }

    /// The image that a guest's memory was started from must not change, and its data must not reappear.
    #[test]
    fn a_private_copy_of_a_file_is_kept() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(MIB).unwrap();
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let mapping = MmapRegion::build(Some(FileOffset::new(file, 0)), MIB as usize, prot, flags).unwrap();
        let region = GuestRegion::new(mapping, GuestAddress(0)).unwrap();
        let memory = GuestMap::from_regions(vec![region]).unwrap();
        memory.write_obj(u64::MAX, GuestAddress(0)).unwrap();
        assert_eq!(discard(&memory, &(0..MIB)), Discarded { kept: MIB, ..Discarded::default() });
        assert!(!is_zero(&memory, 0));
    }

    #[test]
    fn a_part_of_a_huge_page_is_no_page() {
        assert_eq!(whole_pages(&(PAGE..HUGE_PAGE), HUGE_PAGE), HUGE_PAGE..HUGE_PAGE);
        assert_eq!(whole_pages(&(PAGE..3 * HUGE_PAGE + PAGE), HUGE_PAGE), HUGE_PAGE..3 * HUGE_PAGE);
    }

    proptest! {
        #[test]
        fn exactly_the_whole_pages_of_a_range_are_discarded(
            start in 0..4 * MIB, len in 0..4 * MIB, shared in any::<bool>()
        ) {
            let memory = memory(shared);
            fill(&memory);
            let discarded = discard(&memory, &(start..start + len));
            let Discarded { freed, kept, refused, outside } = discarded;
            prop_assert_eq!((freed + kept + outside, refused), (len, 0));
            let mut zero = 0;
            for page in (0..MIB).chain(2 * MIB..3 * MIB).step_by(PAGE as usize) {
                let inside = start <= page && page + PAGE <= start + len;
                prop_assert_eq!(is_zero(&memory, page), inside, "{:#x}", page);
                zero += u64::from(inside) * PAGE;
            }
            prop_assert_eq!(freed, zero);
        }
    }
}
