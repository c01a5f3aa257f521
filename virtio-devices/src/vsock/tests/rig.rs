//! A driver and a host, without threads.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;
use zerocopy::{FromBytes, IntoBytes};

use super::super::packet::{HEADER, Header, Ports, STREAM, op};
use super::super::steps::VsockSteps;
use crate::net::steps::Step;
use crate::testing::driver_queue::{BUFFERS, DriverQueue, WRITE, memory};

pub(crate) const CID: u32 = 3;
/// The size of a receive buffer, Linux's.
pub(crate) const BUFFER: u32 = 4096;
const QUEUE: u16 = 256;
const RECEIVE_BUFFERS: u64 = BUFFERS + (2 << 20);
/// Guest memory for one packet to send, and the number of these that are used in turn.
const SLOT: u64 = 0x2_0000;
const SLOTS: u64 = 16;
/// The room of the guest's sockets, Linux's default.
const ROOM: u32 = 256 << 10;

/// A packet that the driver received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Packet {
    pub header: Header,
    pub data: Vec<u8>,
}

impl Packet {
    pub(crate) fn op(&self) -> u16 {
        self.header.op.get()
    }

    pub(crate) fn ports(&self) -> Ports {
        Ports { host: self.header.src_port.get(), guest: self.header.dst_port.get() }
    }
}

type Listeners = Arc<Mutex<HashMap<u32, Vec<UnixStream>>>>;

pub(crate) struct Rig {
    pub steps: VsockSteps,
    pub receive: DriverQueue,
    pub transmit: DriverQueue,
    /// The host's ends of connections that the guest opened, by port.
    pub listeners: Listeners,
    slot: u64,
    /// The guest's room for each connection, and the bytes that it has taken of each.
    pub room: u32,
    pub taken: HashMap<Ports, u32>,
}

