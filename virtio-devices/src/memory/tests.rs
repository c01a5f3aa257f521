use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{RwLock, RwLockReadGuard};
use proptest::prelude::*;
use virtio_queue::QueueT;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion, Permissions};

use super::*;
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{Ring, Used};
use crate::testing::driver_queue::{DriverQueue, WRITE};

const PAGE: u64 = PAGE_SIZE as u64;

/// Two regions of 256 pages with a hole between them.
fn map() -> GuestMap {
    GuestMap::from_ranges(&[(GuestAddress(0), 256 << 12), (GuestAddress(2 << 20), 256 << 12)]).unwrap()
}

/// The written pages, by guest physical page number.
fn take(log: &WriteLog) -> Vec<u64> {
    let mut all = Vec::new();
    for (index, region) in log.map().iter().enumerate() {
        let mut pages = vec![0; 4];
        log.take(index, &mut pages);
        let bit = |page: &u64| pages[(page / 64) as usize] & 1 << (page % 64) != 0;
        all.extend((0..256).filter(bit).map(|page| region.start_addr().0 / PAGE + page));
    }
    all
}

#[test]
fn writes_through_the_map_are_logged_once_while_a_log_exists() {
    let map = map();
    map.write_obj(1u8, GuestAddress(0)).unwrap();
    let log = WriteLog::new(&map).unwrap();
    assert!(take(&log).is_empty());
    map.write_obj(1u8, GuestAddress(5 * PAGE)).unwrap();
    map.write_slice(&[1; 2], GuestAddress(64 * PAGE - 1)).unwrap();
    map.store(1u16, GuestAddress((2 << 20) + 255 * PAGE), Ordering::Relaxed).unwrap();
    let _ = map.read_obj::<u8>(GuestAddress(9 * PAGE)).unwrap();
    assert_eq!(take(&log), [5, 63, 64, 512 + 255]);
    assert!(take(&log).is_empty());
    drop(log);
    map.write_obj(1u8, GuestAddress(6 * PAGE)).unwrap();
    let log = WriteLog::new(&map).unwrap();
    assert!(take(&log).is_empty());
}

#[test]
fn a_map_is_collected_by_one_at_a_time() {
    let map = map();
    let log = WriteLog::new(&map).unwrap();
    let busy = WriteLog::new(&map.clone()).unwrap_err();
    assert_eq!(busy.kind(), std::io::ErrorKind::ResourceBusy);
    // The second log takes nothing from the first.
    map.write_obj(1u8, GuestAddress(0)).unwrap();
    assert_eq!(take(&log), [0]);
    drop(log);
    WriteLog::new(&map).unwrap();
}

#[test]
fn concurrent_writes_are_never_missed_by_the_write_log() {
    const PAGES: u64 = 64;
    let map = map();
    let stop = AtomicBool::new(false);
    let seen = AtomicU64::new(0);
    // The writer counts up in each page. The collector's copies, taken after the bits, together with the pages marked
    // later, must have the writer's last values.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0u64;
            while !stop.load(Ordering::Relaxed) {
                value += 1;
                for page in 0..PAGES {
                    map.write_obj(value, GuestAddress(page * PAGE)).unwrap();
                }
                seen.store(value, Ordering::Relaxed);
            }
        });
        for _ in 0..50 {
            let log = WriteLog::new(&map).unwrap();
            let mut copy: Vec<u64> = (0..PAGES).map(|page| map.read_obj(GuestAddress(page * PAGE)).unwrap()).collect();
            let mut pass = || {
                for page in take(&log) {
                    copy[page as usize] = map.read_obj(GuestAddress(page * PAGE)).unwrap();
                }
            };
            (0..20).for_each(|_| pass());
            // The last collection needs a stopped writer: here, repeated until nothing is written between two rounds.
            let start = seen.load(Ordering::Relaxed);
            while seen.load(Ordering::Relaxed) < start + 2 {
                std::thread::yield_now();
            }
            pass();
            assert!(copy.iter().all(|value| *value > start), "{start}: {copy:?}");
        }
        stop.store(true, Ordering::Relaxed);
    });
}

