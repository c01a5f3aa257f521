//! A switch with two hostile ports, whose drivers write anything anywhere in their rings, and two honest ones.
//!
//! Frames that arrive at an honest port must have a source address that one of the others may use, and lie in the
//! buffers that it has provided. The honest ports must reach each other after each step, for any operations of the
//! others, and never get a request for a reset. There may be an uplink with a rate: a frame sent to it has a source
//! address that one of the ports may use, and stays within the rate.

use std::num::NonZeroU32;

use virtio_devices::testing::SwitchSteps;
use virtio_devices::testing::driver_queue::{DriverQueue, WRITE};
use virtio_devices::{GuestMap, NetSpec, Policy};
use vm_memory::{Bytes, GuestAddress};

use crate::input::{Input, Seed};

const SIZE: u16 = 16;
/// The rings and buffers of the hostile drivers lie below.
const HOSTILE: u64 = 0x1_0000;
/// First address of the honest ports' rings and buffers, which hostile descriptors do not reach.
const HONEST: u64 = 0x4_0000;
const END: u64 = 0x8_0000;
/// A ring's room; each port has three.
const RING: u64 = 0x2000;
const AVAILABLE: u64 = 0x400;
/// The buffers of the honest drivers: the sizes of a port's area, and of each buffer.
const BUFFERS: u64 = 0x1_0000;
const BUFFER: u64 = 0x800;

/// The length of a frame's header.
const HEADER: usize = 12;

// Feature bits (`virtio 1.4 §5.1.3`, §6).
const ALWAYS: u64 = 1 << 32 | 1 << 17 | 1 << 18 | 1 << 23;
const OFFLOADS: u64 = 0x7f << 7 | 3;
const MERGED: u64 = 1 << 15;
const EVENT_IDX: u64 = 1 << 29;

/// The longest frame, with its tags and header.
const LONGEST: usize = 0x1_0100;
/// The most that the switch stores for an uplink, as time and as bytes; the larger of the two applies.
const STORE: (f64, f64) = (10e-3, 2.0 * LONGEST as f64);
/// Duration of a turn of the switch, in seconds.
const TURN: f64 = 100e-6;

// The kinds of operation.
const DESCRIPTOR: u8 = 0;
const AVAILABLE_INDEX: u8 = 1;
const MEMORY: u8 = 2;
const SEND: u8 = 3;
const PROVIDE: u8 = 4;
const RUN: u8 = 5;
const KINDS: u8 = 6;

thread_local! {
    /// Created once, because that takes longer than running an input.
    static RAM: GuestMap =
        GuestMap::from_ranges(&[(GuestAddress(0), END as usize)]).expect("memory for a guest");
}

fn put(at: u64, bytes: &[u8]) {
    // Bytes beyond guest memory are ignored.
    RAM.with(|ram| _ = ram.write(bytes, GuestAddress(at)));
}

fn mac(port: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, port]
}

/// Address of a port's queue.
fn place(port: u8, queue: u8) -> u64 {
    let base = if port < 2 { 0 } else { HONEST };
    base + RING * (3 * u64::from(port % 2) + u64::from(queue))
}

/// The driver's side of the receive, the transmit and, of a hostile port, the control queue.
fn queues<const N: usize>(ram: &GuestMap, port: u8) -> [DriverQueue; N] {
    std::array::from_fn(|queue| {
        let at = place(port, queue as u8);
        DriverQueue::at(ram, [at, at + AVAILABLE, at + 0x800], SIZE)
    })
}

fn spec(port: u8) -> NetSpec {
    NetSpec {
        queue_size: SIZE,
        policy: Policy { address: Some(mac(port)), spoof_check: true, trusted: false, ..Policy::default() },
        ..NetSpec::new(&format!("v{port}"), mac(port))
    }
}

/// The honest drivers' side.
struct Honest {
    /// Queues by port.
    queues: [[DriverQueue; 2]; 2],
    reached: u64,
    /// Number of frames received from hostile ports.
    strange: u64,
}

/// Peer behind the uplink.
#[derive(Default)]
struct Beyond {
    /// The uplink's rate in Mbit/s.
    rate: Option<NonZeroU32>,
    turns: u32,
    frames: u64,
    bytes: usize,
}

impl Beyond {
    /// Checks the frames sent to the uplink in a turn.
    fn turn(&mut self, steps: &mut SwitchSteps) {
        let mut room = [0; LONGEST];
        self.turns += 1;
        while let Some(len) = steps.leaves(&mut room) {
            let source = &room[HEADER + 6..HEADER + 12];
            assert!((0..4).any(|port| source == mac(port)), "a spoofed source: {source:x?}");
            self.frames += 1;
            self.bytes += len - HEADER;
        }
        let rate = f64::from(self.rate.map_or(0, NonZeroU32::get)) * 1e6 / 8.0;
        // Each port may exceed its share by one frame.
        let most = rate * TURN * f64::from(self.turns) + STORE.1.max(rate * STORE.0) + 4.0 * LONGEST as f64;
        assert!(self.bytes as f64 <= most, "{} bytes in {} turns at {:?} Mbit/s", self.bytes, self.turns, self.rate);
    }
}

