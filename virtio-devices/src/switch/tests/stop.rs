//! Ports that stop, reset and come back while others send.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_net::{VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_F_MQ};

use super::rig::*;
use crate::testing::driver_queue::{WRITE, eventually};
use crate::{Counter, VirtioDevice};

#[test]
fn stopped_port_is_not_written_to_by_any_sender() {
    for workers in [1, 2] {
        let mut lan = Lan::running(&Config { workers, ..Config::open(3) });
        let mut receiver = lan.nics.pop().unwrap();
        let mut sender = lan.nics.pop().unwrap();
        let (stop, mut got) = (AtomicBool::new(false), 0);
        let slowest = thread::scope(|scope| {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    (0..32).for_each(|_| sender.queue(&frame(mac(1), mac(2), 1500)));
                    sender.kick();
                    sender.wait_sent(32);
                }
            });
            let mut slowest = Duration::ZERO;
            for round in 1..=100 {
                receiver.provide(128, 2048);
                receiver.kick();
                if round % 8 == 0 {
                    eventually("a frame", || {
                        let frames = receiver.received();
                        got += frames.len();
                        !frames.is_empty()
                    });
                }
                let began = Instant::now();
                receiver.stop();
                slowest = slowest.max(began.elapsed());
                let used = receiver.rx.read_u16(receiver.rx.used() + 2);
                receiver.wipe();
                thread::sleep(Duration::from_micros(50));
                assert_eq!(receiver.rx.read_u16(receiver.rx.used() + 2), used, "a used ring after a stop");
                assert!(receiver.is_wiped(), "a buffer after a stop");
                receiver.reset();
                receiver.start(FEATURES);
            }
            stop.store(true, Ordering::Release);
            slowest
        });
        assert!(got > 0);
        // It waits for one frame; the rest is the machine's delay.
        assert!(slowest < Duration::from_secs(30), "{slowest:?}");
    }
}

#[test]
fn a_port_resumes_where_it_was_after_a_stop_without_reset() {
    let mut lan = Lan::running(&Config::closed(3));
    for round in 0..20 {
        lan.nics[1].send(&frame(mac(1), mac(2), 64 + round));
        lan.nics[1].stop();
        lan.nics[2].stop();
        lan.nics[2].start(FEATURES);
        lan.nics[1].start(FEATURES);
    }
    let lens: Vec<_> = lan.nics[2].received().iter().map(Vec::len).collect();
    assert_eq!(lens, (64..84).collect::<Vec<_>>());
}

/// Ports stop and resume one after the other, and frames that wait in their rings are for each other.
#[test]
fn frames_wait_until_all_ports_are_back() {
    for (first, last) in [(1, 2), (2, 1)] {
        let mut lan = Lan::running(&Config::closed(3));
        for round in 0..20 {
            lan.nics[0].net.hold_frames(true);
            lan.nics[1].queue(&frame(mac(1), mac(2), 64 + round));
            lan.nics[1].kick();
            lan.nics[first].stop();
            thread::sleep(Duration::from_millis(2));
            lan.nics[last].stop();
            lan.nics[1].queue(&frame(mac(1), mac(2), 164 + round));
            lan.nics[first].start(FEATURES);
            thread::sleep(Duration::from_millis(2));
            lan.nics[last].start(FEATURES);
            lan.nics[0].net.hold_frames(false);
            lan.nics[1].wait_sent(2);
            let mut lens = Vec::new();
            eventually("both frames", || {
                lens.extend(lan.nics[2].received().iter().map(Vec::len));
                lens.len() == 2
            });
            assert_eq!(lens, [64 + round, 164 + round]);
        }
        assert_eq!(lan.count(1, Counter::TxUnknown), 0);
    }
}

#[test]
fn idle_ports_cost_no_thread_and_open_ones_none_but_the_workers() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("idle_sw")).count()
    };
    let mut lan = Lan::new(&Config { id: "idle", workers: 2, ..Config::closed(5) });
    assert_eq!(threads(), 0);
    lan.nics.iter_mut().for_each(|nic| nic.start(FEATURES));
    // The threads have their names once they run.
    eventually("two workers", || threads() == 2);
    drop(lan);
    // A joined thread may be listed for a moment.
    eventually("the workers' end", || threads() == 0);
}

#[test]
fn an_invalid_ring_ends_and_the_others_continue() {
    let mut lan = Lan::running(&Config::closed(4));
    // More chains than the queue has.
    lan.nics[2].rx.set_avail_index(0x4000);
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert!(lan.nics[2].interrupts.needs_reset());
    assert_eq!(lan.count(2, Counter::BrokenRings), 1);
    lan.nics[1].send(&frame(mac(1), mac(3), 64));
    assert_eq!(lan.nics[3].received().len(), 1);
    lan.nics[3].tx.set_avail_index(0x4000);
    lan.nics[3].kick();
    eventually("a request for a reset", || lan.nics[3].interrupts.needs_reset());
    lan.nics[1].send(&frame(mac(1), mac(3), 64));
    assert_eq!(lan.nics[3].received().len(), 1, "it still receives");
}

