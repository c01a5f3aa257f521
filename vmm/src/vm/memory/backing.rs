//! Host memory behind a part of the guest's memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::Advice;
use virtio_devices::{DirtyBitmap, GuestRegion};
use vm_memory::bitmap::NewBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, MmapRegion};

use super::error::MemoryError;
use crate::config::{MemoryConfig, MemoryZoneConfig};

/// The host's page size, in bytes.
const PAGE: u64 = 4096;
/// The size and alignment of transparent huge pages, in bytes.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// The backing of the regions of a part of a guest's memory.
#[derive(Clone)]
pub(super) struct Backing {
    /// The key that gives the size.
    key: &'static str,
    size: u64,
    huge_page: Option<u64>,
    thp: bool,
    dump: bool,
    mergeable: bool,
    reserve: bool,
    /// The host's NUMA node that pages come from.
    node: Option<u32>,
    shared: bool,
    file: Option<Arc<File>>,
    /// True if the configuration names the file, or its folder.
    is_named: bool,
}

impl Backing {
    /// The backing of `config`, a part of the memory `all`; other processes can map it if `config` or `shared` requires
    /// it. A zone's file is never shared against its own setting: the guest would write to it.
    pub(super) fn new(config: &MemoryZoneConfig, all: &MemoryConfig, shared: bool) -> Result<Self, MemoryError> {
        Self::with_size("size", config.size, config, all, shared)
    }

    /// The backing of the memory that a memory device can add to `config`, without a file of its own.
    pub(super) fn of_room(config: &MemoryZoneConfig, all: &MemoryConfig, shared: bool) -> Result<Self, MemoryError> {
        Self::with_size("hotplug_size", config.room().unwrap_or(0), config, all, shared)
    }

    fn with_size(
        key: &'static str,
        size: u64,
        config: &MemoryZoneConfig,
        all: &MemoryConfig,
        shared: bool,
    ) -> Result<Self, MemoryError> {
        let huge_page = match huge_page(config) {
            None if config.hugepages => return Err(MemoryError::HugePageSize(HUGE_PAGE as u64)),
            page => page,
        };
        if let Some(page) = huge_page
            && !(page.is_power_of_two() && page > PAGE && huge_page_exists(page))
        {
            return Err(MemoryError::HugePageSize(page));
        }
        let page = huge_page.unwrap_or(PAGE);
        if size == 0 || !size.is_multiple_of(page) {
            return Err(MemoryError::Unaligned { key, size, page });
        }
        let MemoryZoneConfig { mergeable, reserve, host_numa_node: node, .. } = *config;
        let (thp, dump) = (all.thp && huge_page.is_none(), all.dump);
        let (shared_zone, is_named) = (config.shared, config.file.is_some());
        let mut backing = Self {
            key,
            size,
            huge_page,
            thp,
            dump,
            mergeable,
            reserve,
            node,
            shared: shared_zone,
            file: None,
            is_named,
        };
        if let Some(path) = &config.file {
            let problem = |problem| MemoryError::File { path: path.clone(), problem };
            backing.file = Some(Arc::new(open_file(path, size).map_err(problem)?));
        } else if shared || config.shared {
            backing.shared = true;
            backing.file = Some(Arc::new(backing.create_file().map_err(|error| backing.map_error(error))?));
        }
        // Huge pages are always reserved.
        if reserve && backing.shared && huge_page.is_none() {
            return Err(MemoryError::ReserveShared);
        }
        Ok(backing)
    }

    /// The same backing with copy-on-write pages of `file`. The file is not changed.
    pub(super) fn of_image(&self, file: &Arc<File>) -> Self {
        Self { shared: false, file: Some(Arc::clone(file)), ..self.clone() }
    }

    /// The same backing with the pages of another program's `file`, whose size may be sealed.
    ///
    /// # Errors
    ///
    /// Fails if the other program could truncate the file, which would end this process with SIGBUS. Only the zone's
    /// own file may be unsealed, because other programs can change that anyway.
    pub(super) fn of_passed(&self, file: &Arc<File>, is_sealed: bool) -> Result<Self, MemoryError> {
        if !is_sealed && !self.is_file_of(file).map_err(|error| self.map_error(error))? {
            return Err(MemoryError::Unsealed);
        }
        Ok(Self { shared: true, file: Some(Arc::clone(file)), ..self.clone() })
    }

    /// True if `file` is the one that the configuration names, or an unnamed file in the directory that the
    /// configuration names.
    fn is_file_of(&self, file: &File) -> io::Result<bool> {
        let Some(own) = self.file.as_ref().filter(|_| self.is_named) else { return Ok(false) };
        let (own, other) = (rustix::fs::fstat(own)?, rustix::fs::fstat(file)?);
        let is_same = own.st_ino == other.st_ino || (own.st_nlink == 0 && other.st_nlink == 0);
        Ok(own.st_dev == other.st_dev && is_same && FileType::from_raw_mode(other.st_mode).is_file())
    }

    /// Creates a memfd for all regions. Its size is sealed, so that no peer can make this process fault by truncating
    /// it.
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

