//! A limited NIC over a tap, in virtual time.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::counters::Counter;
use super::super::enforced::PolicyCell;
use super::super::pass::Next;
use super::super::testing::*;
use super::super::transmit::Transmit;
use crate::RateLimits;
use crate::frames::policy::Policy;
use crate::os::clock;
use crate::os::clock::testing::StoppedClock;

/// The delay of a worker after a wait.
const LATE: Duration = Duration::from_micros(60);
/// More than any bucket holds.
const MORE: usize = 13_000_000;

/// Returns the bytes per second of a NIC that always has frames of `len` bytes in each of its `pairs` queues, may send
/// `mbits` Mbit/s, and sends at least `count`.
fn sent_a_second(mbits: u32, len: usize, pairs: u16, count: u64) -> f64 {
    let clock = StoppedClock::new();
    let mut rig = Rig::new();
    rig.policy =
        PolicyCell::new(Policy { max_tx_rate: NonZeroU32::new(mbits), ..Policy::default() }, RateLimits::default());
    rig.policy.load().transmit.take(MORE, 1);
    let mut drivers: Vec<_> = (0..pairs).map(|pair| DriverQueue::new(&rig.memory, pair, 256)).collect();
    let queues: Vec<_> = drivers.iter().map(|driver| Arc::clone(&driver.queue)).collect();
    let mut transmits: Vec<_> = queues.iter().map(|queue| Transmit::new(rig.ring(queue, 1, false), 0)).collect();
    drivers[0].memory_write(BUFFERS, &with_header(&frame(OTHER, len)));
    let (mut received, mut first) = (0, None::<(Instant, u64)>);
    loop {
        let mut waits = Vec::new();
        for (driver, transmit) in drivers.iter_mut().zip(&mut transmits) {
            driver.take_used();
            (driver.outstanding()..100).for_each(|_| _ = driver.add(&[(BUFFERS, len as u32 + 12, 0)]));
            match rig.pass(|pass| transmit.run(pass)).unwrap() {
                Next::Limited(wait) => waits.push(wait),
                next => assert_eq!(next, Next::More),
            }
            received += std::iter::from_fn(|| receive(&rig.peer)).count() as u64;
        }
        if waits.len() < drivers.len() {
            continue;
        }
        // Before its first frame, it pays off its debt.
        if received > 0 && first.is_none() {
            first = Some((clock::now(), received));
        }
        if let Some((since, before)) = first
            && received - before >= count
        {
            let expected = [Counter::TxFrames, Counter::TxBytes, Counter::Interrupts, Counter::TxRateWaits];
            assert!(rig.counts().iter().all(|(counter, _)| expected.contains(counter)), "{:?}", rig.counts());
            assert_eq!(rig.count(Counter::TxFrames), received);
            return ((received - before) * len as u64) as f64 / (clock::now() - since).as_secs_f64();
        }
        clock.advance(waits.into_iter().min().unwrap() + LATE);
    }
}

#[test]
fn rate_is_within_2_percent_without_loss_on_1_and_4_pairs() {
    for (len, count) in [(64, 3_000), ((64 << 10) - 12, 150)] {
        for mbits in [10, 100, 1_000, 10_000] {
            for pairs in [1, 4] {
                let rate = sent_a_second(mbits, len, pairs, count) * 8e-6;
                println!("{len} bytes, {pairs} pairs, {mbits} Mbit/s: {rate:.2}");
                assert!((rate / f64::from(mbits) - 1.0).abs() < 0.02, "{len} {pairs} {mbits}: {rate}");
            }
        }
    }
}
