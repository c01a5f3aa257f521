//! The effect of limits of bandwidth and frames on a NIC over a tap.

use std::time::{Duration, Instant};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_MRG_RXBUF,
};

use super::super::counters::Counter;
use super::super::testing::*;
use crate::{NetSpec, RateLimit, RateLimits, VirtioDevice};

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

fn limit(size: u64, refill: Duration) -> Option<RateLimit> {
    Some(RateLimit { size, one_time_burst: 0, refill })
}

fn guest(pairs: u16, limits: RateLimits) -> Guest {
    let mut guest = Guest::with(NetSpec { limits, ..spec(pairs, 64) });
    guest.start_fresh(if pairs > 1 { 1 << VIRTIO_NET_F_MQ } else { 0 });
    guest
}

impl Guest {
    /// Makes `count` frames of `len` bytes available in a transmit queue, and rings.
    fn transmit(&mut self, queue: u16, count: u64, len: usize) {
        for _ in 0..count {
            self.queues[usize::from(queue)].send(BUFFERS, &with_header(&frame(OTHER, len)), &[]);
        }
        self.kick(queue);
    }

    fn sent(&self, pair: usize) -> usize {
        std::iter::from_fn(|| receive(&self.host[pair])).count()
    }
}

#[test]
fn tx_rate_limit_keeps_excess_frames_in_the_ring() {
    let mut guest = guest(1, RateLimits { ops: limit(4, NEVER), bandwidth: None });
    guest.transmit(1, 10, 60);
    eventually("wait", || guest.count(Counter::TxRateWaits) > 0);
    assert_eq!((guest.count(Counter::TxFrames), guest.sent(0)), (4, 4));
    // A waiting worker is stopped at once, and neither a new start nor a reset refills the bucket.
    for _ in 0..3 {
        let (waits, began) = (guest.count(Counter::TxRateWaits), Instant::now());
        guest.stop();
        assert!(began.elapsed() < Duration::from_secs(60));
        guest.device.reset();
        guest.start_fresh(0);
        guest.kick(1);
        eventually("wait", || guest.count(Counter::TxRateWaits) > waits);
    }
    assert_eq!((guest.count(Counter::TxFrames), guest.sent(0)), (4, 0));
    guest.stop();
}

#[test]
fn rx_rate_limit_is_separate_and_keeps_excess_frames_in_the_tap() {
    let mut guest = guest(1, RateLimits { ops: limit(4, NEVER), bandwidth: None });
    guest.transmit(1, 4, 60);
    eventually("transmission", || guest.count(Counter::TxFrames) == 4);
    guest.provide(0, 16, 2048);
    (0..10).for_each(|_| send(&guest.host[0], &with_header(&frame(OTHER, 60))));
    eventually("wait", || guest.count(Counter::RxRateWaits) > 0);
    assert_eq!((guest.queues[0].take_used().len(), guest.count(Counter::RxFrames)), (4, 4));
    assert!(!guest.is_drained(0), "the others wait in the tap");
    guest.stop();
}

/// A header for TCP segments of 100 bytes, and a frame that becomes this many.
fn segmented(segments: usize) -> Vec<u8> {
    let mut bytes = with_header(&frame(OTHER, 54 + 100 * segments));
    bytes[..12].copy_from_slice(&[1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0]);
    bytes
}

#[test]
fn a_segmented_frame_counts_as_its_packets_in_both_directions() {
    let mut guest =
        Guest::with(NetSpec { limits: RateLimits { ops: limit(10, NEVER), bandwidth: None }, ..spec(1, 64) });
    let of_segments = [VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4];
    guest.start_fresh(of_segments.iter().fold(1 << VIRTIO_NET_F_MRG_RXBUF, |all, feature| all | 1 << feature));
    for _ in 0..3 {
        guest.queues[1].send(BUFFERS, &segmented(8), &[]);
    }
    guest.kick(1);
    eventually("wait", || guest.count(Counter::TxRateWaits) > 0);
    assert_eq!(guest.count(Counter::TxFrames), 2, "16 of 10 packets");
    guest.provide(0, 32, 2048);
    (0..3).for_each(|_| send(&guest.host[0], &segmented(8)));
    eventually("wait", || guest.count(Counter::RxRateWaits) > 0);
    assert_eq!(guest.count(Counter::RxFrames), 2);
    guest.stop();
}

#[test]
fn a_frame_of_more_than_512_packets_is_refused_under_a_limit() {
    for (limits, counts) in [
        (RateLimits { ops: limit(1000, NEVER), bandwidth: None }, [1, 1]),
        (RateLimits { ops: None, bandwidth: limit(1 << 20, NEVER) }, [2, 0]),
    ] {
        let mut guest = Guest::with(NetSpec { limits, ..spec(1, 64) });
        guest.start_fresh(1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_TSO4);
        for size in [1, 2] {
            let mut bytes = segmented(6);
            bytes[4] = size;
            guest.queues[1].send(BUFFERS, &bytes, &[]);
            guest.kick(1);
            eventually("the frame", || !guest.queues[1].take_used().is_empty());
        }
        eventually("counts", || [Counter::TxFrames, Counter::TxBadHeaders].map(|c| guest.count(c)) == counts);
        guest.stop();
    }
}

#[test]
fn waiting_frames_continue_as_the_buckets_refill() {
    let began = Instant::now();
    // 60 bytes in 20 ms, beyond the first.
    let mut guest = guest(1, RateLimits { bandwidth: limit(60, Duration::from_millis(20)), ops: None });
    guest.provide(0, 16, 2048);
    (0..8).for_each(|_| send(&guest.host[0], &with_header(&frame(OTHER, 60))));
    guest.transmit(1, 8, 60);
    // One doorbell was rung, and no other is needed.
    eventually("all frames", || guest.count(Counter::TxFrames) == 8 && guest.count(Counter::RxFrames) == 8);
    assert!(began.elapsed() >= Duration::from_millis(6 * 20), "{:?}", began.elapsed());
    assert!(guest.count(Counter::TxRateWaits) > 0 && guest.count(Counter::RxRateWaits) > 0);
    guest.stop();
}

#[test]
fn all_queue_pairs_share_the_limits() {
    let mut guest = guest(2, RateLimits { ops: limit(6, NEVER), bandwidth: None });
    guest.transmit(1, 4, 60);
    eventually("transmission", || guest.count(Counter::TxFrames) == 4);
    guest.transmit(3, 4, 60);
    eventually("wait", || guest.count(Counter::TxRateWaits) > 0);
    assert_eq!(guest.count(Counter::TxFrames), 6);
    guest.stop();
}
