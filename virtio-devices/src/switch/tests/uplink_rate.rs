//! The traffic of ports to an uplink with a rate, through a worker, in virtual time.

use std::num::NonZeroU32;
use std::time::Duration;

use super::rig::*;
use crate::frames::policy::Policy;
use crate::net::testing::nonzero;
use crate::os::clock;
use crate::os::clock::testing::StoppedClock;
use crate::switch::PortSettings;
use crate::{Counter, DeviceSpecific, VirtioDevice};

/// The delay of a worker after a wait.
const LATE: Duration = Duration::from_micros(60);
/// An address behind the uplink.
const WORLD: [u8; 6] = [0x52, 0x54, 0, 0, 0x99, 1];
/// The counters that do not count a loss.
const HARMLESS: [Counter; 6] = [
    Counter::TxFrames,
    Counter::TxBytes,
    Counter::TxFlooded,
    Counter::Kicks,
    Counter::Interrupts,
    Counter::TxRateWaits,
];

/// Makes frames for `to` available at the ports 1 and up, which always have more.
fn refill(lan: &mut Lan, len: usize, to: [u8; 6]) {
    for port in 1..lan.nics.len() as u16 {
        let nic = &mut lan.nics[usize::from(port)];
        let at = nic.send_area();
        nic.tx.memory_write(at, &[&[0; 12], &frame(mac(port), to, len)[..]].concat());
        nic.tx.take_used();
        (nic.tx.outstanding()..usize::from(SIZE)).for_each(|_| nic.queue_again(len as u32 + 12));
        nic.kick();
    }
}

fn guaranteed(min_tx_rate: u32, weight: u8) -> PortSettings {
    PortSettings { min_tx_rate, weight, ..PortSettings::default() }
}

/// The rate of each port except the PF's over `time`, in Mbit/s. All frames arrive.
fn sent(
    lan: &mut Lan,
    worker: &mut crate::switch::worker::SwitchWorker,
    clock: &StoppedClock,
    len: usize,
    time: Duration,
) -> Vec<f64> {
    let bytes =
        |lan: &Lan| (1..lan.nics.len() as u16).map(|port| lan.count(port, Counter::TxBytes)).collect::<Vec<_>>();
    let (before, start) = (bytes(lan), clock::now());
    let all = |lan: &Lan| (1..lan.nics.len() as u16).map(|port| lan.count(port, Counter::TxFrames)).sum::<u64>();
    let (mut arrived, first) = (0, all(lan));
    while clock::now() < start + time {
        refill(lan, len, WORLD);
        worker.step(Some(Duration::ZERO));
        arrived += lan.at_uplink().len() as u64;
        clock.advance(worker.timeout(None).unwrap_or_default().max(Duration::from_micros(1)) + LATE);
    }
    assert_eq!(arrived, all(lan) - first);
    for nic in &lan.nics[1..] {
        let others = nonzero(&nic.net.counters()).into_iter().filter(|(counter, _)| !HARMLESS.contains(counter));
        assert_eq!(others.collect::<Vec<_>>(), []);
    }
    let passed = (clock::now() - start).as_secs_f64();
    before.iter().zip(bytes(lan)).map(|(before, after)| (after - before) as f64 * 8e-6 / passed).collect()
}

/// Three VFs on an uplink of `rate` Mbit/s, which have used up the initial content of the buckets.
fn lan(rate: u32) -> (Lan, crate::switch::worker::SwitchWorker) {
    let (lan, worker) = Lan::stepped_at(4, NonZeroU32::new(rate));
    let shares = lan.switch.0.core().shares().unwrap();
    while shares.lock().limited_for(3).is_none() {
        shares.lock().take(3, 1000);
    }
    (lan, worker)
}

