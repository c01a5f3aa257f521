//! A console as seen by its driver and its user.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::time::{Duration, Instant};

use super::port::{RECEIVE, TRANSMIT};
use super::*;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually, memory};

/// The queues, by index.
const RX: usize = RECEIVE as usize;
const TX: usize = TRANSMIT as usize;

/// The user at the other end of the console.
struct User {
    window: Arc<ConsoleWindow>,
    output: PipeReader,
    input: Option<PipeWriter>,
}

type Guest = crate::testing::guest::Guest<Console, User>;

impl Guest {
    fn new() -> Self {
        let (output, writer) = io::pipe().unwrap();
        let (reader, input) = io::pipe().unwrap();
        let device = CharDevice::over(Some(reader.into()), writer.into()).unwrap();
        let device = Arc::new(device.with_patience(Duration::from_millis(50)));
        let window = Arc::new(ConsoleWindow::new(ConsoleSize { columns: 80, rows: 25 }));
        let console = Console::new("__console", device, Some(Arc::clone(&window)));
        let user = User { window, output, input: Some(input) };
        let mut guest = Self::stopped(console, user, &memory(), &[16, 16]);
        guest.start();
        guest
    }

    fn count(&self, counter: ConsoleCounter) -> u64 {
        self.device.counters().get(counter)
    }

    fn type_in(&mut self, text: &[u8]) {
        self.host.input.as_mut().unwrap().write_all(text).unwrap();
    }

    /// The driver's input once it has `len` bytes.
    fn received(&mut self, len: usize) -> Vec<u8> {
        let mut data = Vec::new();
        eventually("input", || {
            for (head, len) in self.queues[RX].take_used() {
                data.extend(self.queues[RX].bytes(BUFFERS + u64::from(head) * 4096, len as usize));
            }
            data.len() >= len
        });
        data
    }

    /// Makes `count` receive buffers of `len` bytes available.
    fn provide(&mut self, count: u64, len: u32) {
        for _ in 0..count {
            let head = self.queues[RX].build(&[(0, len, WRITE)]);
            self.queues[RX].set_raw(head, (BUFFERS + u64::from(head) * 4096, len, WRITE, 0));
            self.queues[RX].offer(head);
        }
        self.kick(RECEIVE);
    }
}

#[test]
fn transmitted_bytes_come_out_in_order() {
    let mut guest = Guest::new();
    assert_eq!(guest.workers[0].thread.name(), "__console_q0");
    guest.queues[TX].send(BUFFERS, b"hello world", &[3, 0, 2]);
    guest.queues[TX].send(BUFFERS + 0x1000, &[b'x'; 10_000], &[]);
    guest.kick(TRANSMIT);
    let mut bytes = vec![0; 10_011];
    guest.host.output.read_exact(&mut bytes).unwrap();
    assert!(bytes.starts_with(b"hello world") && bytes[11..].iter().all(|byte| *byte == b'x'));
    eventually("completion", || guest.count(ConsoleCounter::TxBytes) == 10_011);
    assert_eq!(guest.queues[TX].take_used().iter().map(|(_, len)| *len).collect::<Vec<_>>(), [0, 0]);
    assert!(guest.interrupted(TRANSMIT));
}

#[test]
fn input_waits_for_buffers_and_buffers_for_input() {
    let mut guest = Guest::new();
    guest.type_in(b"early");
    guest.provide(2, 3);
    assert_eq!(guest.received(5), b"early");
    guest.provide(1, 64);
    std::thread::sleep(Duration::from_millis(20));
    assert!(guest.queues[RX].take_used().is_empty());
    guest.type_in(b"late");
    assert_eq!(guest.received(4), b"late");
    assert!(guest.interrupted(RECEIVE));
    guest.type_in(b"after a pause");
    guest.stop();
    guest.start();
    guest.provide(1, 64);
    assert_eq!(guest.received(13), b"after a pause");
}

