//! All connections of a device: assigns packets to them, and schedules their turns.
//!
//! Nothing here waits, and everything has a limit: [`MAX_CONNECTIONS`], each with limited kept data; [`MAX_CALLERS`];
//! and [`MAX_RESETS`] replies to packets without a connection, beyond which no packet is read from the guest until it
//! has taken some (`virtio 1.4 §5.10.6.1.1`).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::caller::{Caller, ConnectRequest};
use super::connection::{Connection, End};
use super::counters::{Tally, VsockCounter};
use super::packet::{HOST_CID, Header, Ports, STREAM, op};
use super::poller::{Event, Poller};
use crate::queue::iovecs::IoVecs;

/// The most connections at a time, of both directions.
pub(crate) const MAX_CONNECTIONS: usize = 1023;
/// The most clients of the host at a time that have not named a port. A further one replaces the oldest.
pub(crate) const MAX_CALLERS: usize = 256;
/// The most queued resets; beyond it, no more packets are read from the guest.
pub(crate) const MAX_RESETS: usize = 256;
/// The first port assigned to clients of the host.
pub(crate) const FIRST_PORT: u32 = 1 << 30;
/// The number of those ports.
const PORTS: u32 = 1 << 30;
/// No port (`VMADDR_PORT_ANY`). As the host's port, it distinguishes other poll tokens from those of connections.
const NO_PORT: u32 = u32::MAX;

/// The token of the worker's doorbell in its [`Poller`].
pub(crate) const DOORBELL: u64 = u64::MAX;
/// The number of the listening socket.
pub(crate) const LISTENER: u64 = u64::MAX - 1;

/// Function that connects to a port of the host for the guest.
pub(crate) type Connect = Box<dyn Fn(u32) -> io::Result<UnixStream> + Send>;

/// All connections of a device.
pub(crate) struct Muxer {
    cid: u64,
    poller: Poller,
    connect: Connect,
    connections: HashMap<Ports, Connection>,
    callers: BTreeMap<u32, Caller>,
    next_caller: u32,
    next_port: u32,
    /// Connections with packets for the guest, in the order of their turns.
    turns: BTreeMap<u64, Ports>,
    next_ticket: u64,
    deadlines: BTreeSet<(Instant, Ports)>,
    /// Resets for the guest, with the type of socket.
    resets: VecDeque<(Ports, u16)>,
}

impl fmt::Debug for Muxer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connections, callers, resets, .. } = self;
        let counts = (connections.len(), callers.len(), resets.len());
        f.debug_tuple("Muxer").field(&counts).finish()
    }
}

/// Next output to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// A packet without payload.
    Packet(Header),
    /// Data of the host on this connection.
    Data(Ports),
}

impl Muxer {
    /// Creates an empty set of connections, for a guest with the context ID `cid`. Clients get ports from `port` on.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor for the poll set.
    pub(crate) fn new(cid: u64, port: u32, connect: Connect) -> io::Result<Self> {
        Ok(Self {
            cid,
            poller: Poller::new()?,
            connect,
            connections: HashMap::new(),
            callers: BTreeMap::new(),
            next_caller: 0,
            next_port: port % PORTS,
            turns: BTreeMap::new(),
            next_ticket: 0,
            deadlines: BTreeSet::new(),
            resets: VecDeque::new(),
        })
    }

    /// The poll set. The worker adds its doorbell and the listening socket.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// A client of the host.
    pub(crate) fn admit(&mut self, stream: UnixStream, now: Instant, tally: &mut Tally) {
        if self.callers.len() == MAX_CALLERS {
            // The oldest has had the most time to name a port.
            self.callers.pop_first();
            tally.count(VsockCounter::RefusedClients);
        }
        // The two highest numbers are reserved for the doorbell and the listener.
        while self.next_caller >= u32::MAX - 1 || self.callers.contains_key(&self.next_caller) {
            self.next_caller = self.next_caller.wrapping_add(1);
        }
        let number = self.next_caller;
        self.next_caller += 1;
        if self.poller.add(&stream, Ports { host: NO_PORT, guest: number }.to_bits()).is_err() {
            return tally.count(VsockCounter::RefusedClients);
        }
        self.callers.insert(number, Caller::new(stream));
        self.hear_caller(number, now, tally);
    }

