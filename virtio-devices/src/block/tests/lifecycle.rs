//! Starts, stops and resets.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::*;

use super::super::counters::BlockCounter;
use super::super::testing::*;
use super::super::{Block, BlockError, BlockSpec};
use crate::transport::features::has;
use crate::{DeviceSpecific, GuestRegion, VirtioDevice};

#[test]
fn an_impossible_disk_is_refused() {
    let open = |spec: BlockSpec| {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(512).unwrap();
        Block::open(BlockSpec { path: file.path().into(), ..spec }).err()
    };
    assert!(open(spec(true)).is_none());
    assert!(matches!(open(BlockSpec { queues: 0, ..spec(true) }), Some(BlockError::NoQueue)));
    for queue_size in [0, 1, 3, 40_000] {
        assert!(matches!(open(BlockSpec { queue_size, ..spec(true) }), Some(BlockError::QueueSize(_))), "{queue_size}");
    }
    let serial = |len| BlockSpec { serial: Some("x".repeat(len)), ..spec(true) };
    assert!(open(serial(20)).is_none());
    assert!(open(serial(21)).unwrap().to_string().contains("more than 20 bytes"));
}

#[test]
fn a_stop_completes_what_was_begun_and_a_start_continues_there() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let features = guest.device.features();
        let mut given = 0;
        for _ in 0..50 {
            guest.put_header(VIRTIO_BLK_T_OUT, 0);
            for i in 0..20 {
                guest.queues[0].add(&[(HEADER_AT, 16, 0), (BUFFERS + i * 4096, 4096, 0), (STATUS_AT, 1, WRITE)]);
                given += 1;
            }
            guest.kick(0);
            guest.stop();
            // Complete requests are in the ring now; the rest is untouched.
            let done = guest.queues[0].take_used().len();
            assert_eq!(guest.count(BlockCounter::WriteOps) as usize, given - 20 + done);
            guest.start_with(features);
            guest.kick(0);
            guest.await_used(0, 20 - done);
        }
        assert_eq!(guest.count(BlockCounter::WriteOps) as usize, given);
    }
}

/// A driver may request much at a time from a slow medium: here 8 times 32 MiB, at 50 ms for each MiB.
#[test]
fn a_stop_does_not_wait_for_what_the_worker_transfers_itself() {
    const PIECES: usize = 128;
    const PIECE: usize = 256 << 10;
    // Directly, and through the worker's own buffer, which is also used with io_uring.
    for (io_uring, alignment, offset) in [(false, 1, 0), (false, 4096, 512), (true, 4096, 512)] {
        let mut guest = Guest::new(io_uring);
        guest.stop();
        guest.change_image(|image| {
            image.resize((PIECES * PIECE) as u64).unwrap();
            image.alignment = alignment;
            image.slowness = Duration::from_millis(50);
        });
        let features = guest.device.features();
        guest.put_header(VIRTIO_BLK_T_IN, 0);
        guest.put(BUFFERS, &[0xff; 4096]);
        // All pieces are the same memory.
        let pieces = vec![(BUFFERS + offset, PIECE as u32, WRITE); PIECES];
        let table = BUFFERS + (1 << 20);
        for n in 0..8 {
            let chain = [&[(HEADER_AT, 16, 0)], &pieces[..], &[(STATUS_AT, 1, WRITE)]].concat();
            guest.queues[0].add_indirect(table + n * 0x1000, &chain);
        }
        guest.start_with(features);
        guest.kick(0);
        eventually("the first transfer", || guest.queues[0].bytes(BUFFERS + offset, 1) == [0]);
        let began = Instant::now();
        guest.stop();
        let took = began.elapsed();
        assert!(took < Duration::from_secs(8), "{took:?} of the 12 s that all would take");
        // No request is lost, and none is done twice as far as the driver can see.
        let done = guest.queues[0].take_used().len();
        assert!(done < 8);
        guest.change_image(|image| image.slowness = Duration::ZERO);
        guest.start_with(features);
        guest.kick(0);
        let used = guest.await_used(0, 8 - done);
        assert!(used.iter().all(|(_, len)| *len as usize == PIECES * PIECE + 1));
        assert_eq!(guest.queues[0].bytes(STATUS_AT, 1), [OK]);
        assert_eq!(guest.count(BlockCounter::ReadOps), 8);
        guest.stop();
        assert_eq!(guest.queues[0].take_used(), []);
    }
}

#[test]
fn each_queue_has_a_worker_named_after_it_if_multiqueue_is_used() {
    for io_uring in ENGINES {
        let mut guest = Guest::with(BlockSpec { queues: 3, ..spec(io_uring) });
        let features = guest.device.features();
        assert!(has(features, VIRTIO_BLK_F_MQ));
        let names: Vec<_> = guest.workers.iter().map(|worker| worker.thread.name()).collect();
        assert_eq!(names, ["_disk0_q0", "_disk0_q1", "_disk0_q2"]);
        guest.put_header(VIRTIO_BLK_T_IN, 0);
        for queue in 0..3 {
            guest.queues[queue].add(&[(HEADER_AT, 16, 0), (BUFFERS, 512, WRITE), (STATUS_AT, 1, WRITE)]);
            guest.kick(queue as u16);
            guest.await_used(queue as u16, 1);
            eventually("an interrupt", || guest.interrupts.eventfd(queue as u16).unwrap().read().is_ok());
        }
        guest.stop();
        guest.start_with(features & !(1 << VIRTIO_BLK_F_MQ));
        assert_eq!(guest.workers.iter().map(|worker| worker.doorbells[0].0).collect::<Vec<_>>(), [0]);
    }
}

