//! Memory slots of a memory device, and access without them.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::GuestRegion;

const BLOCK: u64 = 64 << 10;
const START: u64 = 1 << 30;
const BLOCKS: u64 = 16;
const ACK: Work = Work::Done(Answer::Ack);

/// The shown parts, and the number of changes that still succeed.
#[derive(Default)]
struct Slots {
    shown: Mutex<BTreeSet<usize>>,
    left: Mutex<Option<usize>>,
    stops: Mutex<Option<(usize, Arc<AtomicBool>)>>,
}

impl Slots {
    fn shown(&self) -> Vec<usize> {
        self.shown.lock().iter().copied().collect()
    }

    fn change(&self) -> io::Result<()> {
        if let Some(left) = &mut *self.left.lock() {
            *left = left.checked_sub(1).ok_or(io::ErrorKind::OutOfMemory)?;
        }
        if let Some((left, stop)) = &mut *self.stops.lock() {
            *left = left.saturating_sub(1);
            stop.store(*left == 0, Ordering::Release);
        }
        Ok(())
    }
}

impl MemSlots for Slots {
    fn show(&self, part: usize) -> io::Result<()> {
        if !self.shown.lock().contains(&part) {
            self.change()?;
            self.shown.lock().insert(part);
        }
        Ok(())
    }

    fn hide(&self, part: usize) -> io::Result<()> {
        if self.shown.lock().contains(&part) {
            self.change()?;
            self.shown.lock().remove(&part);
        }
        Ok(())
    }
}