    pub(super) fn region(&self, range: &Range<u64>, offset: u64) -> Result<GuestRegion, MemoryError> {
        let len = usize::try_from(range.end - range.start).map_err(|error| self.map_error(io::Error::other(error)))?;
        let mapping = self.map_aligned(len, offset)?;
        let region = GuestRegion::new(mapping, GuestAddress(range.start))
            .ok_or_else(|| self.map_error(io::ErrorKind::InvalidInput.into()))?;
        if !self.dump {
            // Core dumps must not contain a tenant's memory.
            advise(&region, Advice::LinuxDontDump).map_err(|errno| self.map_error(errno.into()))?;
        }
        if self.thp {
            // Fails on a host without transparent huge pages, which only costs speed.
            let _ = advise(&region, Advice::LinuxHugepage);
        }
        if let Some(node) = self.node {
            bind(&region, node).map_err(|error| MemoryError::Node { node, error })?;
        }
        if self.mergeable {
            advise(&region, Advice::LinuxMergeable).map_err(|_| MemoryError::Merge)?;
        }
        Ok(region)
    }

    /// A mapping aligned to huge pages, so that they can back huge pages of the guest.
    ///
    /// Linux before 6.7 places a mapping directly below the previous one, whatever its size. To align it, the surplus
    /// is mapped while the mapping is made again. This is best effort: another thread may map something in between.
    fn map_aligned(&self, len: usize, offset: u64) -> Result<MmapRegion<DirtyBitmap>, MemoryError> {
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

    fn map(&self, len: usize, offset: u64) -> Result<MmapRegion<DirtyBitmap>, MemoryError> {
        // Guests normally overcommit memory. Huge pages are reserved, so that a guest is not killed later.
        let is_reserved = self.reserve || self.huge_page.is_some();
        let mut flags = if is_reserved { 0 } else { libc::MAP_NORESERVE };
        let bitmap = DirtyBitmap::with_len(len);
        let mut builder =
            MmapRegionBuilder::new_with_bitmap(len, bitmap).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
        match &self.file {
            Some(file) => {
                flags |= if self.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
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

    pub(super) fn map_error(&self, error: io::Error) -> MemoryError {
        match self.huge_page {
            Some(page) if error.raw_os_error() == Some(libc::ENOMEM) => {
                MemoryError::HugePages { key: self.key, size: self.size, page, needed: self.size / page }
            }
            _ => MemoryError::Map { key: self.key, size: self.size, error },
        }
    }
}

/// Opens the file at `path` for `size` bytes of memory. In a directory, creates a file without a name.
///
/// # Errors
///
/// Fails with the problem and its remedy.
fn open_file(path: &Path, size: u64) -> Result<File, String> {
    let failed = |error: io::Error| format!("cannot be opened: {error}; give a file, or a directory");
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if metadata.is_dir() {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        rustix::fs::ftruncate(&file, size).map_err(|error| failed(error.into()))?;
        return Ok(file.into());
    }
    if !metadata.is_file() {
        return Err("neither a regular file nor a directory; give one of these".to_string());
    }
    // Accessing memory beyond the end of its file would end this process.
    if metadata.len() < size {
        return Err(format!("{} bytes long, and the zone has {size}; make the file longer", metadata.len()));
    }
    File::options().read(true).write(true).open(path).map_err(failed)
}

/// Binds the pages of `region` to the host's NUMA node `node`.
fn bind(region: &GuestRegion, node: u32) -> io::Result<()> {
    const MPOL_BIND: libc::c_int = 2;
    const MPOL_MF_STRICT: libc::c_uint = 1;
    const MPOL_MF_MOVE: libc::c_uint = 2;
    let bits = libc::c_ulong::BITS;
    let word = usize::try_from(node / bits).map_err(io::Error::other)?;
    let mut nodes = vec![0 as libc::c_ulong; word + 1];
    if let Some(last) = nodes.last_mut() {
        *last = 1 << (node % bits);
    }
    // The kernel uses one bit less than the given number.
    let most = nodes.len() * bits as usize + 1;
    // SAFETY: the range is one whole mapping of guest memory, and only the origin of its pages changes; the kernel
    // reads as many words of `nodes` as there are.
    let result = unsafe {
        let (address, len) = (region.as_ptr(), region.size());
        libc::syscall(libc::SYS_mbind, address, len, MPOL_BIND, nodes.as_ptr(), most, MPOL_MF_STRICT | MPOL_MF_MOVE)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The size of the huge pages that `config` requests, in bytes; `None` also if the host has none.
pub(super) fn huge_page(config: &MemoryZoneConfig) -> Option<u64> {
    config.hugepages.then(|| config.hugepage_size.or_else(default_huge_page)).flatten()
}

/// The host's default huge page size, in bytes.
fn default_huge_page() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

fn huge_page_exists(page: u64) -> bool {
    Path::new(&format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page / 1024)).exists()
}

/// Advises the host about all pages of `region`.
pub(super) fn advise(region: &GuestRegion, advice: Advice) -> rustix::io::Result<()> {
    // SAFETY: the range is one whole mapping of guest memory. No Rust reference points into it, and this advice only
    // changes when its pages are allocated, and if they are zero.
    unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) }
}
