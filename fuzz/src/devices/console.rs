//! The two queues of a console, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! The first byte of the input chooses the queue. Output must match the driver's data, and input must reach the driver
//! in order, each byte once. Some chains leave the device free to do anything; the run ends with the first of those.

use std::io::{self, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SeekFrom, ftruncate, memfd_create};
use virtio_devices::testing::{ConsoleSteps, Step};
use virtio_devices::{CharDevice, ConsoleCounter};

use crate::guest::{self, BUFFERS, Chain, Driver, Expected, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

/// The feature bit of event indexes.
const EVENT_IDX: u32 = 29;
/// The most chains in one step.
const BATCH: usize = 16;
/// The most bytes of input for one buffer.
const PART: usize = 4096;
/// The most bytes of output that are read from a chain.
const MAX_CHAIN: usize = 256 << 10;
/// The most bytes that are typed in an input: they must fit into a pipe.
const MAX_INPUT: usize = 32 << 10;

// Flags of an input.
const TRANSMIT: u8 = 1;
const EVENTS: u8 = 2;

// The kinds of operation, after those of the driver.
const TYPE: u8 = guest::KINDS;
const END: u8 = guest::KINDS + 1;
const RUN: u8 = guest::KINDS + 2;
const KINDS: u8 = guest::KINDS + 3;

thread_local! {
    /// Destination of output: an in-memory file, which never makes the device wait.
    static OUTPUT: OwnedFd = memfd_create("output", MemfdFlags::CLOEXEC).expect("the host makes files in memory");
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// The expected counters: bytes received and transmitted, bad chains of both directions, chains that are too long.
type Counts = [u64; 5];

const COUNTERS: [ConsoleCounter; 5] = [
    ConsoleCounter::RxBytes,
    ConsoleCounter::TxBytes,
    ConsoleCounter::RxBadChains,
    ConsoleCounter::TxBadChains,
    ConsoleCounter::TxTooLong,
];

/// As [`run`]. Returns the counters.
fn run_to_end(input: &[u8]) -> Counts {
    let mut input = Input::new(input);
    let flags = input.u8();
    let (transmit, features) = (flags & TRANSMIT != 0, u64::from(flags & EVENTS != 0) << EVENT_IDX);
    let driver = Driver::new(&mut input, features != 0);
    driver.fill_buffers();
    let output = OUTPUT.with(|output| {
        ftruncate(output, 0).and_then(|()| rustix::fs::seek(output, SeekFrom::Start(0))).expect("a file");
        output.try_clone().expect("a descriptor is left")
    });
    let (reader, writer) = io::pipe().expect("a pipe");
    let device = CharDevice::over(Some(reader.into()), output).expect("a character device");
    let device = Arc::new(device.with_patience(Duration::ZERO));
    let steps = ConsoleSteps::new(Driver::memory(), device, transmit, features).expect("an eventfd");
    let counts = Counts::default();
    let (typed, sent) = (Vec::new(), Vec::new());
    let mut console = Console { driver, steps, transmit, writer: Some(writer), typed, given: 0, sent, counts };
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN if !console.run() => break,
            RUN => {}
            TYPE => console.type_in(16 * usize::from(input.u8())),
            END => console.writer = None,
            kind => console.driver.apply(kind, &mut input),
        }
    }
    console.counts
}

struct Console {
    driver: Driver,
    steps: ConsoleSteps,
    transmit: bool,
    /// Pipe for input, until its end.
    writer: Option<PipeWriter>,
    typed: Vec<u8>,
    /// Number of input bytes that the driver has received.
    given: usize,
    /// All output.
    sent: Vec<u8>,
    counts: Counts,
}

impl Console {
    fn type_in(&mut self, len: usize) {
        let from = self.typed.len();
        if let Some(writer) = self.writer.as_mut().filter(|_| from + len <= MAX_INPUT) {
            self.typed.extend((from..from + len).map(|n| (n % 253) as u8));
            writer.write_all(&self.typed[from..]).expect("the pipe holds all input");
        }
    }

