//! The watchdog with its driver.

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::*;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually};

/// Times that no test waits for.
const LONG: Times = Times { interval: Duration::from_secs(3600), limit: Duration::from_secs(3600) };
/// Times after which the pings have ended at once.
const SHORT: Times = Times { interval: Duration::from_millis(5), limit: Duration::from_millis(20) };

type Guest = crate::testing::guest::Guest<Watchdog>;

/// A guest, and the number of times that its pings have ended.
fn guest(times: Times) -> (Guest, Arc<AtomicUsize>) {
    let expiries = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&expiries);
    let expiry = move || {
        counted.fetch_add(1, Ordering::SeqCst);
    };
    (Guest::new(Watchdog::with_times("__watchdog", Arc::new(expiry), times)), expiries)
}

impl Guest {
    fn ping(&mut self) -> u32 {
        self.send(&[(BUFFERS, 1, WRITE)])
    }

    fn count(&self, counter: WatchdogCounter) -> u64 {
        self.device.counters().get(counter)
    }
}

fn now(expiries: &AtomicUsize) -> usize {
    expiries.load(Ordering::SeqCst)
}

#[test]
fn a_ping_is_answered_with_a_one() {
    let (mut guest, _) = guest(LONG);
    assert_eq!(guest.workers[0].thread.name(), "__watchdog_q0");
    guest.queues[0].memory_write(BUFFERS, &[0xee; 2]);
    assert_eq!(guest.ping(), 1);
    assert_eq!(guest.queues[0].bytes(BUFFERS, 2), [1, 0xee]);
    guest.await_interrupt(0);
    eventually("a count", || guest.count(WatchdogCounter::Pings) == 1);
    assert_eq!(guest.device.device_type(), 35);
    assert_eq!(guest.device.queue_sizes(), [8]);
}

#[test]
fn nothing_happens_to_a_guest_that_never_pings() {
    let (_guest, expiries) = guest(SHORT);
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(now(&expiries), 0);
}

#[test]
fn a_guest_that_stops_pinging_is_reported_once() {
    let (mut guest, expiries) = guest(SHORT);
    guest.ping();
    eventually("an expiry", || now(&expiries) == 1);
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(now(&expiries), 1);
    eventually("a count", || guest.count(WatchdogCounter::Expiries) == 1);
    // The next ping starts the clock again.
    guest.ping();
    eventually("an expiry", || now(&expiries) == 2);
}

#[test]
fn a_buffer_that_cannot_be_written_to_is_no_ping() {
    let (mut guest, expiries) = guest(SHORT);
    for buffer in [(BUFFERS, 1, 0), (BUFFERS, 0, WRITE), (MEMORY, 1, WRITE), (u64::MAX, u32::MAX, WRITE)] {
        assert_eq!(guest.send(&[buffer]), 0);
    }
    eventually("counts", || guest.count(WatchdogCounter::BadChains) == 4);
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!((now(&expiries), guest.count(WatchdogCounter::Pings)), (0, 0));
}

#[test]
fn a_running_clock_continues_after_a_pause_but_not_a_reset() {
    let (mut guest, expiries) = guest(LONG);
    guest.ping();
    guest.stop();
    assert_eq!(guest.device.save(), DeviceSpecific::Config(vec![1]));
    guest.device.times = SHORT;
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(now(&expiries), 0, "a pause is no silence");
    guest.start();
    eventually("an expiry", || now(&expiries) == 1);
    guest.stop();

    guest.device.times = LONG;
    guest.start();
    guest.ping();
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    guest.device.times = SHORT;
    guest.start();
    std::thread::sleep(10 * SHORT.limit);
    assert_eq!(now(&expiries), 1, "a new driver has to ping first");
}

#[test]
fn broken_ring_is_abandoned_without_stopping_the_watchdog() {
    let (mut guest, expiries) = guest(SHORT);
    guest.ping();
    guest.break_ring(0);
    eventually("an expiry", || now(&expiries) >= 1);
    eventually("a count", || guest.count(WatchdogCounter::BrokenRings) == 1);
}

#[test]
fn a_state_that_no_driver_could_have_caused_is_refused() {
    let (mut guest, _) = guest(LONG);
    guest.stop();
    let config = |bytes: &[u8]| DeviceSpecific::Config(bytes.to_vec());
    for (state, started) in [(config(&[0]), Some(0)), (config(&[1, 0]), Some(0)), (config(&[1]), None)] {
        assert!(guest.device.restore(&state, started).is_err());
        assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    }
    guest.device.restore(&config(&[1]), Some(0)).unwrap();
    assert_eq!(guest.device.save(), config(&[1]));
}
