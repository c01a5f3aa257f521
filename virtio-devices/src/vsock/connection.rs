//! A connection between a program in the guest and one on the host.
//!
//! Data of the host is read from its socket into the driver's buffers, and stays in the socket while the guest has no
//! room. Data of the guest is written from the driver's buffers to the socket; the rest that the socket does not accept
//! is kept, at most [`ROOM`](super::credit::ROOM) bytes, which the guest's credit covers.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};

use super::credit::{FromGuest, ToGuest};
use super::packet::{Header, Ports, STREAM, Shutdown, op};
use crate::queue::iovecs::IoVecs;

/// Timeout for the guest's reply to a request or to the end of a connection, and for the host to read some of the data
/// that is left at that end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// The most buffers of the driver that are filled at once.
pub(crate) const MAX_BURST: usize = 32;

bitflags::bitflags! {
    /// Packets that the guest must get, most important first.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    struct Owed: u8 {
        const REQUEST = 1;
        const RESPONSE = 2;
        const CREDIT_UPDATE = 4;
        const CREDIT_REQUEST = 8;
        const SHUTDOWN = 16;
    }
}

/// Phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The guest has not replied to a request.
    Requested,
    /// Both ends are connected.
    Established,
    /// The guest has ended the connection, and the host has not read all of its data.
    Draining,
}

/// End of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The guest needs no reset: it has ended the connection, or was never asked for it.
    Known,
    /// The guest must get a reset.
    Reset,
    /// As `Reset`, because the guest violated the protocol.
    Broken,
    /// As `Reset`, because time ran out.
    TimedOut,
    /// As `TimedOut`, but the guest needs no reset.
    TimedOutKnown,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    phase: Phase,
    owed: Owed,
    from_guest: FromGuest,
    to_guest: ToGuest,
    /// Data of the guest that the host has not accepted.
    rest: VecDeque<u8>,
    /// True if there may be data to read from the host.
    readable: bool,
    /// The host has closed both directions.
    hung_up: bool,
    /// True if a credit request was sent since the guest last had room.
    asked: bool,
    /// True if the guest sends credit updates without a request.
    volunteers: bool,
    /// Directions that the guest has shut down.
    guest: Shutdown,
    /// Directions that the host has shut down.
    host: Shutdown,
    /// Number of buffers to fill at once: grows while all of them are filled.
    burst: usize,
    end: Option<End>,
    deadline: Option<Instant>,
    /// The muxer's record of its turn.
    pub ticket: Option<u64>,
    /// The muxer's record of its deadline.
    pub timer: Option<Instant>,
}

impl Connection {
    fn new(stream: UnixStream, others: usize, phase: Phase, owed: Owed) -> Self {
        Self {
            stream,
            phase,
            owed,
            from_guest: FromGuest::beside(others),
            to_guest: ToGuest::default(),
            rest: VecDeque::new(),
            readable: true,
            hung_up: false,
            asked: false,
            volunteers: false,
            guest: Shutdown::empty(),
            host: Shutdown::empty(),
            burst: 1,
            end: None,
            deadline: None,
            ticket: None,
            timer: None,
        }
    }

    /// Creates a connection for a client of the host at `now`, in addition to `others`.
    pub(crate) fn of_client(stream: UnixStream, others: usize, now: Instant) -> Self {
        Self { deadline: Some(now + PATIENCE), ..Self::new(stream, others, Phase::Requested, Owed::REQUEST) }
    }

    /// Creates a connection for `request` of the guest, in addition to `others`.
    pub(crate) fn of_guest(stream: UnixStream, others: usize, request: &Header) -> Self {
        let mut connection = Self::new(stream, others, Phase::Established, Owed::RESPONSE);
        connection.to_guest.hear(request);
        connection
    }

    /// True if the guest has already dropped the connection.
    pub(crate) fn is_draining(&self) -> bool {
        self.phase == Phase::Draining
    }

    /// The way to end the connection, once it must end.
    pub(crate) fn end(&self) -> Option<End> {
        self.end
    }

