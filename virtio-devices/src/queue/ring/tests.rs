//! Chains are compared with the crate virtio-queue, as an independent implementation of the standard.

use std::sync::Arc;

use proptest::prelude::*;
use virtio_queue::desc::split::Descriptor as Reference;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, GuestAddress, Permissions};

use super::*;
use crate::iommu::{Iommu, IommuCounter, Range, Request};
use crate::testing::driver_queue::{DriverQueue, INDIRECT, NEXT, WRITE};
use crate::{DmaSpace, GuestMap, Memory};

const SIZE: u16 = 8;
const PAGE: u64 = 4096;
/// The page of the rings, in page 0x10 and after it.
const RINGS: u16 = 1;
/// Border between two regions of guest memory.
const BORDER: u64 = 0x8_0000;
const END: u64 = 0xa_0000;

fn map() -> GuestMap {
    let ranges = [(GuestAddress(0), BORDER as usize), (GuestAddress(BORDER), (END - BORDER) as usize)];
    GuestMap::from_ranges(&ranges).unwrap()
}

/// Addresses of descriptor tables: within a page, across pages, across regions, at the end, and outside of memory.
const TABLES: [u64; 8] =
    [0x3_0000, 0x3_1000 - 24, 0x3_2fe8, BORDER - 40, BORDER - 64, END - 48, END + PAGE, u64::MAX - 47];

type Raw = (u64, u32, u16, u16);
/// The head of a chain, and its descriptors.
type Walked = (u16, Vec<Raw>);

/// Descriptors that a driver may write.
fn descriptor() -> impl Strategy<Value = Raw> {
    let address = prop_oneof![0..END, proptest::sample::select(TABLES.to_vec()), any::<u64>()];
    let len = prop_oneof![0..200_u32, (0..10_u32).prop_map(|count| 16 * count), any::<u32>()];
    let flags = prop_oneof![
        4 => Just(NEXT),
        2 => Just(NEXT | WRITE),
        1 => Just(INDIRECT),
        2 => 0..8_u16,
    ];
    (address, len, flags, 0..SIZE + 1)
}

fn table() -> impl Strategy<Value = Vec<Raw>> {
    proptest::collection::vec(descriptor(), usize::from(SIZE))
}

/// A queue whose table crosses the border of two regions, or lies in one.
fn driver(map: &GuestMap, across: bool, descriptors: &[Raw], indirect: &[Vec<Raw>]) -> DriverQueue {
    let mut driver = DriverQueue::new(map, RINGS, SIZE);
    let at = if across { BORDER - 64 } else { 0x1_0000 };
    driver.queue.lock().set_desc_table_address(Some(at as u32), None);
    let tables = TABLES.iter().zip(indirect).map(|(at, raw)| (*at, raw.as_slice()));
    for (at, raw) in tables.chain([(at, descriptors)]) {
        for (index, raw) in (0..).zip(raw) {
            // As far as it lies in memory.
            if at.checked_add(16 * u64::from(index) + 16).is_some_and(|end| end <= END) {
                driver.set_descriptor(at, index, *raw);
            }
        }
    }
    (0..SIZE).for_each(|head| driver.offer(head));
    driver
}

/// The chains of a queue according to `virtio-queue`, and according to this crate.
fn walk(queue: &mut Queue, view: &DmaView) -> Vec<Walked> {
    let next = queue.next_avail();
    let chains = queue.iter(view).unwrap();
    let raw = |found: Reference| (found.addr().raw_value(), found.len(), found.flags(), found.next());
    let chains = chains.map(|chain| (chain.head_index(), chain.map(raw).collect())).collect();
    queue.set_next_avail(next);
    chains
}

fn walked(driver: &DriverQueue, view: &DmaView) -> Vec<Walked> {
    let queue = Arc::clone(&driver.queue);
    let mut ring = Ring { index: 0, queue: queue.lock(), considered: Wrapping(0) };
    let mut chains = Vec::new();
    while let Some(chain) = ring.next(view).unwrap() {
        let raw = |found: Descriptor| (found.address, found.len, found.flags, found.next);
        chains.push((chain.head_index(), chain.map(raw).collect()));
    }
    ring.put_back(chains.len() as u16);
    chains
}

