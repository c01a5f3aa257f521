//! Receivers without buffers, and senders that compete.

use std::time::{Duration, Instant};

use super::rig::*;
use crate::os::clock::testing::StoppedClock;
use crate::switch::PortSettings;
use crate::testing::driver_queue::eventually;
use crate::{Counter, HostNic};

#[test]
fn a_frame_waits_for_buffers_that_come_soon() {
    let (mut lan, mut worker) = Lan::stepped(3);
    // The frame waits a millisecond, and so may be lost on a busy machine.
    eventually("a frame that has waited", || {
        lan.nics[1].queue(&frame(mac(1), mac(2), 64));
        lan.nics[1].kick();
        worker.step(Some(Duration::ZERO));
        let waits = lan.nics[1].tx.take_used().is_empty();
        lan.nics[2].provide(1, 2048);
        lan.nics[2].kick();
        worker.step(Some(Duration::ZERO));
        let arrived = lan.nics[2].received_raw().len();
        if waits && arrived == 1 {
            return true;
        }
        // Once it was given up, it needs more than one buffer before frames wait for it again.
        lan.nics[2].provide(40, 2048);
        for _ in 0..40 {
            lan.nics[1].queue(&frame(mac(1), mac(2), 64));
        }
        lan.nics[1].kick();
        worker.step(Some(Duration::ZERO));
        lan.nics[1].tx.take_used();
        lan.nics[2].received_raw();
        false
    });
    assert_eq!(lan.nics[1].tx.take_used().len(), 1);
}

#[test]
fn bufferless_receiver_delays_its_sender_one_millisecond_once() {
    let mut lan = Lan::running(&Config::closed(4));
    lan.nics[3].reset();
    lan.nics[3].start(FEATURES);
    lan.settle();
    let began = Instant::now();
    for _ in 0..200 {
        lan.nics[1].send(&frame(mac(1), mac(3), 64));
    }
    let [waited, at_once] = [Counter::RxNoBuffers, Counter::RxCongested].map(|counter| lan.count(3, counter));
    // Each second later, if the machine is so slow, one waits again.
    let most = 2 + began.elapsed().as_secs();
    assert!(waited + at_once == 200 && (1..=most).contains(&waited), "{waited} {at_once}");
    lan.nics[3].provide(64, 2048);
    lan.nics[1].send(&frame(mac(1), mac(3), 64));
    assert_eq!(lan.nics[3].received().len(), 1);
}

/// A receiver that provides one buffer at a time cannot delay its senders again and again.
#[test]
fn a_receiver_with_few_buffers_is_not_waited_for() {
    let clock = StoppedClock::new();
    let (mut lan, mut worker) = Lan::stepped(4);
    lan.nics[2].provide(200, 2048);
    let mut step = |lan: &mut Lan| {
        lan.nics[1].queue(&frame(mac(1), mac(3), 64));
        lan.nics[1].queue(&frame(mac(1), mac(2), 64));
        lan.nics[1].kick();
        worker.step(Some(Duration::ZERO));
        lan.nics[1].tx.take_used().len()
    };
    assert_eq!(step(&mut lan), 0, "the first frame waits");
    clock.advance(Duration::from_millis(2));
    assert_eq!(step(&mut lan), 4);
    for _ in 0..20 {
        lan.nics[3].provide(1, 2048);
        assert_eq!((step(&mut lan), step(&mut lan)), (2, 2));
    }
    assert_eq!((lan.nics[3].received_raw().len(), lan.nics[2].received_raw().len()), (20, 42));
    lan.nics[3].provide(40, 2048);
    assert_eq!(step(&mut lan), 2);
    lan.nics[3].received_raw();
    (0..39).for_each(|_| assert_eq!(step(&mut lan), 2));
    assert_eq!(step(&mut lan), 2, "all of its time for this second has gone");
    lan.nics[3].provide(31, 2048);
    (0..32).for_each(|_| assert_eq!(step(&mut lan), 2));
    // Its ring may be too small for more: 31 buffers at once are too few for a wait in the same second.
    clock.advance(Duration::from_secs(1));
    assert_eq!(step(&mut lan), 0, "it is waited for again");
    clock.advance(Duration::from_millis(2));
    assert_eq!(step(&mut lan), 4);
    assert_eq!(step(&mut lan), 2, "once in a second");
}

#[test]
fn a_wait_that_ended_with_its_sender_is_none_of_the_next() {
    let clock = StoppedClock::new();
    let (mut lan, mut worker) = Lan::stepped(4);
    let mut send = |lan: &mut Lan, port: u16| {
        let nic = &mut lan.nics[usize::from(port)];
        nic.queue(&frame(mac(port), mac(3), 64));
        nic.kick();
        worker.step(Some(Duration::ZERO));
        lan.nics[usize::from(port)].tx.take_used().len()
    };
    assert_eq!(send(&mut lan, 1), 0);
    lan.nics[1].reset();
    clock.advance(Duration::from_millis(5));
    assert_eq!(send(&mut lan, 2), 0, "it waits as if there had been no other");
    clock.advance(Duration::from_millis(2));
    assert_eq!(send(&mut lan, 2), 2);
}

