//! A channel as seen by its driver, which does as Linux does, and by the host.

mod hostile;
mod saved;

use std::time::Instant;

use super::exchange::MAX_WAITING;
use super::ports::{NOTICES, OF_DRIVER, REPLIES, REQUESTS, TO_DRIVER};
use super::*;
use crate::os::clock;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually, memory};
use crate::{RateLimit, testing};

/// Buffers are a page each, and those of a queue are together.
const PAGE: u64 = 4096;
/// Number of entries of each queue.
const SIZE: u16 = 64;
/// Address of all ports in control messages about none.
const NO_PORT: u32 = u32::MAX;
// Events of control messages.
const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

type Guest = testing::guest::Guest<GuestChannel, Arc<ChannelEnd>>;

/// A channel without a limit by time, or with `rate`.
fn channel(rate: Option<RateLimit>) -> (GuestChannel, Arc<ChannelEnd>) {
    let end = Arc::new(ChannelEnd::with_rate(rate, clock::now()).unwrap());
    (GuestChannel::new("__channel", Arc::clone(&end), ["sriov.control", "sriov.events"]), end)
}

impl Guest {
    /// A driver whose queues run, with buffers to receive in.
    fn new(rate: Option<RateLimit>) -> Self {
        let (channel, end) = channel(rate);
        let mut guest = Self::stopped(channel, end, &memory(), &[SIZE; 6]);
        guest.start();
        for queue in [REPLIES, TO_DRIVER, NOTICES] {
            guest.provide(queue, 16, PAGE as u32);
        }
        guest
    }

    /// A driver that has made its ports, the first of which is open.
    fn opened(rate: Option<RateLimit>) -> Self {
        let mut guest = Self::new(rate);
        guest.tell(NO_PORT, DEVICE_READY, 1);
        guest.tell(0, PORT_READY, 1);
        guest.tell(1, PORT_READY, 1);
        guest.tell(0, PORT_OPEN, 1);
        guest
    }

    fn count(&self, counter: ChannelCounter) -> u64 {
        self.device.counters().get(counter)
    }

    /// Address of the buffer of a descriptor.
    fn buffer(queue: u16, head: u16) -> u64 {
        BUFFERS + (u64::from(queue) * u64::from(SIZE) + u64::from(head)) * PAGE
    }

    /// Makes `count` receive buffers of `len` bytes available.
    fn provide(&mut self, queue: u16, count: usize, len: u32) {
        let driver = &mut self.queues[usize::from(queue)];
        for _ in 0..count {
            let head = driver.build(&[(0, len, WRITE)]);
            driver.set_raw(head, (Self::buffer(queue, head), len, WRITE, 0));
            driver.offer(head);
        }
        self.kick(queue);
    }

    /// Contents of used receive buffers; the driver provides each again.
    fn received(&mut self, queue: u16) -> Vec<Vec<u8>> {
        let driver = &mut self.queues[usize::from(queue)];
        let used = driver.take_used();
        let bytes = |&(head, len): &(u32, u32)| driver.bytes(Self::buffer(queue, head as u16), len as usize);
        let received: Vec<_> = used.iter().map(bytes).collect();
        if !used.is_empty() {
            self.provide(queue, used.len(), PAGE as u32);
        }
        received
    }

    /// Waits for `count` lines in a receive queue.
    fn lines(&mut self, queue: u16, count: usize) -> Vec<String> {
        let mut bytes = Vec::new();
        eventually("lines", || {
            bytes.extend(self.received(queue).concat());
            bytes.iter().filter(|byte| **byte == b'\n').count() >= count
        });
        String::from_utf8(bytes).unwrap().lines().map(str::to_string).collect()
    }

    /// Makes a chain available without waiting until it is used.
    fn offer(&mut self, queue: u16, data: &[u8]) {
        let driver = &mut self.queues[usize::from(queue)];
        let head = driver.build(&[(0, data.len() as u32, 0)]);
        // Longer data lies in the buffers of the next descriptors as well.
        let address = Self::buffer(queue, head);
        driver.memory_write(address, data);
        driver.set_raw(head, (address, data.len() as u32, 0, 0));
        driver.offer(head);
        self.kick(queue);
    }

    /// Writes to the control port, as a program does that does not wait.
    fn write(&mut self, data: &[u8]) {
        self.offer(REQUESTS, data);
    }