impl Rig {
    /// Creates a rig with programs of the host on all ports below 1000.
    pub(crate) fn new() -> Self {
        let map = memory();
        let listeners = Listeners::default();
        let accepted = Arc::clone(&listeners);
        let connect = move |port| {
            if port >= 1000 {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (near, far) = pair();
            accepted.lock().entry(port).or_default().push(far);
            Ok(near)
        };
        let [receive, transmit] = [0, 1].map(|index| DriverQueue::new(&map, index, QUEUE));
        let steps = VsockSteps::new(map, CID, 0, connect).unwrap();
        Self { steps, receive, transmit, listeners, slot: 0, room: ROOM, taken: HashMap::new() }
    }

    /// The same with receive buffers.
    pub(crate) fn ready() -> Self {
        let mut rig = Self::new();
        rig.provide(200);
        rig
    }

    /// Makes `count` receive buffers available.
    pub(crate) fn provide(&mut self, count: usize) {
        for _ in 0..count {
            let head = self.receive.build(&[(0, BUFFER, WRITE)]);
            let at = RECEIVE_BUFFERS + u64::from(head) * u64::from(BUFFER);
            self.receive.set_raw(head, (at, BUFFER, WRITE, 0));
            self.receive.offer(head);
        }
    }

    /// A header of the guest for this connection.
    pub(crate) fn header(&self, ports: Ports, op: u16) -> Header {
        Header {
            src_cid: u64::from(CID).into(),
            dst_cid: 2.into(),
            src_port: ports.guest.into(),
            dst_port: ports.host.into(),
            kind: STREAM.into(),
            op: op.into(),
            buf_alloc: self.room.into(),
            fwd_cnt: self.taken.get(&ports).copied().unwrap_or_default().into(),
            ..Header::default()
        }
    }

    /// Makes a packet available, split into pieces of these lengths and the rest.
    pub(crate) fn offer(&mut self, header: Header, data: &[u8], pieces: &[usize]) {
        let at = BUFFERS + self.slot * SLOT;
        self.slot = (self.slot + 1) % SLOTS;
        self.transmit.send(at, &[header.as_bytes(), data].concat(), pieces);
    }

    /// Sends a packet.
    pub(crate) fn send_raw(&mut self, header: Header, data: &[u8]) {
        self.offer(header, data, if data.is_empty() { &[] } else { &[HEADER] });
        assert_eq!(self.transmit(), Step::Doorbell);
    }

    pub(crate) fn transmit(&mut self) -> Step {
        let queue = Arc::clone(&self.transmit.queue);
        loop {
            match self.steps.transmit(&queue) {
                Step::More => {}
                step => return step,
            }
        }
    }

    pub(crate) fn send(&mut self, ports: Ports, op: u16) {
        self.send_raw(self.header(ports, op), &[]);
    }

    pub(crate) fn send_data(&mut self, ports: Ports, data: &[u8]) {
        let mut header = self.header(ports, op::RW);
        header.len = (data.len() as u32).into();
        self.send_raw(header, data);
    }

    pub(crate) fn shut_down(&mut self, ports: Ports, flags: u32) {
        let mut header = self.header(ports, op::SHUTDOWN);
        header.flags = flags.into();
        self.send_raw(header, &[]);
    }

    /// Makes the device check its sockets and send the driver all packets, and returns them.
    pub(crate) fn packets(&mut self) -> Vec<Packet> {
        self.steps.look();
        let queue = Arc::clone(&self.receive.queue);
        let mut packets = Vec::new();
        loop {
            let step = self.steps.receive(&queue);
            for (head, len) in self.receive.take_used() {
                let at = RECEIVE_BUFFERS + u64::from(head) * u64::from(BUFFER);
                let bytes = self.receive.bytes(at, len as usize);
                // A bad buffer is returned empty.
                let Ok((header, data)) = Header::read_from_prefix(&bytes) else { continue };
                assert_eq!(header.len.get() as usize, data.len());
                packets.push(Packet { header, data: data.to_vec() });
            }
            if step != Step::More {
                return packets;
            }
        }
    }

    /// All packets, whose data the guest takes; provides new buffers for the used ones.
    pub(crate) fn take_packets(&mut self) -> Vec<Packet> {
        let packets = self.packets();
        for packet in &packets {
            let taken = self.taken.entry(packet.ports()).or_default();
            *taken = taken.wrapping_add(packet.data.len() as u32);
        }
        self.provide(packets.len());
        packets
    }

    /// The only packet.
    pub(crate) fn packet(&mut self) -> Packet {
        let mut packets = self.take_packets();
        assert_eq!(packets.len(), 1, "{packets:?}");
        packets.remove(0)
    }

    pub(crate) fn assert_quiet(&mut self) {
        assert_eq!(self.packets(), []);
    }

    /// Sends the device a credit update.
    pub(crate) fn update(&mut self, ports: Ports) {
        self.send(ports, op::CREDIT_UPDATE);
    }

    /// A client of the host that has sent `line`.
    pub(crate) fn client(&mut self, line: &str) -> UnixStream {
        let (near, mut far) = pair();
        far.write_all(line.as_bytes()).unwrap();
        self.steps.admit(near);
        far
    }

    /// A client that is connected to `port` of the guest.
    pub(crate) fn connected_client(&mut self, port: u32) -> (UnixStream, Ports) {
        let client = self.client(&format!("CONNECT {port}\n"));
        let request = self.packet();
        assert_eq!((request.op(), request.header.dst_port.get()), (op::REQUEST, port));
        let ports = request.ports();
        self.send(ports, op::RESPONSE);
        assert_eq!(read(&client), format!("OK {}\n", ports.host).into_bytes());
        (client, ports)
    }

    /// A connection of the guest to `port` of the host.
    pub(crate) fn connected_guest(&mut self, port: u32, guest: u32) -> (UnixStream, Ports) {
        let ports = Ports { host: port, guest };
        self.send(ports, op::REQUEST);
        let response = self.packet();
        assert_eq!((response.op(), response.ports()), (op::RESPONSE, ports));
        let far = self.listeners.lock().get_mut(&port).unwrap().pop().unwrap();
        (far, ports)
    }
}

pub(crate) fn pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_nonblocking(true).unwrap();
    (near, far)
}

/// All data available now.
pub(crate) fn read(mut stream: &UnixStream) -> Vec<u8> {
    let mut data = Vec::new();
    if let Err(error) = stream.read_to_end(&mut data) {
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
    data
}

/// True if the peer has sent nothing, and has closed its side.
pub(crate) fn is_at_end(mut stream: &UnixStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

/// Bytes that differ by position.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ (i / 251) as u8).collect()
}

/// Writes as much as fits, and returns the number of bytes.
pub(crate) fn write(mut stream: &UnixStream, data: &[u8]) -> usize {
    let mut done = 0;
    while done < data.len() {
        match stream.write(&data[done..]) {
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    done
}