/// The 16 invalid buffers of one frame do not affect the next.
#[test]
fn buffers_behind_many_bad_ones_are_found_by_the_next_frame() {
    let (mut lan, mut worker) = Lan::stepped(3);
    let buffer = lan.nics[2].send_area();
    (0..16).for_each(|_| _ = lan.nics[2].rx.add(&[(buffer, 2048, 0)]));
    lan.nics[2].provide(4, 2048);
    (0..3).for_each(|_| lan.nics[1].queue(&frame(mac(1), mac(2), 64)));
    lan.nics[1].kick();
    worker.step(Some(Duration::ZERO));
    let counts = [Counter::RxBadChains, Counter::RxTooLong, Counter::RxFrames].map(|counter| lan.count(2, counter));
    assert_eq!(counts, [16, 1, 2]);
}

/// A receiver that provides a buffer just before each frame would be given up.
#[test]
fn a_trickle_of_buffers_is_waited_for_a_millisecond_a_second() {
    let clock = StoppedClock::new();
    let (mut lan, mut worker) = Lan::stepped(4);
    let (mut waits, mut given) = (0, 0);
    for _ in 0..200 {
        lan.nics[2].provide(1, 2048);
        lan.nics[1].queue(&frame(mac(1), mac(3), 64));
        lan.nics[1].queue(&frame(mac(1), mac(2), 64));
        lan.nics[1].kick();
        worker.step(Some(Duration::ZERO));
        let done = lan.nics[1].tx.take_used().len();
        if done == 0 {
            waits += 1;
            clock.advance(Duration::from_micros(990));
            lan.nics[3].provide(1, 2048);
            lan.nics[3].kick();
            worker.step(Some(Duration::ZERO));
            given += lan.nics[1].tx.take_used().len();
        }
        given += done;
    }
    // The second wait was for the rest of the millisecond, in which the test's clock made a longer step.
    assert_eq!((waits, given, lan.count(2, Counter::RxFrames)), (2, 400, 200));
}

/// A frame for many ports costs more than a batch may. It continues in the next, and each receiver gets it once.
#[test]
fn a_flood_of_a_long_frame_is_divided_and_reaches_all_once() {
    const PORTS: u16 = 16;
    let (mut lan, mut worker) = Lan::stepped(PORTS);
    lan.nics.iter_mut().for_each(|nic| nic.provide(64, 2048));
    let long = frame(mac(1), BROADCAST, 60_000);
    lan.nics[1].queue(&long);
    lan.nics[1].kick();
    crate::memory::effort::counted::take_longest();
    let mut steps = 0;
    while lan.nics[1].tx.take_used().is_empty() {
        worker.step(Some(Duration::ZERO));
        steps += 1;
        assert!(steps < 100);
    }
    let longest = crate::memory::effort::counted::take_longest();
    println!("{steps} steps, {longest} ns at most");
    assert!(steps > 2 && longest <= 200_000, "{steps} steps, {longest} ns");
    for port in (0..PORTS).filter(|port| *port != 1) {
        assert_eq!(lan.nics[usize::from(port)].received(), std::slice::from_ref(&long), "{port}");
    }
    assert_eq!(lan.count(1, Counter::TxFrames), 1);
}

/// Ports of a flood that has reached some of them.
fn half_flooded(ports: u16) -> (Lan, crate::switch::worker::SwitchWorker, Vec<u8>) {
    let (mut lan, mut worker) = Lan::stepped(ports);
    lan.nics.iter_mut().for_each(|nic| nic.provide(64, 2048));
    let long = frame(mac(1), BROADCAST, 60_000);
    lan.nics[1].queue(&long);
    lan.nics[1].kick();
    worker.step(Some(Duration::ZERO));
    assert_eq!(lan.nics[1].tx.take_used(), []);
    (lan, worker, long)
}

#[test]
fn a_divided_flood_reaches_all_once_if_a_port_closes() {
    const PORTS: u16 = 16;
    let (mut lan, mut worker, long) = half_flooded(PORTS);
    let mut got: Vec<_> = lan.nics.iter_mut().map(|nic| nic.received().len()).collect();
    let had = got.iter().position(|frames| *frames == 1).unwrap();
    lan.nics[had].reset();
    lan.settle();
    while lan.nics[1].tx.take_used().is_empty() {
        worker.step(Some(Duration::ZERO));
    }
    for (port, nic) in lan.nics.iter_mut().enumerate().filter(|(port, _)| *port != had) {
        let more = nic.received();
        assert!(more.iter().all(|frame| *frame == long));
        got[port] += more.len();
    }
    got.remove(1);
    assert_eq!(got, [1; PORTS as usize - 1]);
}

