//! The queues of a guest's channel, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! A single ring serves as each of the six queues in turn, so that control messages and bytes of any kind come in any
//! order.
//! After each step, the channel must be in a state that can be restored: within all limits, with nothing left of a port
//! that is closed.

use serde_json::Value;
use virtio_devices::testing::{ChannelSteps, Step, Stepped as _};
use virtio_devices::{ChannelCounter, ChannelState, DeviceSpecific, MAX_LINE, MAX_MESSAGE};
use vm_api::channel::Request;

use crate::guest::{self, BUFFERS, Driver, OFFER, WRITE};
use crate::input::{Input, Seed};

/// The feature bit of event indexes.
const EVENT_IDX: u32 = 29;

// The kinds of operation, after those of the driver.
/// Makes the ring that of another queue.
const SELECT: u8 = guest::KINDS;
const RUN: u8 = guest::KINDS + 1;
/// The host takes a line.
const TAKE: u8 = guest::KINDS + 2;
/// The host answers the oldest line that it has taken.
const ANSWER: u8 = guest::KINDS + 3;
const ANNOUNCE: u8 = guest::KINDS + 4;
/// Fills the buffers with one byte.
const FILL: u8 = guest::KINDS + 5;
const KINDS: u8 = guest::KINDS + 6;

// The queues of the channel.
const REPLIES: u8 = 0;
const REQUESTS: u8 = 1;
const TO_DRIVER: u8 = 2;
const OF_DRIVER: u8 = 3;
const NOTICES: u8 = 4;

/// Effects of an input: lines, lines that were too long, lines that are requests, bytes received.
type Effects = [u64; 4];

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the effects.
fn run_to_end(input: &[u8]) -> Effects {
    let mut input = Input::new(input);
    let features = u64::from(input.u8() & 1) << EVENT_IDX;
    let mut driver = Driver::new(&mut input, features != 0);
    let mut channel = Channel::new(features);
    while !input.is_empty() {
        match input.u8() % KINDS {
            SELECT => channel.steps.select(u16::from(input.u8() % 6)),
            RUN if !channel.run(&driver) => break,
            RUN => {}
            TAKE => channel.take(),
            ANSWER => channel.answer(input.u16().into()),
            ANNOUNCE => channel.announce(input.u16().into()),
            FILL => {
                let fill = [input.u8(); 0x4000];
                driver.store(BUFFERS.into(), &fill);
            }
            kind => driver.apply(kind, &mut input),
        }
        channel.check();
    }
    let count = |counter| channel.steps.count(counter);
    let (lines, long) = (count(ChannelCounter::Lines), count(ChannelCounter::LongLines));
    [lines, long, channel.requests, count(ChannelCounter::RxBytes)]
}

struct Channel {
    steps: ChannelSteps,
    /// The openings of lines that the host has taken and not answered.
    taken: Vec<u64>,
    requests: u64,
}

impl Channel {
    fn new(features: u64) -> Self {
        let steps = ChannelSteps::new(Driver::memory(), features).expect("descriptors are left");
        Self { steps, taken: Vec::new(), requests: 0 }
    }

    /// Runs a turn of the worker for the selected queue. Returns false if the run must end.
    fn run(&mut self, driver: &Driver) -> bool {
        let Some(mut queue) = self.steps.queue(&driver.queue) else { return false };
        let mut last = Step::More;
        // A message that closes the port is handled in the second turn.
        for _ in 0..3 {
            last = self.steps.step(&mut queue);
            self.steps.end_pass();
            if last != Step::More {
                break;
            }
        }
        last != Step::Broken
    }

    fn take(&mut self) {
        let Some(line) = self.steps.end().take() else { return };
        self.taken.push(line.opening);
        let Some(bytes) = line.bytes else { return };
        assert!(bytes.len() < MAX_LINE && !bytes.contains(&b'\n'));
        if let Ok(request) = serde_json::from_slice::<Request>(&bytes) {
            let text = serde_json::to_string(&request).expect("a request is JSON");
            assert_eq!(serde_json::from_str::<Request>(&text).ok(), Some(request.clone()));
            self.requests += u64::from(request.command().is_some());
        }
    }

    /// Sends a reply that says which opening it is for.
    fn answer(&mut self, len: usize) {
        if self.taken.is_empty() {
            return;
        }
        let opening = self.taken.remove(0);
        let mut reply = format!("{{\"opening\":{opening},\"fill\":\"").into_bytes();
        reply.resize(reply.len() + len % (MAX_MESSAGE - 64), b'x');
        reply.extend(b"\"}\n");
        self.steps.end().answer(opening, reply);
    }

    fn announce(&self, len: usize) {
        self.steps.end().announce([vec![b'x'; len % MAX_MESSAGE], vec![b'\n']].concat());
    }