#[test]
fn a_queue_runs_on_its_cpus_and_the_others_on_any() {
    let allowed = |worker: &crate::Worker| {
        let name = worker.thread.name().to_string();
        let threads = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let mut statuses = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok());
        let status = statuses.find(|status| status.starts_with(&format!("Name:\t{name}\n"))).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
        line.unwrap_or_default().to_string()
    };
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let all = own.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t")).unwrap();
    let cpu = all.split(['-', ',']).next().unwrap();
    let queue_cpus = vec![(1, vec![cpu.parse().unwrap(), 1023])];
    let guest = Guest::with(BlockSpec { id: "bound".into(), queues: 2, queue_cpus, ..spec(true) });
    eventually("its CPU", || allowed(&guest.workers[1]) == cpu);
    eventually("any CPU", || allowed(&guest.workers[0]) == all);
    let open = |queue_cpus| Block::open(BlockSpec { path: guest.host.path().into(), queue_cpus, ..spec(true) }).err();
    let none = open(vec![(0, vec![1023])]).unwrap();
    assert!(matches!(none, BlockError::Cpus(0)) && none.to_string().contains("can run on none of the CPUs"), "{none}");
}

#[test]
fn guest_memory_that_is_exchanged_is_used_from_then_on() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        assert_eq!(guest.write(0, &pattern(512, 1)), (OK, 1));
        // The same regions, and one more, as after memory hotplug.
        let (more, map) = (vm_memory::GuestAddress(1 << 32), guest.queues[0].memory.clone());
        let region = GuestRegion::from_range(more, 1 << 16, None).unwrap();
        let map = vm_memory::GuestRegionCollection::insert_region(&map, Arc::new(region)).unwrap();
        guest.memory.lock().unwrap().replace(map.clone());
        guest.put_header(VIRTIO_BLK_T_IN, 0);
        assert_eq!(guest.send(&[(HEADER_AT, 16, 0), (1 << 32, 512, WRITE), (STATUS_AT, 1, WRITE)]), 513);
        let mut data = vec![0; 512];
        vm_memory::Bytes::read_slice(&map, &mut data, more).unwrap();
        assert_eq!(data, pattern(512, 1));
    }
}

fn writeback(guest: &Guest) -> u8 {
    let mut data = [0xee];
    guest.device.config_read(32, &mut data);
    data[0]
}

fn stable(guest: &Guest) -> bool {
    guest.device.stable.load(Ordering::Acquire)
}

#[test]
fn a_reset_returns_to_the_cache_of_power_on_and_keeps_the_image() {
    let mut guest = Guest::new(true);
    assert_eq!(guest.write(0, &pattern(512, 1)), (OK, 1));
    guest.device.config_write(30, &[9, 9, 0, 9]);
    assert_eq!(writeback(&guest), 0);
    guest.device.config_write(33, &[1]);
    guest.device.config_write(u64::MAX, &[1]);
    guest.device.config_write(0, &[]);
    assert_eq!(writeback(&guest), 0);
    guest.stop();
    guest.device.reset();
    assert_eq!(writeback(&guest), 1);
    assert_eq!(guest.image()[..512], pattern(512, 1));
    assert_eq!(guest.device.size().get(), SIZE as u64);
}

#[test]
fn a_disk_with_stable_writes_keeps_them_stable_after_a_restore() {
    let mut guest = Guest::new(true);
    let features = guest.device.features();
    assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    guest.device.config_write(32, &[0]);
    let saved = guest.device.save();
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    for (state, started) in
        [(&saved, Some(features & !(1 << VIRTIO_BLK_F_CONFIG_WCE))), (&DeviceSpecific::Config(vec![0]), Some(features))]
    {
        assert!(guest.device.restore(state, started).is_err(), "{state:?} {started:?}");
    }
    guest.device.restore(&saved, Some(features)).unwrap();
    guest.start_with(features);
    assert!(stable(&guest));
    assert_eq!(guest.write(0, &pattern(512, 1)), (OK, 1));
}

