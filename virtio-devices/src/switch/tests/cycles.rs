//! Ports that are reset under load, again and again. No frame to or from a port from before its reset exists after it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use super::rig::*;
use crate::testing::driver_queue::eventually;

const CYCLES: u32 = 100;
/// The offset of the cycle in which a frame was built.
const STAMP: std::ops::Range<usize> = 20..24;

fn stamped(from: u16, to: u16, cycle: u32) -> Vec<u8> {
    let mut frame = frame(mac(from), mac(to), 200);
    frame[STAMP].copy_from_slice(&cycle.to_le_bytes());
    frame
}

fn cycle_of(frame: &[u8]) -> u32 {
    u32::from_le_bytes(frame[STAMP].try_into().unwrap())
}

/// Sends frames of the current cycle all the time, until `stop`. Publishes the last cycle before which all of its
/// frames are known to be handled.
fn flood(nic: &mut Nic, to: u16, cycle: &AtomicU32, past: &AtomicU32, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        let now = cycle.load(Ordering::Acquire);
        past.store(now, Ordering::Release);
        (0..32).for_each(|_| nic.queue(&stamped(1, to, now)));
        nic.kick();
        nic.wait_sent(32);
    }
}

#[test]
fn frames_sent_before_a_receivers_reset_never_arrive_after_it() {
    for workers in [1, 2] {
        let mut lan = Lan::running(&Config { workers, ..Config::closed(3) });
        let mut receiver = lan.nics.pop().unwrap();
        let mut sender = lan.nics.pop().unwrap();
        let (cycle, past, stop, mut got) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false), 0);
        thread::scope(|scope| {
            let (cycle, past, stop) = (&cycle, &past, &stop);
            scope.spawn(move || flood(&mut sender, 2, cycle, past, stop));
            for now in 1..=CYCLES {
                receiver.stop();
                receiver.reset();
                cycle.store(now, Ordering::Release);
                eventually("the end of earlier frames", || past.load(Ordering::Acquire) == now);
                receiver.provide(128, 2048);
                receiver.start(FEATURES);
                eventually("a frame", || {
                    receiver.kick();
                    let frames = receiver.received();
                    frames.iter().for_each(|frame| assert_eq!(cycle_of(frame), now, "{workers} workers"));
                    got += frames.len();
                    !frames.is_empty()
                });
            }
            stop.store(true, Ordering::Release);
        });
        assert!(got >= CYCLES as usize);
    }
}

/// The ring is full at the reset, with frames that wait for a receiver without buffers or for a turn.
#[test]
fn frames_unsent_at_a_senders_reset_never_leave_after_it() {
    for workers in [1, 2] {
        let mut lan = Lan::running(&Config { workers, ..Config::closed(3) });
        let mut receiver = lan.nics.pop().unwrap();
        let mut sender = lan.nics.pop().unwrap();
        for cycle in 1..=CYCLES {
            (0..60).for_each(|_| sender.queue(&stamped(1, 2, cycle)));
            sender.kick();
            if cycle % 2 == 0 {
                thread::yield_now();
            }
            sender.stop();
            // The sent frames have arrived; the ring with the others no longer exists.
            receiver.received().iter().for_each(|frame| assert_eq!(cycle_of(frame), cycle));
            sender.reset();
            sender.start(FEATURES);
            receiver.provide(64, 2048);
            receiver.kick();
            lan.switch.set_port(0, crate::switch::PortSettings::default()).wait().unwrap();
            assert_eq!(receiver.received(), Vec::<Vec<u8>>::new(), "cycle {cycle}, {workers} workers");
        }
    }
}
