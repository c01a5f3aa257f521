//! A clock as a driver reads it.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::*;
use crate::net::testing::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually, memory};
use crate::{Interrupts, Memory};

struct Guest {
    rtc: Rtc,
    queue: DriverQueue,
    interrupts: Arc<Interrupts>,
    workers: Vec<Worker>,
}

impl Guest {
    fn new() -> Self {
        let rtc = Rtc::new(RtcSpec { id: "__rtc".into() });
        let queue = DriverQueue::new(&memory(), 0, 16);
        let interrupts = Arc::new(Interrupts::new(1, 2));
        interrupts.set_queue_vector(0, 0);
        let mut guest = Self { rtc, queue, interrupts, workers: Vec::new() };
        guest.start();
        guest
    }

    fn start(&mut self) {
        self.workers = self
            .rtc
            .start(Start {
                memory: Memory::new(self.queue.memory.clone()),
                features: FEATURES,
                queues: vec![(0, Arc::clone(&self.queue.queue))],
                interrupts: Arc::clone(&self.interrupts),
            })
            .unwrap();
    }

    fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    fn kick(&self) {
        self.workers[0].kick.write(1).unwrap();
    }

    fn count(&self, counter: RtcCounter) -> u64 {
        self.rtc.counters().get(counter)
    }

    fn used(&mut self, count: usize) -> Vec<u32> {
        let mut used = Vec::new();
        eventually("completion", || {
            used.extend(self.queue.take_used());
            used.len() >= count
        });
        used.into_iter().map(|(_, len)| len).collect()
    }

    /// The answer to a request of this type, for the first clock, in a chain of these pieces of the answer.
    fn ask(&mut self, kind: u16, pieces: &[u32]) -> Vec<u8> {
        let mut request = [0; 16];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        self.queue.memory_write(BUFFERS, &request);
        let mut chain = vec![(BUFFERS, 3, 0), (BUFFERS + 3, 13, 0)];
        let mut at = BUFFERS + 64;
        for len in pieces {
            chain.push((at, *len, WRITE));
            at += u64::from(*len);
        }
        self.queue.add(&chain);
        self.kick();
        let len = self.used(1)[0];
        self.queue.bytes(BUFFERS + 64, len as usize)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
    }
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()
}

#[test]
fn the_clock_is_the_hosts() {
    let mut guest = Guest::new();
    assert_eq!(guest.workers[0].thread.name(), "__rtc_q0");
    assert_eq!(guest.ask(0x1000, &[16])[8..10], [1, 0]);
    let before = now();
    let answer = guest.ask(1, &[5, 5, 6]);
    let after = now();
    assert_eq!(answer[..8], [0; 8]);
    let reading = u128::from(u64::from_le_bytes(answer[8..].try_into().unwrap()));
    assert!((before..=after).contains(&reading), "{before} {reading} {after}");
    eventually("counts", || guest.count(RtcCounter::Readings) == 1 && guest.count(RtcCounter::Requests) == 1);
    eventually("an interrupt", || guest.interrupts.eventfd(0).unwrap().read().is_ok());
    // A worker that is started again goes on.
    guest.stop();
    guest.start();
    assert_eq!(guest.ask(1, &[64]).len(), 16);
}

#[test]
fn what_the_clock_cannot_do_is_refused_by_a_status() {
    let mut guest = Guest::new();
    assert_eq!(guest.ask(2, &[24]), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.ask(1, &[8]), [4, 0, 0, 0, 0, 0, 0, 0]);
    eventually("counts", || guest.count(RtcCounter::Refused) == 2);
}

#[test]
fn chains_that_make_no_sense_are_given_back_empty_and_counted() {
    let mut guest = Guest::new();
    for chain in [
        vec![(BUFFERS, 16, 0)],
        vec![(BUFFERS, 16, 0), (BUFFERS + 64, 7, WRITE)],
        vec![(BUFFERS, 16, WRITE), (BUFFERS + 64, 16, 0)],
        vec![(MEMORY - 8, 16, 0), (BUFFERS + 64, 16, WRITE)],
        vec![(BUFFERS, 16, 0), (u64::MAX, u32::MAX, WRITE)],
    ] {
        guest.queue.add(&chain);
    }
    guest.kick();
    assert_eq!(guest.used(5), [0; 5]);
    eventually("counts", || guest.count(RtcCounter::BadChains) == 5);
}

#[test]
fn a_ring_that_makes_no_sense_is_given_up_and_the_driver_asked_to_reset() {
    let mut guest = Guest::new();
    guest.queue.write(guest.queue.avail() + 2, 1000u16.to_le_bytes());
    guest.kick();
    eventually("a wish for a reset", || guest.interrupts.needs_reset());
    guest.stop();
    guest.rtc.reset();
    assert_eq!(guest.count(RtcCounter::BrokenRings), 1);
}
