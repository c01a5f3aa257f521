//! The guest's memory.

mod backing;
mod error;
pub(crate) mod places;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::mm::Advice;
use virtio_devices::{GuestMap, GuestRegion, Memory, fill_with_zeros};
use vm_memory::{FileOffset, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use crate::arch::x86_64::layout::Layout;
use crate::config::{MemoryConfig, MemoryZoneConfig};
use crate::lazy_memory::image_layout::ImageLayout;
use crate::lazy_memory::page_faults::{PageFaults, Progress};
use backing::{Backing, advise};
pub use error::MemoryError;
use places::places;

/// The guest's mapped memory.
///
/// Private and anonymous with transparent huge pages, which boots fastest; or a memfd, which other processes can map.
/// With hugepages=on, either consists of the host's reserved huge pages.
#[derive(Debug)]
pub struct GuestRam {
    // Drop order: the filler ends before the memory is unmapped.
    /// Filler of the memory, if it was restored.
    filling: Option<PageFaults>,
    memory: Memory,
    config: MemoryConfig,
    shared: bool,
    /// First addresses of the memory devices' regions.
    of_devices: Vec<u64>,
    /// The image that the memory was mapped from when it was made.
    image: Option<Image>,
}

/// Existing memory to map.
#[derive(Debug, Clone)]
pub(crate) enum Image {
    /// Snapshot file, and the place of each region in it. The file is not changed.
    Snapshot(Arc<File>, ImageLayout),
    /// Memory of another program, which is shared with it.
    Passed(Arc<[PassedRegion]>),
}

/// A region of another program's memory.
#[derive(Debug, Clone)]
pub(crate) struct PassedRegion {
    /// Addresses in the guest.
    pub range: Range<u64>,
    /// File that contains the region.
    pub file: Arc<File>,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// True if the other program cannot make the file shorter.
    pub is_sealed: bool,
}

impl GuestRam {
    /// Maps memory according to `config` and `layout`, as a memfd if `config` or `shared` requires it; backends may
    /// need one.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot allocate the memory. Nothing is mapped then.
    pub fn new(config: &MemoryConfig, layout: &Layout, shared: bool) -> Result<Self, MemoryError> {
        Self::of(config, layout, shared, None)
    }

    /// As [`Self::new`]. With an image, maps that.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::new`] does, and if the image has other regions.
    pub(crate) fn of(
        config: &MemoryConfig,
        layout: &Layout,
        shared: bool,
        image: Option<&Image>,
    ) -> Result<Self, MemoryError> {
        let memory = Memory::new(map(config, layout, shared, image)?);
        let of_devices = places(config, layout).into_iter().map(|place| place.range.start).collect();
        Ok(Self { filling: None, memory, config: config.clone(), shared, of_devices, image: image.cloned() })
    }

    /// Starts to fill the memory from `faults`.
    pub(crate) fn fill_by(&mut self, faults: PageFaults) {
        self.filling = Some(faults);
    }

    /// Progress of the filler, if there is one.
    pub(crate) fn filling(&self) -> Option<&Arc<Progress>> {
        self.filling.as_ref().map(PageFaults::progress)
    }

    /// Stops waiting for memory that cannot be read: the guest ends.
    pub(crate) fn give_up_on_failure(&self) {
        self.filling.iter().for_each(PageFaults::give_up_on_failure);
    }

    /// Stops the filler. Missing pages read as zero.
    pub(crate) fn forget_filling(&mut self) {
        self.filling = None;
    }

    /// Allocates all memory, except that of memory devices.
    ///
    /// # Errors
    ///
    /// Fails if the host has too little memory.
    pub(crate) fn populate(&self) -> io::Result<()> {
        let memory = self.memory.memory();
        let mut at_boot = memory.iter().filter(|region| !self.of_devices.contains(&region.start_addr().0));
        at_boot.try_for_each(|region| populate(region, true))
    }

    /// True if the memory is mapped from an image. Its pages cannot be discarded: they would show the file's contents
    /// again.
    pub(crate) fn is_image(&self) -> bool {
        let Some(Image::Snapshot(image, _)) = &self.image else { return false };
        let is_mapped = |region: &GuestRegion| {
            let of = region.file_offset().map(FileOffset::arc);
            of.is_some_and(|of| Arc::ptr_eq(image, of))
        };
        self.memory.memory().iter().any(is_mapped)
    }

    /// This memory and another region at the addresses `range`, mapped in the same way. The guest's memory does not
    /// change before [`Self::set`].
    ///
    /// # Errors
    ///
    /// Fails if the host cannot allocate the region.
    pub fn grown(&self, range: &Range<u64>) -> Result<GuestMap, MemoryError> {
        self.grown_of(range, None)
    }

    /// As [`Self::grown`]. With an image, maps the region from that.
    pub(crate) fn grown_of(&self, range: &Range<u64>, image: Option<&Image>) -> Result<GuestMap, MemoryError> {
        let config = MemoryConfig { size: range.end - range.start, ..self.config.clone() };
        let failed = |error| MemoryError::Map { key: "size", size: config.size, error: io::Error::other(error) };
        let mut added = Vec::new();
        for part in config.parts() {
            added.extend(map_part(&part, &config, std::slice::from_ref(range), self.shared, image)?);
        }
        let region = added.pop().ok_or_else(|| failed(vm_memory::GuestRegionCollectionError::NoMemoryRegion))?;
        self.memory.memory().insert_region(Arc::new(region)).map_err(failed)
    }

    /// New memory, mapped in the same way, with the size and the layout of another start. The guest's memory does not
    /// change before [`Self::set`].
    ///
    /// # Errors
    ///
    /// Fails if the host cannot allocate it in addition to the present memory.
    pub fn anew(&self, size: u64, layout: &Layout) -> Result<GuestMap, MemoryError> {
        map(&MemoryConfig { size, ..self.config.clone() }, layout, self.shared, None)
    }

    /// Makes `memory` the guest's memory.
    pub fn set(&self, memory: GuestMap) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).replace(memory);
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.memory.memory().iter().map(GuestMemoryRegion::len).sum()
    }

    /// The memory as devices see it.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// True if other processes can map it.
    pub fn is_shared(&self) -> bool {
        self.memory.memory().iter().all(is_shared)
    }

    /// Sets all memory to zero. Mappings stay, including those of other processes. With `keep_pages` the host pages
    /// stay the same, as devices that have pinned them require.
    ///
    /// # Errors
    ///
    /// Fails if a system call fails. The memory's contents are undefined then.
    pub fn clear(&self, keep_pages: bool) -> Result<(), MemoryError> {
        for region in self.memory.memory().iter() {
            let discarded = match region.file_offset() {
                _ if keep_pages => Err(rustix::io::Errno::BUSY),
                Some(file) if is_shared(region) => {
                    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(file.file(), punch, file.start(), region.len())
                }
                // Discarded pages would show the file's contents again.
                Some(_) => Err(rustix::io::Errno::BUSY),
                None => advise(region, Advice::LinuxDontNeed),
            };
            // Linux before 5.18 cannot discard private huge pages.
            if discarded.is_err() {
                fill_with_zeros(region, &(0..region.len())).map_err(MemoryError::Clear)?;
            }
        }
        let memory = self.memory.memory();
        let prefault = self.config.parts().iter().any(|part| part.prefault);
        let mut at_boot = memory.iter().filter(|region| !self.of_devices.contains(&region.start_addr().0));
        at_boot.try_for_each(|region| populate(region, prefault)).map_err(MemoryError::Clear)
    }
}

