//! The number of system calls of a worker. The kernel counts its reads and writes; besides, it makes one waiting call
//! for each turn of its loop.

use std::fs;
use std::time::Duration;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::rig::*;
use crate::Counter;
use crate::os::clock::testing::StoppedClock;
use crate::switch::worker::SwitchWorker;

/// The number of reads and writes of this thread.
fn transfers() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    let count = |name| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse::<u64>().unwrap();
    count("syscr:") + count("syscw:")
}

/// The calls of a turn.
fn step(worker: &mut SwitchWorker) -> u64 {
    let before = transfers();
    let own = transfers() - before;
    let before = transfers();
    worker.step(Some(Duration::ZERO));
    1 + transfers() - before - own
}

/// The calls until there is nothing to do.
fn finish(worker: &mut SwitchWorker) -> u64 {
    let mut calls = step(worker);
    while worker.timeout(None) == Some(Duration::ZERO) {
        calls += step(worker);
    }
    calls
}

fn lan() -> (Lan, SwitchWorker) {
    let (mut lan, mut worker) = Lan::stepped_with(3, 1, FEATURES | 1 << VIRTIO_RING_F_EVENT_IDX);
    lan.nics[1].provide(u64::from(SIZE) - 1, 2048);
    lan.nics[2].provide(u64::from(SIZE) - 1, 2048);
    lan.nics.iter().for_each(Nic::kick);
    finish(&mut worker);
    (lan, worker)
}

/// Requests an interrupt for the next frame after those that the driver has seen.
fn rearm(nic: &mut Nic, received: &mut u16) {
    let used = nic.rx.take_used().len();
    nic.provide(used as u64, 2048);
    *received = received.wrapping_add(used as u16);
    nic.rx.set_used_event(*received);
}

#[test]
fn a_bulk_of_usual_frames_costs_at_most_2_calls_for_each_64() {
    for len in [64, 1514] {
        let (mut lan, mut worker) = lan();
        let at = lan.nics[1].send_area();
        lan.nics[1].tx.memory_write(at, &[&[0; 12], &frame(mac(1), mac(2), len)[..]].concat());
        let (mut sent, mut received, mut calls) = (0_u16, 0, 0);
        for _ in 0..300 {
            // As Linux does: when three quarters of the frames in flight were sent.
            let tx = &mut lan.nics[1].tx;
            let (done, interrupt) = (tx.take_used().len() as u16, sent.wrapping_add(192));
            (tx.outstanding()..usize::from(SIZE)).for_each(|_| _ = tx.add(&[(at, len as u32 + 12, 0)]));
            if sent == 0 || done > 0 && sent % 192 + done % 192 >= 192 {
                tx.set_used_event(interrupt);
            }
            sent = sent.wrapping_add(done);
            rearm(&mut lan.nics[2], &mut received);
            lan.nics[1].kick();
            calls += step(&mut worker);
        }
        let frames = lan.count(2, Counter::RxFrames);
        println!("{len} bytes: {calls} calls, {frames} frames: {:.2} for 64", calls as f64 * 64.0 / frames as f64);
        assert!(calls > 300 && lan.count(2, Counter::Interrupts) > 100, "{calls}: nothing was counted");
        assert!(calls * 64 <= frames * 2, "{len}: {calls} {frames}");
    }
}

/// Covers drivers that request an interrupt for each sent frame, as Linux does, and others. The former find sent frames
/// by themselves at the next occasion.
#[test]
fn a_request_and_its_answer_cost_4_calls() {
    [true, false].into_iter().for_each(assert_that_a_request_and_its_answer_cost_4_calls);
}

fn assert_that_a_request_and_its_answer_cost_4_calls(told: bool) {
    let _clock = StoppedClock::new();
    let (mut lan, mut worker) = lan();
    let mut received = [0; 3];
    for (from, to) in [(1, 2), (2, 1)] {
        lan.nics[from].tx.set_used_event(0x8000);
        rearm(&mut lan.nics[to], &mut received[to]);
    }
    for round in 0..20 {
        let mut calls = 0;
        for (from, to) in [(1_u16, 2_u16), (2, 1)] {
            if told {
                lan.nics[usize::from(from)].tx.set_used_event(round);
            }
            lan.nics[usize::from(from)].queue(&frame(mac(from), mac(to), 64));
            lan.nics[usize::from(from)].kick();
            calls += finish(&mut worker);
            assert_eq!(lan.nics[usize::from(from)].tx.take_used().len(), 1);
            rearm(&mut lan.nics[usize::from(to)], &mut received[usize::from(to)]);
        }
        assert_eq!(calls, 4);
    }
    assert_eq!(received, [0, 20, 20]);
}
