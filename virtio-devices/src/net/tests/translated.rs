//! A NIC behind an IOMMU: it can access mapped memory, and no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vm_memory::Permissions;

use super::super::counters::Counter;
use super::super::testing::*;
use crate::iommu::{Iommu, IommuAttachment, IommuCounter, Range, Request};
use crate::{DmaSpace, VirtioDevice};

const OWN: u32 = 0x100;
const NEIGHBOURS: u32 = 0x101;
/// I/O addresses of pages: a writable one, a readable one, a neighbour's, and an unmapped one.
const WRITABLE: u64 = 0x40_0000_0000;
const READABLE: u64 = 0x40_0000_1000;
const OF_NEIGHBOUR: u64 = 0x40_0000_2000;
const NOWHERE: u64 = 0x40_0000_3000;
/// The guest addresses behind them.
const PAGES: u64 = BUFFERS;
const LEN: u32 = 2048;

struct Rig {
    guest: Guest,
    iommu: Arc<Iommu>,
    /// The attachment of the NIC, and its neighbour's.
    _attachment: [IommuAttachment; 2],
}

impl Rig {
    /// A running NIC, in a domain where its rings are mapped.
    fn new() -> Self {
        let iommu = Iommu::new(64);
        let attachment = [OWN, NEIGHBOURS].map(|rid| iommu.add_endpoint(0, pci::Rid::from_bits(rid as u16)));
        for (domain, endpoint) in [(1, OWN), (2, NEIGHBOURS)] {
            iommu.carry_out(Request::Attach { domain, endpoint, bypass: false }).unwrap();
        }
        let range = Range { first: 0, last: BUFFERS - 1 };
        let rings = Request::Map { domain: 1, range, target: 0, access: Permissions::ReadWrite };
        iommu.carry_out(rings).unwrap();
        let mut guest = Guest::new(1, 64);
        let mut start = guest.to_start(0);
        let endpoint = Arc::clone(attachment[0].endpoint());
        start.memory = DmaSpace::translated(start.memory.memory().clone(), endpoint);
        guest.workers = guest.device.start(start).unwrap();
        Self { guest, iommu, _attachment: attachment }
    }

    fn map(&self, domain: u32, address: u64, target: u64, access: Permissions) {
        let range = Range { first: address, last: address + 0xfff };
        self.iommu.carry_out(Request::Map { domain, range, target, access }).unwrap();
    }

    fn unmap(&self, address: u64) {
        let range = Range { first: address, last: address + 0xfff };
        self.iommu.carry_out(Request::Unmap { domain: 1, range }).unwrap();
    }

    fn faults(&self) -> u64 {
        self.iommu.counters().get(IommuCounter::Faults)
    }

    /// Posts a receive buffer.
    fn post(&mut self, address: u64) {
        self.guest.queues[0].add(&[(address, LEN, WRITE)]);
        self.guest.kick(0);
    }
}

#[test]
fn nic_reaches_only_memory_mapped_for_it_and_keeps_running() {
    let mut rig = Rig::new();
    rig.map(1, WRITABLE, PAGES, Permissions::Write);
    rig.map(1, READABLE, PAGES + 0x1000, Permissions::Read);
    rig.map(2, OF_NEIGHBOUR, PAGES + 0x2000, Permissions::ReadWrite);
    let canary = vec![0xc5; 0x4000];
    rig.guest.queues[0].memory_write(PAGES, &canary);
    for (n, address) in [READABLE, OF_NEIGHBOUR, NOWHERE, PAGES].into_iter().enumerate() {
        let faults = rig.faults();
        rig.post(address);
        send(&rig.guest.host[0], &with_header(&frame(MAC, 100)));
        eventually("the buffer is given back", || {
            rig.guest.queues[0].outstanding() > 0 && { !rig.guest.queues[0].take_used().is_empty() }
        });
        assert!(rig.faults() > faults, "{n}");
        assert_eq!(rig.guest.queues[0].bytes(PAGES, 0x4000), canary, "{address:#x}");
    }
    let sent = rig.guest.count(Counter::TxFrames);
    for address in [WRITABLE, OF_NEIGHBOUR, NOWHERE] {
        rig.guest.queues[1].add(&[(address, 100, 0)]);
        rig.guest.kick(1);
        eventually("the buffer is given back", || !rig.guest.queues[1].take_used().is_empty());
    }
    assert_eq!((rig.guest.count(Counter::TxFrames), receive(&rig.guest.host[0])), (sent, None));

    // Mapped memory is found, even if a buffer spans two mappings.
    rig.map(1, NOWHERE, PAGES + 0x3000, Permissions::ReadWrite);
    rig.post(WRITABLE);
    send(&rig.guest.host[0], &with_header(&frame(MAC, 100)));
    eventually("a frame", || !rig.guest.queues[0].take_used().is_empty());
    assert_eq!(rig.guest.queues[0].bytes(PAGES + 12, 100), frame(MAC, 100));
    rig.map(1, NOWHERE + 0x1000, PAGES, Permissions::ReadWrite);
    rig.guest.queues[0].memory_write(PAGES + 0x3fc0, &with_header(&frame(OTHER, 100))[..64]);
    rig.guest.queues[0].memory_write(PAGES, &with_header(&frame(OTHER, 100))[64..]);
    rig.guest.queues[1].add(&[(NOWHERE + 0xfc0, 112, 0)]);
    rig.guest.kick(1);
    eventually("it is sent", || rig.guest.count(Counter::TxFrames) == sent + 1);
    assert_eq!(receive(&rig.guest.host[0]), Some(with_header(&frame(OTHER, 100))));
    assert!(!rig.guest.interrupts.needs_reset());
}

#[test]
fn a_ring_that_was_unmapped_needs_a_reset() {
    let rig = Rig::new();
    let range = Range { first: 0, last: BUFFERS - 1 };
    rig.iommu.carry_out(Request::Unmap { domain: 1, range }).unwrap();
    rig.guest.kick(1);
    eventually("a request for a reset", || rig.guest.interrupts.needs_reset());
    assert!(rig.faults() > 0);
}

#[test]
fn page_unmapped_under_traffic_is_not_written_afterwards() {
    const ROUNDS: usize = 10_000;
    let mut rig = Rig::new();
    let stop = Arc::new(AtomicBool::new(false));
    let (peer, stopping) = (rig.guest.host[0].try_clone().unwrap(), Arc::clone(&stop));
    let traffic = thread::spawn(move || {
        let data = with_header(&frame(MAC, 1000));
        while !stopping.load(Ordering::Acquire) {
            if rustix::io::write(&peer, &data).is_err() {
                thread::yield_now();
            }
        }
    });
    let canary = vec![0xc5; 0x1000];
    for round in 0..ROUNDS {
        rig.map(1, WRITABLE, PAGES, Permissions::ReadWrite);
        rig.post(WRITABLE);
        // At any moment of the worker's work.
        (0..round % 100 * 10).for_each(|_| std::hint::spin_loop());
        rig.unmap(WRITABLE);
        rig.guest.queues[0].memory_write(PAGES, &canary);
        // The worker has the buffer, or finds that it is unmapped.
        soon("the buffer is given back", || !rig.guest.queues[0].take_used().is_empty());
        assert_eq!(rig.guest.queues[0].bytes(PAGES, 0x1000), canary, "{round}");
    }
    stop.store(true, Ordering::Release);
    traffic.join().unwrap();
    let (received, faults) = (rig.guest.count(Counter::RxFrames), rig.faults());
    println!("{ROUNDS} rounds, {received} frames, {faults} faults");
    assert!(received > 0 && faults > 0);
}