/// True if other processes can map `region`.
fn is_shared(region: &GuestRegion) -> bool {
    region.file_offset().is_some() && region.flags() & libc::MAP_SHARED != 0
}

/// Maps the memory of a start.
fn map(config: &MemoryConfig, layout: &Layout, shared: bool, image: Option<&Image>) -> Result<GuestMap, MemoryError> {
    let parts = config.parts();
    let sizes: Vec<_> = parts.iter().map(|part| part.size).collect();
    let mut regions = Vec::new();
    let named = |part: &MemoryZoneConfig, error| match part.id.as_str() {
        "" => error,
        id => MemoryError::Zone { id: id.to_string(), error: Box::new(error) },
    };
    for (part, ranges) in parts.iter().zip(layout.parts(&sizes)) {
        let mapped = map_part(part, config, &ranges, shared, image);
        regions.extend(mapped.map_err(|error| named(part, error))?);
    }
    // All that memory devices can plug is mapped, for backends too. It costs nothing until it is plugged and used.
    for place in places(config, layout) {
        if let Some(part) = parts.get(place.part) {
            let backing = Backing::of_room(part, config, shared);
            let region = backing.and_then(|backing| region_of(&backing, &place.range, 0, image));
            regions.push(region.map_err(|error| named(part, error))?);
        }
    }
    regions.sort_by_key(GuestMemoryRegion::start_addr);
    let failed = |error| MemoryError::Map { key: "size", size: config.total(), error: io::Error::other(error) };
    GuestMap::from_regions(regions).map_err(failed)
}