impl Honest {
    fn buffer(port: usize, number: u16) -> u64 {
        HONEST + BUFFERS * (1 + port as u64) + BUFFER * u64::from(number)
    }

    /// Makes the buffer with this number available in the descriptor of the same number.
    fn offer(&mut self, port: usize, queue: usize, number: u16, (len, flags): (u32, u16)) {
        let queue = &mut self.queues[port][queue];
        queue.set_raw(number, (Self::buffer(port, number), len, flags, 0));
        queue.offer(number);
    }

    /// Receives the frames at a port, checks them, and provides the buffers again. Returns true if `expected` was among
    /// them.
    fn receive(&mut self, port: usize, expected: &[u8]) -> bool {
        let (mut found, mut further) = (false, 0_u16);
        while let Some((head, len)) = self.queues[port][0].take_one_used() {
            assert!(head < 8 && u64::from(len) <= BUFFER, "a buffer that was not provided: {head} {len}");
            let got = self.queues[port][0].bytes(Self::buffer(port, head as u16), len as usize);
            // Further buffers of a frame do not begin with a header.
            if further == 0 {
                further = u16::from_le_bytes([got[10], got[11]]);
                let source = &got[HEADER + 6..HEADER + 12];
                let sender = (0..4).find(|sender| source == mac(*sender));
                assert!(sender.is_some_and(|sender| sender != 2 + port as u8), "a spoofed source: {source:x?}");
                self.strange += u64::from(sender.is_some_and(|sender| sender < 2));
                found |= &got[HEADER..] == expected;
            }
            further = further.checked_sub(1).expect("a number of buffers");
            self.offer(port, 0, head as u16, (BUFFER as u32, WRITE));
        }
        assert_eq!(further, 0, "a frame is there as a whole");
        found
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns how often the honest ports reached each other, how many frames of the hostile ones arrived, and
/// how many were sent to the uplink.
fn run_to_end(input: &[u8]) -> (u64, u64, u64) {
    let mut input = Input::new(input);
    let choice = input.u8();
    let on = |bit: u8, features| if choice >> bit & 1 == 1 { features } else { 0 };
    let features = ALWAYS | on(0, OFFLOADS) | on(1, MERGED) | on(2, EVENT_IDX);
    put(0, &[0; END as usize]);
    let ram = RAM.with(Clone::clone);
    let mut hostile: [[DriverQueue; 3]; 2] = [0, 1].map(|port| queues(&ram, port));
    let mut honest = Honest { queues: [2, 3].map(|port| queues(&ram, port)), reached: 0, strange: 0 };
    let ports = hostile.iter().map(|queues| &queues[..]).chain(honest.queues.iter().map(|queues| &queues[..]));
    let ports = (0..).zip(ports).map(|(port, queues)| {
        let queues = (0..).zip(queues).map(|(index, queue)| (index, queue.queue.clone()));
        (spec(port), queues.collect())
    });
    let rate = [None, NonZeroU32::new(1), NonZeroU32::new(100), NonZeroU32::new(10_000)][usize::from(choice >> 6)];
    let mut beyond = Beyond { rate, ..Beyond::default() };
    let mut steps = SwitchSteps::new(&ram, features, rate, ports.collect()).expect("descriptors are left");
    for port in 0..2 {
        (0..8).for_each(|number| honest.offer(port, 0, number, (BUFFER as u32, WRITE)));
    }
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN => check(&mut steps, &mut honest, &mut beyond),
            kind => write(kind, &mut input, &mut hostile),
        }
    }
    (honest.reached, honest.strange, beyond.frames)
}