proptest! {
    #[test]
    fn exactly_the_pages_of_a_range_are_noted(
        ranges in proptest::collection::vec((0..256u64 << 12, 0..40_000usize), 0..4)
    ) {
        let map = map();
        let log = WriteLog::new(&map).unwrap();
        let mut expected: Vec<u64> = Vec::new();
        for (start, len) in ranges {
            let len = len.min(((256 << 12) - start) as usize);
            map.write(&vec![1; len], GuestAddress(start)).unwrap();
            if let Some(last) = len.checked_sub(1) {
                expected.extend(start / PAGE..=(start + last as u64) / PAGE);
            }
        }
        expected.sort_unstable();
        expected.dedup();
        prop_assert_eq!(take(&log), expected);
    }
}

#[test]
fn a_note_beyond_the_end_is_left_out() {
    let map = map();
    let log = WriteLog::new(&map).unwrap();
    let region = map.iter().next().unwrap();
    region.bitmap().mark_dirty(255 * PAGE_SIZE, usize::MAX);
    region.bitmap().mark_dirty(usize::MAX, usize::MAX);
    region.bitmap().mark_dirty(300 * PAGE_SIZE, 1);
    assert_eq!(take(&log), [255]);
}

#[test]
fn syscall_and_raw_writes_to_segments_are_logged() {
    let map = map();
    let space = DmaSpace::from(map.clone());
    let view = space.pass();
    let mut driver = DriverQueue::new(&map, 0, 8);
    let queue = Arc::clone(&driver.queue);
    let mut ring = Ring::open(0, queue.lock(), false, &view).unwrap();
    let mut offer = |ring: &mut Ring<'_>, pieces: &[(u64, u32)]| {
        let buffers: Vec<_> = pieces.iter().map(|&(at, len)| (at, len, WRITE)).collect();
        driver.add(&buffers);
        ring.next(&view).unwrap().unwrap()
    };
    let pieces: &[(u64, u32)] = &[(0x80000, 100), (0x90ffe, 4)];
    let pages = [0x80, 0x90, 0x91];
    let (mut storage, mut other) = (Storage::default(), Storage::default());
    let chain = offer(&mut ring, pieces);
    let mut segments = IoVecs::new(&mut storage);
    segments.append(&view, chain, Permissions::Write).unwrap();
    let log = WriteLog::new(&map).unwrap();

    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&write, &[7; 103]).unwrap();
    assert_eq!(segments.receive(read.as_fd(), &mut []).unwrap(), 103);
    assert_eq!(take(&log), pages);
    rustix::io::write(&write, &[7; 102]).unwrap();
    segments.receive(read.as_fd(), &mut []).unwrap();
    assert_eq!(take(&log), pages[..2], "only what was written");

    segments.write_at(100, &[1; 2]);
    assert_eq!(take(&log), [0x90]);
    segments.zero_front(104);
    assert_eq!(take(&log), pages);
    segments.note_written(104);
    assert_eq!(take(&log), pages);
    let chain = offer(&mut ring, &[(0xa0000, 200)]);
    let mut from = IoVecs::new(&mut other);
    from.append(&view, chain, Permissions::Write).unwrap();
    // Discards the writes that offered the chain.
    take(&log);
    assert_eq!(from.copy_at(0, 104, &segments, 0), 104);
    assert_eq!(take(&log), pages);
    segments.take_last().unwrap().write(1);
    assert_eq!(take(&log), [0x91]);
    segments.advance(101);
    segments.write_at(0, &[1]);
    assert_eq!(take(&log), [0x90]);
    ring.give_back(&view, &[Used { head: 0, len: 1 }]).unwrap();
    assert_eq!(take(&log), [driver.used() / PAGE]);
}

/// Two adjacent regions, a hole, and another region.
fn three_regions() -> GuestMap {
    let ranges = [(0, 16), (16, 16), (48, 16)].map(|(page, pages)| (GuestAddress(page * PAGE), pages << 12));
    GuestMap::from_ranges(&ranges).unwrap()
}

