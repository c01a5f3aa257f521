//! Requests of a driver, and their results.

use std::sync::Arc;

use virtio_bindings::virtio_blk::*;

use super::super::counters::BlockCounter;
use super::super::testing::*;
use super::super::{Block, BlockError, BlockSpec};
use crate::VirtioDevice;
use crate::transport::features::has;

#[test]
fn written_data_is_in_the_image_and_is_read_back() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let data = pattern(5 * 512, 7);
        assert_eq!(guest.write(3, &data), (OK, 1));
        assert_eq!(guest.image()[3 * 512..8 * 512], data);
        assert_eq!(guest.read(3, data.len()), (OK, data));
        assert_eq!((guest.count(BlockCounter::WriteOps), guest.count(BlockCounter::WriteBytes)), (1, 2560));
        assert_eq!((guest.count(BlockCounter::ReadOps), guest.count(BlockCounter::ReadBytes)), (1, 2560));
        assert!(guest.interrupts.eventfd(0).unwrap().read().is_ok());
    }
}

#[test]
fn a_header_and_data_in_many_pieces_are_one_request() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        guest.put_header(VIRTIO_BLK_T_OUT, 1);
        let data = pattern(1024, 3);
        guest.put(BUFFERS, &data);
        // The end of the header shares a descriptor with the first bytes of data.
        let mut mixed = guest.queues[0].bytes(HEADER_AT + 10, 6);
        mixed.extend_from_slice(&data[..100]);
        guest.put(BUFFERS + 0x10_0000, &mixed);
        let chain = [
            (HEADER_AT, 4, 0),
            (HEADER_AT + 4, 6, 0),
            (BUFFERS + 0x10_0000, 106, 0),
            (BUFFERS + 100, 1, 0),
            (BUFFERS + 101, 923, 0),
            (STATUS_AT, 1, WRITE),
        ];
        assert_eq!(guest.send(&chain), 1);
        assert_eq!(guest.queues[0].bytes(STATUS_AT, 1), [OK]);
        assert_eq!(guest.image()[512..1536], data);
    }
}

#[test]
fn the_status_is_the_last_writable_byte_wherever_it_lies() {
    let mut guest = Guest::new(true);
    assert_eq!(guest.write(0, &pattern(512, 1)), (OK, 1));
    guest.put_header(VIRTIO_BLK_T_IN, 0);
    guest.put(BUFFERS, &[0xee; 513]);
    assert_eq!(guest.send(&[(HEADER_AT, 16, 0), (BUFFERS, 513, WRITE)]), 513);
    assert_eq!(guest.queues[0].bytes(BUFFERS, 513), [&pattern(512, 1)[..], &[OK]].concat());
}

#[test]
fn the_serial_number_is_padded_cut_and_else_the_id() {
    let mut guest = Guest::new(false);
    let id = |guest: &mut Guest, len| {
        guest.put(BUFFERS, &[0xee; 24]);
        let result = guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(BUFFERS, len, WRITE)]);
        (result, guest.queues[0].bytes(BUFFERS, 24))
    };
    let mut expected = *b"serial-1\0\0\0\0\0\0\0\0\0\0\0\0\xee\xee\xee\xee";
    assert_eq!(id(&mut guest, 24), ((OK, 21), expected.to_vec()));
    expected[6..].fill(0xee);
    assert_eq!(id(&mut guest, 6), ((OK, 7), expected.to_vec()));
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, &[]), (OK, 1));
    let long = "an-id-that-is-longer-than-it-may-be";
    let mut guest = Guest::with(BlockSpec { serial: None, id: long.into(), ..spec(false) });
    assert_eq!(id(&mut guest, 20).1[..20], long.as_bytes()[..20]);
}

#[test]
fn flushes_and_requests_without_data_succeed() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, &[]), (OK, 1));
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, &[(BUFFERS, 0, 0)]), (OK, 1));
        assert_eq!(guest.count(BlockCounter::FlushOps), 1);
    }
}

