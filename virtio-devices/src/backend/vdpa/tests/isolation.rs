//! The mappings that a device of a domain gets: those of the domain, unchanged, and no others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, Permissions};

use super::*;
use crate::Memory;
use crate::iommu::{Iommu, IommuAttachment, Range, Request};
use crate::memory::Translate;

const PAGE: u64 = 4096;

/// A device that runs, of a function behind an IOMMU.
struct Member {
    endpoint: u32,
    kernel: Scripted,
    _vdpa: Vdpa,
    _attachment: IommuAttachment,
}

impl Member {
    fn new(iommu: &Arc<Iommu>, endpoint: u16, memory: &Memory) -> Self {
        let (attachment, kernel) = (iommu.add_endpoint(0, pci::Rid::from_bits(endpoint)), Scripted::default());
        let mut vdpa = kernel.open_over(spec(1), memory).unwrap();
        let dma = DmaSpace::translated(memory.clone(), Arc::clone(attachment.endpoint()) as Arc<dyn Translate>);
        start_behind(&mut vdpa, &dma, &[queue(0, 0), queue(1, 0)], NEGOTIATED, true).unwrap();
        Self { endpoint: endpoint.into(), kernel, _vdpa: vdpa, _attachment: attachment }
    }

    fn attach(&self, iommu: &Iommu, domain: u32) {
        iommu.carry_out(Request::Attach { domain, endpoint: self.endpoint, bypass: false }).unwrap();
    }

    /// The device's mappings: the first I/O address, the length, the guest's address and the permissions.
    fn reached(&self, memory: &Memory) -> Vec<(u64, u64, u64, Permissions)> {
        let guest = memory.memory();
        let address = |host: u64| {
            let mut regions = guest.iter().map(|region| (region.as_ptr() as u64, region.start_addr().0, region.len()));
            let (at, start, _) = regions.find(|(at, _, len)| (*at..at + len).contains(&host)).unwrap();
            start + host - at
        };
        let told = &self.kernel.0.lock().reached;
        told.values().map(|part| (part.iova(), part.size(), address(part.host()), part.access())).collect()
    }
}

fn map(iommu: &Iommu, domain: u32, (first, pages): (u64, u64), target: u64, access: Permissions) {
    let range = Range { first, last: first + pages * PAGE - 1 };
    iommu.carry_out(Request::Map { domain, range, target, access }).unwrap();
}

fn unmap(iommu: &Iommu, domain: u32, (first, pages): (u64, u64)) {
    iommu.carry_out(Request::Unmap { domain, range: Range { first, last: first + pages * PAGE - 1 } }).unwrap();
}

#[test]
fn a_device_gets_its_own_domains_mappings_and_no_neighbours() {
    let (iommu, memory) = (Iommu::new(48), shared_memory());
    let [one, other] = [0x100, 0x101].map(|endpoint| Member::new(&iommu, endpoint, &memory));
    one.attach(&iommu, 1);
    other.attach(&iommu, 2);
    assert_eq!([&one, &other].map(|member| member.reached(&memory)), [vec![], vec![]], "nothing of bypass is left");

    map(&iommu, 1, (0x7000_0000, 2), 0x4000, Permissions::ReadWrite);
    map(&iommu, 1, (0x7001_0000, 1), 1 << 32, Permissions::Read);
    map(&iommu, 1, (0x7002_0000, 1), 0x9000, Permissions::Write);
    map(&iommu, 1, (0x7003_0000, 1), 0x9000, Permissions::No);
    map(&iommu, 2, (0x7000_0000, 1), 0xa000, Permissions::Read);
    let of_one = [
        (0x7000_0000, 2 * PAGE, 0x4000, Permissions::ReadWrite),
        (0x7001_0000, PAGE, 1 << 32, Permissions::Read),
        (0x7002_0000, PAGE, 0x9000, Permissions::Write),
    ];
    let of_other = [(0x7000_0000, PAGE, 0xa000, Permissions::Read)];
    assert_eq!((one.reached(&memory), other.reached(&memory)), (of_one.to_vec(), of_other.to_vec()));

    // The same addresses in another domain are other ones.
    other.kernel.asked();
    unmap(&iommu, 1, (0x7000_0000, 2));
    assert_eq!((one.reached(&memory), other.reached(&memory)), (of_one[1..].to_vec(), of_other.to_vec()));
    assert_eq!(other.kernel.asked(), [""; 0], "its kernel is not asked");

    // A device that joins gets the same mappings, and one that leaves has none left.
    other.attach(&iommu, 1);
    assert_eq!(other.reached(&memory), of_one[1..]);
    one.attach(&iommu, 3);
    assert_eq!((one.reached(&memory), other.reached(&memory)), (vec![], of_one[1..].to_vec()));
}

/// Ends the traffic, also of a test that fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_page_unmapped_from_a_device_under_traffic_is_not_written() {
    const ROUNDS: u64 = 10_000;
    const IOVA: u64 = 0x7000_0000;
    const CANARY: u64 = 0x4000;
    let (iommu, memory) = (Iommu::new(48), shared_memory());
    let member = Member::new(&iommu, 0x100, &memory);
    member.attach(&iommu, 1);
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let guest = memory.memory().clone();
    thread::scope(|scope| {
        // The device writes to all of its mappings. Its kernel drops nothing in the middle of a write.
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let script = member.kernel.0.lock();
                for part in script.reached.values() {
                    guest.write_slice(&[0x11; 64], GuestAddress(CANARY)).unwrap();
                    assert_eq!(part.iova(), IOVA);
                    written.fetch_add(1, Ordering::Relaxed);
                }
                drop(script);
                thread::yield_now();
            }
        });
        let _end = End(&stop);
        // On a busy machine, the device's thread may come late.
        let until = Instant::now() + Duration::from_secs(30);
        let is_due = |round| round < ROUNDS || written.load(Ordering::Relaxed) == 0 && Instant::now() < until;
        for round in (0..).take_while(|round| is_due(*round)) {
            map(&iommu, 1, (IOVA, 1), CANARY, Permissions::ReadWrite);
            if round % 2 == 0 {
                thread::yield_now();
            }
            unmap(&iommu, 1, (IOVA, 1));
            guest.write_slice(&[0xc5; 64], GuestAddress(CANARY)).unwrap();
            thread::yield_now();
            let mut found = [0; 64];
            guest.read_slice(&mut found, GuestAddress(CANARY)).unwrap();
            assert_eq!(found, [0xc5; 64], "{round}");
        }
    });
    let written = written.load(Ordering::Relaxed);
    println!("{ROUNDS} rounds, {written} writes");
    assert!(written > 0);
}
