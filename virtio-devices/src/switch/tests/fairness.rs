//! The share that others keep while a VF does its worst. Work is counted as ports are charged for it: the bytes of each
//! copy, and a fixed cost of each frame and of each drop. So the figures are the same on every machine.

use std::time::Duration;

use super::rig::*;
use crate::Counter;
use crate::net::testing::nonzero;
use crate::os::clock::testing::StoppedClock;
use crate::switch::tx_batch::FRAME_COST;

/// The length of every frame: that of usual frames.
pub(super) const LEN: usize = 1514;
/// The senders and receivers besides the hostile port.
const HONEST: [(u16, u16); 2] = [(1, 2), (3, 4)];
const HOSTILE: u16 = 5;
/// The port that takes the hostile port's frames, and provides buffers.
const TAKER: u16 = 6;
/// The port that provides no buffers.
const DEAD: u16 = 7;
const TURNS: u64 = 100;

/// The behaviour of the hostile port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attack {
    /// The same as that of the others.
    None,
    /// Full rings, and frames for a port that accepts none.
    FullRings,
    /// Broadcasts to all ports, which have buffers for them.
    Broadcasts,
    /// Broadcasts to all ports, of which only the honest receivers have buffers.
    BroadcastsWithoutBuffers,
    /// Endless commands that each set as many addresses as possible, besides frames like the others'.
    Commands,
    /// Frames whose source it changes all the time.
    Heads,
}

/// Makes frames of a port available that always has some.
pub(super) fn refill(lan: &mut Lan, from: u16, to: [u8; 6]) {
    let nic = &mut lan.nics[usize::from(from)];
    let at = nic.send_area();
    nic.tx.memory_write(at, &[&[0; 12], &frame(mac(from), to, LEN)[..]].concat());
    nic.tx.take_used();
    (nic.tx.outstanding()..usize::from(SIZE)).for_each(|_| nic.queue_again(LEN as u32 + 12));
    nic.kick();
}

/// Makes buffers of a port available that always has some.
pub(super) fn provide(lan: &mut Lan, port: u16) {
    let nic = &mut lan.nics[usize::from(port)];
    nic.rx.take_used();
    let missing = usize::from(SIZE) - nic.rx.outstanding();
    nic.provide(missing as u64, 2048);
}

/// The work of the switch so far, as ports are charged for it.
fn work(lan: &Lan) -> u64 {
    let of = |counter: Counter, count: u64| match counter {
        Counter::RxBytes => count,
        Counter::RxFrames | Counter::RxNoBuffers | Counter::RxCongested | Counter::TxSpoofedMac => {
            count * FRAME_COST as u64
        }
        _ => 0,
    };
    lan.nics.iter().flat_map(|nic| nonzero(&nic.net.counters())).map(|(counter, count)| of(counter, count)).sum()
}

/// The frames that honest ports have sent, and their cost.
fn honest(lan: &Lan) -> [u64; 2] {
    let frames: u64 = HONEST.iter().map(|(from, _)| lan.count(*from, Counter::TxFrames)).sum();
    [frames, frames * (LEN + FRAME_COST) as u64]
}

