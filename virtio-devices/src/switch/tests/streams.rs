//! Doorbells and interrupts of drivers like Linux's, on a machine with one processor that the worker preempts at each
//! doorbell. In virtual time.

use std::time::Duration;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::rig::*;
use crate::Counter;
use crate::os::clock::testing::StoppedClock;
use crate::switch::worker::SwitchWorker;

/// The time in which a program sends a frame.
const SENDS: Duration = Duration::from_micros(6);

/// A switch and the events at it.
struct Machine {
    lan: Lan,
    worker: SwitchWorker,
    clock: StoppedClock,
    /// By port: frames sent, the doorbells for them, and frames that the driver has seen to be sent.
    sent: [u16; 3],
    doorbells: [u32; 3],
    reaped: [u16; 3],
    received: [u16; 3],
}

impl Machine {
    fn new() -> Self {
        Self::with(FEATURES | 1 << VIRTIO_RING_F_EVENT_IDX)
    }

    fn with(features: u64) -> Self {
        let clock = StoppedClock::new();
        let (mut lan, worker) = Lan::stepped_with(3, 1, features);
        for port in [1, 2] {
            lan.nics[port].provide(u64::from(SIZE) - 1, 2048);
            lan.nics[port].kick();
        }
        let none = [0; 3];
        let mut new = Self { lan, worker, clock, sent: none, doorbells: [0; 3], reaped: none, received: none };
        new.run();
        new
    }

    /// Runs the worker until it waits.
    fn run(&mut self) {
        self.worker.step(Some(Duration::ZERO));
        while self.worker.timeout(None) == Some(Duration::ZERO) {
            self.worker.step(Some(Duration::ZERO));
        }
    }

    /// Lets time pass, in which the worker runs when its wait is over.
    fn pass(&mut self, time: Duration) {
        let mut left = time;
        while let Some(wait) = self.worker.timeout(None).filter(|wait| *wait <= left) {
            self.clock.advance(wait);
            left -= wait;
            self.run();
        }
        self.clock.advance(left);
    }

    /// Does what Linux does before it sends and when it receives: reaps sent frames, and requests an interrupt after
    /// three quarters of the rest.
    fn reap(&mut self, port: usize) {
        let tx = &mut self.lan.nics[port].tx;
        self.reaped[port] = self.reaped[port].wrapping_add(tx.take_used().len() as u16);
        let rest = self.sent[port].wrapping_sub(self.reaped[port]);
        tx.set_used_event(self.reaped[port].wrapping_add(rest * 3 / 4));
    }

    fn send(&mut self, from: u16, to: u16) {
        let port = usize::from(from);
        self.reap(port);
        self.lan.nics[port].queue(&frame(mac(from), mac(to), 64));
        self.sent[port] = self.sent[port].wrapping_add(1);
        if self.lan.nics[port].tx.avail_event() == self.sent[port].wrapping_sub(1) {
            self.doorbells[port] += 1;
            self.lan.nics[port].kick();
            self.run();
        }
    }

    /// Handles the driver's interrupt: takes the frames that have arrived. Returns their number.
    fn receive(&mut self, port: usize) -> usize {
        self.reap(port);
        let count = self.lan.nics[port].received().len();
        self.received[port] = self.received[port].wrapping_add(count as u16);
        self.lan.nics[port].rx.set_used_event(self.received[port]);
        count
    }

    fn interrupts(&self, port: u16) -> u64 {
        self.lan.count(port, Counter::Interrupts)
    }
}

#[test]
fn a_stream_of_single_frames_costs_few_doorbells_and_interrupts() {
    const FRAMES: u64 = 1000;
    let mut machine = Machine::new();
    let mut longest = Duration::ZERO;
    let mut waiting = Duration::ZERO;
    for _ in 0..FRAMES {
        machine.send(1, 2);
        machine.pass(SENDS);
        waiting = if machine.receive(2) > 0 { Duration::ZERO } else { waiting + SENDS };
        longest = longest.max(waiting);
    }
    machine.pass(Duration::from_millis(1));
    machine.receive(2);
    let (doorbells, told, interrupts) = (machine.doorbells[1], machine.interrupts(1), machine.interrupts(2));
    println!("{FRAMES} frames: {doorbells} doorbells, {told} interrupts at the sender, {interrupts} at the receiver");
    println!("the longest wait: {longest:?}");
    assert_eq!(machine.lan.count(2, Counter::RxFrames), FRAMES);
    assert!(u64::from(doorbells) <= FRAMES / 100 && told <= FRAMES / 100, "{doorbells} {told}");
    assert!(interrupts <= FRAMES / 4, "{interrupts}");
    assert!(longest <= Duration::from_micros(110), "{longest:?}");
    // The driver rings again for later frames.
    let before = machine.doorbells[1];
    machine.pass(Duration::from_secs(1));
    machine.send(1, 2);
    assert_eq!((machine.doorbells[1], machine.receive(2)), (before + 1, 1));
}

#[test]
fn request_and_reply_pass_at_once_and_interrupt_only_receivers() {
    const ROUNDS: u64 = 500;
    let mut machine = Machine::new();
    for _ in 0..ROUNDS {
        for (from, to) in [(1, 2), (2, 1)] {
            machine.pass(5 * SENDS);
            machine.send(from, to);
            assert_eq!(machine.receive(usize::from(to)), 1);
        }
    }
    machine.pass(Duration::from_millis(1));
    let interrupts = [1, 2].map(|port| machine.interrupts(port));
    println!("{ROUNDS} rounds: {:?} doorbells, {interrupts:?} interrupts", &machine.doorbells[1..]);
    assert_eq!(machine.doorbells[1..], [500, 500]);
    // The last answer is followed by nothing.
    assert!(interrupts.iter().sum::<u64>() <= 2 * ROUNDS + 1, "{interrupts:?}");
}

#[test]
fn driver_awaiting_tx_completion_is_interrupted_within_250_us() {
    let mut machine = Machine::new();
    machine.send(1, 2);
    assert_eq!(machine.lan.nics[1].tx.take_used().len(), 1, "its buffer is given back at once");
    machine.pass(Duration::from_micros(249));
    assert_eq!(machine.interrupts(1), 0);
    machine.pass(Duration::from_micros(1));
    assert_eq!(machine.interrupts(1), 1);
    machine.pass(Duration::from_millis(10));
    assert_eq!(machine.interrupts(1), 1);
}

#[test]
fn driver_without_event_idx_gets_tx_interrupts_at_once() {
    let mut machine = Machine::with(FEATURES);
    machine.lan.nics[1].queue(&frame(mac(1), mac(2), 64));
    machine.lan.nics[1].kick();
    machine.run();
    assert_eq!(machine.interrupts(1), 1);
}

#[test]
fn a_driver_whose_port_stops_is_told_before() {
    let mut machine = Machine::new();
    machine.send(1, 2);
    assert_eq!(machine.interrupts(1), 0);
    machine.lan.nics[1].stop();
    assert_eq!(machine.interrupts(1), 1);
    assert!(machine.lan.nics[1].interrupts.eventfd(1).unwrap().read().is_ok());
}

/// TCP waits for the return of sent buffers before it sends much more.
#[test]
fn a_driver_that_has_sent_much_is_told_at_once() {
    let mut machine = Machine::new();
    let nic = &mut machine.lan.nics[1];
    nic.queue_raw(&[&[0; 12], &frame(mac(1), mac(2), 60 << 10)[..]].concat(), &[12]);
    nic.queue_again((60 << 10) + 12);
    nic.queue_again((60 << 10) + 12);
    nic.kick();
    machine.run();
    assert_eq!(machine.interrupts(1), 1);
}