#[test]
fn ranges_are_zero_afterwards_and_nothing_else_is() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        if !has(guest.device.features(), VIRTIO_BLK_F_DISCARD) {
            // The file system of the temporary directory has no holes: the disk must not do what it did not offer.
            guest.put(BUFFERS, &segment(8, 8, 0));
            let result = guest.request(VIRTIO_BLK_T_DISCARD, 0, &[(BUFFERS, 16, 0)]);
            assert_eq!(result, (UNSUPP, 1));
            continue;
        }
        let data = pattern(SIZE / 2, 9);
        assert_eq!(guest.write(0, &data).0, OK);
        let mut expected = [&data[..], &[0; SIZE / 2]].concat();
        for (kind, sector, flags) in
            [(VIRTIO_BLK_T_DISCARD, 8, 0), (VIRTIO_BLK_T_WRITE_ZEROES, 32, 1), (VIRTIO_BLK_T_WRITE_ZEROES, 65, 0)]
        {
            guest.put(BUFFERS, &segment(sector, 9, flags));
            let (status, len) = guest.request(kind, 0, &[(BUFFERS, 16, 0)]);
            assert_eq!((status, len), (OK, 1), "{kind} {flags}");
            expected[sector as usize * 512..(sector as usize + 9) * 512].fill(0);
        }
        assert!(guest.image() == expected);
        assert_eq!(guest.host.as_file().metadata().unwrap().len(), SIZE as u64);
    }
}

#[test]
fn a_read_only_disk_has_its_feature_and_stays_as_it_is() {
    let mut guest = Guest::with(BlockSpec { read_only: true, ..spec(true) });
    let features = guest.device.features();
    assert!(has(features, VIRTIO_BLK_F_RO) && !has(features, VIRTIO_BLK_F_DISCARD));
    assert_eq!(guest.write(0, &pattern(512, 1)), (IOERR, 1));
    assert_eq!(guest.read(0, 512), (OK, vec![0; 512]));
    assert_eq!(guest.count(BlockCounter::BadRequests), 1);
}

#[test]
fn buffers_that_are_not_aligned_go_through_one_that_is() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        guest.stop();
        guest.align(512);
        guest.start();
        // Larger than the bounce buffer.
        let data = pattern(600 << 10, 5);
        guest.put(BUFFERS + 1, &data);
        let write =
            guest.request(VIRTIO_BLK_T_OUT, 8, &[(BUFFERS + 1, 1000, 0), (BUFFERS + 1001, (600 << 10) - 1000, 0)]);
        assert_eq!(write, (OK, 1));
        assert_eq!(guest.count(BlockCounter::BouncedOps), 1);
        assert!(guest.image()[8 * 512..][..600 << 10] == data);
        let read = guest.request(VIRTIO_BLK_T_IN, 8, &[(BUFFERS + (1 << 20) + 7, 600 << 10, WRITE)]);
        assert_eq!(read, (OK, (600 << 10) + 1));
        assert!(guest.queues[0].bytes(BUFFERS + (1 << 20) + 7, 600 << 10) == data);
        assert_eq!(guest.count(BlockCounter::BouncedOps), 2);
        assert_eq!(guest.read(8, 512), (OK, data[..512].to_vec()));
        assert_eq!(guest.count(BlockCounter::BouncedOps), 2);
    }
}

#[test]
fn around_the_page_cache_any_buffer_works() {
    // The build directory is more likely to be on a file system with direct I/O than the temporary one.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.as_file().set_len(SIZE as u64).unwrap();
    for io_uring in ENGINES {
        let direct = BlockSpec { path: file.path().into(), direct: true, ..spec(io_uring) };
        // A child that another test spawns would keep the last image's lock for a moment.
        let opened = {
            let _spawning = SPAWNING.lock();
            Block::open(direct)
        };
        let block = match opened {
            Ok(block) => block,
            Err(error) => {
                assert!(matches!(error, BlockError::Direct(_)), "{error}");
                continue;
            }
        };
        let mut guest = Guest::new(io_uring);
        guest.stop();
        guest.device = block;
        guest.start();
        let data = pattern(64 << 10, io_uring.into());
        for shift in [0, 1, 511] {
            guest.put(BUFFERS + shift, &data);
            assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 128, &[(BUFFERS + shift, 64 << 10, 0)]), (OK, 1));
            assert!(read_all(file.as_file())[64 << 10..128 << 10] == data);
            guest.put(BUFFERS + shift, &vec![0; 64 << 10]);
            assert_eq!(guest.request(VIRTIO_BLK_T_IN, 128, &[(BUFFERS + shift, 64 << 10, WRITE)]).0, OK);
            assert!(guest.queues[0].bytes(BUFFERS + shift, 64 << 10) == data);
        }
    }
}

