//! A limited port, in virtual time.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;

use super::rig::*;
use crate::Counter;
use crate::frames::policy::Policy;
use crate::net::testing::nonzero;
use crate::os::clock;
use crate::os::clock::testing::StoppedClock;

/// The delay of a worker after a wait.
const LATE: Duration = Duration::from_micros(60);
/// More than any bucket holds.
const MORE: usize = 13_000_000;
/// The number of chains that are kept available in each queue.
const AHEAD: usize = 200;

/// The counters that do not count a loss.
const HARMLESS: [Counter; 7] = [
    Counter::RxFrames,
    Counter::RxBytes,
    Counter::TxFrames,
    Counter::TxBytes,
    Counter::Kicks,
    Counter::Interrupts,
    Counter::TxRateWaits,
];

/// Returns the bytes per second of a port that always has frames of `len` bytes in each of its `pairs` queues, may send
/// `mbits` Mbit/s, and sends at least `count`.
fn sent_a_second(mbits: u32, len: usize, pairs: u16, count: u64) -> f64 {
    let clock = StoppedClock::new();
    let (mut lan, mut worker) = Lan::stepped_with(3, pairs, FEATURES | 1 << VIRTIO_NET_F_MQ);
    lan.nics[1].set_policy(Policy { max_tx_rate: NonZeroU32::new(mbits), ..untrusted() });
    lan.nics[1].net.use_up(MORE);
    lan.nics[2].provide(u64::from(SIZE), 1 << 14);
    let at = lan.nics[1].send_area();
    lan.nics[1].tx.memory_write(at, &[&[0; 12], &frame(mac(1), mac(2), len)[..]].concat());
    let buffers = [(at, len as u32 + 12, 0)];
    let (mut given, mut waits, mut first) = (0, 0, None::<(Instant, u64)>);
    loop {
        let nic = &mut lan.nics[1];
        for queue in std::iter::once(&mut nic.tx).chain(nic.further.iter_mut().map(|[_, transmit]| transmit)) {
            given += queue.take_used().len();
            let ahead = AHEAD - queue.outstanding();
            (0..ahead).for_each(|_| _ = queue.add(&buffers));
        }
        nic.kick();
        worker.step(Some(Duration::ZERO));
        let used = lan.nics[2].rx.take_used().len();
        lan.nics[2].provide(used as u64, 1 << 14);
        if std::mem::replace(&mut waits, lan.count(1, Counter::TxRateWaits)) == lan.count(1, Counter::TxRateWaits) {
            continue;
        }
        // Now it has sent all that its limit allows, and has more.
        let wait = worker.timeout(None).unwrap();
        let sent = lan.count(2, Counter::RxBytes);
        // Before its first frame, it pays off its debt.
        if sent > 0 && first.is_none() {
            first = Some((clock::now(), sent));
        }
        if let Some((since, before)) = first
            && sent - before >= count * len as u64
        {
            for nic in &lan.nics[1..] {
                let others =
                    nonzero(&nic.net.counters()).into_iter().filter(|(counter, _)| !HARMLESS.contains(counter));
                assert_eq!(others.collect::<Vec<_>>(), []);
            }
            let nic = &mut lan.nics[1];
            given += nic.tx.take_used().len();
            given += nic.further.iter_mut().map(|[_, transmit]| transmit.take_used().len()).sum::<usize>();
            // Frames over the limit are still in its rings, and all others have arrived.
            assert_eq!(lan.count(2, Counter::RxFrames), given as u64);
            return (sent - before) as f64 / (clock::now() - since).as_secs_f64();
        }
        clock.advance(wait + LATE);
    }
}

/// Checks one length of frames with all rates, for one and for 4 pairs of queues.
fn assert_rates(len: usize, count: u64) {
    for mbits in [10, 100, 1_000, 10_000] {
        for pairs in [1, 4] {
            let rate = sent_a_second(mbits, len, pairs, count) * 8e-6;
            println!("{len} bytes, {pairs} pairs, {mbits} Mbit/s: {rate:.2}");
            assert!((rate / f64::from(mbits) - 1.0).abs() < 0.02, "{len} {pairs} {mbits}: {rate}");
        }
    }
}

#[test]
fn rate_is_within_2_percent_without_loss_for_short_frames() {
    assert_rates(64, 4_000);
}

#[test]
fn rate_is_within_2_percent_without_loss_for_64_kib_frames() {
    assert_rates((64 << 10) - 12, 150);
}