proptest! {
    /// A look-up that a view remembers changes no later access.
    #[test]
    fn view_with_cached_lookups_behaves_like_the_map(
        accesses in proptest::collection::vec((prop_oneof![9 => 0..66 * PAGE, 1 => any::<u64>()], 0..9000_usize), 1..20)
    ) {
        let maps = [three_regions(), three_regions()];
        let (space, plain) = (DmaSpace::from(maps[0].clone()), &maps[1]);
        let (view, logs) = (space.pass(), maps.each_ref().map(|map| WriteLog::new(map).unwrap()));
        for (address, len) in accesses {
            let (at, data) = (GuestAddress(address), vec![1; len]);
            let slices = GuestMemoryBackend::get_slices(plain, at, len);
            let lens: Vec<_> = slices.map(|slice| slice.map(|s| s.len()).ok()).collect();
            let seen = GuestMemory::get_slices(&*view, at, len, Permissions::Write).unwrap();
            prop_assert_eq!(seen.map(|slice| slice.map(|s| s.len()).ok()).collect::<Vec<_>>(), lens.clone());
            let whole = view.whole(address, len);
            let first = lens.first().copied().flatten();
            prop_assert_eq!(whole.as_ref().map(|s| s.len()), first.filter(|first| *first == len));
            let host = whole.as_ref().map(|s| s.ptr_guard_mut().as_ptr());
            prop_assert_eq!(view.host(address, len), host);
            prop_assert_eq!(host, maps[0].get_host_address(at).ok().filter(|_| whole.is_some()));
            if let Some(whole) = whole {
                whole.copy_from(&data);
            } else {
                let _ = view.write(&data, at);
            }
            let _ = plain.write(&data, at);
            prop_assert_eq!(take(&logs[0]), take(&logs[1]));
        }
    }
}

#[test]
fn buffer_across_regions_is_two_segments_and_logs_each_page() {
    let map = three_regions();
    let space = DmaSpace::from(map.clone());
    let view = space.pass();
    let mut driver = DriverQueue::new(&map, 0, 8);
    // The used ring crosses from one region into the next in its second element.
    driver.queue.lock().set_used_ring_address(Some((16 * PAGE - 16) as u32), None);
    let queue = Arc::clone(&driver.queue);
    let mut ring = Ring::open(0, queue.lock(), false, &view).unwrap();
    driver.add(&[
        (16 * PAGE - 100, 50, WRITE),
        (16 * PAGE - 50, 150, WRITE),
        (14 * PAGE, 0, WRITE),
        (50 * PAGE, 7, WRITE),
    ]);
    let mut storage = Storage::default();
    let mut segments = IoVecs::new(&mut storage);
    let extent = segments.append(&view, ring.next(&view).unwrap().unwrap(), Permissions::Write).unwrap();
    assert_eq!((extent.segments, extent.bytes), (4, 207));
    let lens: Vec<_> = segments.segments().iter().map(|segment| segment.iov_len).collect();
    assert_eq!(lens, [50, 50, 100, 7]);
    let log = WriteLog::new(&map).unwrap();
    assert_eq!(segments.write_at(60, &[9; 147]), 147);
    assert_eq!(take(&log), [15, 16, 50]);
    let mut second = [0; 101];
    map.read_slice(&mut second, GuestAddress(16 * PAGE)).unwrap();
    assert_eq!((&second[..100], second[100]), (&[9; 100][..], 0));
    let used: Vec<_> = (0..4).map(|head| Used { head, len: 0x0101_0101 * u32::from(head) }).collect();
    ring.give_back(&view, &used[..1]).unwrap();
    assert_eq!(take(&log), [15]);
    ring.give_back(&view, &used[1..]).unwrap();
    assert_eq!(take(&log), [15, 16]);
    let elements = map.read_obj::<[u64; 4]>(GuestAddress(16 * PAGE - 12)).unwrap().map(u64::from_le);
    assert_eq!(elements, [0, 0x0101_0101_0000_0001, 0x0202_0202_0000_0002, 0x0303_0303_0000_0003]);
}

#[test]
fn pages_that_are_given_back_to_the_host_are_noted() {
    let map = map();
    let log = WriteLog::new(&map).unwrap();
    discard::discard(&map, &(PAGE..3 * PAGE));
    assert_eq!(take(&log), [1, 2]);
    discard::clear(&map, &(7 * PAGE..8 * PAGE));
    assert_eq!(take(&log), [7]);
}

/// Pages by their I/O address, with their permissions.
#[derive(Default)]
struct Pages {
    pages: BTreeMap<u64, (u64, Permissions)>,
    lock: RwLock<()>,
    bypassed: AtomicBool,
    faults: AtomicU64,
}

