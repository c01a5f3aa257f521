//! Entropy as received by a driver.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::*;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually};

type Guest = crate::testing::guest::Guest<Rng>;

fn rng(source: &str) -> Rng {
    Rng::open(RngSpec { id: "__rng".into(), source: source.into() }).unwrap()
}

impl Guest {
    fn count(&self, counter: RngCounter) -> u64 {
        self.device.counters().get(counter)
    }
}

#[test]
fn buffers_of_any_pieces_are_filled_with_what_differs() {
    let mut guest = Guest::new(rng("/dev/urandom"));
    assert_eq!(guest.workers[0].thread.name(), "__rng_q0");
    guest.queues[0].add(&[(BUFFERS, 64, WRITE)]);
    guest.queues[0].add(&[(BUFFERS + 64, 1, WRITE), (BUFFERS + 65, 63, WRITE)]);
    guest.kick(0);
    assert_eq!(guest.used(0, 2), [64, 64]);
    let [first, second] = [0, 64].map(|at| guest.queues[0].bytes(BUFFERS + at, 64));
    assert!(first != second && first != [0; 64] && second != [0; 64]);
    eventually("counts", || guest.count(RngCounter::Bytes) == 128 && guest.count(RngCounter::Requests) == 2);
    guest.await_interrupt(0);
}

#[test]
fn a_long_buffer_gets_a_bounded_part() {
    let mut guest = Guest::new(rng("/dev/zero"));
    guest.queues[0].memory_write(BUFFERS, &vec![0xee; 1 << 20]);
    guest.queues[0].add(&[(BUFFERS, 1000, WRITE), (BUFFERS + 1000, 1 << 20, WRITE)]);
    guest.kick(0);
    assert_eq!(guest.used(0, 1)[0], 64 << 10);
    let data = guest.queues[0].bytes(BUFFERS, (64 << 10) + 1);
    assert!(data[..64 << 10] == [0; 64 << 10] && data[64 << 10] == 0xee);
}

#[test]
fn chains_that_make_no_sense_are_given_back_empty_and_counted() {
    let mut guest = Guest::new(rng("/dev/urandom"));
    for chain in [(BUFFERS, 16, 0), (BUFFERS, 0, WRITE), (MEMORY - 8, 16, WRITE), (u64::MAX, u32::MAX, WRITE)] {
        guest.queues[0].add(&[chain]);
    }
    guest.queues[0].add(&[(BUFFERS, 16, WRITE)]);
    guest.kick(0);
    assert_eq!(guest.used(0, 5), [0, 0, 0, 0, 16]);
    eventually("counts", || guest.count(RngCounter::BadChains) == 4);
}

#[test]
fn a_source_that_ends_keeps_the_buffer_waiting() {
    let begin = Instant::now();
    let device = rng("/dev/urandom");
    *device.source.lock() = File::open("/dev/null").unwrap().into();
    let mut guest = Guest::new(device);
    guest.queues[0].add(&[(BUFFERS, 16, WRITE)]);
    guest.kick(0);
    eventually("an error", || guest.count(RngCounter::BackendErrors) > 0);
    guest.stop();
    assert!(guest.queues[0].take_used().is_empty());
    let most = 3 + begin.elapsed().as_secs();
    assert!(guest.count(RngCounter::BackendErrors) <= most, "it is not asked again and again");
    guest.device = rng("/dev/urandom");
    guest.start();
    assert_eq!(guest.used(0, 1)[0], 16);
}

#[test]
fn buffer_is_filled_after_a_source_failure_without_a_doorbell() {
    let mut guest = Guest::new(rng("/dev/urandom"));
    // Nothing is mapped at its beginning.
    let broken = OwnedFd::from(File::open("/proc/self/mem").unwrap());
    let source = std::mem::replace(&mut *guest.device.source.lock(), broken);
    guest.queues[0].add(&[(BUFFERS, 16, WRITE)]);
    guest.kick(0);
    // The doorbell is counted after the attempt that it caused: no further attempt follows.
    eventually("a failure", || guest.count(RngCounter::Kicks) == 1 && guest.count(RngCounter::BackendErrors) > 0);
    *guest.device.source.lock() = source;
    assert_eq!(guest.used(0, 1)[0], 16);
    assert_eq!(guest.count(RngCounter::Kicks), 1);
}

#[test]
fn broken_rng_ring_is_abandoned_and_sets_device_needs_reset() {
    let mut guest = Guest::new(rng("/dev/urandom"));
    guest.break_ring(0);
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.count(RngCounter::BrokenRings), 1);
}

#[test]
fn a_file_that_is_no_source_is_refused_in_one_line() {
    let open = |source: &str| Rng::open(RngSpec { id: "__rng".into(), source: source.into() }).map(|_| ()).unwrap_err();
    assert!(open("/dev/none").to_string().starts_with("src=/dev/none: cannot be opened: "));
    assert_eq!(
        open("/dev/null").to_string(),
        "src=/dev/null: has no bytes; give a source that never ends, such as /dev/urandom"
    );
    for source in ["/proc/self/exe", "/tmp"] {
        assert!(matches!(open(source), RngError::NotADevice(_)));
    }
}