/// Returns the frames that an honest port sends per turn, the honest ports' share of the work in percent, and the
/// commands that were executed per turn.
fn measure(attack: Attack) -> (f64, f64, f64) {
    let clock = StoppedClock::new();
    let ports = if attack == Attack::Broadcasts || attack == Attack::BroadcastsWithoutBuffers { 64 } else { 8 };
    let (mut lan, mut worker) = Lan::stepped(ports);
    let mut turn = |lan: &mut Lan, number: u64| {
        for (from, to) in HONEST {
            refill(lan, from, mac(to));
            provide(lan, to);
        }
        match attack {
            Attack::None | Attack::Commands => refill(lan, HOSTILE, mac(TAKER)),
            Attack::FullRings => refill(lan, HOSTILE, mac(DEAD)),
            Attack::Broadcasts | Attack::BroadcastsWithoutBuffers => refill(lan, HOSTILE, BROADCAST),
            Attack::Heads => {
                refill(lan, HOSTILE, mac(TAKER));
                let nic = &lan.nics[usize::from(HOSTILE)];
                nic.tx.memory_write(nic.send_area() + 12 + 6, &mac((number % 2) as u16 * HOSTILE));
            }
        }
        if attack == Attack::Commands {
            let addresses: Vec<_> = (0..64).map(|i| [2, 0, 0, 0, number as u8, i]).collect();
            lan.nics[usize::from(HOSTILE)].queue_tables(&addresses);
        }
        if attack == Attack::Broadcasts {
            (0..ports).for_each(|port| provide(lan, port));
        }
        provide(lan, TAKER);
        worker.step(Some(Duration::ZERO));
        // A frame that waits for its receiver is dropped after a millisecond, and a turn takes less.
        clock.advance(Duration::from_micros(100));
    };
    (0..20).for_each(|number| turn(&mut lan, number));
    let commands = |lan: &Lan| {
        [Counter::ControlCommands, Counter::ControlRefused].iter().map(|c| lan.count(HOSTILE, *c)).sum::<u64>()
    };
    let before = (honest(&lan), work(&lan), commands(&lan));
    (0..TURNS).for_each(|number| turn(&mut lan, number));
    let [frames, cost] = [0, 1].map(|what| honest(&lan)[what] - before.0[what]);
    let lost = HONEST.iter().map(|(from, _)| lan.count(*from, Counter::TxSpoofedMac)).sum::<u64>();
    assert_eq!(lost, 0);
    let fair = (work(&lan) - before.1) as f64 * HONEST.len() as f64 / (HONEST.len() + 1) as f64;
    let in_a_turn = |count: u64| count as f64 / TURNS as f64;
    let frames = in_a_turn(frames) / HONEST.len() as f64;
    (frames, cost as f64 * 100.0 / fair, in_a_turn(commands(&lan) - before.2))
}

#[test]
fn other_ports_keep_80_percent_of_their_share_under_attack() {
    let (fair, share, _) = measure(Attack::None);
    println!("{:?}: {fair} frames a turn, {share:.1} %", Attack::None);
    assert!((99.0..101.0).contains(&share), "{share}");
    for attack in
        [Attack::FullRings, Attack::Broadcasts, Attack::BroadcastsWithoutBuffers, Attack::Commands, Attack::Heads]
    {
        let (frames, share, commands) = measure(attack);
        println!("{attack:?}: {frames} frames a turn, {share:.1} % of the share, {commands} commands a turn");
        assert!(frames >= 0.8 * fair && share >= 80.0, "{attack:?}: {frames} of {fair}, {share}");
        assert!(if attack == Attack::Commands { (1.0..=2.0).contains(&commands) } else { commands == 0.0 });
    }
}

/// Compares a sender that sends every other frame to a port without buffers with one whose receivers all have buffers.
#[test]
fn receiver_without_buffers_costs_others_less_than_5_percent() {
    let [with, without] = [DEAD, TAKER].map(|other| {
        let clock = StoppedClock::new();
        let (mut lan, mut worker) = Lan::stepped(8);
        let nic = &mut lan.nics[1];
        let [one, two] = [0, 1 << 16].map(|offset| nic.send_area() + offset);
        nic.tx.memory_write(one, &[&[0; 12], &frame(mac(1), mac(2), LEN)[..]].concat());
        nic.tx.memory_write(two, &[&[0; 12], &frame(mac(1), mac(other), LEN)[..]].concat());
        let mut idle = Duration::ZERO;
        for _ in 0..200 {
            [2, TAKER].iter().for_each(|port| provide(&mut lan, *port));
            let nic = &mut lan.nics[1];
            nic.tx.take_used();
            while nic.tx.outstanding() + 2 <= usize::from(SIZE) {
                [one, two].iter().for_each(|at| _ = nic.tx.add(&[(*at, LEN as u32 + 12, 0)]));
            }
            nic.kick();
            worker.step(Some(Duration::ZERO));
            if let Some(wait) = worker.timeout(None) {
                idle += wait;
                clock.advance(wait);
            }
        }
        println!("{other}: {} frames, {idle:?} idle", lan.count(2, Counter::RxFrames));
        assert!(idle <= Duration::from_millis(1), "{idle:?}");
        lan.count(2, Counter::RxFrames)
    });
    assert!(with * 100 > without * 95, "{with} of {without}");
}
