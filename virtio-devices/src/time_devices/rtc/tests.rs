//! A clock as read by a driver.

use std::time::{SystemTime, UNIX_EPOCH};

use super::*;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually};

type Guest = crate::testing::guest::Guest<Rtc>;

fn rtc() -> Rtc {
    Rtc::new(RtcSpec { id: "__rtc".into() })
}

impl Guest {
    fn count(&self, counter: RtcCounter) -> u64 {
        self.device.counters().get(counter)
    }

    /// Sends a request of this type for the first clock, with reply buffers of these lengths. Returns the reply.
    fn ask(&mut self, kind: u16, pieces: &[u32]) -> Vec<u8> {
        let mut request = [0; 16];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        self.queues[0].memory_write(BUFFERS, &request);
        let mut chain = vec![(BUFFERS, 3, 0), (BUFFERS + 3, 13, 0)];
        let mut at = BUFFERS + 64;
        for len in pieces {
            chain.push((at, *len, WRITE));
            at += u64::from(*len);
        }
        let len = self.send(&chain);
        self.queues[0].bytes(BUFFERS + 64, len as usize)
    }
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()
}

#[test]
fn the_clock_is_the_hosts() {
    let mut guest = Guest::new(rtc());
    assert_eq!(guest.workers[0].thread.name(), "__rtc_q0");
    assert_eq!(guest.ask(0x1000, &[16])[8..10], [1, 0]);
    let before = now();
    let answer = guest.ask(1, &[5, 5, 6]);
    let after = now();
    assert_eq!(answer[..8], [0; 8]);
    let reading = u128::from(u64::from_le_bytes(answer[8..].try_into().unwrap()));
    assert!((before..=after).contains(&reading), "{before} {reading} {after}");
    eventually("counts", || guest.count(RtcCounter::Readings) == 1 && guest.count(RtcCounter::Requests) == 1);
    guest.await_interrupt(0);
    // A restarted worker continues.
    guest.stop();
    guest.start();
    assert_eq!(guest.ask(1, &[64]).len(), 16);
}

#[test]
fn an_impossible_request_to_the_clock_has_a_status() {
    let mut guest = Guest::new(rtc());
    assert_eq!(guest.ask(2, &[24]), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.ask(1, &[8]), [4, 0, 0, 0, 0, 0, 0, 0]);
    eventually("counts", || guest.count(RtcCounter::Refused) == 2);
}

#[test]
fn chains_that_make_no_sense_are_given_back_empty_and_counted() {
    let mut guest = Guest::new(rtc());
    for chain in [
        vec![(BUFFERS, 16, 0)],
        vec![(BUFFERS, 16, 0), (BUFFERS + 64, 7, WRITE)],
        vec![(BUFFERS, 16, WRITE), (BUFFERS + 64, 16, 0)],
        vec![(MEMORY - 8, 16, 0), (BUFFERS + 64, 16, WRITE)],
        vec![(BUFFERS, 16, 0), (u64::MAX, u32::MAX, WRITE)],
    ] {
        guest.queues[0].add(&chain);
    }
    guest.kick(0);
    assert_eq!(guest.used(0, 5), [0; 5]);
    eventually("counts", || guest.count(RtcCounter::BadChains) == 5);
}

#[test]
fn broken_rtc_ring_is_abandoned_and_sets_device_needs_reset() {
    let mut guest = Guest::new(rtc());
    guest.break_ring(0);
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.count(RtcCounter::BrokenRings), 1);
}