    /// Sends a control message, and waits until the device has handled it, as Linux does.
    fn tell(&mut self, port: u32, event: u16, value: u16) {
        let message = [&port.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat();
        self.offer(OF_DRIVER, &message);
        self.await_used(OF_DRIVER, 1);
    }

    /// The next line that the host gets.
    fn taken(&self) -> ChannelLine {
        let mut line = None;
        eventually("a line", || {
            line = line.take().or_else(|| self.host.take());
            line.is_some()
        });
        line.unwrap()
    }

    /// As [`Self::taken`], for a line that is text.
    fn text(&self) -> (u64, String) {
        let line = self.taken();
        (line.opening, String::from_utf8(line.bytes.unwrap()).unwrap())
    }
}

/// Control messages: port, event, value, and the rest.
fn message(bytes: &[u8]) -> (u32, u16, u16, String) {
    let (id, rest) = bytes.split_first_chunk().unwrap();
    let (event, rest) = rest.split_first_chunk().unwrap();
    let (value, name) = rest.split_first_chunk().unwrap();
    let name = String::from_utf8(name.to_vec()).unwrap();
    (u32::from_le_bytes(*id), u16::from_le_bytes(*event), u16::from_le_bytes(*value), name)
}

#[test]
fn a_driver_finds_two_ports_with_names() {
    let mut guest = Guest::new(None);
    assert_eq!(guest.workers[0].thread.name(), "__channel_q0");
    let mut config = [0xff; 12];
    guest.device.config_read(0, &mut config);
    assert_eq!(config, [0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    guest.tell(NO_PORT, DEVICE_READY, 1);
    let mut messages = Vec::new();
    let mut next = |guest: &mut Guest, count: usize| {
        eventually("messages", || {
            messages.extend(guest.received(TO_DRIVER).iter().map(|bytes| message(bytes)));
            messages.len() >= count
        });
        std::mem::take(&mut messages)
    };
    assert_eq!(next(&mut guest, 2), [(0, PORT_ADD, 1, String::new()), (1, PORT_ADD, 1, String::new())]);
    guest.tell(1, PORT_READY, 1);
    assert_eq!(next(&mut guest, 2), [(1, PORT_NAME, 1, "sriov.events".into()), (1, PORT_OPEN, 1, String::new())]);
    guest.tell(0, PORT_READY, 1);
    assert_eq!(next(&mut guest, 2), [(0, PORT_NAME, 1, "sriov.control".into()), (0, PORT_OPEN, 1, String::new())]);
    assert_eq!(guest.count(ChannelCounter::BadMessages), 0);
}

#[test]
fn lines_reach_the_host_and_replies_the_guest() {
    let mut guest = Guest::opened(None);
    guest.write(b"first\nsec");
    let (opening, line) = guest.text();
    assert_eq!((line.as_str(), guest.host.take()), ("first", None));
    guest.write(b"");
    guest.write(b"ond\n\nlast\n");
    assert_eq!([guest.text().1, guest.text().1, guest.text().1], ["second", "", "last"]);
    for reply in ["1\n", "2\n", "3\n", "4\n"] {
        guest.host.answer(opening, reply.into());
    }
    assert_eq!(guest.lines(REPLIES, 4), ["1", "2", "3", "4"]);
    // More replies than lines are not read as those of a later line.
    guest.host.answer(opening, b"5\n".to_vec());
    guest.write(b"once more\n");
    guest.text();
    guest.host.answer(opening, b"6\n".to_vec());
    assert_eq!(guest.lines(REPLIES, 1), ["6"]);
    assert_eq!((guest.count(ChannelCounter::Lines), guest.count(ChannelCounter::Openings)), (5, 1));
}

#[test]
fn a_reply_longer_than_a_buffer_is_given_in_parts() {
    let mut guest = Guest::opened(None);
    guest.write(b"line\n");
    let (opening, _) = guest.text();
    let reply = [vec![b'x'; MAX_MESSAGE - 1], vec![b'\n']].concat();
    guest.host.answer(opening, reply.clone());
    assert_eq!(guest.lines(REPLIES, 1), [String::from_utf8(reply[..MAX_MESSAGE - 1].to_vec()).unwrap()]);
}

#[test]
fn the_next_opener_gets_nothing_of_the_one_before() {
    let mut guest = Guest::opened(None);
    guest.write(b"asked\nwaiting\nhal");
    let (opening, _) = guest.text();
    guest.tell(0, PORT_OPEN, 0);
    guest.tell(0, PORT_OPEN, 1);
    assert_eq!(guest.host.take(), None, "a request of a program that is gone is not carried out");
    guest.host.answer(opening, b"late\n".to_vec());
    guest.write(b"new\n");
    let (next, line) = guest.text();
    assert_eq!(line, "new", "it does not continue the half line");
    assert_ne!(next, opening);
    guest.host.answer(opening, b"late\n".to_vec());
    guest.host.answer(next, b"mine\n".to_vec());
    assert_eq!(guest.lines(REPLIES, 1), ["mine"]);
}

#[test]
fn what_a_program_wrote_before_it_ended_is_dropped() {
    let mut guest = Guest::opened(None);
    // Eight wait, so that all others are still in the ring when the port is closed.
    for n in 0..40 {
        guest.write(format!("{n}\nhalf").as_bytes());
    }
    eventually("a full channel", || guest.count(ChannelCounter::Full) > 0);
    guest.tell(0, PORT_OPEN, 0);
    guest.await_used(REQUESTS, 40);
    guest.tell(0, PORT_OPEN, 1);
    guest.write(b"new\n");
    assert_eq!(guest.text().1, "new");
    assert_eq!((guest.host.take(), guest.count(ChannelCounter::Lines)), (None, MAX_WAITING as u64 + 1));
    assert!(guest.count(ChannelCounter::Dropped) > 0);
}

#[test]
fn nothing_is_read_from_a_port_that_is_not_open() {
    let mut guest = Guest::new(None);
    guest.write(b"early\n");
    guest.await_used(REQUESTS, 1);
    guest.offer(NOTICES + 1, b"to the port of notices\n");
    guest.await_used(NOTICES + 1, 1);
    assert_eq!(guest.host.take(), None);
    eventually("counts", || guest.count(ChannelCounter::Dropped) == 6 + 23);
}

#[test]
fn a_long_line_is_refused_once_and_skipped() {
    let mut guest = Guest::opened(None);
    let longest = [vec![b'a'; MAX_LINE - 1], vec![b'\n']].concat();
    guest.write(&longest);
    assert_eq!(guest.taken().bytes.unwrap().len(), MAX_LINE - 1);
    guest.await_used(REQUESTS, 1);
    for part in [&[b'b'; MAX_LINE - 1][..], b"b", &[b'b'; 3 * MAX_LINE], b"rest\nnext\n"] {
        guest.write(part);
        guest.await_used(REQUESTS, 1);
    }
    assert_eq!(guest.taken().bytes, None);
    assert_eq!(guest.text().1, "next");
    // The newline itself may be the byte that is too many.
    guest.write(&[vec![b'c'; MAX_LINE], b"\nafter\n".to_vec()].concat());
    assert_eq!(guest.taken().bytes, None);
    assert_eq!(guest.text().1, "after");
    assert_eq!((guest.host.take(), guest.count(ChannelCounter::LongLines)), (None, 2));
}

#[test]
fn notices_are_for_who_listens_and_the_oldest_are_dropped() {
    let mut guest = Guest::opened(None);
    guest.host.announce(b"unheard\n".to_vec());
    guest.tell(1, PORT_OPEN, 1);
    guest.host.announce(b"heard\n".to_vec());
    assert_eq!(guest.lines(NOTICES, 1), ["heard"]);
    // Without buffers, all of them wait.
    guest.stop();
    for n in 0..MAX_WAITING_NOTICES + 3 {
        guest.host.announce(format!("{n}\n").into_bytes());
    }
    guest.start();
    let lines = guest.lines(NOTICES, MAX_WAITING_NOTICES);
    assert_eq!((lines.len(), lines[0].as_str(), lines[63].as_str()), (64, "3", "66"));
    eventually("a count", || guest.count(ChannelCounter::LostNotices) == 3);
    guest.stop();
    guest.host.announce(b"for who has left\n".to_vec());
    guest.start();
    guest.received(NOTICES);
    guest.tell(1, PORT_OPEN, 0);
    guest.tell(1, PORT_OPEN, 1);
    guest.host.announce(b"for the next\n".to_vec());
    let last = guest.lines(NOTICES, 1).pop().unwrap();
    assert_eq!(last, "for the next");
}

#[test]
fn a_driver_without_ports_gets_nothing() {
    let (channel, end) = channel(None);
    let mut guest = Guest::stopped(channel, end, &memory(), &[SIZE; 6]);
    guest.start_with(guest.device.features() & !(1 << F_MULTIPORT));
    guest.tell(0, PORT_OPEN, 1);
    guest.write(b"line\n");
    guest.await_used(REQUESTS, 1);
    assert_eq!(guest.host.take(), None);
}

#[test]
fn a_reset_ends_the_session() {
    let mut guest = Guest::opened(None);
    guest.write(b"asked\nwaiting\nhal");
    let (opening, _) = guest.text();
    guest.await_used(REQUESTS, 1);
    guest.stop();
    guest.device.reset();
    assert_eq!((guest.host.take(), guest.device.save()), (None, DeviceSpecific::PowerOn));
    guest.start();
    guest.tell(0, PORT_OPEN, 1);
    guest.host.answer(opening, b"late\n".to_vec());
    guest.write(b"new\n");
    let (next, line) = guest.text();
    guest.host.answer(next, b"mine\n".to_vec());
    assert_eq!((line.as_str(), guest.lines(REPLIES, 1)), ("new", vec!["mine".to_string()]));
}