#[test]
fn a_shrunk_image_fails_reads_past_its_end_and_does_not_grow() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        guest.host.as_file().set_len(1024).unwrap();
        assert_eq!(guest.read(1, 1024).0, IOERR);
        assert_eq!(guest.read(0, 1024).0, OK);
        assert_eq!(guest.count(BlockCounter::BackendErrors), 1);
        assert_eq!(guest.host.as_file().metadata().unwrap().len(), 1024);
    }
}

#[test]
fn a_write_is_stable_when_the_driver_does_not_flush_or_said_so() {
    use std::sync::atomic::Ordering;
    const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
    const WCE: u64 = 1 << VIRTIO_BLK_F_CONFIG_WCE;
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let version = guest.device.features() & !FLUSH & !WCE;
        for (features, writeback, stable) in [
            (FLUSH, None, false),
            (0, None, true),
            (FLUSH, Some(0), false),
            (FLUSH | WCE, None, false),
            (FLUSH | WCE, Some(0), true),
            (FLUSH | WCE, Some(1), false),
        ] {
            guest.stop();
            guest.device.reset();
            guest.queues = vec![DriverQueue::new(&memory(), 0, 64)];
            guest.memory = crate::Memory::new(guest.queues[0].memory.clone());
            guest.start_with(version | features);
            if let Some(writeback) = writeback {
                guest.device.config_write(32, &[writeback]);
            }
            assert_eq!(guest.device.stable.load(Ordering::Acquire), stable, "{features:#x} {writeback:?}");
            assert_eq!(guest.write(0, &pattern(512, 2)), (OK, 1));
            guest.put(BUFFERS, &segment(0, 8, 1));
            let (status, _) = guest.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[(BUFFERS, 16, 0)]);
            assert_eq!(status, if has(version, VIRTIO_BLK_F_DISCARD) { OK } else { UNSUPP });
        }
    }
}

#[test]
fn pages_filled_by_reads_are_logged_and_sources_of_writes_not() {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
    for (io_uring, alignment) in [(false, 1), (true, 1), (true, 512)] {
        let mut guest = Guest::new(io_uring);
        guest.stop();
        guest.align(alignment);
        guest.start();
        let map = guest.queues[0].memory.clone();
        let log = crate::WriteLog::new(&map).unwrap();
        let region = map.iter().next().unwrap();
        let noted = |at: u64| region.bitmap().dirty_at(at as usize);
        // Unaligned, so that one variant goes through a bounce buffer.
        let (from, to) = (BUFFERS + 0x1001, BUFFERS + 0x3ffe);
        assert_eq!(guest.request(1, 0, &[(from, 1024, 0)]).0, OK);
        assert!(!noted(from), "{io_uring} {alignment}");
        log.take(0, &mut [0; 64]);
        assert_eq!(guest.request(0, 0, &[(to, 1024, WRITE)]), (OK, 1025));
        assert!(noted(to) && noted(to + 2), "{io_uring} {alignment}");
        assert!(!noted(to + 0x1000 + 2) && !noted(to - 0x1000), "{io_uring} {alignment}");
        // The driver writes 0xee there before the request.
        log.take(0, &mut [0; 64]);
        let head = guest.queues[0].build(&[(HEADER_AT, 16, 0), (STATUS_AT, 1, WRITE)]);
        guest.put_header(VIRTIO_BLK_T_FLUSH, 0);
        log.take(0, &mut [0; 64]);
        guest.queues[0].offer(head);
        guest.kick(0);
        guest.await_used(0, 1);
        assert!(noted(STATUS_AT), "{io_uring} {alignment}");
    }
}

#[test]
fn an_image_that_only_fails_is_reported_once_until_it_works() {
    use parking_lot::Mutex;

    use crate::device::failures::FailureChange;
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let told = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&told);
        guest.device.observe_failures(Box::new(move |change| seen.lock().push(change)));
        // The host's file has no data beyond that.
        guest.host.as_file().set_len(1024).unwrap();
        for sector in [2, 3, 2] {
            assert_eq!(guest.read(sector, 512).0, IOERR);
        }
        // The request itself is at fault, not the host.
        assert_eq!(guest.read(1 << 40, 512).0, IOERR);
        let failing = FailureChange::Failing("it is shorter than the disk".into());
        assert_eq!(*told.lock(), std::slice::from_ref(&failing));
        guest.host.as_file().set_len(SIZE as u64).unwrap();
        assert_eq!(guest.read(2, 512).0, OK);
        eventually("the end of the failures", || *told.lock() == [failing.clone(), FailureChange::Recovered]);
    }
}
