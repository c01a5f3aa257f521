//! The guest's memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::Advice;
use thiserror::Error;
use virtio_devices::Memory;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MemoryRegionAddress, MmapRegion,
};

use crate::arch::x86_64::layout::Layout;
use crate::config::MemoryConfig;
use crate::config::bytes;

/// The host's page size, in bytes.
const PAGE: u64 = 4096;
/// The size and alignment of transparent huge pages, in bytes.
const HUGE_PAGE: usize = 2 << 20;

/// Why the guest's memory cannot be allocated or cleared.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is not a whole number of pages.
    #[error(
        "--memory size={}: not a multiple of the page size; make it a multiple of {}",
        bytes(*.size), bytes(*.page)
    )]
    Unaligned {
        /// The size asked for, in bytes.
        size: u64,
        /// The page size, in bytes.
        page: u64,
    },
    /// The host has no huge pages of this size.
    #[error(
        "--memory hugepage_size={}: the host has no huge pages of this size; /sys/kernel/mm/hugepages lists its sizes",
        bytes(*.0)
    )]
    HugePageSize(u64),
    /// The host has too few free huge pages.
    #[error(
        "--memory size={},hugepages=on: the host has too few free huge pages; {needed} of {} are needed, see \
         /proc/sys/vm/nr_hugepages",
        bytes(*.size),
        bytes(*.page)
    )]
    HugePages {
        /// The size asked for, in bytes.
        size: u64,
        /// The size of a huge page, in bytes.
        page: u64,
        /// How many are needed.
        needed: u64,
    },
    /// The host cannot allocate the memory.
    #[error("--memory size={}: the host cannot allocate the memory: {error}; give less", bytes(*.size))]
    Map {
        /// The size asked for, in bytes.
        size: u64,
        /// Why.
        error: io::Error,
    },
    /// The memory cannot be cleared for a reboot.
    #[error("cannot clear the guest's memory: {0}")]
    Clear(io::Error),
}

/// The guest's mapped memory.
///
/// Private and anonymous with transparent huge pages, which boots fastest; or a memfd, which other processes can map.
/// With hugepages=on, either consists of the host's reserved huge pages.
#[derive(Debug)]
pub struct GuestRam {
    memory: Memory,
    prefault: bool,
}

/// The backing of all regions of a guest's memory.
struct Backing {
    size: u64,
    huge_page: Option<u64>,
    thp: bool,
    file: Option<Arc<File>>,
}

impl GuestRam {
    /// Maps memory according to `config` and `layout`. It is a memfd if `config` or `shared` says so; backends may need
    /// that.
    ///
    /// # Errors
    ///
    /// The host cannot allocate it. Nothing is mapped then.
    pub fn new(config: &MemoryConfig, layout: &Layout, shared: bool) -> Result<Self, MemoryError> {
        let backing = Backing::new(config, shared)?;
        let mut regions = Vec::new();
        let mut offset = 0;
        for range in [&layout.low, &layout.high] {
            if !range.is_empty() {
                regions.push(backing.region(range, offset)?);
                offset += range.end - range.start;
            }
        }
        let memory =
            GuestMemoryMmap::from_regions(regions).map_err(|error| backing.map_error(io::Error::other(error)))?;
        let ram = Self { memory: Memory::new(memory), prefault: config.prefault };
        ram.populate().map_err(|error| backing.map_error(error))?;
        Ok(ram)
    }

    /// The memory as devices see it.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether other processes can map it.
    pub fn is_shared(&self) -> bool {
        self.memory.memory().iter().all(|region| region.file_offset().is_some())
    }

    /// Sets all memory to zero. Mappings stay, including those of other processes. With `keep_pages` the host pages
    /// stay the same, as devices that have pinned them require.
    ///
    /// # Errors
    ///
    /// A system call failed. The memory's contents are undefined then.
    pub fn clear(&self, keep_pages: bool) -> Result<(), MemoryError> {
        for region in self.memory.memory().iter() {
            let discarded = match region.file_offset() {
                _ if keep_pages => Err(rustix::io::Errno::BUSY),
                Some(file) => {
                    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(file.file(), punch, file.start(), region.len())
                }
                None => advise(region, Advice::LinuxDontNeed),
            };
            // Linux before 5.18 cannot discard private huge pages, either.
            if discarded.is_err() {
                fill_with_zeros(region).map_err(MemoryError::Clear)?;
            }
        }
        self.populate().map_err(MemoryError::Clear)
    }

    fn populate(&self) -> io::Result<()> {
        if self.prefault {
            for region in self.memory.memory().iter() {
                match advise(region, Advice::LinuxPopulateWrite) {
                    // Linux before 5.14 does not know this advice.
                    Err(rustix::io::Errno::INVAL) => fill_with_zeros(region)?,
                    result => result?,
                }
            }
        }
        Ok(())
    }
}

