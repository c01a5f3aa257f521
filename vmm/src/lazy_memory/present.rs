//! Existing pages of guest memory: reading others, which are zero, would allocate them. Also the written pages of a
//! private file mapping, which differ from the file.
//!
//! Shared memory is a file with holes. Private memory is found in the page tables: in bulk with `PAGEMAP_SCAN` (Linux
//! 6.7, `Documentation/admin-guide/mm/pagemap.rst`), or page by page.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use virtio_devices::{FileMapping, GuestRegion};
use vm_memory::GuestMemoryRegion;

/// Size of a page, in bytes.
pub(crate) const PAGE: u64 = 4096;
/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`.
pub(crate) const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// Categories of pages in memory or on swap (`linux/fs.h`).
const PRESENT_OR_SWAPPED: u64 = 1 << 3 | 1 << 4;
/// Category of file pages.
const OF_FILE: u64 = 1 << 2;
/// Ranges per call.
const MOST_RANGES: usize = 512;
/// Pages per read of `/proc/self/pagemap`.
const PAGES_AT_ONCE: usize = 8192;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Kind of page to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sought {
    /// Pages that exist.
    Existing,
    /// Pages that no longer belong to the file.
    Written,
}

impl Sought {
    /// True if the page with this pagemap entry matches. Bits 63, 62 and 61: present, swapped, and file or shared.
    const fn has(self, entry: u64) -> bool {
        entry >> 62 != 0 && (matches!(self, Self::Existing) || entry & 1 << 61 == 0)
    }
}

/// Finder of existing pages.
pub(crate) struct Pages {
    /// `/proc/self/pagemap`; without it, all private pages count as existing.
    pagemap: Option<File>,
}

/// Callback for each range with pages, as offsets in the region.
type Visit<'a> = &'a mut dyn FnMut(Range<u64>) -> io::Result<()>;

impl Pages {
    /// Opens the page tables.
    pub(crate) fn new() -> Self {
        Self { pagemap: File::open("/proc/self/pagemap").ok() }
    }

    /// Calls `visit` for the ranges of `region` with pages, as offsets. A range may be visited twice.
    ///
    /// # Errors
    ///
    /// As `visit`.
    pub(crate) fn each(&self, region: &GuestRegion, visit: Visit<'_>) -> io::Result<()> {
        self.each_within(region, &(0..region.len()), visit)
    }

    /// As [`Self::each`], within a part of the region, which begins and ends at a page boundary.
    ///
    /// # Errors
    ///
    /// As `visit`.
    pub(crate) fn each_within(&self, region: &GuestRegion, within: &Range<u64>, visit: Visit<'_>) -> io::Result<()> {
        if let Some(file) = region.file_offset() {
            let start = file.start();
            data(file.file(), &(start.saturating_add(within.start)..start.saturating_add(within.end)), &mut |range| {
                visit(range.start - start..range.end - start)
            })?;
            if region.flags() & libc::MAP_SHARED != 0 {
                return Ok(());
            }
            // A private mapping of a file also has the pages written since.
        }
        self.private(region, within, visit)
    }

    fn private(&self, region: &GuestRegion, within: &Range<u64>, visit: Visit<'_>) -> io::Result<()> {
        let Some(pagemap) = &self.pagemap else { return visit(within.clone()) };
        look(pagemap, region.as_ptr() as u64, within, Sought::Existing, visit)
    }
}

/// True if a page of a private file mapping was written. Scans its page tables.
///
/// # Errors
///
/// Fails if the page tables cannot be read.
pub(crate) fn is_written(mapping: &FileMapping) -> io::Result<bool> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut found = false;
    let seen = look(&pagemap, mapping.address() as u64, &(0..mapping.len()), Sought::Written, &mut |_| {
        found = true;
        // The first page is enough.
        Err(io::ErrorKind::Interrupted.into())
    });
    if found { Ok(true) } else { seen.map(|()| false) }
}

/// Calls `visit` for the `sought` pages of `range`, from `base` on.
fn look(pagemap: &File, base: u64, range: &Range<u64>, sought: Sought, visit: Visit<'_>) -> io::Result<()> {
    match scan(pagemap, base, range, sought, visit) {
        Err(error) if is_unknown(&error) => read(pagemap, base, range, sought, visit),
        result => result,
    }
}

/// True if the kernel does not support a request.
fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL))
}

/// Calls `visit` for the parts of `range` of a file with data.
///
/// # Errors
///
/// As `visit`, and if the file cannot be read.
pub(crate) fn data(file: &File, range: &Range<u64>, visit: Visit<'_>) -> io::Result<()> {
    let mut next = range.start;
    while next < range.end {
        let start = match rustix::fs::seek(file, SeekFrom::Data(next)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            // The file system has no holes (hugetlbfs).
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::SPIPE) => return visit(next..range.end),
            Err(error) => return Err(error.into()),
        };
        if start >= range.end {
            return Ok(());
        }
        let hole = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(range.end);
        visit(start..hole)?;
        next = hole;
    }
    Ok(())
}

/// As [`look`], with `PAGEMAP_SCAN`.
fn scan(pagemap: &File, base: u64, range: &Range<u64>, sought: Sought, visit: Visit<'_>) -> io::Result<()> {
    let not = if sought == Sought::Written { OF_FILE } else { 0 };
    let mut found = [PageRegion::default(); MOST_RANGES];
    let mut next = base + range.start;
    let end = base + range.end;
    while next < end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start: next,
            end,
            vec: found.as_mut_ptr() as u64,
            vec_len: MOST_RANGES as u64,
            category_inverted: not,
            category_mask: not,
            category_anyof_mask: PRESENT_OR_SWAPPED,
            return_mask: PRESENT_OR_SWAPPED,
            ..ScanArg::default()
        };
        // SAFETY: the argument is a `pm_scan_arg` that lives through the call, and its vector has as many elements as
        // it says. The kernel only looks the addresses up in the page tables.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut arg) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for part in found.iter().take(count) {
            visit(part.start - base..part.end - base)?;
        }
        // `walk_end` is the end of the scan; always advance.
        next = arg.walk_end.max(next + PAGE);
    }
    Ok(())
}

/// As [`scan`], page by page.
fn read(pagemap: &File, base: u64, range: &Range<u64>, sought: Sought, visit: Visit<'_>) -> io::Result<()> {
    let mut entries = vec![0u8; PAGES_AT_ONCE * 8];
    let mut run: Option<Range<u64>> = None;
    let mut next = range.start;
    while next < range.end {
        let pages = usize::try_from((range.end - next).div_ceil(PAGE)).unwrap_or(PAGES_AT_ONCE).min(PAGES_AT_ONCE);
        let bytes = entries.get_mut(..pages * 8).unwrap_or_default();
        pagemap.read_exact_at(bytes, (base + next) / PAGE * 8)?;
        for entry in bytes.as_chunks::<8>().0 {
            let exists = sought.has(u64::from_ne_bytes(*entry));
            match &mut run {
                Some(run) if exists => run.end = next + PAGE,
                None if exists => run = Some(next..next + PAGE),
                _ => {
                    if let Some(run) = run.take() {
                        visit(run)?;
                    }
                }
            }
            next += PAGE;
        }
    }
    run.map_or(Ok(()), |run| visit(run.start..run.end.min(range.end)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use virtio_devices::GuestMap;
    use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend};

    use super::*;

    const PAGES: u64 = 3000;
    const TOUCHED: [u64; 6] = [0, 5, 6, 7, 1500, PAGES - 1];

    fn touch(memory: &GuestMap) {
        for page in TOUCHED {
            memory.write_obj(7u8, GuestAddress(page * PAGE + 9)).unwrap();
        }
    }

    fn pages(ranges: &[Range<u64>]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.start / PAGE..range.end.div_ceil(PAGE)).collect()
    }

    fn found(region: &GuestRegion) -> BTreeSet<u64> {
        let mut ranges = Vec::new();
        Pages::new()
            .each(region, &mut |range| {
                ranges.push(range);
                Ok(())
            })
            .unwrap();
        pages(&ranges)
    }

    #[test]
    fn only_pages_that_were_touched_exist() {
        let private = GuestMap::from_ranges(&[(GuestAddress(0), (PAGES * PAGE) as usize)]).unwrap();
        let region = private.iter().next().unwrap();
        // SAFETY: a whole mapping, to which there are no references.
        unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxNoHugepage) }
            .unwrap();
        touch(&private);
        let (pagemap, base) = (File::open("/proc/self/pagemap").unwrap(), region.as_ptr() as u64);
        let mut each = [Vec::new(), Vec::new()];
        if let Err(error) = scan(&pagemap, base, &(0..region.len()), Sought::Existing, &mut |range| {
            each[0].push(range);
            Ok(())
        }) {
            assert!(is_unknown(&error));
            each[0].extend(TOUCHED.map(|page| page * PAGE..page * PAGE + PAGE));
        }
        read(&pagemap, base, &(0..region.len()), Sought::Existing, &mut |range| {
            each[1].push(range);
            Ok(())
        })
        .unwrap();
        assert_eq!(each.map(|ranges| pages(&ranges)), [BTreeSet::from(TOUCHED), BTreeSet::from(TOUCHED)]);
        assert_eq!(found(region), BTreeSet::from(TOUCHED));
    }

    #[test]
    fn a_part_is_asked_for_what_it_has_and_nothing_else() {
        let file = File::from(rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((PAGES + 8) * PAGE).unwrap();
        let size = (PAGES * PAGE) as usize;
        let private = GuestMap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
        let at = FileOffset::new(file, 8 * PAGE);
        let shared = GuestMap::from_ranges_with_files([(GuestAddress(0), size, Some(at))]).unwrap();
        for memory in [private, shared] {
            let region = memory.iter().next().unwrap();
            // SAFETY: a whole mapping, to which there are no references.
            unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxNoHugepage) }
                .unwrap();
            touch(&memory);
            for (part, expected) in [(0..6, vec![0, 5]), (6..1500, vec![6, 7]), (1501..PAGES - 1, vec![])] {
                let mut ranges = Vec::new();
                let within = part.start * PAGE..part.end * PAGE;
                let seen = Pages::new().each_within(region, &within, &mut |range| {
                    ranges.push(range);
                    Ok(())
                });
                seen.unwrap();
                assert_eq!(pages(&ranges), expected.into_iter().collect(), "{part:?}");
            }
        }
    }

    /// A private mapping of a file of [`PAGES`] pages, all of them read.
    fn private_mapping(contents: u8) -> FileMapping {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![contents; (PAGES * PAGE) as usize], 0).unwrap();
        let mapping = FileMapping::new(&file, PAGES * PAGE, true).unwrap();
        for page in 0..PAGES as usize {
            // SAFETY: the page is mapped, and nothing has a reference into it.
            assert_eq!(unsafe { mapping.address().add(page * PAGE as usize).read_volatile() }, contents);
        }
        mapping
    }

    #[test]
    fn a_private_mapping_is_written_once_a_page_was() {
        for page in [0, PAGES / 2, PAGES - 1] {
            let mapping = private_mapping(7);
            let pagemap = File::open("/proc/self/pagemap").unwrap();
            let by_entries = || {
                let mut count = 0;
                let base = mapping.address() as u64;
                read(&pagemap, base, &(0..mapping.len()), Sought::Written, &mut |range| {
                    count += (range.end - range.start) / PAGE;
                    Ok(())
                })
                .unwrap();
                count
            };
            assert!(!is_written(&mapping).unwrap() && by_entries() == 0);
            // SAFETY: the page is mapped, and nothing has a reference into it. The byte keeps its value.
            unsafe { mapping.address().add((page * PAGE) as usize).write_volatile(7) };
            assert!(is_written(&mapping).unwrap() && by_entries() == 1, "{page}");
            mapping.forget_writes();
            assert!(!is_written(&mapping).unwrap());
        }
    }

    #[test]
    fn a_file_knows_its_own() {
        let file = File::from(rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((PAGES + 8) * PAGE).unwrap();
        let at = FileOffset::new(file, 8 * PAGE);
        let shared = GuestMap::from_ranges_with_files([(GuestAddress(0), (PAGES * PAGE) as usize, Some(at))]).unwrap();
        touch(&shared);
        assert_eq!(found(shared.iter().next().unwrap()), BTreeSet::from(TOUCHED));
    }
}
