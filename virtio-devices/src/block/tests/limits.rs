//! Effects of rate limits on requests.

use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::*;

use super::super::counters::BlockCounter;
use super::super::testing::*;
use super::super::{Block, BlockSpec};
use crate::{BlockState, BucketState, DeviceSpecific, RateLimit, RateLimitGroup, RateLimits, StateError, VirtioDevice};

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

fn limit(size: u64, one_time_burst: u64, refill: Duration) -> Option<RateLimit> {
    Some(RateLimit { size, one_time_burst, refill })
}

fn limited(io_uring: bool, queues: u16, limits: RateLimits) -> Guest {
    Guest::with(BlockSpec { limits, queues, ..spec(io_uring) })
}

impl Guest {
    /// Makes `count` requests for a sector available, and rings the doorbell.
    fn ask(&mut self, queue: u16, count: usize) {
        self.put_header(VIRTIO_BLK_T_IN, 0);
        for _ in 0..count {
            let chain = [(HEADER_AT, 16, 0), (BUFFERS, 512, WRITE), (STATUS_AT, 1, WRITE)];
            self.queues[usize::from(queue)].add(&chain);
        }
        self.kick(queue);
    }
}

#[test]
fn no_more_is_begun_than_the_limit_of_operations_lets_through() {
    for io_uring in ENGINES {
        let ops = limit(4, 2, NEVER);
        let mut guest = limited(io_uring, 1, RateLimits { ops, bandwidth: None });
        guest.ask(0, 10);
        assert_eq!(guest.await_used(0, 6).len(), 6);
        eventually("wait", || guest.count(BlockCounter::RateWaits) > 0);
        // A waiting worker stops at once, and neither a new start nor a reset refills the bucket.
        let features = guest.device.features();
        for _ in 0..3 {
            let waits = guest.count(BlockCounter::RateWaits);
            let began = Instant::now();
            guest.stop();
            assert!(began.elapsed() < Duration::from_secs(60));
            guest.device.reset();
            guest.start_with(features);
            guest.kick(0);
            eventually("wait", || guest.count(BlockCounter::RateWaits) > waits);
        }
        assert_eq!(guest.queues[0].take_used(), []);
        assert_eq!(guest.count(BlockCounter::ReadOps), 6);
    }
}

#[test]
fn waiting_requests_are_carried_out_as_the_bucket_refills() {
    for io_uring in ENGINES {
        let ops = limit(2, 0, Duration::from_millis(20));
        let began = Instant::now();
        let mut guest = limited(io_uring, 1, RateLimits { ops, bandwidth: None });
        guest.ask(0, 20);
        // One doorbell was rung, and no other is needed.
        assert_eq!(guest.await_used(0, 20).len(), 20);
        assert!(began.elapsed() >= Duration::from_millis(180), "two at once, and one in each 10 ms: {began:?}");
        assert!(guest.count(BlockCounter::RateWaits) > 0);
    }
}

#[test]
fn a_request_above_the_bandwidth_runs_and_the_next_one_waits() {
    for io_uring in ENGINES {
        let bandwidth = limit(512, 0, NEVER);
        let mut guest = limited(io_uring, 1, RateLimits { bandwidth, ops: None });
        assert_eq!(guest.write(0, &pattern(4096, 1)), (OK, 1));
        guest.ask(0, 1);
        eventually("wait", || guest.count(BlockCounter::RateWaits) > 0);
        assert_eq!((guest.queues[0].take_used(), guest.count(BlockCounter::ReadOps)), (vec![], 0));
    }
}

#[test]
fn dataless_requests_use_no_bandwidth_and_refused_ones_one_op() {
    let limits = RateLimits { bandwidth: limit(512, 0, NEVER), ops: limit(4, 0, NEVER) };
    let mut guest = limited(true, 1, limits);
    assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(BUFFERS, 20, WRITE)]), (OK, 21));
    assert_eq!(guest.request(99, 0, &[]).0, UNSUPP);
    assert_eq!(guest.read(0, 512).0, OK);
    assert_eq!(guest.count(BlockCounter::RateWaits), 0);
    guest.ask(0, 1);
    eventually("wait", || guest.count(BlockCounter::RateWaits) > 0);
}

