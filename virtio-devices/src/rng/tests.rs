//! Entropy as a driver gets it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::*;
use crate::net::testing::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually, memory};
use crate::{Interrupts, Memory};

struct Guest {
    rng: Rng,
    queue: DriverQueue,
    interrupts: Arc<Interrupts>,
    workers: Vec<Worker>,
}

impl Guest {
    fn new(source: &str) -> Self {
        let rng = Rng::open(RngSpec { id: "__rng".into(), source: source.into() }).unwrap();
        let queue = DriverQueue::new(&memory(), 0, 16);
        let interrupts = Arc::new(Interrupts::new(1, 2));
        interrupts.set_queue_vector(0, 0);
        let mut guest = Self { rng, queue, interrupts, workers: Vec::new() };
        guest.start();
        guest
    }

    fn start(&mut self) {
        self.workers = self
            .rng
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

    fn count(&self, counter: RngCounter) -> u64 {
        self.rng.counters().get(counter)
    }

    fn used(&mut self, count: usize) -> Vec<(u32, u32)> {
        let mut used = Vec::new();
        eventually("completion", || {
            used.extend(self.queue.take_used());
            used.len() >= count
        });
        used
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
    }
}

#[test]
fn buffers_of_any_pieces_are_filled_with_what_differs() {
    let mut guest = Guest::new("/dev/urandom");
    assert_eq!(guest.workers[0].thread.name(), "__rng_q0");
    guest.queue.add(&[(BUFFERS, 64, WRITE)]);
    guest.queue.add(&[(BUFFERS + 64, 1, WRITE), (BUFFERS + 65, 63, WRITE)]);
    guest.kick();
    assert_eq!(guest.used(2).iter().map(|(_, len)| *len).collect::<Vec<_>>(), [64, 64]);
    let [first, second] = [0, 64].map(|at| guest.queue.bytes(BUFFERS + at, 64));
    assert!(first != second && first != [0; 64] && second != [0; 64]);
    eventually("counts", || guest.count(RngCounter::Bytes) == 128 && guest.count(RngCounter::Requests) == 2);
    eventually("an interrupt", || guest.interrupts.eventfd(0).unwrap().read().is_ok());
}

#[test]
fn a_long_buffer_gets_a_bounded_part() {
    let mut guest = Guest::new("/dev/zero");
    guest.queue.memory_write(BUFFERS, &vec![0xee; 1 << 20]);
    guest.queue.add(&[(BUFFERS, 1000, WRITE), (BUFFERS + 1000, 1 << 20, WRITE)]);
    guest.kick();
    assert_eq!(guest.used(1)[0].1, 64 << 10);
    let data = guest.queue.bytes(BUFFERS, (64 << 10) + 1);
    assert!(data[..64 << 10] == [0; 64 << 10] && data[64 << 10] == 0xee);
}

#[test]
fn chains_that_make_no_sense_are_given_back_empty_and_counted() {
    let mut guest = Guest::new("/dev/urandom");
    for chain in [(BUFFERS, 16, 0), (BUFFERS, 0, WRITE), (MEMORY - 8, 16, WRITE), (u64::MAX, u32::MAX, WRITE)] {
        guest.queue.add(&[chain]);
    }
    guest.queue.add(&[(BUFFERS, 16, WRITE)]);
    guest.kick();
    assert_eq!(guest.used(5).iter().map(|(_, len)| *len).collect::<Vec<_>>(), [0, 0, 0, 0, 16]);
    eventually("counts", || guest.count(RngCounter::BadChains) == 4);
}

#[test]
fn a_source_that_ends_keeps_the_buffer_waiting() {
    let begin = Instant::now();
    let mut guest = Guest::new("/dev/null");
    guest.queue.add(&[(BUFFERS, 16, WRITE)]);
    guest.kick();
    eventually("an error", || guest.count(RngCounter::BackendErrors) > 0);
    guest.stop();
    assert!(guest.queue.take_used().is_empty());
    let most = 3 + begin.elapsed().as_secs();
    assert!(guest.count(RngCounter::BackendErrors) <= most, "it is not asked again and again");
    guest.rng = Rng::open(RngSpec { id: "__rng".into(), source: "/dev/urandom".into() }).unwrap();
    guest.start();
    assert_eq!(guest.used(1)[0].1, 16);
}

#[test]
fn a_buffer_that_the_source_failed_is_filled_later_without_another_doorbell() {
    let mut guest = Guest::new("/dev/urandom");
    // There is nothing mapped at its beginning.
    let broken = OwnedFd::from(File::open("/proc/self/mem").unwrap());
    let source = std::mem::replace(&mut *guest.rng.source.lock(), broken);
    guest.queue.add(&[(BUFFERS, 16, WRITE)]);
    guest.kick();
    // The doorbell is counted after the try that it led to: none is to come any more.
    eventually("a failure", || guest.count(RngCounter::Kicks) == 1 && guest.count(RngCounter::BackendErrors) > 0);
    *guest.rng.source.lock() = source;
    assert_eq!(guest.used(1)[0].1, 16);
    assert_eq!(guest.count(RngCounter::Kicks), 1);
}

#[test]
fn a_ring_that_makes_no_sense_is_given_up_and_the_driver_asked_to_reset() {
    let mut guest = Guest::new("/dev/urandom");
    guest.queue.write(guest.queue.avail() + 2, 1000u16.to_le_bytes());
    guest.kick();
    eventually("a wish for a reset", || guest.interrupts.needs_reset());
    guest.stop();
    guest.rng.reset();
    assert_eq!(guest.count(RngCounter::BrokenRings), 1);
}

#[test]
fn what_is_no_source_is_refused_in_one_line() {
    let open = |source: &str| Rng::open(RngSpec { id: "__rng".into(), source: source.into() }).map(|_| ()).unwrap_err();
    assert!(open("/dev/none").to_string().starts_with("src=/dev/none: cannot be opened: "));
    for source in ["/proc/self/exe", "/tmp"] {
        assert!(matches!(open(source), RngError::NotADevice(_)));
    }
}