/// Maps a part of the memory at the addresses `ranges`.
fn map_part(
    part: &MemoryZoneConfig,
    config: &MemoryConfig,
    ranges: &[Range<u64>],
    shared: bool,
    image: Option<&Image>,
) -> Result<Vec<GuestRegion>, MemoryError> {
    let backing = Backing::new(part, config, shared)?;
    let mut regions = Vec::new();
    let mut offset = 0;
    for range in ranges {
        let region = region_of(&backing, range, offset, image)?;
        populate(&region, part.prefault).map_err(|error| backing.map_error(error))?;
        regions.push(region);
        offset += range.end - range.start;
    }
    Ok(regions)
}

/// Maps the region of these addresses: from the image if that has the region, or else from its backing at `offset`.
fn region_of(
    backing: &Backing,
    range: &Range<u64>,
    offset: u64,
    image: Option<&Image>,
) -> Result<GuestRegion, MemoryError> {
    match image {
        Some(Image::Snapshot(file, layout)) if let Some(offset) = layout.offset(range) => {
            backing.of_image(file).region(range, offset)
        }
        Some(Image::Passed(all)) if let Some(passed) = all.iter().find(|passed| passed.range == *range) => {
            backing.of_passed(&passed.file, passed.is_sealed)?.region(range, passed.offset)
        }
        _ => backing.region(range, offset),
    }
}