#[test]
fn unread_output_blocks_neither_the_driver_nor_input() {
    let mut guest = Guest::new();
    for i in 0..10 {
        guest.queues[TX].send(BUFFERS + i * 0x1_0000, &[b'x'; 0x1_0000], &[]);
    }
    guest.kick(TRANSMIT);
    let start = Instant::now();
    let mut used = 0;
    eventually("completion", || {
        used += guest.queues[TX].take_used().len();
        used == 10
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    guest.provide(1, 16);
    guest.type_in(b"x");
    assert_eq!(guest.received(1), b"x");
}

#[test]
fn the_end_of_input_ends_nothing_else() {
    let mut guest = Guest::new();
    guest.provide(1, 16);
    guest.host.input = None;
    guest.queues[TX].send(BUFFERS, b"still here", &[]);
    guest.kick(TRANSMIT);
    let mut bytes = [0; 10];
    guest.host.output.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"still here");
    let kicks = guest.count(ConsoleCounter::Kicks);
    std::thread::sleep(Duration::from_millis(20));
    assert!(guest.queues[RX].take_used().is_empty() && guest.count(ConsoleCounter::Kicks) <= kicks + 2);
}

#[test]
fn chains_that_make_no_sense_are_given_back_and_counted() {
    let mut guest = Guest::new();
    for chain in [(BUFFERS, 8, WRITE), (MEMORY - 4, 8, 0), (u64::MAX, u32::MAX, 0)] {
        guest.queues[TX].add(&[chain]);
    }
    for chain in [(BUFFERS, 8, 0), (BUFFERS, 0, WRITE), (MEMORY - 4, 8, WRITE)] {
        guest.queues[RX].add(&[chain]);
    }
    // The same memory in several buffers: more bytes than any driver transmits.
    let many: Vec<_> = (0..8).map(|_| (BUFFERS, 1 << 20, 0)).collect();
    guest.queues[TX].add(&many);
    guest.kick(TRANSMIT);
    eventually("counts", || guest.count(ConsoleCounter::TxTooLong) == 1);
    assert_eq!(guest.count(ConsoleCounter::TxBadChains), 3);
    eventually("counts", || guest.count(ConsoleCounter::RxBadChains) == 3);
    assert_eq!(guest.queues[TX].take_used().len(), 4);
    assert_eq!(guest.queues[RX].take_used().len(), 3);
}

#[test]
fn a_ring_that_makes_no_sense_leaves_the_other_direction_alone() {
    let mut guest = Guest::new();
    guest.break_ring(RECEIVE);
    guest.queues[TX].send(BUFFERS, b"x", &[]);
    guest.kick(TRANSMIT);
    let mut byte = [0];
    guest.host.output.read_exact(&mut byte).unwrap();
    guest.stop();
    assert_eq!(guest.count(ConsoleCounter::BrokenRings), 1);
}

#[test]
fn the_size_is_offered_for_a_terminal_and_changes_are_told() {
    let mut guest = Guest::new();
    let read = |console: &Console| {
        let mut data = [0xff; 8];
        console.config_read(0, &mut data);
        data
    };
    assert_eq!(read(&guest.device), [80, 0, 25, 0, 0, 0, 0, 0]);
    assert!(guest.config_changed(), "there are drivers that read no size before");
    guest.host.window.resize(ConsoleSize { columns: 80, rows: 25 });
    assert_eq!((guest.config_changed(), guest.device.config_generation()), (false, 0));
    guest.host.window.resize(ConsoleSize { columns: 300, rows: 50 });
    assert_eq!((read(&guest.device), guest.device.config_generation()), ([44, 1, 50, 0, 0, 0, 0, 0], 1));
    assert!(guest.config_changed());
    // After a reset there is no driver to notify, and the next driver reads the present size.
    guest.stop();
    guest.device.reset();
    guest.host.window.resize(ConsoleSize { columns: 81, rows: 26 });
    assert!(!guest.config_changed());
    assert_eq!(read(&guest.device)[..4], [81, 0, 26, 0]);
    guest.start();
    assert!(guest.config_changed());
    let device = Arc::clone(guest.device.device());
    let other = Console::new("__console", device, None);
    assert_eq!((other.features() & 1, read(&other)), (0, [0; 8]));
}

#[test]
fn a_driver_that_did_not_negotiate_the_size_is_not_told_of_it() {
    let mut guest = Guest::new();
    guest.stop();
    guest.device.reset();
    assert!(guest.config_changed());
    guest.start_with(guest.device.features() & !(1 << F_SIZE));
    guest.host.window.resize(ConsoleSize { columns: 300, rows: 50 });
    assert!(!guest.config_changed());
}

#[test]
fn missing_input_delays_neither_output_nor_a_stop() {
    let mut guest = Guest::new();
    guest.provide(1, 16);
    for round in 1..=20 {
        guest.queues[TX].send(BUFFERS, b"x", &[]);
        guest.kick(TRANSMIT);
        // Counted after the worker has checked for input.
        eventually("output", || guest.count(ConsoleCounter::TxBytes) == round);
        let start = Instant::now();
        guest.stop();
        assert!(start.elapsed() < Duration::from_secs(30));
        guest.start();
    }
}
