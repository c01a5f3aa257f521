//! Overwriting guest memory with zeros, where its pages must be kept.

use std::io;
use std::ops::Range;

use crate::GuestRegion;
use rustix::fs::SeekFrom;
use vm_memory::{Bytes, GuestMemoryRegion, MemoryRegionAddress};

/// Zeroes the pages of `region` at the offsets `range`, in bytes. Skips pages that a shared region does not have: they
/// read as zero, and writing to them would allocate them.
///
/// # Errors
///
/// Fails if the host cannot report the existing pages, or `range` is not in the region.
pub fn fill_with_zeros(region: &GuestRegion, range: &Range<u64>) -> io::Result<()> {
    fill(region, range, next_data)
}

/// The same only for the pages that the file behind `region` has, whether the region is shared or a private copy.
pub(crate) fn zero_what_the_file_has(region: &GuestRegion, range: &Range<u64>) -> io::Result<()> {
    fill(region, range, next_in_file)
}

/// Finds the next part of a range, offsets in a region.
type Next = fn(&GuestRegion, &Range<u64>) -> io::Result<Option<Range<u64>>>;

fn fill(region: &GuestRegion, range: &Range<u64>, next: Next) -> io::Result<()> {
    static ZEROS: [u8; 65536] = [0; 65536];
    let mut offset = range.start;
    while let Some(data) = next(region, &(offset..range.end))? {
        offset = data.start;
        while offset < data.end {
            let len = ZEROS.len().min(usize::try_from(data.end - offset).unwrap_or(usize::MAX));
            let zeros = ZEROS.get(..len).unwrap_or(&ZEROS);
            offset += region.write(zeros, MemoryRegionAddress(offset)).map_err(io::Error::other)? as u64;
        }
    }
    Ok(())
}

/// The next part of `range`, offsets in `region`, that has pages; `None` if there is none.
pub(crate) fn next_data(region: &GuestRegion, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
    if region.flags() & libc::MAP_SHARED != 0 {
        return next_in_file(region, range);
    }
    Ok((!range.is_empty()).then(|| range.clone()))
}

/// The next part of `range`, offsets in `region`, that the file behind it has; all of it if there is no file.
fn next_in_file(region: &GuestRegion, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
    let Some(file) = region.file_offset() else { return Ok((!range.is_empty()).then(|| range.clone())) };
    let start = match rustix::fs::seek(file.file(), SeekFrom::Data(file.start().saturating_add(range.start))) {
        Ok(start) => start.saturating_sub(file.start()),
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if start >= range.end {
        return Ok(None);
    }
    let hole = rustix::fs::seek(file.file(), SeekFrom::Hole(file.start().saturating_add(start)))?;
    Ok(Some(start..range.end.min(hole.saturating_sub(file.start()))))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend};

    use super::*;
    use crate::GuestMap;

    const PAGE: u64 = 4096;
    const PAGES: u64 = 256;

    /// A region of [`PAGES`] pages in the second half of a file.
    fn memory() -> GuestMap {
        let file = File::from(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(2 * PAGES * PAGE).unwrap();
        let file = FileOffset::new(file, PAGES * PAGE);
        GuestMap::from_ranges_with_files([(GuestAddress(0), (PAGES * PAGE) as usize, Some(file))]).unwrap()
    }

    #[test]
    fn zeroed_range_reads_zero_and_unused_pages_stay_unallocated() {
        let memory = memory();
        let used = [0, 5, 6, 100, 200, 255];
        for page in used {
            memory.write_obj(u64::MAX, GuestAddress(page * PAGE + 8)).unwrap();
        }
        let region = memory.iter().next().unwrap();
        let blocks = || rustix::fs::fstat(region.file_offset().unwrap().file()).unwrap().st_blocks;
        let before = blocks();
        fill_with_zeros(region, &(5 * PAGE..200 * PAGE)).unwrap();
        let zero = |page: u64| memory.read_obj::<u64>(GuestAddress(page * PAGE + 8)).unwrap() == 0;
        assert_eq!(used.map(zero), [false, true, true, true, false, false]);
        assert_eq!(blocks(), before);
        fill_with_zeros(region, &(0..PAGES * PAGE)).unwrap();
        fill_with_zeros(region, &(7..7)).unwrap();
        assert_eq!((used.map(zero), blocks()), ([true; 6], before));
    }

    #[test]
    fn a_range_outside_of_the_region_is_an_error() {
        let memory = memory();
        memory.write_obj(u64::MAX, GuestAddress(0)).unwrap();
        let region = memory.iter().next().unwrap();
        assert!(fill_with_zeros(region, &(0..2 * PAGES * PAGE)).is_ok(), "the file has no pages there");
        let private = GuestMap::from_ranges(&[(GuestAddress(0), PAGE as usize)]).unwrap();
        assert!(fill_with_zeros(private.iter().next().unwrap(), &(0..2 * PAGE)).is_err());
    }
}
