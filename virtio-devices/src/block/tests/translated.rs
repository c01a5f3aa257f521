//! A disk behind an IOMMU.

use std::sync::Arc;
use std::thread;

use vm_memory::Permissions;

use super::super::counters::BlockCounter;
use super::super::testing::*;
use crate::iommu::{Iommu, IommuAttachment, Range, Request};

const ENDPOINT: u32 = 0x28;
/// I/O addresses are the guest's plus this.
const SHIFT: u64 = 1 << 40;

/// A disk whose rings and buffers are at different I/O addresses, in pages.
fn disk(io_uring: bool) -> (Guest, Arc<Iommu>, IommuAttachment) {
    let iommu = Iommu::new(48);
    let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(ENDPOINT as u16));
    let mut guest = Guest::new(io_uring);
    guest.stop();
    guest.start_behind(Arc::clone(attachment.endpoint()) as _);
    (guest, iommu, attachment)
}

fn map(iommu: &Iommu, first: u64, last: u64, target: u64) {
    let access = Permissions::ReadWrite;
    iommu.carry_out(Request::Map { domain: 1, range: Range { first, last }, target, access }).unwrap();
}

#[test]
fn an_idle_disk_delays_no_attach_and_finds_what_is_mapped() {
    for io_uring in ENGINES {
        let (mut guest, iommu, _attachment) = disk(io_uring);
        let data = pattern(3 * 4096, 5);
        assert_eq!(guest.write(8, &data), (OK, 1), "in bypass");
        // Would deadlock if the disk, which waits for a doorbell, were in a pass.
        let attach = {
            let iommu = Arc::clone(&iommu);
            thread::spawn(move || {
                map_rings(&iommu);
            })
        };
        eventually("the attach", || attach.is_finished());
        attach.join().unwrap();

        map(&iommu, SHIFT, SHIFT + 0xfff, BUFFERS + 0x2000);
        map(&iommu, SHIFT + 0x1000, SHIFT + 0x1fff, BUFFERS);
        let read = |guest: &mut Guest, len: u32| {
            guest.put_header(0, 8);
            guest.put(BUFFERS, &[0; 3 * 4096]);
            let used = guest.send(&[(HEADER_AT, 16, 0), (SHIFT, len, WRITE), (STATUS_AT, 1, WRITE)]);
            (used, guest.queues[0].bytes(BUFFERS, 3 * 4096))
        };
        let (used, bytes) = read(&mut guest, 0x2000);
        assert_eq!((used, &bytes[0x2000..], &bytes[..0x1000]), (0x2001, &data[..0x1000], &data[0x1000..0x2000]));
        let bad = guest.count(BlockCounter::BadChains);
        let (_, bytes) = read(&mut guest, 0x3000);
        assert_eq!(
            (bytes, guest.count(BlockCounter::BadChains)),
            (vec![0; 3 * 4096], bad + 1),
            "its end is not mapped"
        );
        let range = Range { first: SHIFT, last: SHIFT + 0x1fff };
        iommu.carry_out(Request::Unmap { domain: 1, range }).unwrap();
        let (_, bytes) = read(&mut guest, 0x1000);
        assert_eq!(bytes, vec![0; 3 * 4096]);
        assert!(!guest.interrupts.needs_reset());
    }
}

/// Attaches the disk to a domain that maps all that the requests of [`Guest`] use, except the buffers.
fn map_rings(iommu: &Iommu) {
    iommu.carry_out(Request::Attach { domain: 1, endpoint: ENDPOINT, bypass: false }).unwrap();
    map(iommu, 0, MEMORY - 1, 0);
}