proptest! {
    #[test]
    fn a_chain_of_any_tables_is_walked_as_virtio_queue_walks_it(
        across: bool,
        descriptors in table(),
        indirect in proptest::collection::vec(table(), TABLES.len()),
    ) {
        let map = map();
        let driver = driver(&map, across, &descriptors, &indirect);
        let space = DmaSpace::from(map);
        let view = space.pass();
        prop_assert_eq!(walked(&driver, &view), walk(&mut driver.queue.lock(), &view));
    }

    #[test]
    fn ring_behind_an_iommu_is_walked_with_same_accesses_and_faults(
        across: bool,
        descriptors in table(),
        indirect in proptest::collection::vec(table(), TABLES.len()),
        // The permissions of each page.
        pages in proptest::collection::vec(proptest::option::weighted(0.8, 0..3_u8), (END / PAGE) as usize),
        up_there: bool,
    ) {
        let map = map();
        let driver = driver(&map, across, &descriptors, &indirect);
        let iommu = Iommu::new(64);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(8));
        iommu.carry_out(Request::Attach { domain: 1, endpoint: 8, bypass: false }).unwrap();
        let page = |at: u64, target, access| {
            let range = Range { first: at, last: at + (PAGE - 1) };
            iommu.carry_out(Request::Map { domain: 1, range, target, access })
        };
        for (page_number, access) in (0..).zip(&pages) {
            let at = page_number * PAGE;
            // The ring itself must be mapped.
            let access = if (0x1_8000..0x1_c000).contains(&at) { Some(2) } else { *access };
            if let Some(access) = access {
                let access = [Permissions::Read, Permissions::Write, Permissions::ReadWrite][usize::from(access)];
                page(at, at, access).unwrap();
            }
        }
        if up_there {
            page(u64::MAX - (PAGE - 1), 0x3_0000, Permissions::Read).unwrap();
        }
        let space = DmaSpace::translated(Memory::new(map), Arc::clone(attachment.endpoint()) as _);
        let view = space.pass();
        let faults = || iommu.counters().get(IommuCounter::Faults);
        let before = faults();
        let expected = walk(&mut driver.queue.lock(), &view);
        let between = faults();
        prop_assert_eq!(walked(&driver, &view), expected);
        prop_assert_eq!(faults() - between, between - before);
    }
}

#[test]
fn looping_chain_is_cut_at_the_size_of_its_table() {
    let map = map();
    let mut driver = DriverQueue::new(&map, RINGS, SIZE);
    driver.set_raw(0, (0x8_0000, 10, NEXT, 1));
    driver.set_raw(1, (0x8_0000, 10, NEXT, 0));
    driver.offer(0);
    driver.set_descriptor(0x9_0000, 0, (0x8_0000, 10, NEXT, 0));
    driver.set_raw(2, (0x9_0000, 48, INDIRECT, 0));
    driver.offer(2);
    let chains = walked(&driver, &DmaView::identity(&map));
    let lens: Vec<_> = chains.iter().map(|(head, chain)| (*head, chain.len())).collect();
    assert_eq!(lens, [(0, usize::from(SIZE)), (2, 3)]);
}

#[test]
fn ring_not_set_up_or_with_an_index_beyond_its_size_is_broken() {
    let map = map();
    let view = DmaView::identity(&map);
    let driver = DriverQueue::new(&map, RINGS, SIZE);
    let queue = Arc::clone(&driver.queue);
    let next =
        || Ring { index: 0, queue: queue.lock(), considered: Wrapping(0) }.next(&view).map(|chain| chain.is_some());
    assert_eq!(next(), Ok(false));
    queue.lock().set_next_avail(u16::MAX);
    driver.set_avail_index(SIZE - 1);
    assert_eq!(next(), Ok(true), "it goes round");
    driver.set_avail_index(SIZE);
    assert_eq!(next(), Ok(true));
    queue.lock().set_next_avail(u16::MAX);
    driver.set_avail_index(SIZE);
    assert_eq!(next(), Err(BrokenRing));
    let fault = || RingFault::of(&queue.lock(), &view).map(|fault| fault.to_string());
    assert_eq!(fault().unwrap(), "avail index 8 is 9 ahead of the last one; the ring has 8");
    driver.set_avail_index(0);
    assert_eq!(fault(), None);
    let used = queue.lock().used_ring();
    queue.lock().try_set_used_ring_address(GuestAddress(END)).unwrap();
    assert_eq!(fault().unwrap(), "its used ring, 70 bytes at 0xa0000, is not in the guest's memory");
    queue.lock().try_set_used_ring_address(GuestAddress(used)).unwrap();
    queue.lock().set_ready(false);
    assert_eq!(next(), Err(BrokenRing));
}

#[test]
fn a_ring_that_is_partly_unmapped_is_broken() {
    let map = map();
    let driver = DriverQueue::new(&map, RINGS, SIZE);
    // The flags and the index are at the end of a page, the heads on the next.
    driver.queue.lock().set_avail_ring_address(Some(0x1_8ffc), None);
    driver.write(0x1_8ffe, 1_u16.to_le_bytes());
    let iommu = Iommu::new(64);
    let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(8));
    iommu.carry_out(Request::Attach { domain: 1, endpoint: 8, bypass: false }).unwrap();
    let space = DmaSpace::translated(Memory::new(map), Arc::clone(attachment.endpoint()) as _);
    let map_pages = |first, last| {
        let range = Range { first, last };
        iommu.carry_out(Request::Map { domain: 1, range, target: first, access: Permissions::ReadWrite }).unwrap();
    };
    map_pages(0x1_0000, 0x1_8fff);
    map_pages(0x1_9000, 0x1_ffff);
    let mut ring = Ring::open(0, driver.queue.lock(), false, &space.pass()).unwrap();
    assert!(ring.next(&space.pass()).unwrap().is_some());
    ring.put_back(1);
    iommu.carry_out(Request::Unmap { domain: 1, range: Range { first: 0x1_9000, last: 0x1_ffff } }).unwrap();
    assert_eq!(ring.next(&space.pass()).map(|chain| chain.is_some()), Err(BrokenRing));
}