#[test]
fn a_divided_flood_that_may_go_to_one_alone_is_not_repeated() {
    let (mut lan, mut worker, _) = half_flooded(16);
    // The PF has it, and is the only one to which the port may send now.
    assert_eq!(lan.nics[0].received().len(), 1);
    let others: usize = lan.nics[2..].iter_mut().map(|nic| nic.received().len()).sum();
    drop(lan.switch.set_port(1, PortSettings { isolated: true, ..PortSettings::default() }));
    while lan.nics[1].tx.take_used().is_empty() {
        worker.step(Some(Duration::ZERO));
    }
    assert!(lan.nics.iter_mut().all(|nic| nic.received().is_empty()));
    assert!(others < 14, "the flood was divided");
    assert_eq!(lan.count(1, Counter::TxFrames), 1);
}

#[test]
fn a_divided_flood_ends_when_its_port_stops() {
    let (mut lan, _worker, _) = half_flooded(16);
    lan.nics[1].stop();
    // The driver has it back, so that no later start repeats it for those who have it.
    assert_eq!((lan.nics[1].tx.take_used().len(), lan.count(1, Counter::TxFrames)), (1, 1));
}

#[test]
fn a_flood_from_the_uplink_is_divided_and_reaches_all_once() {
    let mut lan = Lan::running(&Config::open(16));
    let long = frame([2; 6], BROADCAST, 60_000);
    lan.send_from_uplink(&long);
    lan.send_from_uplink(&frame([2; 6], BROADCAST, 60));
    for nic in &mut lan.nics {
        let mut got = Vec::new();
        eventually("both frames", || {
            got.extend(nic.received());
            got.len() >= 2
        });
        assert!(got.len() == 2 && got[0] == long);
    }
}

#[test]
fn a_frame_to_many_ports_waits_for_none() {
    let mut lan = Lan::running(&Config::closed(4));
    lan.nics[3].reset();
    lan.nics[3].start(FEATURES);
    lan.settle();
    (0..10).for_each(|_| lan.nics[1].send(&frame(mac(1), BROADCAST, 64)));
    assert_eq!((lan.nics[2].received().len(), lan.count(3, Counter::RxNoBuffers)), (10, 10));
}

/// The number of frames, of 128 each, that two ports with these weights send in one turn each. Those of the first go to
/// `to`.
fn competing(weights: [u8; 2], to: [u8; 6]) -> [usize; 2] {
    mirrored_competing(weights, to, None)
}

/// The same, with copies of the frames of the first for the port `mirror`.
fn mirrored_competing(weights: [u8; 2], to: [u8; 6], mirror: Option<u16>) -> [usize; 2] {
    // A turn ends by time as well.
    let _clock = StoppedClock::new();
    let (mut lan, mut worker) = Lan::stepped(4);
    lan.nics.iter_mut().for_each(|nic| nic.provide(200, 2048));
    for (port, weight) in [1, 2].into_iter().zip(weights) {
        let mirror = mirror.filter(|_| port == 1);
        lan.switch.set_port(port, PortSettings { weight, mirror, ..PortSettings::default() }).wait().unwrap();
    }
    for (port, to) in [(1, to), (2, mac(0))] {
        let frame = frame(mac(port), to, 1500);
        let nic = &mut lan.nics[usize::from(port)];
        nic.queue(&frame);
        (1..128).for_each(|_| nic.queue_again(1512));
        nic.kick();
    }
    worker.step(Some(Duration::ZERO));
    [1, 2].map(|port| lan.nics[port].tx.take_used().len())
}

#[test]
fn ports_that_compete_send_by_their_weights() {
    let [one, other] = competing([10, 10], mac(3));
    assert_eq!(one, other);
    assert!((64..128).contains(&one), "{one}: more than a batch, and not all");
    let [one, other] = competing([4, 12], mac(3));
    assert!((one * 3).abs_diff(other) <= 3, "{one} {other}");
}

#[test]
fn a_frame_costs_its_sender_as_much_as_it_has_receivers() {
    let [one, other] = competing([10, 10], BROADCAST);
    // The frame has three copies.
    assert!((one * 3).abs_diff(other) <= 3, "{one} {other}");
}

#[test]
fn a_mirrored_frame_costs_its_sender_twice_as_much() {
    let [one, other] = mirrored_competing([10, 10], mac(3), Some(0));
    assert!((one * 2).abs_diff(other) <= 2, "{one} {other}");
}

#[test]
fn a_rate_limit_holds_back_and_loses_nothing() {
    let mut lan = Lan::running(&Config::closed(3));
    let policy = crate::Policy { max_tx_rate: std::num::NonZeroU32::new(10), ..untrusted() };
    lan.nics[1].set_policy(policy);
    // The bucket holds 131,094 bytes. The debt beyond is 160 ms, however slow the machine is, and 16 times 10 frames
    // are 187 ms.
    let (began, mut got) = (Instant::now(), 0);
    lan.nics[1].net.use_up(331_094);
    for _ in 0..16 {
        for _ in 0..10 {
            lan.nics[1].queue(&frame(mac(1), mac(2), 1460));
        }
        lan.nics[1].kick();
        lan.nics[1].wait_sent(10);
        got += lan.nics[2].received().len();
    }
    let took = began.elapsed();
    assert_eq!(got, 160);
    assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(60), "{took:?}");
    assert!(lan.count(1, Counter::TxRateWaits) > 0);
    assert!(lan.nics[1].net.link_up());
}
