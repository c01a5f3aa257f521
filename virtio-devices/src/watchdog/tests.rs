//! The watchdog as its driver uses it.

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::*;
use crate::net::testing::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually, memory};
use crate::{Interrupts, Memory};

/// Times that no test waits for.
const LONG: Times = Times { interval: Duration::from_secs(3600), limit: Duration::from_secs(3600) };
/// Times after which the pings have ended at once.
const SHORT: Times = Times { interval: Duration::from_millis(5), limit: Duration::from_millis(20) };

struct Guest {
    watchdog: Watchdog,
    queue: DriverQueue,
    interrupts: Arc<Interrupts>,
    workers: Vec<Worker>,
    expiries: Arc<AtomicUsize>,
}

impl Guest {
    fn new(times: Times) -> Self {
        let expiries = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&expiries);
        let expiry = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let watchdog = Watchdog::with_times("__watchdog", Arc::new(expiry), times);
        let queue = DriverQueue::new(&memory(), 0, 8);
        let interrupts = Arc::new(Interrupts::new(1, 2));
        interrupts.set_queue_vector(0, 0);
        let mut guest = Self { watchdog, queue, interrupts, workers: Vec::new(), expiries };
        guest.start();
        guest
    }

    fn start(&mut self) {
        let start = Start {
            memory: Memory::new(self.queue.memory.clone()),
            features: FEATURES,
            queues: vec![(0, Arc::clone(&self.queue.queue))],
            interrupts: Arc::clone(&self.interrupts),
        };
        self.workers = self.watchdog.start(start).unwrap();
    }

    fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    /// Makes a buffer available, rings, and waits until it is given back. Returns how much of it was written.
    fn offer(&mut self, buffer: (u64, u32, u16)) -> u32 {
        self.queue.add(&[buffer]);
        self.workers[0].kick.write(1).unwrap();
        let mut used = Vec::new();
        eventually("completion", || {
            used.extend(self.queue.take_used());
            !used.is_empty()
        });
        used[0].1
    }

    fn ping(&mut self) -> u32 {
        self.offer((BUFFERS, 1, WRITE))
    }

    fn count(&self, counter: WatchdogCounter) -> u64 {
        self.watchdog.counters().get(counter)
    }

    fn expiries(&self) -> usize {
        self.expiries.load(Ordering::SeqCst)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
    }
}

#[test]
fn a_ping_is_answered_with_a_one() {
    let mut guest = Guest::new(LONG);
    assert_eq!(guest.workers[0].thread.name(), "__watchdog_q0");
    guest.queue.memory_write(BUFFERS, &[0xee; 2]);
    assert_eq!(guest.ping(), 1);
    assert_eq!(guest.queue.bytes(BUFFERS, 2), [1, 0xee]);
    eventually("an interrupt", || guest.interrupts.eventfd(0).unwrap().read().is_ok());
    eventually("a count", || guest.count(WatchdogCounter::Pings) == 1);
    assert_eq!(guest.watchdog.device_type(), 35);
    assert_eq!(guest.watchdog.queue_sizes(), [8]);
}

#[test]
fn nothing_happens_to_a_guest_that_never_pings() {
    let guest = Guest::new(SHORT);
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(guest.expiries(), 0);
}

#[test]
fn a_guest_that_stops_pinging_is_reported_once() {
    let mut guest = Guest::new(SHORT);
    guest.ping();
    eventually("an expiry", || guest.expiries() == 1);
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(guest.expiries(), 1);
    eventually("a count", || guest.count(WatchdogCounter::Expiries) == 1);
    // The next first ping starts the clock again.
    guest.ping();
    eventually("an expiry", || guest.expiries() == 2);
}

#[test]
fn what_cannot_be_written_to_is_no_ping() {
    let mut guest = Guest::new(SHORT);
    for buffer in [(BUFFERS, 1, 0), (BUFFERS, 0, WRITE), (MEMORY, 1, WRITE), (u64::MAX, u32::MAX, WRITE)] {
        assert_eq!(guest.offer(buffer), 0);
    }
    eventually("counts", || guest.count(WatchdogCounter::BadChains) == 4);
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!((guest.expiries(), guest.count(WatchdogCounter::Pings)), (0, 0));
}

#[test]
fn a_clock_that_ran_goes_on_after_a_pause_and_not_after_a_reset() {
    let mut guest = Guest::new(LONG);
    guest.ping();
    guest.stop();
    assert_eq!(guest.watchdog.save(), DeviceSpecific::Config(vec![1]));
    guest.watchdog.times = SHORT;
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(guest.expiries(), 0, "a pause is no silence");
    guest.start();
    eventually("an expiry", || guest.expiries() == 1);
    guest.stop();

    guest.watchdog.times = LONG;
    guest.start();
    guest.ping();
    guest.stop();
    guest.watchdog.reset();
    assert_eq!(guest.watchdog.save(), DeviceSpecific::PowerOn);
    guest.watchdog.times = SHORT;
    guest.start();
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(guest.expiries(), 1, "a new driver has to ping first");
}

#[test]
fn a_ring_that_makes_no_sense_is_given_up_and_does_not_stop_the_clock() {
    let mut guest = Guest::new(SHORT);
    guest.ping();
    guest.queue.write(guest.queue.avail() + 2, 1000u16.to_le_bytes());
    guest.workers[0].kick.write(1).unwrap();
    eventually("a wish for a reset", || guest.interrupts.needs_reset());
    eventually("an expiry", || guest.expiries() >= 1);
    eventually("a count", || guest.count(WatchdogCounter::BrokenRings) == 1);
}

#[test]
fn a_state_that_no_driver_could_have_caused_is_refused() {
    let mut guest = Guest::new(LONG);
    guest.stop();
    let config = |bytes: &[u8]| DeviceSpecific::Config(bytes.to_vec());
    for (state, started) in [(config(&[0]), Some(0)), (config(&[1, 0]), Some(0)), (config(&[1]), None)] {
        assert!(guest.watchdog.restore(&state, started).is_err());
        assert_eq!(guest.watchdog.save(), DeviceSpecific::PowerOn);
    }
    guest.watchdog.restore(&config(&[1]), Some(0)).unwrap();
    assert_eq!(guest.watchdog.save(), config(&[1]));
}
