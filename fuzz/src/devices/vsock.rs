//! The vsock device between a guest that sends any packets in any chains and programs of the host that send, read and
//! disconnect at any time.
//!
//! The data that one side reads from a connection must be a prefix of the data that the other side has sent; the guest
//! gets at most as much as it has room for; and nothing exceeds its limit. The host's programs are private socket
//! pairs, so an input always has the same effect.

mod driver;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use virtio_devices::testing::{Step, VsockSteps};

use crate::input::{Input, Seed};
use driver::{CID, Driver, Header};

/// The most programs of the host in an input.
const PROGRAMS: usize = 16;
/// The ports of the guest, and the host's ports with listeners.
const PORTS: u32 = 4;
/// The first port that the device assigns to clients.
const FIRST_PORT: u32 = 1 << 30;

// The kinds of operation.
const PACKET: u8 = 0;
const CLIENT: u8 = 1;
const HOST_SENDS: u8 = 2;
const HOST_READS: u8 = 3;
const HOST_ENDS: u8 = 4;
const PROVIDE: u8 = 5;
const RECEIVE: u8 = 6;
const WAIT: u8 = 7;
const CHAIN: u8 = 8;
const KINDS: u8 = 9;

// The operations of packets (`virtio 1.4 §5.10.6`).
const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const SHUTDOWN: u16 = 4;
const RW: u16 = 5;
const CREDIT_UPDATE: u16 = 6;

/// A connection's ports: the host's and the guest's.
type Ports = (u32, u32);

/// Traffic of a connection, from the guest's view.
#[derive(Default)]
struct Line {
    /// Bytes that the guest sent.
    sent: Vec<u8>,
    /// Bytes that it received.
    received: Vec<u8>,
    /// The room that it last announced: the size, and the forwarded count.
    room: (u32, u32),
}

/// A program of the host.
struct Program {
    stream: Option<UnixStream>,
    /// The connection; of a client, once it has read its port.
    line: Option<Rc<RefCell<Line>>>,
    /// The guest's port that a client requested.
    asked: Option<u32>,
    sent: Vec<u8>,
    received: Vec<u8>,
}

struct Machine {
    steps: VsockSteps,
    driver: Driver,
    lines: HashMap<Ports, Rc<RefCell<Line>>>,
    programs: Vec<Program>,
    connected: mpsc::Receiver<UnixStream>,
    /// Numbers of connections and bytes.
    seen: (usize, usize),
}

fn pattern(from: usize, len: usize) -> impl Iterator<Item = u8> {
    (from..from + len).map(|n| (n % 251) as u8 ^ (n / 251) as u8)
}

fn pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().expect("a pair of sockets");
    for end in [&near, &far] {
        end.set_nonblocking(true).expect("a socket that does not block");
    }
    (near, far)
}