#[test]
fn a_cache_turned_off_before_the_start_is_off_if_negotiated() {
    let mut guest = Guest::new(true);
    let features = guest.device.features();
    for saves in [false, true] {
        guest.stop();
        guest.device.reset();
        guest.device.config_write(32, &[0]);
        assert_eq!(writeback(&guest), 0);
        if saves {
            let saved = guest.device.save();
            guest.device.reset();
            guest.device.restore(&saved, None).unwrap();
        }
        guest.start_with(features);
        assert_eq!((writeback(&guest), stable(&guest)), (0, true), "{saves}");
        // A stop that is not a reset does not change the choice.
        guest.stop();
        guest.start_with(features);
        assert_eq!((writeback(&guest), stable(&guest)), (0, true), "{saves}");
    }
    guest.stop();
    guest.device.reset();
    guest.device.config_write(32, &[0]);
    guest.start_with(features & !(1 << VIRTIO_BLK_F_CONFIG_WCE));
    assert_eq!((writeback(&guest), stable(&guest)), (1, false));
    assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    guest.device.config_write(32, &[0]);
    assert_eq!((writeback(&guest), stable(&guest)), (1, false));
}

#[test]
fn a_driver_that_cannot_flush_the_cache_begins_without_it() {
    let mut guest = Guest::new(true);
    let features = guest.device.features() & !(1 << VIRTIO_BLK_F_FLUSH);
    guest.stop();
    guest.device.reset();
    guest.start_with(features);
    assert_eq!((writeback(&guest), stable(&guest)), (0, true));
    guest.device.config_write(32, &[1]);
    assert_eq!((writeback(&guest), stable(&guest)), (1, false));
    let saved = guest.device.save();
    guest.stop();
    guest.device.reset();
    guest.device.restore(&saved, Some(features)).unwrap();
    guest.start_with(features);
    assert_eq!((writeback(&guest), stable(&guest)), (1, false));
}

#[test]
fn a_driver_sets_the_cache_as_negotiated_right_after_a_restore() {
    let mut guest = Guest::new(true);
    let features = guest.device.features();
    for (features, chosen) in [(features, 0), (features & !(1 << VIRTIO_BLK_F_CONFIG_WCE), 1)] {
        guest.stop();
        guest.device.reset();
        guest.device.restore(&DeviceSpecific::PowerOn, Some(features)).unwrap();
        guest.device.config_write(32, &[0]);
        assert_eq!(writeback(&guest), chosen, "{features:#x}");
    }
}

#[test]
fn a_driver_is_notified_of_a_new_size_and_uses_it() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let capacity = |guest: &Guest| {
            let mut sectors = [0; 8];
            guest.device.config_read(0, &mut sectors);
            u64::from_le_bytes(sectors)
        };
        let beyond = SIZE as u64 / 512;
        assert_eq!(guest.read(beyond, 512).0, IOERR);
        let (size, generation) = (guest.device.size(), guest.device.config_generation());
        size.set(2 * SIZE as u64).unwrap();
        assert_eq!(capacity(&guest), 2 * beyond);
        assert_ne!(guest.device.config_generation(), generation);
        assert!(guest.interrupts.eventfd(1).unwrap().read().is_ok());
        assert_eq!(guest.write(beyond, &pattern(512, 3)).0, OK);
        assert_eq!(guest.read(beyond, 512), (OK, pattern(512, 3)));
        // The same size, or an impossible one, is not a change.
        assert!(size.set(2 * SIZE as u64).is_ok() && size.set(1000).is_err());
        assert!(guest.interrupts.eventfd(1).unwrap().read().is_err());
        guest.stop();
        guest.device.reset();
        size.set(512).unwrap();
        assert!(guest.interrupts.eventfd(1).unwrap().read().is_err(), "there is no driver to notify");
        assert_eq!((capacity(&guest), guest.host.as_file().metadata().unwrap().len()), (1, 512));
    }
}

#[test]
fn reads_and_writes_have_latencies() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let latencies = guest.device.latencies();
        assert_eq!(latencies.iter().count(), 0);
        assert_eq!(guest.read(0, 512).0, OK);
        let values: Vec<_> = latencies.iter().collect();
        assert_eq!(
            values.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["read_latency_min", "read_latency_max", "read_latency_avg",]
        );
        assert!(values.iter().all(|(_, value)| *value == values[0].1), "there was one: {values:?}");
        assert_eq!(guest.write(0, &[1; 512]).0, OK);
        assert_eq!(latencies.iter().count(), 6);
    }
}

#[test]
fn an_image_that_keeps_its_space_is_zeroed_and_not_discarded() {
    let mut guest = Guest::with(BlockSpec { sparse: false, ..spec(true) });
    let features = guest.device.features();
    assert!(!has(features, VIRTIO_BLK_F_DISCARD));
    guest.put(BUFFERS, &segment(0, 8, 0));
    assert_eq!(guest.request(VIRTIO_BLK_T_DISCARD, 0, &[(BUFFERS, 16, 0)]), (UNSUPP, 1));
    let blocks = |guest: &Guest| std::os::unix::fs::MetadataExt::blocks(&guest.host.as_file().metadata().unwrap());
    let before = blocks(&guest);
    assert!(before >= SIZE as u64 / 512);
    assert_eq!(guest.write(0, &pattern(8192, 1)).0, OK);
    guest.put(BUFFERS, &segment(0, 8, 1));
    let (status, _) = guest.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[(BUFFERS, 16, 0)]);
    assert!(status == OK && guest.image()[..4096] == [0; 4096]);
    assert_eq!(blocks(&guest), before);
}