    /// Time of the next timeout.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Handles a timeout at `now`.
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.is_closing() && !self.rest.is_empty() {
            // A socket is reported writable only when most of it is free. Trying shows if the host has read anything.
            let before = self.rest.len();
            self.flush(now);
            if self.end.is_some() || self.rest.len() < before {
                return;
            }
        }
        let known = self.phase == Phase::Draining || self.owed.contains(Owed::REQUEST);
        self.end_as(if known { End::TimedOutKnown } else { End::TimedOut });
    }

    fn end_as(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// Handles a packet of the guest and its `payload`. Returns true if a connection was established.
    pub(crate) fn receive(
        &mut self,
        ports: Ports,
        header: &Header,
        payload: &mut IoVecs<'_, '_>,
        now: Instant,
    ) -> bool {
        self.to_guest.hear(header);
        self.volunteers |= header.op.get() == op::CREDIT_UPDATE && !self.asked;
        self.asked &= self.to_guest.room() == 0;
        let established = self.phase == Phase::Established;
        match header.op.get() {
            op::RESPONSE if self.phase == Phase::Requested && !self.owed.contains(Owed::REQUEST) => {
                return self.establish(ports);
            }
            op::RW if established => self.take(payload, now),
            op::SHUTDOWN if established => self.shut_down(Shutdown::from_bits_truncate(header.flags.get()), now),
            op::RST => self.drop_guest(now),
            op::CREDIT_REQUEST if established => self.owed |= Owed::CREDIT_UPDATE,
            op::CREDIT_REQUEST | op::CREDIT_UPDATE => {}
            _ => self.end_as(End::Broken),
        }
        false
    }

    /// Reports the guest's acceptance to the client before any data of the guest.
    fn establish(&mut self, ports: Ports) -> bool {
        let line = format!("OK {}\n", ports.host);
        // The socket is empty, so it accepts this, unless the client has disconnected.
        match send(&self.stream, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) if sent == line.len() => {
                (self.phase, self.deadline) = (Phase::Established, None);
                true
            }
            _ => {
                self.end_as(End::Reset);
                false
            }
        }
    }

    /// Writes the guest's data to the host, and keeps the part that the host does not accept.
    fn take(&mut self, payload: &mut IoVecs<'_, '_>, now: Instant) {
        let len = payload.bytes();
        if self.guest.contains(Shutdown::SEND) || !self.from_guest.receive(len) {
            return self.end_as(End::Broken);
        }
        if self.host.contains(Shutdown::RECEIVE) {
            // The guest has been notified, or will be, that the host no longer reads.
            return self.from_guest.forward(len);
        }
        if self.rest.is_empty() {
            match payload.send_to_socket(self.stream.as_fd()) {
                Ok(sent) => {
                    self.from_guest.forward(sent);
                    payload.advance(sent);
                }
                Err(error) if is_transient(&error) => {}
                Err(_) => {
                    self.from_guest.forward(len);
                    return self.host_receives_no_more();
                }
            }
        }
        self.keep(payload);
        self.flush(now);
        if self.from_guest.should_tell() {
            self.owed |= Owed::CREDIT_UPDATE;
        }
    }

    /// Keeps the payload, which the guest's credit covers.
    fn keep(&mut self, payload: &IoVecs<'_, '_>) {
        let mut part = [0; 4096];
        let mut done = 0;
        loop {
            let len = payload.read_at(done, &mut part);
            self.rest.extend(part.get(..len).unwrap_or_default());
            done += len;
            if len < part.len() {
                return;
            }
        }
    }

    /// Writes kept data, as far as the host accepts it.
    fn flush(&mut self, now: Instant) {
        while !self.rest.is_empty() {
            let (first, second) = self.rest.as_slices();
            let parts = [IoSlice::new(first), IoSlice::new(second)];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.stream, &parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => {
                    self.rest.drain(..sent.min(self.rest.len()));
                    self.from_guest.forward(sent);
                    if self.is_closing() {
                        self.deadline = Some(now + PATIENCE);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => return self.host_receives_no_more(),
            }
        }
        // Few connections ever have kept data, so its memory is freed.
        self.rest = VecDeque::new();
        self.end_writing();
    }

    /// True if the guest will send no more.
    fn is_closing(&self) -> bool {
        self.phase == Phase::Draining || self.guest.is_all()
    }

    /// Shuts down the host's side once all of the guest's data is written.
    fn end_writing(&mut self) {
        if !self.rest.is_empty() {
            return;
        }
        if self.phase == Phase::Draining {
            self.end_as(End::Known);
        } else if self.guest.is_all() {
            self.end_as(End::Reset);
        } else if self.guest.contains(Shutdown::SEND) {
            // Fails if the client has disconnected, which is detected elsewhere.
            let _ = self.stream.shutdown(net::Shutdown::Write);
        }
    }

    /// Drops kept data after the client has stopped reading, and notifies the guest.
    fn host_receives_no_more(&mut self) {
        self.from_guest.forward(self.rest.len());
        self.rest = VecDeque::new();
        self.announce(Shutdown::RECEIVE);
        self.end_writing();
    }

    /// Notes that the host has shut down a direction, and queues one notification of the guest.
    fn announce(&mut self, shutdown: Shutdown) {
        if self.phase == Phase::Established && !self.host.contains(shutdown) {
            self.owed |= Owed::SHUTDOWN;
        }
        self.host |= shutdown;
    }

    /// Handles a shutdown by the guest.
    fn shut_down(&mut self, shutdown: Shutdown, now: Instant) {
        self.guest |= shutdown;
        if shutdown.contains(Shutdown::RECEIVE) {
            let _ = self.stream.shutdown(net::Shutdown::Read);
        }
        if self.guest.is_all() {
            self.deadline = Some(now + PATIENCE);
        }
        self.end_writing();
    }

    /// Handles a reset by the guest. Data that it sent before a shutdown of sending is still written.
    fn drop_guest(&mut self, now: Instant) {
        if self.phase == Phase::Established && self.guest.contains(Shutdown::SEND) && !self.rest.is_empty() {
            (self.phase, self.owed, self.deadline) = (Phase::Draining, Owed::empty(), Some(now + PATIENCE));
        } else {
            self.end_as(End::Known);
        }
    }

    /// Handles an event of the host's socket.
    pub(crate) fn host_changed(&mut self, readable: bool, writable: bool, hung_up: bool, now: Instant) {
        self.readable |= readable;
        self.hung_up |= hung_up;
        // Nothing reads the kept data after a hang-up. Once is enough: shutting the socket down is another event of it.
        if hung_up && !self.host.is_all() && (self.host | self.guest_receives_not()).contains(Shutdown::SEND) {
            self.host_receives_no_more();
            self.announce(Shutdown::all());
        }
        if writable && !self.rest.is_empty() {
            self.flush(now);
            if !self.guest.contains(Shutdown::SEND) && self.from_guest.should_tell() {
                self.owed |= Owed::CREDIT_UPDATE;
            }
        }
    }

    /// Shutdown flag for a guest that no longer receives: data of the host then has no receiver.
    fn guest_receives_not(&self) -> Shutdown {
        if self.guest.contains(Shutdown::RECEIVE) { Shutdown::SEND } else { Shutdown::empty() }
    }

    /// True if the host's data can be read now, as far as known.
    fn wants_to_read(&self) -> bool {
        self.phase == Phase::Established
            && self.readable
            && !(self.host | self.guest_receives_not()).contains(Shutdown::SEND)
    }

    /// Determines the work after a change. Returns true if there is a packet for the guest.
    pub(crate) fn settle(&mut self) -> bool {
        if self.wants_to_read() && self.to_guest.room() == 0 && !self.asked && !self.volunteers {
            self.asked = true;
            self.owed |= Owed::CREDIT_REQUEST;
        }
        !self.owed.is_empty() || self.wants_to_read() && self.to_guest.room() > 0
    }

    /// Number of the driver's buffers for the next packets, and bytes of payload in them.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        if self.owed.is_empty() { (self.burst, self.to_guest.room()) } else { (1, 0) }
    }

    /// The next packet without payload, which precedes all data of this connection.
    pub(crate) fn control(&mut self, cid: u64, ports: Ports, now: Instant) -> Option<Header> {
        let mut header = Header::to_guest(cid, ports, STREAM, 0);
        let (owed, op) = [
            (Owed::REQUEST, op::REQUEST),
            (Owed::RESPONSE, op::RESPONSE),
            (Owed::SHUTDOWN, op::SHUTDOWN),
            (Owed::CREDIT_UPDATE, op::CREDIT_UPDATE),
            (Owed::CREDIT_REQUEST, op::CREDIT_REQUEST),
        ]
        .into_iter()
        .find(|(owed, _)| self.owed.contains(*owed))?;
        self.owed -= owed | Owed::CREDIT_UPDATE;
        header.op = op.into();
        if owed == Owed::SHUTDOWN {
            header.flags = self.host.bits().into();
            if self.host.is_all() {
                self.deadline.get_or_insert(now + PATIENCE);
            }
        }
        self.from_guest.tell(&mut header);
        Some(header)
    }

    /// Reads from the host into `data`, as much as the guest has room for, and returns the number of bytes.
    pub(crate) fn fill(&mut self, data: &mut IoVecs<'_, '_>) -> usize {
        let wanted = data.bytes();
        data.truncate(self.to_guest.room());
        if data.bytes() == 0 {
            // An empty read would look like the end.
            return 0;
        }
        match data.receive(self.stream.as_fd(), &mut []) {
            Ok(len @ 1..) => {
                self.to_guest.send(len);
                self.burst = if len == wanted { (self.burst * 2).min(MAX_BURST) } else { self.burst };
                len
            }
            Err(error) if is_transient(&error) => {
                self.readable = error.kind() == io::ErrorKind::Interrupted;
                self.burst = (self.burst / 2).max(1);
                0
            }
            result => {
                self.readable = false;
                self.announce(Shutdown::SEND);
                if self.hung_up || result.is_err() {
                    self.host_receives_no_more();
                }
                0
            }
        }
    }

    /// The header of a packet with `len` bytes of payload.
    pub(crate) fn data_header(&mut self, cid: u64, ports: Ports, len: usize) -> Header {
        let mut header = Header::to_guest(cid, ports, STREAM, op::RW);
        // At most the size of one buffer of the driver.
        header.len = (len as u32).into();
        self.from_guest.tell(&mut header);
        self.owed -= Owed::CREDIT_UPDATE;
        header
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