#[test]
fn all_queues_of_a_disk_share_its_limits() {
    let ops = limit(6, 0, NEVER);
    let mut guest = limited(true, 2, RateLimits { ops, bandwidth: None });
    guest.ask(0, 4);
    assert_eq!(guest.await_used(0, 4).len(), 4);
    guest.ask(1, 4);
    assert_eq!(guest.await_used(1, 2).len(), 2);
    eventually("wait", || guest.count(BlockCounter::RateWaits) > 0);
    assert_eq!(guest.count(BlockCounter::ReadOps), 6);
}

#[test]
fn disks_of_a_group_share_its_limits() {
    let group = RateLimitGroup::new(RateLimits { ops: limit(6, 0, NEVER), bandwidth: None }).unwrap();
    let mut guests = [0; 2].map(|_| {
        let mut guest = Guest::new(true);
        guest.stop();
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(SIZE as u64).unwrap();
        let path = image.path().into();
        guest.device = Block::open(BlockSpec { path, ..spec(true) }).unwrap().limited_by(group.clone());
        guest.start();
        guest
    });
    guests[0].ask(0, 4);
    assert_eq!(guests[0].await_used(0, 4).len(), 4);
    guests[1].ask(0, 4);
    assert_eq!(guests[1].await_used(0, 2).len(), 2);
    eventually("wait", || guests[1].count(BlockCounter::RateWaits) > 0);
    assert_eq!(guests[1].count(BlockCounter::ReadOps), 2);
}

/// The state of a disk after saving and loading.
fn saved(block: &Block) -> DeviceSpecific {
    serde_json::from_str(&serde_json::to_string(&block.save()).unwrap()).unwrap()
}

#[test]
fn a_restored_disk_has_no_more_left_of_its_limits_than_it_had() {
    let limits = RateLimits { bandwidth: limit(4096, 0, NEVER), ops: limit(6, 1, NEVER) };
    let mut old = limited(true, 1, limits);
    assert_eq!(old.device.save(), DeviceSpecific::PowerOn, "all are full");
    old.ask(0, 4);
    assert_eq!(old.await_used(0, 4).len(), 4);
    old.stop();
    let state = saved(&old.device);
    let mut new = limited(true, 1, limits);
    new.stop();
    let features = new.device.features();
    new.device.restore(&state, Some(features)).unwrap();
    let DeviceSpecific::Block(BlockState { writeback: None, limits: buckets }) = new.device.save() else { panic!() };
    assert_eq!((buckets.len(), buckets[1].burst), (2, 0));
    new.start_with(features);
    new.ask(0, 4);
    // One of the burst and six of the bucket, four of which were used before.
    assert_eq!(new.await_used(0, 3).len(), 3);
    eventually("wait", || new.count(BlockCounter::RateWaits) > 0);
    assert_eq!(new.count(BlockCounter::ReadOps), 3);
    // Neither a reset nor a driver that has not started yet changes that.
    new.stop();
    new.device.reset();
    let state = saved(&new.device);
    new.device.restore(&state, None).unwrap();
}

#[test]
fn a_restored_disk_group_keeps_its_budget_in_any_restore_order() {
    let limits = RateLimits { ops: limit(6, 0, NEVER), bandwidth: None };
    let (old, new) = (RateLimitGroup::new(limits).unwrap(), RateLimitGroup::new(limits).unwrap());
    let disk = |group: &RateLimitGroup| {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(SIZE as u64).unwrap();
        Block::open(BlockSpec { path: image.path().into(), ..spec(true) }).unwrap().limited_by(group.clone())
    };
    (0..5).for_each(|_| old.take_op());
    for _ in 0..2 {
        disk(&new).restore(&saved(&disk(&old)), None).unwrap();
    }
    let left = std::iter::from_fn(|| new.limited_for().is_none().then(|| new.take_op())).count();
    assert_eq!(left, 1);
}

#[test]
fn a_disk_is_not_restored_to_limits_that_it_does_not_have() {
    let bucket = BucketState { missing: 0, burst: 0 };
    let state = |limits| DeviceSpecific::Block(BlockState { writeback: None, limits });
    let mut none = Guest::new(true);
    none.stop();
    assert!(matches!(none.device.restore(&state(vec![bucket]), None), Err(StateError::Shape("rate limits"))));
    let mut guest = limited(true, 1, RateLimits { ops: limit(6, 0, NEVER), bandwidth: None });
    guest.stop();
    for wrong in
        [vec![bucket; 2], vec![BucketState { burst: 1, ..bucket }], vec![BucketState { missing: u64::MAX, burst: 0 }]]
    {
        assert!(guest.device.restore(&state(wrong), None).is_err());
    }
    guest.device.restore(&state(vec![bucket]), None).unwrap();
}