impl Machine {
    fn new(features: u64) -> Self {
        let (sender, connected) = mpsc::channel();
        let driver = Driver::new();
        let connect = move |port| {
            if port >= PORTS {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (near, far) = pair();
            let _ = sender.send(far);
            Ok(near)
        };
        let steps = VsockSteps::new(driver.receive.memory.clone(), CID, features, connect).expect("a poll set");
        Self { steps, driver, lines: HashMap::new(), programs: Vec::new(), connected, seen: (0, 0) }
    }

    fn apply(&mut self, input: &mut Input<'_>) {
        match input.u8() % KINDS {
            PACKET => self.packet(input),
            CLIENT => self.client(input),
            HOST_SENDS => {
                let (choice, len) = (input.u8(), input.u16());
                if let Some(program) = self.program(choice) {
                    program.send(len.into());
                }
            }
            HOST_READS => {
                let choice = input.u8();
                let lines = self.lines.clone();
                if let Some(program) = self.program(choice) {
                    program.read(&lines);
                }
            }
            HOST_ENDS => {
                let (choice, how) = (input.u8(), input.u8());
                if let Some(program) = self.program(choice) {
                    program.end(how);
                }
            }
            PROVIDE => self.driver.provide(input.u8() % 32, input.u16()),
            RECEIVE => self.receive(),
            WAIT => self.steps.wait(Duration::from_millis(u64::from(input.u16() % 4096))),
            _ => {
                self.driver.chain(input);
                self.transmit(None);
            }
        }
        self.check_limits();
    }

    fn program(&mut self, choice: u8) -> Option<&mut Program> {
        let count = self.programs.len().max(1);
        self.programs.get_mut(usize::from(choice) % count)
    }

    /// The guest sends a packet.
    fn packet(&mut self, input: &mut Input<'_>) {
        let (choice, op, flags, len) = (input.u8(), u16::from(input.u8() % 10), input.u8(), input.u16());
        // Ports of the host with and without listeners, and those of clients.
        let guest = u32::from(choice) % PORTS;
        let host = match choice / 4 % 8 {
            port @ 0..=4 => u32::from(port),
            client => FIRST_PORT + u32::from(client) - 5 + u32::from(choice / 32),
        };
        let ports = (host, guest);
        let line = self.lines.get(&ports).cloned();
        let taken = line.as_ref().map_or(0, |line| line.borrow().received.len());
        let room = match flags >> 6 {
            0 => (256 << 10, taken as u32),
            1 => (u32::from(flags & 63), taken as u32),
            2 => (1 << 10, (taken / 2) as u32),
            _ => (u32::from(flags), u32::from(len) << 16),
        };
        let is_data = op == RW;
        let data: Vec<u8> = match &line {
            Some(line) if is_data => pattern(line.borrow().sent.len(), len.into()).collect(),
            _ => vec![0xee; usize::from(len % 64)],
        };
        // Sometimes the length is wrong.
        let told = if flags & 0x3c == 0x3c { u32::from(len) << 4 | 1 } else { data.len() as u32 };
        let header = Header { host, guest, len: told, op, flags: u32::from(flags & 3), room };
        if !self.driver.send(&header, &data, flags >> 2 & 7) {
            return;
        }
        if let Some(line) = &line {
            let mut line = line.borrow_mut();
            if is_data {
                line.sent.extend(&data);
            }
            line.room = room;
        }
        self.transmit(Some((ports, room, op)));
    }

    /// Lets the device take all packets. The last packet opens a connection, if there is a new one.
    fn transmit(&mut self, packet: Option<(Ports, (u32, u32), u16)>) {
        while self.steps.transmit(&self.driver.transmit.queue) == Step::More {}
        self.driver.take_transmitted();
        while let Ok(stream) = self.connected.try_recv() {
            self.seen.0 += 1;
            let line = Rc::new(RefCell::new(Line::default()));
            // A request in a malformed chain has unrecorded ports, so the connection is not tracked.
            if let Some((ports, room, REQUEST)) = packet {
                line.borrow_mut().room = room;
                self.lines.insert(ports, Rc::clone(&line));
                self.add(stream, Some(line), None);
            }
        }
    }

    fn add(&mut self, stream: UnixStream, line: Option<Rc<RefCell<Line>>>, asked: Option<u32>) {
        let program = Program { stream: Some(stream), line, asked, sent: Vec::new(), received: Vec::new() };
        self.programs.push(program);
        if self.programs.len() > PROGRAMS {
            self.programs.remove(0);
        }
    }

    /// Connects a client of the host, with a valid line or with any bytes.
    fn client(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let (near, mut far) = pair();
        let guest = u32::from(choice) % PORTS;
        let is_line = choice < 0xc0;
        let text = if is_line { format!("CONNECT {guest}\n").into_bytes() } else { input.slice(40).to_vec() };
        let _ = far.write_all(&text);
        self.steps.admit(near);
        self.add(far, None, is_line.then_some(guest));
    }

    /// Lets the driver receive packets.
    fn receive(&mut self) {
        self.steps.look();
        while self.steps.receive(&self.driver.receive.queue) == Step::More {}
        for (header, data) in self.driver.take_received() {
            let ports = (header.host, header.guest);
            assert_eq!(header.len as usize, data.len(), "the length of a packet's data");
            assert!(matches!(header.op, 1..=7), "{}", header.op);
            if header.op == REQUEST {
                self.seen.0 += 1;
                assert!(header.host >= FIRST_PORT && self.lines.insert(ports, Rc::default()).is_none());
            }
            let Some(line) = self.lines.get(&ports) else { continue };
            let mut line = line.borrow_mut();
            if header.op == RW {
                line.received.extend(&data);
                self.seen.1 += data.len();
                let (room, passed_on) = line.room;
                let waiting = (line.received.len() as u32).wrapping_sub(passed_on);
                assert!(!data.is_empty() && waiting <= room, "{waiting} bytes in a room of {room}");
            } else {
                assert!(data.is_empty());
            }
            assert!(header.room.1 as usize <= line.sent.len(), "the host cannot have taken more than was sent");
        }
    }

    fn check_limits(&self) {
        let (connections, callers) = self.steps.census();
        assert!(connections <= 1023 && callers <= 256);
        assert!(self.steps.resets() <= 256 + 1023);
    }

    /// Lets all transfers complete.
    fn finish(mut self) -> (usize, usize) {
        for _ in 0..4 {
            self.driver.provide(32, 4096);
            self.receive();
            let lines = self.lines.clone();
            self.programs.iter_mut().for_each(|program| program.read(&lines));
            self.steps.wait(Duration::from_secs(3));
        }
        for program in &self.programs {
            let Some(line) = &program.line else { continue };
            assert!(program.sent.starts_with(&line.borrow().received), "the guest received what the host did not send");
        }
        self.seen
    }
}

impl Program {
    fn send(&mut self, len: usize) {
        let Some(stream) = &mut self.stream else { return };
        let data: Vec<u8> = pattern(self.sent.len(), len).collect();
        if let Ok(sent) = stream.write(&data) {
            self.sent.extend(&data[..sent]);
        }
    }