#[test]
fn a_nic_that_is_gone_leaves_its_port_to_another() {
    let mut lan = Lan::running(&Config::closed(3));
    lan.nics.pop();
    lan.settle();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!(lan.count(1, Counter::TxUnknown) + lan.count(1, Counter::TxFrames), 1);
    let port = lan.switch.port(2).unwrap();
    assert_eq!(format!("{port:?}"), "PortHandle(\"pf0\")");
    assert!(lan.switch.port(3).is_none());
    assert!(lan.nics[1].net.features() > 0);
}

/// Each receiver gets the frames of each sender in their order, and none twice, for any number of workers.
#[test]
fn frames_of_a_sender_stay_in_order_with_several_workers() {
    const FRAMES: u32 = 2000;
    let mut lan = Lan::running(&Config { workers: 3, ..Config::closed(4) });
    let mut seen = [[None::<u32>; 4]; 4];
    let (mut sent, mut done) = ([0; 4], [0; 4]);
    let mut arrived = 0;
    eventually("all frames", || {
        for port in 0..4_u16 {
            let at = usize::from(port);
            let nic = &mut lan.nics[at];
            done[at] += nic.tx.take_used().len() as u32;
            while sent[at] < FRAMES && sent[at] - done[at] < 48 {
                let to = (port + 1 + (sent[at] % 3) as u16) % 4;
                let mut frame = frame(mac(port), mac(to), 200);
                frame[20..24].copy_from_slice(&sent[at].to_le_bytes());
                nic.queue(&frame);
                sent[at] += 1;
            }
            for frame in nic.received() {
                let number = u32::from_le_bytes([frame[20], frame[21], frame[22], frame[23]]);
                let last = seen[at][usize::from(frame[11])].replace(number);
                assert!(last.is_none_or(|last| last < number), "{last:?} before {number}");
                arrived += 1;
            }
            nic.kick();
        }
        done == [FRAMES; 4]
    });
    // A missing frame is counted: a slow driver has no buffers for a while.
    arrived += lan.nics.iter_mut().map(|nic| nic.received().len()).sum::<usize>();
    let lost: u64 =
        (0..4).map(|port| lan.count(port, Counter::RxNoBuffers) + lan.count(port, Counter::RxCongested)).sum();
    assert_eq!(arrived as u64 + lost, 4 * u64::from(FRAMES));
    assert!(arrived > 1000, "{arrived}");
}

/// Frames of a sender's queue stay in one receive queue, among those that the driver uses.
#[test]
fn frames_of_one_sender_stay_in_one_queue_of_a_two_pair_port() {
    let mut lan = Lan::new(&Config { pairs: 2, ..Config::closed(3) });
    lan.nics[0].start(FEATURES);
    lan.nics[1].start(FEATURES | 1 << VIRTIO_NET_F_MQ);
    lan.nics[2].start(FEATURES | 1 << VIRTIO_NET_F_MQ);
    lan.nics[2].provide(64, 2048);
    let at = lan.nics[2].send_area() + (7 << 20);
    let [second, _] = &mut lan.nics[2].further[0];
    (0..16).for_each(|i| _ = second.add(&[(at + i * 2048, 2048, WRITE)]));
    lan.settle();
    let got = |lan: &mut Lan| {
        let [second, _] = &mut lan.nics[2].further[0];
        let second = second.take_used().len();
        (lan.nics[2].received().len(), second)
    };
    let send = |lan: &mut Lan| {
        (0..3).for_each(|_| lan.nics[0].send(&frame(mac(0), mac(2), 64)));
        (0..2).for_each(|_| lan.nics[1].send(&frame(mac(1), mac(2), 64)));
    };
    send(&mut lan);
    assert_eq!(got(&mut lan), (5, 0), "one pair until the driver says so");
    assert_eq!(lan.nics[2].command(&[VIRTIO_NET_CTRL_MQ as u8, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8, 2, 0]), 0);
    send(&mut lan);
    assert_eq!(got(&mut lan), (3, 2));
    // This includes its second transmit queue.
    let at = lan.nics[1].send_area() + (7 << 20);
    let data = [&[0; 12][..], &frame(mac(1), mac(2), 64)].concat();
    let [_, transmit] = &mut lan.nics[1].further[0];
    transmit.send(at, &data, &[12]);
    lan.nics[1].kick();
    let [_, transmit] = &mut lan.nics[1].further[0];
    eventually("the frame to be sent", || !transmit.take_used().is_empty());
    assert_eq!(got(&mut lan), (1, 0));
}