impl Translate for Pages {
    fn begin(&self) -> RwLockReadGuard<'_, ()> {
        self.lock.read_recursive()
    }

    fn is_bypassed(&self) -> bool {
        self.bypassed.load(Ordering::Relaxed)
    }

    fn translate(&self, address: u64, len: u64, access: Permissions) -> Option<(u64, u64)> {
        let found = self.pages.get(&(address / PAGE)).filter(|(_, allowed)| allowed.allow(access));
        if found.is_none() {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
        found.map(|(page, _)| (page * PAGE + address % PAGE, len.min(PAGE - address % PAGE)))
    }

    fn mapping(&self, address: u64, access: Permissions) -> Option<DmaMapping> {
        let (first, page) = (address / PAGE * PAGE, self.translate(address, 1, access)?.0 / PAGE * PAGE);
        Some(DmaMapping { first, last: first + (PAGE - 1), target: page, access })
    }

    fn follow(&self, _follower: Option<Arc<dyn DmaFollower>>) -> Result<(), NotFollowed> {
        Ok(())
    }
}

#[test]
fn a_translated_view_reaches_what_is_mapped_and_nothing_else() {
    let map = map();
    let pages = BTreeMap::from([
        (0x100, (3, Permissions::ReadWrite)),
        (0x101, (0x205, Permissions::ReadWrite)),
        (0x102, (9, Permissions::Read)),
        // A page of the hole.
        (0x103, (0x180, Permissions::ReadWrite)),
    ]);
    let iommu = Arc::new(Pages { pages, ..Pages::default() });
    let space = DmaSpace::translated(Memory::new(map.clone()), iommu.clone());
    let view = space.pass();
    let log = WriteLog::new(&map).unwrap();
    let at = GuestAddress(0x100 * PAGE + PAGE - 2);
    view.write_slice(&[1, 2, 3, 4], at).unwrap();
    assert_eq!(take(&log), [3, 0x205], "by guest physical pages");
    assert_eq!(map.read_obj::<[u8; 2]>(GuestAddress(4 * PAGE - 2)).unwrap(), [1, 2]);
    assert_eq!(map.read_obj::<[u8; 2]>(GuestAddress(0x205 * PAGE)).unwrap(), [3, 4]);
    assert_eq!(view.read_obj::<u32>(at).unwrap(), u32::from_le_bytes([1, 2, 3, 4]));

    assert!(view.check_range(GuestAddress(0x102 * PAGE), 16, Permissions::Read));
    assert!(!view.check_range(GuestAddress(0x102 * PAGE), 16, Permissions::Write));
    assert!(!view.check_range(GuestAddress(0x103 * PAGE), 1, Permissions::Read), "the hole");
    assert!(!view.check_range(GuestAddress(0), 1, Permissions::Read), "a guest physical address");
    assert!(view.check_range(GuestAddress(0), 0, Permissions::Read));
    assert!(!view.check_range(GuestAddress(u64::MAX), 2, Permissions::Read));
    assert!(view.physical_memory().is_none());
    assert!(view.write_slice(&[0; 8], GuestAddress(0x102 * PAGE - 4)).is_err_and(|_| true));
    assert_eq!(take(&log), [0x205], "up to the page that may not be written");
    assert!(iommu.faults.load(Ordering::Relaxed) >= 3);
}

#[test]
fn unmap_waits_for_passes_and_one_thread_may_hold_two() {
    let iommu = Arc::new(Pages::default());
    let space = DmaSpace::translated(Memory::new(map()), iommu.clone());
    let (first, second) = (space.pass(), space.pass());
    assert!(iommu.lock.try_write().is_none());
    drop(first);
    assert!(iommu.lock.try_write_for(Duration::from_millis(1)).is_none());
    drop(second);
    assert!(iommu.lock.try_write().is_some());
}

#[test]
fn bypassed_function_uses_guest_addresses_and_holds_its_pass() {
    let iommu = Arc::new(Pages { bypassed: AtomicBool::new(true), ..Pages::default() });
    let space = DmaSpace::translated(Memory::new(map()), iommu.clone());
    let view = space.pass();
    assert!(!view.is_translated());
    view.write_obj(1u8, GuestAddress(0)).unwrap();
    assert_eq!(iommu.faults.load(Ordering::Relaxed), 0);
    assert!(iommu.lock.try_write().is_none());
}