#[test]
fn ports_get_guarantees_and_weighted_rest_without_loss() {
    let clock = StoppedClock::new();
    for len in [1514, 40_000] {
        let (mut lan, mut worker) = lan(1000);
        let ports = [(1, guaranteed(500, 10)), (2, guaranteed(100, 10)), (3, guaranteed(0, 20))];
        lan.switch.set_ports(ports).wait().unwrap();
        let time = Duration::from_millis(100);
        sent(&mut lan, &mut worker, &clock, len, time / 10);
        let found = sent(&mut lan, &mut worker, &clock, len, time);
        println!("{len} bytes: {found:.1?}");
        for (found, expected) in found.iter().zip([600.0, 200.0, 200.0]) {
            assert!((found / expected - 1.0_f64).abs() < 0.02, "{len}: {found} of {expected}");
        }
        // A reset does not change it.
        lan.nics[1].reset();
        lan.nics[1].start(FEATURES);
        lan.settle();
        sent(&mut lan, &mut worker, &clock, len, time / 10);
        let found = sent(&mut lan, &mut worker, &clock, len, time);
        assert!((found[0] / 600.0 - 1.0).abs() < 0.02, "{len}: {found:?} after a reset");
        // A change by the host applies to the next frame.
        lan.switch.set_port(3, guaranteed(400, 20)).wait().unwrap();
        let found = sent(&mut lan, &mut worker, &clock, len, time);
        for (found, expected) in found.iter().zip([500.0, 100.0, 400.0]) {
            assert!((found / expected - 1.0_f64).abs() < 0.02, "{len}: {found} of {expected}");
        }
    }
}

#[test]
fn traffic_between_ports_is_no_part_of_the_uplinks_rate() {
    let _clock = StoppedClock::new();
    let (mut lan, mut worker) = lan(10);
    lan.nics[2].provide(u64::from(SIZE), 2048);
    refill(&mut lan, 1514, mac(2));
    for _ in 0..20 {
        worker.step(Some(Duration::ZERO));
    }
    assert_eq!(lan.count(2, Counter::RxFrames), u64::from(SIZE), "all of its buffers");
    assert_eq!(lan.count(1, Counter::TxRateWaits) + lan.count(3, Counter::TxRateWaits), 0);
}

/// A broadcast that waits for the uplink is copied to others, and counted by its limits, once.
#[test]
fn a_broadcast_waits_as_a_whole() {
    let clock = StoppedClock::new();
    let (mut lan, mut worker) = lan(1);
    let storm = NonZeroU32::new(3);
    lan.nics[1].set_policy(Policy { storm, ..untrusted() });
    lan.switch.set_port(1, PortSettings { mirror: Some(0), ..PortSettings::default() }).wait().unwrap();
    (0..3).for_each(|port| lan.nics[port].provide(16, 2048));
    (0..3).for_each(|_| lan.nics[1].queue(&frame(mac(1), BROADCAST, 1000)));
    lan.nics[1].kick();
    let mut at_uplink = 0;
    for _ in 0..20 {
        worker.step(Some(Duration::ZERO));
        at_uplink += lan.at_uplink().len();
        assert_eq!(lan.nics[2].received().len(), std::mem::take(&mut at_uplink), "no port has it before the others");
        clock.advance(Duration::from_millis(5));
    }
    assert_eq!((lan.count(1, Counter::TxFrames), lan.count(1, Counter::StormDropped)), (3, 0));
    // The copies are the broadcast's own, and the mirror's.
    assert_eq!(lan.nics[0].received().len(), 6);
    assert!(lan.count(1, Counter::TxRateWaits) > 2);
}

#[test]
fn link_speed_is_the_own_limit_or_that_of_the_uplink() {
    let speed = |lan: &Lan, port: usize| {
        let mut speed = [0; 4];
        lan.nics[port].net.config_read(12, &mut speed);
        u32::from_le_bytes(speed)
    };
    let (mut lan, _worker) = lan(800);
    assert_eq!([0, 1, 2].map(|port| speed(&lan, port)), [800; 3]);
    lan.nics[1].set_policy(Policy { max_tx_rate: NonZeroU32::new(90), ..untrusted() });
    assert_eq!([0, 1, 2].map(|port| speed(&lan, port)), [800, 90, 800]);
    lan.nics[1].set_policy(untrusted());
    assert_eq!(speed(&lan, 1), 800);
    let (without, _worker) = Lan::stepped(4);
    assert_eq!(speed(&without, 1), 10_000);
}

#[test]
fn uplink_debt_is_saved_and_refused_without_a_rate() {
    let _clock = StoppedClock::new();
    let (mut old, mut worker) = lan(10);
    refill(&mut old, 1514, WORLD);
    worker.step(Some(Duration::ZERO));
    let DeviceSpecific::Net(state) = old.nics[3].net.save() else { panic!("it owes something") };
    assert!(state.buckets.uplink.is_some());
    let saved = DeviceSpecific::Net(state);
    let (mut new, _) = lan(10);
    new.nics[3].stop();
    new.nics[3].net.restore(&saved, None).unwrap();
    assert_eq!(new.nics[3].net.save(), saved);
    let (mut without, _) = Lan::stepped(4);
    without.nics[3].stop();
    assert!(without.nics[3].net.restore(&saved, None).is_err());
}