/// A fully requested region whose slots have this number of blocks, its memory, and its slots.
fn region(per_slot: usize) -> (MemRegion, GuestMap, Arc<Slots>) {
    let file = File::from(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(BLOCKS * BLOCK).unwrap();
    let place = (GuestAddress(START), (BLOCKS * BLOCK) as usize, Some(FileOffset::new(file, 0)));
    let memory = GuestMap::from_ranges_with_files([place]).unwrap();
    let region = MemRegion::new(&(START..START + BLOCKS * BLOCK), BLOCK, per_slot);
    memory.iter().for_each(|mapped: &GuestRegion| mapped.bitmap().whole().limit(region.reach()));
    let slots = Arc::new(Slots::default());
    region.attach(Arc::clone(&slots) as _).unwrap();
    region.resize(u64::MAX);
    (region, memory, slots)
}

fn at(block: u64) -> u64 {
    START + block * BLOCK
}

fn reached(region: &MemRegion) -> Vec<usize> {
    (0..BLOCKS as usize).filter(|block| region.reach().has(*block)).collect()
}

#[test]
fn blocks_are_within_reach_while_they_are_plugged() {
    let (region, memory, slots) = region(1);
    let go = AtomicBool::new(false);
    assert_eq!((region.plug(&memory, at(2), 3, &go), region.plug(&memory, at(9), 1, &go)), (ACK, ACK));
    assert_eq!((slots.shown(), reached(&region)), (vec![2, 3, 4, 9], vec![2, 3, 4, 9]));
    assert_eq!(region.unplug(&memory, at(3), 1, &go), ACK);
    assert_eq!((slots.shown(), reached(&region)), (vec![2, 4, 9], vec![2, 4, 9]));
    assert_eq!(region.unplug_everything(&memory, &go), ACK);
    assert_eq!((slots.shown(), reached(&region)), (vec![], vec![]));
}

#[test]
fn a_slot_of_several_blocks_stays_until_none_is_plugged() {
    let (region, memory, slots) = region(4);
    let go = AtomicBool::new(false);
    assert_eq!(region.plug(&memory, at(3), 2, &go), ACK);
    assert_eq!((slots.shown(), reached(&region)), (vec![0, 1], vec![3, 4]));
    assert_eq!(region.plug(&memory, at(5), 1, &go), ACK);
    assert_eq!(region.unplug(&memory, at(4), 1, &go), ACK);
    assert_eq!((slots.shown(), reached(&region)), (vec![0, 1], vec![3, 5]));
    assert_eq!(region.unplug(&memory, at(5), 1, &go), ACK);
    assert_eq!((slots.shown(), reached(&region)), (vec![0], vec![3]));
}

#[test]
fn slots_of_several_blocks_show_no_more_than_the_host_wants() {
    let (region, memory, slots) = region(4);
    let go = AtomicBool::new(false);
    region.resize(5 * BLOCK);
    assert_eq!((region.plug(&memory, at(0), 1, &go), region.plug(&memory, at(4), 1, &go)), (ACK, ACK));
    assert_eq!(region.plug(&memory, at(8), 1, &go), Work::Done(Answer::Busy));
    assert_eq!((region.plug(&memory, at(5), 3, &go), slots.shown()), (ACK, vec![0, 1]));
}

#[test]
fn blocks_of_slots_that_are_shown_are_plugged_after_a_shrink() {
    let (region, memory, slots) = region(4);
    let go = AtomicBool::new(false);
    assert_eq!([0, 4, 8].map(|block| region.plug(&memory, at(block), 1, &go)), [ACK; 3]);
    region.resize(4 * BLOCK);
    assert_eq!(region.plug(&memory, at(12), 1, &go), Work::Done(Answer::Busy));
    // All of these slots exist, and the host requests one block more.
    assert_eq!((region.plug(&memory, at(5), 1, &go), slots.shown()), (ACK, vec![0, 1, 2]));
    assert_eq!((region.plug(&memory, at(6), 1, &go), reached(&region)), (Work::Done(Answer::Nack), vec![0, 4, 5, 8]));
}

#[test]
fn a_change_that_the_host_refuses_changes_nothing() {
    let (region, memory, slots) = region(1);
    let go = AtomicBool::new(false);
    assert_eq!(region.plug(&memory, at(0), 2, &go), ACK);
    memory.write_obj(7_u8, GuestAddress(at(1))).unwrap();
    // Changes are undone, if the host allows that.
    for left in [0, 1] {
        *slots.left.lock() = Some(left);
        assert_eq!(region.plug(&memory, at(4), 3, &go), Work::Done(Answer::Busy));
        *slots.left.lock() = None;
        region.as_marked(&(0..BLOCKS as usize));
        assert_eq!((slots.shown(), reached(&region), region.plugged()), (vec![0, 1], vec![0, 1], 2 * BLOCK));
        *slots.left.lock() = Some(left);
        assert_eq!(region.unplug(&memory, at(0), 2, &go), Work::Done(Answer::Busy));
        *slots.left.lock() = None;
        region.as_marked(&(0..BLOCKS as usize));
        assert_eq!((slots.shown(), reached(&region), region.plugged()), (vec![0, 1], vec![0, 1], 2 * BLOCK));
        assert_eq!(memory.read_obj::<u8>(GuestAddress(at(1))).unwrap(), 7);
    }
}

#[test]
fn stopped_request_leaves_plugged_blocks_accessible() {
    let (region, memory, slots) = region(1);
    let stop = Arc::new(AtomicBool::new(false));
    assert_eq!(region.plug(&memory, at(0), 4, &stop), ACK);
    for (changes, work) in [(2, 0), (2, 1), (3, 2)] {
        stop.store(false, Ordering::Release);
        *slots.stops.lock() = Some((changes, Arc::clone(&stop)));
        let stopped = match work {
            0 => region.plug(&memory, at(8), 4, &stop),
            1 => region.unplug(&memory, at(0), 4, &stop),
            _ => region.unplug_everything(&memory, &stop),
        };
        *slots.stops.lock() = None;
        assert_eq!(stopped, Work::Stopped, "{work}");
        assert_eq!((slots.shown(), reached(&region)), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]), "{work}");
    }
}