    /// Runs a step. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let Some(mut ram) = self.driver.before_step(&mut self.steps) else { return false };
        let expected = self.expect(&mut ram);
        let Some(step) = self.driver.step(&mut self.steps, expected, &ram) else { return false };
        assert_eq!(COUNTERS.map(|counter| self.steps.count(counter)), self.counts);
        let mut output = vec![0; self.sent.len() + 1];
        let len = OUTPUT.with(|file| rustix::io::pread(file, &mut output, 0)).expect("a file");
        assert!(output[..len] == self.sent, "the output is not what was transmitted");
        step != Step::Broken
    }

    /// Expected effect of a step, including that on `ram`; `None` if any effect is valid.
    fn expect(&mut self, ram: &mut Snapshot) -> Option<Expected> {
        let (mut step, mut interrupt) = (Step::More, false);
        for _ in 0..BATCH {
            let Some(chains) = self.driver.waiting(ram) else {
                return Some(Expected::new(Step::Broken, interrupt));
            };
            let Some(chain) = chains.first() else {
                step = Step::Doorbell;
                break;
            };
            if chain.verdict == Verdict::Undefined || chain.touches(&self.driver.devices_part()) {
                return None;
            }
            let old = self.driver.given;
            let len = match self.transmit {
                true => self.sends(ram, chain),
                false => match self.receives(ram, chain) {
                    Some(len) => len,
                    None => {
                        step = Step::Frame;
                        break;
                    }
                },
            };
            self.driver.taken = self.driver.taken.wrapping_add(1);
            self.driver.expect_used(ram, chain.head, len);
            interrupt |= self.driver.wants_interrupt(ram, old);
        }
        Some(Expected::new(step, interrupt))
    }

    fn sends(&mut self, ram: &Snapshot, chain: &Chain) -> u32 {
        if chain.verdict != Verdict::Sound || !chain.is_all(false) {
            self.counts[3] += 1;
            return 0;
        }
        let bytes = chain.bytes(ram, false);
        let len = bytes.len().min(MAX_CHAIN);
        self.sent.extend(&bytes[..len]);
        self.counts[1] += len as u64;
        self.counts[4] += u64::from(len < bytes.len());
        0
    }

    /// Number of bytes for a chain; `None` if it must wait.
    fn receives(&mut self, ram: &mut Snapshot, chain: &Chain) -> Option<u32> {
        let room = chain.len(true) as usize;
        if chain.verdict != Verdict::Sound || !chain.is_all(true) || room == 0 {
            self.counts[2] += 1;
            return Some(0);
        }
        let waiting = &self.typed[self.given..];
        let bytes = &waiting[..waiting.len().min(room).min(PART)];
        if bytes.is_empty() {
            return None;
        }
        chain.fill(ram, bytes);
        self.given += bytes.len();
        self.counts[0] += bytes.len() as u64;
        Some(bytes.len() as u32)
    }
}

fn start(flags: u8) -> Seed {
    // A queue of 8 descriptors.
    Seed::new().with([flags, 1])
}

/// Makes a chain of one descriptor available.
fn offer(seed: Seed, index: u8, len: u16, flags: u16) -> Seed {
    guest::descriptor(seed, index, (BUFFERS + 0x1000 * u32::from(index), len, flags, 0)).with([OFFER, index])
}

/// Seeds: output in parts; input that waits for buffers, and buffers that wait for input; its end; invalid chains.
pub fn seeds() -> Vec<Vec<u8>> {
    let sent = offer(offer(start(TRANSMIT | EVENTS), 0, 300, 0), 1, 4097, 0).with([RUN]);
    let chain = guest::descriptor(start(TRANSMIT), 0, (BUFFERS, 10, NEXT, 1));
    let chain = guest::descriptor(chain, 1, (BUFFERS + 20, 10, 0, 0)).with([OFFER, 0, RUN]);
    let wrong = offer(offer(start(TRANSMIT), 0, 300, WRITE), 1, 5, 0).with([RUN]);
    let typed = offer(offer(start(EVENTS).with([TYPE, 20]), 0, 100, WRITE), 1, 4096, WRITE).with([RUN]);
    let waits = offer(start(0), 0, 64, WRITE).with([RUN, TYPE, 1, RUN]);
    let ends = offer(start(0).with([TYPE, 1, END]), 0, 64, WRITE).with([RUN]);
    let ends = offer(ends, 1, 64, WRITE).with([RUN]);
    let readable = offer(offer(start(0).with([TYPE, 1]), 0, 64, 0), 1, 0, WRITE).with([RUN]);
    let broken = start(0).with([guest::AVAILABLE_INDEX, 0xff, 0xff, RUN]);
    [sent, chain, wrong, typed, waits, ends, readable, broken].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_pass_output_and_input_on_and_break_rules() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let expected = [
            [0, 4397, 0, 0, 0],
            [0, 20, 0, 0, 0],
            [0, 5, 0, 1, 0],
            [320, 0, 0, 0, 0],
            [16, 0, 0, 0, 0],
            [16, 0, 0, 0, 0],
            [0, 0, 2, 0, 0],
            [0; 5],
        ];
        assert_eq!(done, expected);
    }
}