    fn hear_caller(&mut self, number: u32, now: Instant, tally: &mut Tally) {
        let Some(caller) = self.callers.get_mut(&number) else { return };
        let port = match caller.read() {
            ConnectRequest::Unknown => return,
            ConnectRequest::Nothing | ConnectRequest::Port(NO_PORT) => None,
            ConnectRequest::Port(port) => Some(port),
        };
        let Some(Caller { stream, .. }) = self.callers.remove(&number) else { return };
        let ports = port.filter(|_| self.connections.len() < MAX_CONNECTIONS).and_then(|guest| self.free_port(guest));
        match ports {
            Some(ports) if self.poller.rename(&stream, ports.to_bits()).is_ok() => {
                let others = self.connections.len();
                self.connections.insert(ports, Connection::of_client(stream, others, now));
                self.settle(ports, false, tally);
            }
            _ => tally.count(VsockCounter::RefusedClients),
        }
    }

    /// A free port of the host.
    fn free_port(&mut self, guest: u32) -> Option<Ports> {
        // One more than the maximum in use.
        for _ in 0..=MAX_CONNECTIONS {
            let host = FIRST_PORT + self.next_port;
            self.next_port = (self.next_port + 1) % PORTS;
            if !self.connections.keys().any(|ports| ports.host == host) {
                return Some(Ports { host, guest });
            }
        }
        None
    }

    /// Handles an event of a socket.
    pub(crate) fn happened(&mut self, event: Event, now: Instant, tally: &mut Tally) {
        let ports = Ports::from_bits(event.token);
        if ports.host == NO_PORT {
            return self.hear_caller(ports.guest, now, tally);
        }
        if let Some(connection) = self.connections.get_mut(&ports) {
            connection.host_changed(event.readable, event.writable, event.hung_up, now);
            self.settle(ports, false, tally);
        }
    }