#[test]
fn a_view_reaches_plugged_blocks_of_a_limited_region_only() {
    let map = three_regions();
    let region = map.find_region(GuestAddress(16 * PAGE)).unwrap();
    let reach = Arc::new(Reach::new(4 * PAGE, 4));
    region.bitmap().whole().limit(&reach);
    let space = DmaSpace::from(map.clone());
    let lens = |address, len| {
        let view = space.pass();
        let slices = GuestMemory::get_slices(&*view, GuestAddress(address), len, Permissions::Write).unwrap();
        slices.map(|slice| slice.map(|slice| slice.len()).ok()).collect::<Vec<_>>()
    };
    assert_eq!(lens(15 * PAGE, 8192), [Some(4096), None]);
    assert!(space.pass().host(16 * PAGE, 1).is_none() && space.pass().piece(16 * PAGE, 1, Permissions::Read).is_none());
    reach.set(1..3, true);
    assert_eq!((lens(15 * PAGE, 8192), lens(20 * PAGE, 8 << 12)), (vec![Some(4096), None], vec![Some(8 << 12)]));
    assert_eq!(lens(27 * PAGE, 8192), [Some(4096), None]);
    assert!(space.pass().host(28 * PAGE - 1, 2).is_none());
    let host = |address| map.get_host_address(GuestAddress(address)).ok();
    assert_eq!(space.pass().host(21 * PAGE, 2), host(21 * PAGE));
    // A write is marked at its physical address.
    let log = WriteLog::new(&map).unwrap();
    space.pass().write_obj(1_u8, GuestAddress(22 * PAGE)).unwrap();
    assert_eq!(take(&log), [22]);
    reach.set(0..4, true);
    assert_eq!(lens(15 * PAGE, 18 << 12), [Some(4096), Some(16 << 12), None]);
    reach.set(1..2, false);
    assert_eq!(lens(20 * PAGE, 1), [None]);
}

/// A disk's worker keeps one view as long as the map is unchanged.
#[test]
fn a_view_that_lasts_loses_what_is_unplugged() {
    let map = three_regions();
    let reach = Arc::new(Reach::new(4 * PAGE, 4));
    map.find_region(GuestAddress(16 * PAGE)).unwrap().bitmap().whole().limit(&reach);
    let view = DmaView::identity(&map);
    let reaches = |page: u64| {
        let address = page * PAGE;
        let found = view.host(address, 8).is_some();
        assert_eq!(view.piece(address, 8, Permissions::Read).is_some(), found);
        assert_eq!(view.check_range(GuestAddress(address), 8, Permissions::Write), found);
        found
    };
    reach.set(0..3, true);
    assert_eq!([16, 20, 24, 28].map(reaches), [true, true, true, false]);
    assert!(view.host(16 * PAGE, 12 << 12).is_some());
    reach.set(1..2, false);
    assert!(view.host(16 * PAGE, 12 << 12).is_none());
    assert_eq!([20, 16, 20, 24, 20, 28].map(reaches), [false, true, false, true, false, false]);
    reach.set(0..4, false);
    assert_eq!([24, 16, 20, 24, 28].map(reaches), [false; 5]);
    reach.set(1..2, true);
    assert_eq!([20, 16].map(reaches), [true, false]);
    // Other regions stay.
    assert!(reaches(15) && !reaches(24));
}

#[test]
fn a_translated_view_reaches_no_unplugged_block() {
    let map = map();
    let region = map.iter().next().unwrap();
    let pages = BTreeMap::from([(0x100, (3, Permissions::ReadWrite))]);
    let space = DmaSpace::translated(Memory::new(map.clone()), Arc::new(Pages { pages, ..Pages::default() }));
    let reaches = || space.pass().check_range(GuestAddress(0x100 * PAGE), 8, Permissions::Write);
    assert!(reaches());
    let reach = Arc::new(Reach::new(PAGE, region.len().div_ceil(PAGE) as usize));
    region.bitmap().whole().limit(&reach);
    assert!(!reaches());
    reach.set(3..4, true);
    assert!(reaches());
}