impl Backing {
    fn new(config: &MemoryConfig, shared: bool) -> Result<Self, MemoryError> {
        let size = config.size;
        let huge_page = match (config.hugepages, config.hugepage_size) {
            (false, _) => None,
            (true, Some(size)) => Some(size),
            (true, None) => Some(default_huge_page().ok_or(MemoryError::HugePageSize(HUGE_PAGE as u64))?),
        };
        if let Some(page) = huge_page
            && !(page.is_power_of_two() && page > PAGE && huge_page_exists(page))
        {
            return Err(MemoryError::HugePageSize(page));
        }
        let page = huge_page.unwrap_or(PAGE);
        if size == 0 || !size.is_multiple_of(page) {
            return Err(MemoryError::Unaligned { size, page });
        }
        let mut backing = Self { size, huge_page, thp: config.thp && huge_page.is_none(), file: None };
        if shared || config.shared {
            backing.file = Some(Arc::new(backing.create_file().map_err(|error| backing.map_error(error))?));
        }
        Ok(backing)
    }

    /// A memfd for all regions. Its size is sealed, so that no peer can make this process fault by truncating it.
    fn create_file(&self) -> io::Result<File> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if let Some(page) = self.huge_page {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(page.ilog2() << libc::MAP_HUGE_SHIFT);
        }
        let fd = rustix::fs::memfd_create("guest-memory", flags)?;
        rustix::fs::ftruncate(&fd, self.size)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd.into())
    }

    fn region(&self, range: &Range<u64>, offset: u64) -> Result<GuestRegionMmap, MemoryError> {
        let len = usize::try_from(range.end - range.start).map_err(|error| self.map_error(io::Error::other(error)))?;
        let mapping = self.map_aligned(len, offset)?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(range.start))
            .ok_or_else(|| self.map_error(io::ErrorKind::InvalidInput.into()))?;
        if self.thp {
            // Fails on a host without transparent huge pages, which only costs speed.
            let _ = advise(&region, Advice::LinuxHugepage);
        }
        Ok(region)
    }

    /// A mapping aligned to huge pages, so that they can back huge pages of the guest.
    ///
    /// Linux before 6.7 places a mapping directly below the previous one, whatever its size. To align it, the surplus
    /// is mapped while the mapping is made again. This is best effort: another thread may map something in between.
    fn map_aligned(&self, len: usize, offset: u64) -> Result<MmapRegion, MemoryError> {
        let mapping = self.map(len, offset)?;
        let surplus = mapping.as_ptr() as usize % HUGE_PAGE;
        if surplus == 0 {
            return Ok(mapping);
        }
        drop(mapping);
        let filling = MmapRegionBuilder::<()>::new(surplus).build();
        let mapping = self.map(len, offset);
        drop(filling);
        mapping
    }

    fn map(&self, len: usize, offset: u64) -> Result<MmapRegion, MemoryError> {
        // Guests normally overcommit memory. Huge pages are reserved instead, so that a guest is not killed later.
        let mut flags = if self.huge_page.is_some() { 0 } else { libc::MAP_NORESERVE };
        let mut builder = MmapRegionBuilder::new(len).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
        match &self.file {
            Some(file) => {
                flags |= libc::MAP_SHARED;
                builder = builder.with_file_offset(FileOffset::from_arc(Arc::clone(file), offset));
            }
            None => {
                flags |= libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                if let Some(page) = self.huge_page {
                    flags |= libc::MAP_HUGETLB | (page.ilog2() as i32) << libc::MAP_HUGE_SHIFT;
                }
            }
        }
        builder.with_hugetlbfs(self.huge_page.is_some()).with_mmap_flags(flags).build().map_err(|error| match error {
            vm_memory::mmap::MmapRegionError::Mmap(error) => self.map_error(error),
            error => self.map_error(io::Error::other(error)),
        })
    }

    fn map_error(&self, error: io::Error) -> MemoryError {
        match self.huge_page {
            Some(page) if error.raw_os_error() == Some(libc::ENOMEM) => {
                MemoryError::HugePages { size: self.size, page, needed: self.size / page }
            }
            _ => MemoryError::Map { size: self.size, error },
        }
    }
}

/// The host's default huge page size, in bytes.
fn default_huge_page() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

fn huge_page_exists(page: u64) -> bool {
    std::path::Path::new(&format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page / 1024)).exists()
}

fn advise(region: &GuestRegionMmap, advice: Advice) -> rustix::io::Result<()> {
    // SAFETY: the range is one whole mapping of guest memory. No Rust reference points into it, and these advices only
    // change when its pages are allocated and whether they are zero.
    unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) }
}