    /// Checks that the state can be restored, and that all replies are for the same opening.
    fn check(&mut self) {
        let state = self.steps.save_and_restore().expect("a driver has caused it");
        let DeviceSpecific::Channel(state) = state else { panic!("a channel: {state:?}") };
        let ChannelState { lines, replies, .. } = &*state;
        assert!(lines.len() + replies.messages.len() <= 8);
        let opening = |reply: &[u8]| serde_json::from_slice::<Value>(reply).expect("a reply")["opening"].clone();
        let mut openings: Vec<_> = replies.messages.iter().map(|reply| opening(&reply.0)).collect();
        openings.dedup();
        assert!(openings.len() <= 1, "a reply is for another opening");
    }
}

fn start() -> Seed {
    // A queue of 8 descriptors, with event indexes.
    Seed::new().with([1, 1])
}

/// Makes a chain of one descriptor available in a queue, and runs that.
fn offer(seed: Seed, (queue, index): (u8, u8), len: u16, flags: u16) -> Seed {
    let seed = guest::descriptor(seed, index, (BUFFERS + 0x800 * u32::from(index), len, flags, 0));
    seed.with([OFFER, index, SELECT, queue, RUN])
}

/// Makes `text` available in a queue.
fn write(seed: Seed, (queue, index): (u8, u8), text: &[u8]) -> Seed {
    let address = BUFFERS + 0x800 * u32::from(index);
    let seed = guest::memory(seed, address, text);
    offer(seed, (queue, index), text.len() as u16, 0)
}

/// A control message of the driver.
fn tell(seed: Seed, index: u8, port: u32, event: u16, value: u16) -> Seed {
    let message = [&port.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat();
    write(seed, (OF_DRIVER, index), &message)
}

/// Seeds: the handshake; each command, answered; half lines, long lines, closing in the middle; notices.
pub fn seeds() -> Vec<Vec<u8>> {
    let ready = tell(tell(start(), 0, u32::MAX, 0, 1), 1, 0, 3, 1);
    let ready = (2..6).fold(ready, |seed, index| offer(seed, (TO_DRIVER, index), 64, WRITE));
    let open = || tell(start(), 0, 0, 6, 1);
    let command = |line: &[u8]| {
        let seed = write(open(), (REQUESTS, 1), line).with([TAKE, ANSWER, 9, 0]);
        offer(seed, (REPLIES, 2), 256, WRITE).done()
    };
    let commands: [&[u8]; 5] = [
        b"{\"id\":1,\"hello\":{\"version\":1}}\n",
        b"{\"id\":2,\"list\":{\"pf\":\"0000:00:03.0\",\"from\":16}}\n",
        b"{\"id\":3,\"get\":{\"vf\":\"0000:00:03.1\"}}\n",
        b"{\"id\":4,\"set\":{\"vf\":\"0000:00:03.1\",\"vlan\":120,\"link\":\"down\",\"spoofchk\":false}}\n",
        b"{\"id\":5,\"reset\":{\"vf\":\"0000:00:03.1\"}}\n",
    ];
    let half = write(write(open(), (REQUESTS, 1), b"{\"id\":"), (REQUESTS, 2), b"6}\nrest").with([TAKE]);
    let closed = tell(half.clone(), 3, 0, 6, 0).with([ANSWER, 0, 0]);
    let closed = write(tell(closed, 4, 0, 6, 1), (REQUESTS, 5), b"new\n").with([TAKE, ANSWER, 1, 0]);
    let closed = offer(closed, (REPLIES, 6), 256, WRITE);
    let long = offer(open().with([FILL, b'x']), (REQUESTS, 1), 5000, 0).with([TAKE]);
    let long = write(long, (REQUESTS, 2), b"x\nnext\n").with([TAKE]);
    let many = offer(open().with([FILL, b'\n']), (REQUESTS, 1), 20, 0).with([TAKE, TAKE, ANSWER, 0, 0, RUN]);
    let notices = tell(start(), 0, 1, 6, 1).with([ANNOUNCE, 7, 0, ANNOUNCE, 9, 0]);
    let notices = offer(offer(notices, (NOTICES, 1), 5, WRITE), (NOTICES, 2), 64, WRITE);
    let mut seeds: Vec<_> = commands.into_iter().map(command).collect();
    seeds.extend([ready, half, closed, long, many, notices].map(Seed::done));
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_ask_for_each_command_and_break_off() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let reply = |opening: u32, fill: u64| format!("{{\"opening\":{opening},\"fill\":\"\"}}\n").len() as u64 + fill;
        let command = [1, 0, 1, reply(1, 9)];
        let mut expected = vec![command; 5];
        expected.extend([
            [0, 0, 0, 8 + 8 + 8 + 7 + 8],
            [1, 0, 0, 0],
            [2, 0, 0, reply(3, 1)],
            [2, 1, 0, 0],
            [8, 0, 0, 0],
            [0, 0, 0, 8 + 10],
        ]);
        assert_eq!(done, expected);
    }
}