    /// True if there is room for all packets that a packet of the guest may cause.
    pub(crate) fn takes_packets(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Handles a packet of the guest, with the rest of its chain.
    pub(crate) fn receive(&mut self, header: &Header, rest: &mut IoVecs<'_, '_>, now: Instant, tally: &mut Tally) {
        tally.count(VsockCounter::TxPackets);
        let ports = Ports::of_guests(header);
        if header.src_cid.get() != self.cid || header.dst_cid.get() != HOST_CID {
            return tally.count(VsockCounter::TxBadPackets);
        }
        let is_reset = header.op.get() == op::RST;
        if header.kind.get() != STREAM {
            if !is_reset {
                self.resets.push_back((ports, header.kind.get()));
            }
            return;
        }
        let len = header.len.get() as usize;
        let is_whole = rest.bytes() >= len;
        rest.truncate(if header.op.get() == op::RW { len } else { 0 });
        match self.connections.get_mut(&ports).filter(|connection| !connection.is_draining()) {
            Some(connection) if is_whole => {
                tally.add(VsockCounter::TxBytes, rest.bytes() as u64);
                let established = connection.receive(ports, header, rest, now);
                tally.add(VsockCounter::Connections, established.into());
                self.settle(ports, false, tally);
            }
            Some(_) => self.remove(ports, End::Broken, tally),
            None if header.op.get() == op::REQUEST => self.open(ports, header, tally),
            None if is_reset => {}
            None => self.resets.push_back((ports, STREAM)),
        }
    }

    /// Opens a connection of the guest.
    fn open(&mut self, ports: Ports, request: &Header, tally: &mut Tally) {
        let is_free = ports.host != NO_PORT && !self.connections.contains_key(&ports);
        let stream = if is_free && self.connections.len() < MAX_CONNECTIONS {
            let stream = (self.connect)(ports.host);
            stream.and_then(|stream| self.poller.add(&stream, ports.to_bits()).map(|()| stream)).ok()
        } else {
            None
        };
        let Some(stream) = stream else {
            tally.count(VsockCounter::RefusedGuests);
            return self.resets.push_back((ports, STREAM));
        };
        tally.count(VsockCounter::Connections);
        let others = self.connections.len();
        self.connections.insert(ports, Connection::of_guest(stream, others, request));
        self.settle(ports, false, tally);
    }

    /// Time of the next connection's timeout.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Ends the connections whose timeouts have passed.
    pub(crate) fn expire(&mut self, now: Instant, tally: &mut Tally) {
        while let Some((_, ports)) = self.deadlines.first().copied().filter(|(deadline, _)| *deadline <= now) {
            match self.connections.get_mut(&ports) {
                Some(connection) => connection.expire(now),
                None => _ = self.deadlines.pop_first(),
            }
            self.settle(ports, false, tally);
        }
    }

    /// Number of the driver's buffers for the next output, and bytes of payload in them; `None` if there is no output.
    pub(crate) fn buffers(&self) -> Option<(usize, usize)> {
        if !self.resets.is_empty() {
            return Some((1, 0));
        }
        let (_, ports) = self.turns.first_key_value()?;
        self.connections.get(ports).map(Connection::buffers)
    }

    /// Takes the next output, for which there is a buffer.
    pub(crate) fn next(&mut self, now: Instant, tally: &mut Tally) -> Option<Output> {
        if let Some((ports, kind)) = self.resets.pop_front() {
            return Some(Output::Packet(Header::to_guest(self.cid, ports, kind, op::RST)));
        }
        let ports = *self.turns.first_key_value()?.1;
        let control = self.connections.get_mut(&ports)?.control(self.cid, ports, now);
        Some(match control {
            Some(header) => {
                self.settle(ports, true, tally);
                Output::Packet(header)
            }
            None => Output::Data(ports),
        })
    }

    /// Reads the host's data of the connection whose turn it is into `data`, and returns the number of bytes.
    pub(crate) fn fill(&mut self, ports: Ports, data: &mut IoVecs<'_, '_>) -> usize {
        self.connections.get_mut(&ports).map_or(0, |connection| connection.fill(data))
    }

    /// The header of a packet with `len` bytes of that data.
    pub(crate) fn data_header(&mut self, ports: Ports, len: usize) -> Header {
        let header = |connection: &mut Connection| connection.data_header(self.cid, ports, len);
        self.connections.get_mut(&ports).map(header).unwrap_or_default()
    }

    /// Ends the turn of a connection after [`Self::fill`].
    pub(crate) fn end_turn(&mut self, ports: Ports, tally: &mut Tally) {
        self.settle(ports, true, tally);
    }

    /// Updates a connection after a change: it ends, or gets a turn, or a timeout. A connection with packets for the
    /// guest keeps its place in the queue, unless this was its turn.
    fn settle(&mut self, ports: Ports, had_turn: bool, tally: &mut Tally) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        if let Some(end) = connection.end() {
            return self.remove(ports, end, tally);
        }
        let wants = connection.settle();
        if (had_turn || !wants)
            && let Some(ticket) = connection.ticket.take()
        {
            self.turns.remove(&ticket);
        }
        if wants && connection.ticket.is_none() {
            connection.ticket = Some(self.next_ticket);
            self.turns.insert(self.next_ticket, ports);
            self.next_ticket += 1;
        }
        let deadline = connection.deadline();
        if connection.timer != deadline {
            if let Some(old) = connection.timer {
                self.deadlines.remove(&(old, ports));
            }
            self.deadlines.extend(deadline.map(|deadline| (deadline, ports)));
            connection.timer = deadline;
        }
    }

    /// Closes a connection's socket, and queues a reset for the guest if `end` requires one.
    fn remove(&mut self, ports: Ports, end: End, tally: &mut Tally) {
        let Some(connection) = self.connections.remove(&ports) else { return };
        if let Some(ticket) = connection.ticket {
            self.turns.remove(&ticket);
        }
        if let Some(timer) = connection.timer {
            self.deadlines.remove(&(timer, ports));
        }
        match end {
            End::TimedOut | End::TimedOutKnown => tally.count(VsockCounter::TimedOut),
            End::Broken => tally.count(VsockCounter::BrokenRules),
            End::Known | End::Reset => {}
        }
        if !matches!(end, End::Known | End::TimedOutKnown) {
            self.resets.push_back((ports, STREAM));
        }
    }

    /// Numbers of connections and of callers.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn census(&self) -> (usize, usize) {
        (self.connections.len(), self.callers.len())
    }

    /// The number of queued resets.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn resets(&self) -> usize {
        self.resets.len()
    }
}
