//! Drivers that send malformed requests.

use proptest::prelude::*;
use virtio_bindings::virtio_blk::*;

use super::super::counters::BlockCounter;
use super::super::testing::*;

#[test]
fn a_chain_without_a_place_for_a_status_is_dropped_and_counted() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        guest.put_header(VIRTIO_BLK_T_OUT, 0);
        let chains: [&[_]; 6] = [
            &[(HEADER_AT, 16, 0)],
            &[(HEADER_AT, 16, 0), (BUFFERS, 512, 0)],
            &[(HEADER_AT, 16, 0), (STATUS_AT, 0, WRITE)],
            // Beyond memory; readable after writable; longer than memory.
            &[(HEADER_AT, 16, 0), (MEMORY - 256, 512, 0), (STATUS_AT, 1, WRITE)],
            &[(STATUS_AT, 1, WRITE), (HEADER_AT, 16, 0)],
            &[(HEADER_AT, 16, 0), (BUFFERS, u32::MAX, WRITE), (STATUS_AT, 1, WRITE)],
        ];
        for chain in chains {
            assert_eq!(guest.send(chain), 0, "{chain:?}");
        }
        assert_eq!(guest.count(BlockCounter::BadChains), 6);
        assert!(guest.image() == [0; SIZE]);
        assert_eq!(guest.read(0, 512).0, OK);
    }
}

#[test]
fn a_request_beyond_the_disk_fails_and_changes_nothing() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let sectors = SIZE as u64 / 512;
        guest.put(BUFFERS, &segment(sectors - 1, 2, 0));
        let data = (BUFFERS, 512, 0);
        for (kind, sector, data, status) in [
            (VIRTIO_BLK_T_OUT, sectors, data, IOERR),
            (VIRTIO_BLK_T_OUT, u64::MAX, data, IOERR),
            (VIRTIO_BLK_T_OUT, 0, (BUFFERS, 100, 0), IOERR),
            (VIRTIO_BLK_T_OUT, sectors - 1, (BUFFERS, 1024, 0), IOERR),
            (VIRTIO_BLK_T_IN, sectors - 1, (BUFFERS + 512, 1024, WRITE), IOERR),
            (VIRTIO_BLK_T_DISCARD, 0, (BUFFERS, 16, 0), IOERR),
            (VIRTIO_BLK_T_WRITE_ZEROES, 0, (BUFFERS, 15, 0), IOERR),
            (VIRTIO_BLK_T_SECURE_ERASE, 0, (BUFFERS, 16, 0), UNSUPP),
            (u32::MAX, 0, data, UNSUPP),
        ] {
            assert_eq!(guest.request(kind, sector, &[data]), (status, 1), "{kind} {sector}");
        }
        guest.put_header(VIRTIO_BLK_T_FLUSH, 0);
        assert_eq!(guest.send(&[(HEADER_AT, 15, 0), (STATUS_AT, 1, WRITE)]), 1);
        assert_eq!(guest.queues[0].bytes(STATUS_AT, 1), [IOERR]);
        assert!(guest.image() == [0; SIZE]);
    }
}

#[test]
fn a_request_with_more_segments_than_a_call_takes_is_dropped() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        guest.put_header(VIRTIO_BLK_T_IN, 0);
        let mut read = |segments: u16, len: u32| {
            let table = BUFFERS + 0x10_0000;
            let queue = &mut guest.queues[0];
            queue.set_descriptor(table, 0, (HEADER_AT, 16, 1, 1));
            for index in 1..=segments {
                queue.set_descriptor(table, index, (BUFFERS, len, 1 | WRITE, index + 1));
            }
            queue.set_descriptor(table, segments + 1, (STATUS_AT, 1, WRITE, 0));
            let head = queue.build(&[(table, 16 * (u32::from(segments) + 2), 4)]);
            queue.offer(head);
            guest.kick(0);
            guest.await_used(0, 1)[0].1
        };
        assert_eq!(read(1020, 512), 1020 * 512 + 1);
        assert_eq!(read(1021, 512), 0);
        assert_eq!(read(2000, 512), 0);
    }
}

#[test]
fn a_disk_gives_up_an_invalid_ring_and_requests_a_reset() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        guest.break_ring(0);
        guest.stop();
        assert_eq!(guest.count(BlockCounter::BrokenRings), 1);
    }
}

/// A descriptor that is mostly invalid, and sometimes valid.
fn descriptor() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let address =
        prop_oneof![2 => Just(HEADER_AT), 4 => BUFFERS..BUFFERS + 0x8000, 1 => 0..MEMORY + 0x1000, 1 => any::<u64>()];
    let len = prop_oneof![2 => Just(16u32), 2 => Just(1u32), 4 => (0..8u32).prop_map(|n| n * 512), 1 => any::<u32>()];
    let flags = prop_oneof![4 => 0..4u16, 1 => 0..8u16, 1 => any::<u16>()];
    (address, len, flags, prop_oneof![4 => 0..8u16, 1 => any::<u16>()])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_chain_of_a_hostile_driver_returns_on_an_intact_ring(
        descriptors in prop::collection::vec((0..8u16, descriptor()), 1..30),
        headers in prop::collection::vec((0..16u32, 0..4096u64), 30),
        heads in prop::collection::vec(prop_oneof![8 => 0..8u16, 1 => any::<u16>()], 30),
        io_uring: bool,
    ) {
        let mut guest = Guest::new(io_uring);
        let mut given = 0;
        for (((index, descriptor), (kind, sector)), head) in descriptors.into_iter().zip(headers).zip(heads) {
            guest.put(HEADER_AT, &header(kind, sector));
            guest.queues[0].set_raw(index, descriptor);
            guest.queues[0].offer(head);
            guest.kick(0);
            given += usize::from(head < 64);
        }
        // The used ring cannot name heads beyond the ring.
        guest.await_used(0, given);
        guest.stop();
        prop_assert!(!guest.interrupts.needs_reset());
        prop_assert_eq!(guest.host.as_file().metadata().unwrap().len(), SIZE as u64);
    }
}