#[test]
fn a_new_vm_has_slots_for_what_is_plugged() {
    let (first, memory, _) = region(4);
    assert_eq!(first.plug(&memory, at(3), 6, &AtomicBool::new(false)), ACK);
    let (second, _, slots) = region(4);
    assert!(second.restore(&first.save().unwrap()));
    assert_eq!((slots.shown(), reached(&second)), (vec![], vec![3, 4, 5, 6, 7, 8]));
    second.attach(Arc::clone(&slots) as _).unwrap();
    assert_eq!(slots.shown(), [0, 1, 2]);
    second.unplug_all();
    assert_eq!(reached(&second), Vec::<usize>::new());
    // The VM has ended, and nothing is taken from it.
    assert_eq!(second.plug(&memory, at(0), 1, &AtomicBool::new(false)), ACK);
    assert_eq!(slots.shown(), [0, 1, 2]);
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// A step is one call, for any pages that a backend has written, and only one step runs after the deadline.
#[test]
fn reclaiming_stops_in_a_gap_and_continues_there() {
    const SIZE: u64 = 16 << 20;
    let file = File::from(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(16 * SIZE).unwrap();
    let place = (GuestAddress(START), (16 * SIZE) as usize, Some(FileOffset::new(file.try_clone().unwrap(), 0)));
    let memory = GuestMap::from_ranges_with_files([place]).unwrap();
    let region = MemRegion::new(&(START..START + 16 * SIZE), SIZE, 1);
    region.resize(u64::MAX);
    assert_eq!(region.plug(&memory, START + 13 * SIZE, 1, &AtomicBool::new(false)), ACK);
    let pages = || rustix::fs::fstat(&file).unwrap().st_blocks / 8;
    // 300 extents in four blocks, a page in the next, and one after the plugged block.
    let extents = (0..300).map(|n| SIZE * 3 + 3 * 4096 + n * 50 * 4096);
    let write = |offset: u64| memory.write_obj(7_u8, GuestAddress(START + offset)).unwrap();
    extents.chain([SIZE * 7, SIZE * 13, SIZE * 14 + 4096]).for_each(write);
    assert_eq!(pages(), 303);
    let now = Instant::now();
    assert_eq!((region.reclaim(&memory, 0, 9, now), pages()), (7, 3));
    assert_eq!((region.reclaim(&memory, 7, 1, later()), pages()), (11, 2));
    assert_eq!((region.reclaim(&memory, 11, 9, now), pages()), (13, 2));
    assert_eq!((region.reclaim(&memory, 13, 9, now), pages()), (16, 1));
    assert_eq!(region.reclaim(&memory, 16, 9, now), 0);
    (0..13).for_each(|block| write(block * SIZE));
    assert_eq!((region.reclaim(&memory, 0, 9, later()), pages()), (0, 1));
}

#[test]
fn pages_of_unplugged_blocks_are_reclaimed_and_no_others() {
    let (region, memory, _) = region(1);
    assert_eq!(region.plug(&memory, at(4), 2, &AtomicBool::new(false)), ACK);
    (0..BLOCKS).for_each(|block| memory.write_obj(u64::MAX, GuestAddress(at(block) + 8192)).unwrap());
    let file = memory.iter().next().unwrap().file_offset().unwrap().file().try_clone().unwrap();
    let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks * 512;
    assert_eq!(blocks(), 4096 * BLOCKS as i64);
    let next = region.reclaim(&memory, 0, 1, later());
    assert_eq!((next, blocks()), (4, 4096 * (BLOCKS as i64 - 4)));
    let next = region.reclaim(&memory, next, 1, later());
    assert_eq!((next, blocks()), (16, 2 * 4096));
    assert_eq!(region.reclaim(&memory, next, 1, later()), 0);
    let word = |block| memory.read_obj::<u64>(GuestAddress(at(block) + 8192)).unwrap();
    assert_eq!([3, 4, 5, 6].map(word), [0, u64::MAX, u64::MAX, 0]);
    // A device of the host may have pinned them.
    region.keep_pages();
    memory.write_obj(7_u64, GuestAddress(at(0))).unwrap();
    assert_eq!((region.reclaim(&memory, 0, 9, later()), memory.read_obj::<u64>(GuestAddress(at(0))).unwrap()), (0, 7));
}

#[test]
fn image_blocks_are_freed_on_unplug_and_read_zero_on_plug() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BLOCKS * BLOCK).unwrap();
    file.write_all_at(&[7; 2 * BLOCK as usize], 0).unwrap();
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
    let image = FileOffset::new(file.try_clone().unwrap(), 0);
    let mapping = vm_memory::MmapRegion::build(Some(image), (BLOCKS * BLOCK) as usize, prot, flags).unwrap();
    let memory = GuestMap::from_regions(vec![GuestRegion::new(mapping, GuestAddress(START)).unwrap()]).unwrap();
    let region = MemRegion::new(&(START..START + BLOCKS * BLOCK), BLOCK, 1);
    region.resize(u64::MAX);
    assert!(region.restore(&[3, 0]));
    let bytes = || [at(0), at(1), at(2)].map(|address| memory.read_obj::<u8>(GuestAddress(address)).unwrap());
    let write = || [0, 1, 2].map(|block| memory.write_obj(9_u8, GuestAddress(at(block))).unwrap());
    let go = AtomicBool::new(false);
    write();
    assert_eq!(region.unplug(&memory, at(0), 2, &go), ACK);
    assert_eq!(bytes(), [7, 7, 9], "the copies are gone");
    assert_eq!((region.plug(&memory, at(1), 2, &go), bytes()), (ACK, [7, 0, 0]));
    write();
    // A backend's write to an unplugged block.
    region.reclaim(&memory, 0, 9, later());
    assert_eq!(bytes(), [7, 9, 9]);
    let mut first = [0];
    file.read_exact_at(&mut first, BLOCK).unwrap();
    assert_eq!(first, [7]);
}