/// Performs a write of a hostile driver.
fn write(kind: u8, input: &mut Input<'_>, queues: &mut [[DriverQueue; 3]; 2]) {
    let choice = input.u8();
    let (port, queue) = (choice & 1, choice >> 1 & 3);
    let at = place(port, queue.min(2));
    let [receive, transmit, _] = &mut queues[usize::from(port)];
    match kind {
        DESCRIPTOR => {
            let number = u64::from(input.u8() % SIZE as u8);
            // Below the honest drivers' memory, or outside of memory.
            let address = u64::from(input.u16()) | u64::from(input.u8() & 0x80) << 24;
            let rest = [&input.u16().to_le_bytes()[..], &[0, 0], &input.array::<4>()].concat();
            put(at + 16 * number, &[&address.to_le_bytes()[..], &rest].concat());
        }
        AVAILABLE_INDEX => {
            let slot = u64::from(input.u8() % SIZE as u8);
            put(at + AVAILABLE + 4 + 2 * slot, &input.array::<2>());
            put(at + AVAILABLE + 2, &input.array::<2>());
        }
        MEMORY => {
            let at = u64::from(input.u16());
            let len = usize::from(input.u8());
            put(at, input.slice(len.min((HOSTILE - at) as usize)));
        }
        SEND => {
            let at = 0xc000 + u64::from(input.u16() & 0x1fff);
            let (addresses, asks, len) = (input.u8(), input.u8(), u32::from(input.u16() & 0xfff));
            let header = if asks & 1 == 0 { [0; HEADER] } else { input.array() };
            let to = if addresses & 4 == 0 { mac(addresses & 3) } else { [0xff; 6] };
            put(at, &[&header[..], &to, &mac(addresses >> 3 & 3), &input.array::<6>()].concat());
            let first = u32::from(asks >> 1).min(len);
            transmit.add(&[(at, first, 0), (at + u64::from(first), len - first, 0)]);
        }
        _ => {
            let buffer = (0xe000 + u64::from(input.u16() & 0xfff), u32::from(input.u16() & 0xfff), WRITE);
            receive.add(&[buffer]);
        }
    }
}

/// Makes the honest ports send to each other, in addition to the hostile ones' traffic.
fn check(steps: &mut SwitchSteps, honest: &mut Honest, beyond: &mut Beyond) {
    let mut frame = [&mac(3)[..], &mac(2), &[8, 0]].concat();
    frame.resize(60, honest.reached as u8);
    put(Honest::buffer(0, 15), &[&[0; HEADER][..], &frame].concat());
    honest.offer(0, 1, 15, ((HEADER + frame.len()) as u32, 0));
    let mut reached = false;
    // A hostile port may have filled the buffers before its turn.
    for _ in 0..4 {
        steps.step();
        beyond.turn(steps);
        honest.receive(0, &[]);
        reached |= honest.receive(1, &frame);
    }
    assert!(honest.queues[0][1].take_one_used().is_some(), "the frame was taken");
    assert!(reached || honest.strange > 0, "honest ports reach each other");
    assert!(!steps.needs_reset(2) && !steps.needs_reset(3), "a reset for what others did");
    honest.reached += u64::from(reached);
}

/// A frame of a hostile port: a buffer at `at`, addresses, and its length.
fn send(seed: Seed, port: u8, addresses: u8, header: Option<[u8; HEADER]>, len: u16) -> Seed {
    let seed = seed.with([SEND, port]).with(0x100_u16.to_le_bytes());
    let asks = u8::from(header.is_some()) | 24;
    let seed = seed.with([addresses, asks]).with((HEADER as u16 + len).to_le_bytes());
    seed.with(header.map(Vec::from).unwrap_or_default()).with([8, 0, 0x45, 0, 0, 40])
}

/// Seeds: frames to all, to each other and with another's source; segments; buffers; invalid rings; and a flood of the
/// uplink.
pub fn seeds() -> Vec<Vec<u8>> {
    let start = |features: u8| Seed::new().with([features]);
    let to_all = send(start(2), 0, 4, None, 60).with([RUN]);
    let to_one = send(start(4), 1, 3 | 1 << 3, None, 1500).with([RUN]);
    let spoofed = send(send(start(0), 0, 3 | 2 << 3, None, 60), 1, 4 | 2 << 3, None, 60).with([RUN]);
    let segment = send(start(1), 0, 3, Some([1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0]), 3000).with([RUN]);
    let provided = start(2).with([PROVIDE, 1, 0, 0, 0xff, 7]);
    let provided = send(provided, 0, 1, None, 60).with([RUN]);
    let broken = start(0).with([AVAILABLE_INDEX, 2, 0, 0, 0, 0xff, 0xff, AVAILABLE_INDEX, 0, 0, 0, 0, 0xff, 0xff]);
    let broken = send(broken, 1, 4 | 1 << 3, None, 60).with([RUN, RUN]);
    let flood = (0..8).fold(start(0x41), |seed, _| {
        // Segments of almost 4 KiB to all, until the port is in debt.
        (0..8).fold(seed, |seed, _| send(seed, 0, 4, Some([1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0]), 4000)).with([RUN])
    });
    [to_all, to_one, spoofed, segment, provided, broken, flood].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_reach_honest_ports_except_by_spoofs_and_invalid_rings() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(done, [(1, 2, 0), (1, 1, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (2, 2, 0), (8, 0, 33)]);
    }
}