fn fill_with_zeros(region: &GuestRegionMmap) -> io::Result<()> {
    static ZEROS: [u8; 65536] = [0; 65536];
    let mut offset = 0;
    while offset < region.len() {
        let written = region.write(&ZEROS, MemoryRegionAddress(offset)).map_err(io::Error::other)?;
        offset += written as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram(config: &MemoryConfig) -> Result<GuestRam, MemoryError> {
        GuestRam::new(config, &Layout::new(config.size, 0, 46).unwrap(), false)
    }

    fn config(size: u64) -> MemoryConfig {
        MemoryConfig { size, ..MemoryConfig::default() }
    }

    #[test]
    fn memory_is_split_at_the_hole_and_aligned() {
        let ram = ram(&config(5 << 30)).unwrap();
        let memory = ram.memory().memory();
        let regions: Vec<_> = memory.iter().map(|region| (region.start_addr().0, region.len())).collect();
        assert_eq!(regions, [(0, 3 << 30), (4 << 30, 2 << 30)]);
        assert!(memory.iter().all(|region| (region.as_ptr() as usize).is_multiple_of(HUGE_PAGE)));
        assert!(memory.iter().all(|region| region.file_offset().is_none()));
    }

    #[test]
    fn shared_memory_is_one_file() {
        let ram = ram(&MemoryConfig { shared: true, ..config(4 << 30) }).unwrap();
        let memory = ram.memory().memory();
        let offsets: Vec<_> = memory.iter().map(|region| region.file_offset().unwrap().start()).collect();
        assert_eq!(offsets, [0, 3 << 30]);
    }

    #[test]
    fn cleared_memory_is_zero_and_at_the_same_place() {
        for (shared, prefault, keep_pages) in [
            (false, false, false),
            (true, false, false),
            (false, true, false),
            (true, true, false),
            (true, false, true),
        ] {
            let ram = ram(&MemoryConfig { shared, prefault, ..config(4 << 20) }).unwrap();
            let host = || ram.memory().memory().get_host_address(GuestAddress(0)).unwrap();
            let before = host();
            let last = GuestAddress((4 << 20) - 8);
            for address in [GuestAddress(0), last] {
                ram.memory().memory().write_obj(u64::MAX, address).unwrap();
            }
            ram.clear(keep_pages).unwrap();
            assert_eq!(host(), before);
            for address in [GuestAddress(0), last] {
                assert_eq!(ram.memory().memory().read_obj::<u64>(address).unwrap(), 0);
            }
        }
    }

    #[test]
    fn pages_that_are_kept_are_those_of_before() {
        let ram = ram(&MemoryConfig { shared: true, ..config(4 << 20) }).unwrap();
        let memory = ram.memory().memory();
        let blocks =
            || rustix::fs::fstat(memory.iter().next().unwrap().file_offset().unwrap().file()).unwrap().st_blocks;
        assert!(ram.is_shared());
        memory.write_obj(u64::MAX, GuestAddress(0)).unwrap();
        let written = blocks();
        ram.clear(true).unwrap();
        assert!(written > 0 && blocks() >= written);
        ram.clear(false).unwrap();
        assert_eq!(blocks(), 0);
    }

    #[test]
    fn a_size_that_is_not_a_multiple_of_the_page_is_refused() {
        for size in [0, 4095, (1 << 20) + 1] {
            assert!(matches!(ram(&config(size)), Err(MemoryError::Unaligned { page: 4096, .. })), "{size}");
        }
    }

    #[test]
    fn a_huge_page_size_that_the_host_lacks_is_refused() {
        for page in [4096, 3 << 20, 1 << 23] {
            let config = MemoryConfig { hugepages: true, hugepage_size: Some(page), ..config(1 << 30) };
            assert!(matches!(ram(&config), Err(MemoryError::HugePageSize(size)) if size == page), "{page}");
        }
    }

    #[test]
    fn too_few_huge_pages_are_an_error_that_says_how_many() {
        // More than any machine that runs this test has set aside.
        let size = 1 << 40;
        for shared in [false, true] {
            let config = MemoryConfig { hugepages: true, hugepage_size: Some(2 << 20), shared, ..config(size) };
            let error = ram(&config).unwrap_err();
            assert!(matches!(error, MemoryError::HugePages { needed: 0x8_0000, .. }), "{error}");
        }
    }

    #[test]
    fn memory_is_filled_with_zeros_where_it_cannot_be_discarded() {
        let ram = ram(&config(192 << 10)).unwrap();
        let memory = ram.memory().memory();
        memory.write_slice(&[0xff; 192 << 10], GuestAddress(0)).unwrap();
        memory.iter().try_for_each(fill_with_zeros).unwrap();
        let mut bytes = [0xff; 192 << 10];
        memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}