    fn read(&mut self, lines: &HashMap<Ports, Rc<RefCell<Line>>>) {
        let Some(stream) = &mut self.stream else { return };
        // No data, the end, or a reset.
        let _ = stream.read_to_end(&mut self.received);
        if let (None, Some(guest)) = (&self.line, self.asked)
            && let Some(end) = self.received.iter().position(|byte| *byte == b'\n')
        {
            let answer: Vec<u8> = self.received.drain(..=end).collect();
            let answer = String::from_utf8(answer).expect("an answer is text");
            let port = answer.strip_prefix("OK ").and_then(|rest| rest.trim_end().parse().ok()).expect("OK and a port");
            self.line = Some(Rc::clone(&lines[&(port, guest)]));
        }
        if let Some(line) = &self.line {
            assert!(line.borrow().sent.starts_with(&self.received), "the host received what the guest did not send");
        }
    }

    fn end(&mut self, how: u8) {
        let Some(stream) = &self.stream else { return };
        let _ = match how % 3 {
            0 => stream.shutdown(Shutdown::Write),
            1 => stream.shutdown(Shutdown::Read),
            _ => {
                self.stream = None;
                Ok(())
            }
        };
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of connections, and of bytes that the guest received.
fn run_to_end(input: &[u8]) -> (usize, usize) {
    let mut input = Input::new(input);
    let event_idx = u64::from(input.u8() & 1) << 29;
    let mut machine = Machine::new(event_idx);
    while !input.is_empty() {
        machine.apply(&mut input);
    }
    machine.finish()
}

fn start() -> Seed {
    Seed::new().with([0, PROVIDE, 31]).with(4096u16.to_le_bytes())
}

/// A packet on the connection selected by `choice`.
fn packet(seed: Seed, choice: u8, op: u16, flags: u8, len: u16) -> Seed {
    seed.with([PACKET, choice, op as u8, flags]).with(len.to_le_bytes())
}

/// Seeds: connections from both sides that carry data both ways and end in each way, a guest without room, clients that
/// disconnect, and invalid chains.
pub fn seeds() -> Vec<Vec<u8>> {
    // Port 1 of the host and port 2 of the guest; the first client, with port 1 of the guest.
    let (to_host, of_client) = (1 << 2 | 2, 5 << 2 | 1);
    let sends = |seed: Seed, program, len: u16| seed.with([HOST_SENDS, program]).with(len.to_le_bytes());
    let guest = packet(start(), to_host, REQUEST, 0, 0).with([RECEIVE]);
    let both = packet(sends(guest.clone(), 0, 20_000), to_host, RW, 0, 5000).with([RECEIVE, HOST_READS, 0]);
    let ended = packet(both.clone().with([HOST_ENDS, 0, 0, RECEIVE]), to_host, SHUTDOWN, 3, 0).with([RECEIVE]);
    let closed = packet(both.with([HOST_ENDS, 0, 2]), to_host, RW, 0, 100).with([RECEIVE]);
    let narrow = packet(sends(guest.clone(), 0, 500), to_host, CREDIT_UPDATE, 0x40 | 20, 0).with([RECEIVE]);
    let narrow = packet(narrow, to_host, CREDIT_UPDATE, 0x40 | 20, 0).with([RECEIVE]);
    let client = start().with([CLIENT, 1, RECEIVE]);
    let client = packet(client, of_client, RESPONSE, 0, 0).with([HOST_READS, 0]);
    let client = packet(sends(client, 0, 3000).with([RECEIVE]), of_client, RW, 4, 900).with([HOST_READS, 0]);
    let late = start().with([CLIENT, 1, RECEIVE, WAIT, 0, 8, RECEIVE, HOST_READS, 0]);
    let gone = start().with([CLIENT, 0xff]).with(b"CONNECT 1").with([HOST_ENDS, 0, 2, RECEIVE]);
    let full = (0..30).fold(guest, |seed, _| packet(seed, to_host, RW, 0, 60_000).with([RECEIVE]));
    let full = packet(full.with([HOST_READS, 0]), to_host, SHUTDOWN, 3, 0).with([WAIT, 0, 4, HOST_READS, 0, RECEIVE]);
    let lost = packet(packet(start(), to_host, RW, 0, 10), to_host, RW, 0x3c, 10).with([RECEIVE]);
    let chain = start().with([CHAIN, 2, 0, 16, 0, 0, 44, 0, 0, 0, 16, 0, 0, 200, 0, 2, RECEIVE]);
    [ended, closed, narrow, client, late, gone, full, lost, chain].map(Seed::done).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_lead_to_connections_that_carry_data() {
        let seen: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(seen[0], (1, 20_000));
        assert_eq!(seen[1], (1, 20_000));
        assert_eq!(seen[2].0, 1);
        assert!((1..=500).contains(&seen[2].1));
        assert_eq!(seen[3], (1, 3000));
        assert_eq!(seen[4..6], [(1, 0), (0, 0)]);
        assert_eq!((seen[6].0, seen[7], seen[8]), (1, (0, 0), (0, 0)));
    }
}