/// Allocates all pages of `region` if `prefault` is set.
fn populate(region: &GuestRegion, prefault: bool) -> io::Result<()> {
    if !prefault {
        return Ok(());
    }
    match advise(region, Advice::LinuxPopulateWrite) {
        // Linux before 5.14 does not support this advice.
        Err(rustix::io::Errno::INVAL) => fill_with_zeros(region, &(0..region.len())),
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use virtio_devices::WriteLog;
    use vm_memory::{Bytes, GuestAddress};

    use super::backing::HUGE_PAGE;
    use super::*;
    use crate::config::HotplugMethod;

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
    fn writes_of_devices_can_be_collected_page_by_page() {
        for shared in [false, true] {
            let ram = ram(&MemoryConfig { shared, ..config(4 << 30) }).unwrap();
            let log = WriteLog::new(&ram.memory().memory()).unwrap();
            let last = (5u64 << 30) - 1;
            ram.memory().memory().write_obj(1u8, GuestAddress(last)).unwrap();
            let mut pages = vec![0; (1 << 30) / 4096 / 64];
            assert_eq!((log.take(0, &mut pages), log.take(1, &mut pages)), (0, 1));
            assert_eq!(pages.last(), Some(&(1 << 63)));
        }
    }

    #[test]
    fn memory_grows_by_a_region_of_its_kind_only_when_set() {
        for shared in [false, true] {
            let ram = ram(&MemoryConfig { shared, ..config(1 << 30) }).unwrap();
            let range = 4 << 30..(4 << 30) + (128 << 20);
            let grown = ram.grown(&range).unwrap();
            assert_eq!((ram.size(), ram.memory().memory().num_regions()), (1 << 30, 1));
            ram.set(grown);
            let memory = ram.memory().memory();
            let last = memory.iter().last().unwrap();
            assert_eq!((last.start_addr().0, last.len(), memory.num_regions()), (4 << 30, 128 << 20, 2));
            assert_eq!((ram.size(), ram.is_shared()), ((1 << 30) + (128 << 20), shared));
            assert!(ram.grown(&range).is_err(), "there is something already");
            memory.write_obj(u64::MAX, GuestAddress(4 << 30)).unwrap();
            ram.clear(false).unwrap();
            assert_eq!(memory.read_obj::<u64>(GuestAddress(4 << 30)).unwrap(), 0);
        }
    }

    /// The flags of the mapping at the start of the guest's memory (`proc_pid_smaps(5)`).
    fn flags(ram: &GuestRam) -> String {
        flags_at(ram.memory().memory().get_host_address(GuestAddress(0)).unwrap() as usize)
    }

    /// The flags of the mapping at `host`. Neighbours of the same kind may be one mapping.
    fn flags_at(host: usize) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let has_it = |line: &&str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16);
            range.is_some_and(|(start, end)| {
                number(start).is_ok_and(|start| (start..number(end).unwrap()).contains(&host))
            })
        };
        let mut lines = smaps.lines().skip_while(|line| !has_it(line));
        lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_string()
    }

    #[test]
    fn pages_are_merged_and_swap_is_set_aside_only_if_asked_for() {
        let flags = |change: fn(&mut MemoryConfig)| {
            let mut config = config(64 << 20);
            change(&mut config);
            flags(&ram(&config).unwrap())
        };
        let (plain, merged) = (flags(|_| {}), flags(|config| config.mergeable = true));
        let reserved = flags(|config| config.reserve = true);
        assert_eq!([&plain, &merged, &reserved].map(|flags| flags.contains(" mg")), [false, true, false]);
        assert_eq!([&plain, &merged, &reserved].map(|flags| flags.contains(" nr")), [true, true, false]);
        let shared = MemoryConfig { reserve: true, shared: true, ..config(64 << 20) };
        assert!(matches!(ram(&shared), Err(MemoryError::ReserveShared)));
    }

    #[test]
    fn core_dumps_have_the_memory_only_if_asked_for() {
        // Shared and private, of zones, added by ACPI, and for memory devices.
        let zone = zone("id=z,size=64M,hotplug_size=128M,shared=on");
        for dump in [false, true] {
            for (shared, zones) in [(false, vec![]), (true, vec![]), (false, vec![zone.clone()])] {
                let size = if zones.is_empty() { 64 << 20 } else { 0 };
                let hotplug_size = (size > 0).then_some(128 << 20);
                let hotplug_method = HotplugMethod::VirtioMem;
                let memory = MemoryConfig { shared, dump, zones, hotplug_method, hotplug_size, ..config(size) };
                let layout = Layout::new(memory.total(), places::addresses(&memory), 46).unwrap();
                let ram = GuestRam::new(&memory, &layout, false).unwrap();
                if size > 0 {
                    ram.set(ram.grown(&(8 << 30..(8 << 30) + (128 << 20))).unwrap());
                }
                let regions = ram.memory().memory();
                assert_eq!(regions.num_regions(), if size > 0 { 3 } else { 2 });
                for region in regions.iter() {
                    let flags = flags_at(region.as_ptr() as usize);
                    assert_eq!(flags.contains(" dd"), !dump, "{flags}");
                }
            }
        }
    }

    fn zone(text: &str) -> MemoryZoneConfig {
        text.parse().unwrap()
    }

    fn zones(zones: &[&str]) -> Result<GuestRam, MemoryError> {
        let zones: Vec<_> = zones.iter().map(|text| zone(text)).collect();
        let config = MemoryConfig { size: 0, zones, ..MemoryConfig::default() };
        GuestRam::new(&config, &Layout::new(config.total(), 0, 46).unwrap(), false)
    }

    #[test]
    fn zones_follow_each_other_with_their_own_properties() {
        let ram = zones(&["id=a,size=1G,shared=on", "id=b,size=3G"]).unwrap();
        let memory = ram.memory().memory();
        let regions: Vec<_> =
            memory.iter().map(|region| (region.start_addr().0, region.len(), is_shared(region))).collect();
        assert_eq!(regions, [(0, 1 << 30, true), (1 << 30, 2 << 30, false), (4 << 30, 1 << 30, false)]);
        assert!(!ram.is_shared());
    }

    #[test]
    fn zone_file_is_loaded_and_changed_only_if_shared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("zone");
        for shared in [false, true] {
            std::fs::write(&path, [7; 8192]).unwrap();
            let text = format!("id=a,size=8K,file={},shared={}", path.display(), if shared { "on" } else { "off" });
            let ram = zones(&[&text]).unwrap();
            let memory = ram.memory().memory();
            assert_eq!(memory.read_obj::<u8>(GuestAddress(8191)).unwrap(), 7);
            memory.write_obj(9u8, GuestAddress(8191)).unwrap();
            assert_eq!(std::fs::read(&path).unwrap()[8191], if shared { 9 } else { 7 });
            assert_eq!(ram.is_shared(), shared);
            ram.clear(false).unwrap();
            assert_eq!(memory.read_obj::<u8>(GuestAddress(8191)).unwrap(), 0);
            assert_eq!(std::fs::read(&path).unwrap()[0], if shared { 0 } else { 7 });
        }
        let refused = |text: &str| zones(&[text]).unwrap_err().to_string();
        let short = refused(&format!("id=a,size=12K,file={}", path.display()));
        assert!(short.starts_with("--memory-zone id=a,file=") && short.contains("8192 bytes long"), "{short}");
        assert!(refused("id=a,size=8K,file=/nonexistent/zone").contains("cannot be opened"));
        // In a directory, the zone's file has no name.
        let ram = zones(&[&format!("id=a,size=8K,file={},shared=on", folder.path().display())]).unwrap();
        assert!(ram.is_shared() && std::fs::read_dir(folder.path()).unwrap().count() == 1);
    }

    #[test]
    fn a_numa_node_that_the_host_does_not_have_is_refused() {
        let error = zones(&["id=a,size=8K,host_numa_node=1023"]).unwrap_err().to_string();
        assert!(error.starts_with("--memory-zone id=a,host_numa_node=1023: the host does not give"), "{error}");
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
    fn clearing_kept_pages_does_not_allocate_unused_ones() {
        let ram = ram(&MemoryConfig { shared: true, ..config(4 << 20) }).unwrap();
        let memory = ram.memory().memory();
        for page in [0, 5, 6, 1023] {
            memory.write_obj(u64::MAX, GuestAddress(page * 4096)).unwrap();
        }
        let file = memory.iter().next().unwrap().file_offset().unwrap().file();
        let blocks = || rustix::fs::fstat(file).unwrap().st_blocks;
        let written = blocks();
        ram.clear(true).unwrap();
        assert_eq!(blocks(), written);
        assert_eq!([0, 5, 6, 1023].map(|page| memory.read_obj::<u64>(GuestAddress(page * 4096)).unwrap()), [0; 4]);
    }

    #[test]
    fn hotpluggable_memory_is_mapped_but_not_allocated_before_use() {
        for shared in [false, true] {
            let mut memory = MemoryConfig { shared, prefault: true, ..config(4 << 20) };
            (memory.hotplug_method, memory.hotplug_size) = (HotplugMethod::VirtioMem, Some(1 << 40));
            let layout = Layout::new(memory.total(), places::addresses(&memory), 46).unwrap();
            let ram = GuestRam::new(&memory, &layout, false).unwrap();
            let regions = ram.memory().memory();
            let last = regions.iter().last().unwrap();
            assert_eq!((last.start_addr().0, last.len(), regions.num_regions()), (4 << 30, 1 << 40, 2));
            assert_eq!(ram.is_shared(), shared);
            ram.clear(false).unwrap();
            if shared {
                let file = last.file_offset().unwrap().file();
                assert_eq!((rustix::fs::fstat(file).unwrap().st_blocks, last.file_offset().unwrap().start()), (0, 0));
            }
        }
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
    fn too_few_huge_pages_are_an_error_with_their_number() {
        // More huge pages than any machine that runs this test has reserved.
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
        memory.iter().try_for_each(|region| fill_with_zeros(region, &(0..region.len()))).unwrap();
        let mut bytes = [0xff; 192 << 10];
        memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}
