//! Rings that are made to cost as much as they can, beside honest ports.

use std::time::{Duration, Instant};

use super::fairness::{LEN, provide, refill};
use super::rig::*;
use crate::Counter;
use crate::net::testing::WRITE;

/// Flags of a descriptor.
const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

/// The hostile pair.
const SENDER: u16 = 5;
const TAKER: u16 = 6;

/// Writes a table of `count` descriptors without a byte and one of `last` bytes, where the port's own frames do not
/// lie. Returns the descriptor that refers to it.
fn table(nic: &Nic, count: u16, last: u32, flags: u16) -> (u64, u32, u16) {
    let (at, data) = (nic.send_area() + (1 << 20), nic.send_area() + (2 << 20));
    for index in 0..count {
        nic.tx.set_descriptor(at, index, (data, 0, flags | NEXT, index + 1));
    }
    nic.tx.set_descriptor(at, count, (data, last, flags, 0));
    (at, 16 * (u32::from(count) + 1), INDIRECT)
}

/// The attack of a hostile pair beside the ports 1 and 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attack {
    /// What the others do.
    None,
    /// A receiver's chains of 1,021 empty descriptors and one of 12 bytes, which are too short for a frame.
    Receive,
    /// A sender's chains of as many, before a frame.
    Transmit,
}

impl Attack {
    fn prepare(self, lan: &mut Lan) {
        match self {
            Self::None => provide(lan, TAKER),
            Self::Receive => {
                let nic = &mut lan.nics[usize::from(TAKER)];
                let chain = table(nic, 1021, 12, WRITE);
                (nic.rx.outstanding()..126).for_each(|_| _ = nic.rx.add(&[chain]));
            }
            Self::Transmit => provide(lan, TAKER),
        }
    }

    fn send(self, lan: &mut Lan) {
        if self != Self::Transmit {
            return refill(lan, SENDER, mac(TAKER));
        }
        let nic = &mut lan.nics[usize::from(SENDER)];
        let chain = table(nic, 1021, LEN as u32 + 12, 0);
        let data = nic.send_area() + (2 << 20);
        nic.tx.memory_write(data, &[&[0; 12], &frame(mac(SENDER), mac(TAKER), LEN)[..]].concat());
        nic.tx.take_used();
        (nic.tx.outstanding()..usize::from(SIZE)).for_each(|_| _ = nic.tx.add(&[chain]));
        nic.kick();
    }
}

#[test]
#[ignore = "measures this machine"]
fn frames_a_second_beside_a_hostile_pair() {
    for attack in [Attack::None, Attack::Receive, Attack::Transmit] {
        let (mut lan, mut worker) = Lan::stepped(8);
        let (mut took, mut longest, mut steps) = (Duration::ZERO, Duration::ZERO, 0);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(4) {
            refill(&mut lan, 1, mac(2));
            provide(&mut lan, 2);
            attack.prepare(&mut lan);
            attack.send(&mut lan);
            let before = Instant::now();
            worker.step(Some(Duration::ZERO));
            let step = before.elapsed();
            (took, longest, steps) = (took + step, longest.max(step), steps + 1);
        }
        let frames = lan.count(1, Counter::TxFrames);
        let second = frames as f64 / took.as_secs_f64();
        println!("{attack:?}: {second:.0} frames/s, {steps} steps, {:?} on average, {longest:?} at most", took / steps);
    }
}
