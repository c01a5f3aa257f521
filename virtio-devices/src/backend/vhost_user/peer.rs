//! A connected peer: its abilities, and the features agreed with it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use virtio_bindings::virtio_config::VIRTIO_F_ACCESS_PLATFORM;

use super::cancel::Cancel;
use super::channel::{Channel, ChannelMessage};
use super::connection::{Answer, Connection, Fault, PeerError};
use super::message::*;
use super::role::VhostUserRole;
use crate::GuestMap;
use crate::transport::features::has;

/// The time limit for the whole negotiation.
const NEGOTIATION: Duration = Duration::from_secs(5);
/// Protocol features that are used if the peer has them.
const WANTED: u64 = 1 << PROTOCOL_F_MQ
    | 1 << PROTOCOL_F_LOG_SHMFD
    | 1 << PROTOCOL_F_REPLY_ACK
    | 1 << PROTOCOL_F_CONFIG
    | 1 << PROTOCOL_F_INFLIGHT_SHMFD
    | 1 << PROTOCOL_F_CONFIGURE_MEM_SLOTS
    | 1 << PROTOCOL_F_STATUS
    | 1 << PROTOCOL_F_DEVICE_STATE;

/// A connected peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(super) connection: Connection,
    /// The feature bits that the peer offers.
    pub(super) features: u64,
    /// The protocol features in use.
    pub(super) protocol: u64,
    /// The role of the peer.
    pub(super) role: VhostUserRole,
    /// The device configuration, as far as it is read. Empty if the peer has none.
    pub(super) config: Vec<u8>,
    channel: Option<Channel>,
    /// The number of memory regions that the peer accepts.
    pub(super) memory_slots: usize,
    /// The memory that the peer is mapping.
    pub(super) mapping: Option<Mapping>,
    /// The parameters of the last start.
    pub(super) started: Option<Started>,
}

/// Memory that a peer is mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// All of the memory.
    pub(super) memory: GuestMap,
    /// The request that the peer has not answered.
    pub(super) asked: Request,
    /// The numbers of the regions that the peer has not been asked to map yet.
    pub(super) left: Range<usize>,
}

/// The parameters of a start, which are sent again when the log begins or ends.
#[derive(Debug)]
pub(crate) struct Started {
    /// The feature bits, without that of the log.
    pub(super) features: u64,
    /// The rings.
    pub(super) rings: Vec<RingPlace>,
}

/// The addresses of a ring.
#[derive(Debug, Clone)]
pub(crate) struct RingPlace {
    /// The index.
    pub(super) index: u32,
    /// The addresses of the descriptor table, the used ring and the available ring: in this process, or the driver's
    /// I/O addresses if the peer translates.
    pub(super) addresses: [u64; 3],
    /// The driver's address of the used ring.
    pub(super) used: u64,
}

impl Peer {
    /// Negotiates the protocol with the peer at the other end of `stream`, and learns its abilities. `cancel` ends the
    /// wait for its answers.
    pub(crate) fn negotiate(
        stream: UnixStream,
        role: VhostUserRole,
        cancel: Option<Cancel>,
    ) -> Result<Self, PeerError> {
        let fault = |fault| PeerError { request: Request::GET_FEATURES, fault };
        let mut connection = Connection::new(stream, cancel).map_err(|error| fault(Fault::System(error)))?;
        connection.allow(NEGOTIATION);
        let mut peer = Self {
            connection,
            features: 0,
            protocol: 0,
            role,
            config: Vec::new(),
            channel: None,
            memory_slots: MAX_FDS,
            mapping: None,
            started: None,
        };
        peer.features = peer.get_u64(Request::GET_FEATURES)?;
        if has(peer.features, F_PROTOCOL_FEATURES) {
            let offered = peer.get_u64(Request::GET_PROTOCOL_FEATURES)?;
            let mut taken = offered & WANTED;
            if role.config_len() == 0 {
                taken &= !(1 << PROTOCOL_F_CONFIG);
            }
            if matches!(role, VhostUserRole::Nic { .. }) {
                taken |= offered & 1 << PROTOCOL_F_RARP;
            }
            // The backend channel is only for changes of the configuration and IOTLB misses.
            let asks = has(peer.features, VIRTIO_F_ACCESS_PLATFORM) && has(taken, PROTOCOL_F_REPLY_ACK);
            if asks && matches!(role, VhostUserRole::Nic { .. })
                || has(taken, PROTOCOL_F_CONFIG) && role.hears_config(peer.features)
            {
                taken |= offered & 1 << PROTOCOL_F_BACKEND_REQ;
            }
            // Acknowledgements work only after this.
            peer.connection.send(Request::SET_PROTOCOL_FEATURES, 0, &longs(&[taken]), &[])?;
            peer.protocol = taken;
        }
        peer.set(Request::SET_OWNER, &[], &[])?;
        if has(peer.protocol, PROTOCOL_F_CONFIGURE_MEM_SLOTS) {
            let slots = peer.get_u64(Request::GET_MAX_MEM_SLOTS)?;
            peer.memory_slots = usize::try_from(slots).unwrap_or(usize::MAX);
        }
        peer.find_config()?;
        if has(peer.protocol, PROTOCOL_F_BACKEND_REQ) {
            peer.open_channel()?;
        }
        Ok(peer)
    }

    /// Makes the peer announce the address `mac`, if it can.
    pub(crate) fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), PeerError> {
        if !has(self.protocol, PROTOCOL_F_RARP) {
            return Ok(());
        }
        let [a, b, c, d, e, f] = mac;
        self.set(Request::SEND_RARP, &[a, b, c, d, e, f, 0, 0], &[])
    }

    /// True if the peer runs the queues of its role.
    pub(crate) fn runs_all(&mut self) -> Result<bool, PeerError> {
        let pairs = match self.role {
            VhostUserRole::Nic { queue_pairs } => queue_pairs,
            // A peer that cannot report its number of queues has a fixed one.
            VhostUserRole::Device { .. } if !has(self.protocol, PROTOCOL_F_MQ) => return Ok(true),
            VhostUserRole::Device { queues, .. } => {
                return Ok(self.get_u64(Request::GET_QUEUE_NUM)? >= u64::from(queues));
            }
        };
        if !has(self.protocol, PROTOCOL_F_MQ) {
            return Ok(pairs <= 1);
        }
        let (count, pairs) = (self.get_u64(Request::GET_QUEUE_NUM)?, u64::from(pairs));
        if count >= 2 * pairs || count < pairs {
            return Ok(count >= pairs);
        }
        // Some peers count queues, and others, such as DPDK, pairs. Naming the last queue tells them apart.
        let last = longs(&[(2 * pairs - 1) | NO_FD]);
        match self.set(Request::SET_VRING_CALL, &last, &[]).and_then(|()| self.barrier()) {
            Ok(()) => Ok(true),
            Err(PeerError { fault: Fault::Refused | Fault::Closed, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Receives one report of the peer, without waiting. Reads a changed configuration, too.
    pub(crate) fn hear(&mut self) -> Result<ChannelMessage, PeerError> {
        let heard = self.channel.as_mut().map_or(ChannelMessage::Nothing, Channel::hear);
        match heard {
            ChannelMessage::ConfigChange => {
                self.connection.allow(NEGOTIATION);
                self.read_config()?;
            }
            // The peer can work without its channel, unless it has to report misses.
            ChannelMessage::End => self.channel = None,
            ChannelMessage::Miss(_) | ChannelMessage::Nothing => {}
        }
        Ok(heard)
    }

    /// True if the peer asks for translations, and acknowledges invalidations.
    pub(crate) fn translates(&self) -> bool {
        has(self.features, VIRTIO_F_ACCESS_PLATFORM) && self.acknowledges() && self.channel.is_some()
    }

    /// True if the peer is connected.
    pub(crate) fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// The descriptors that become readable when the peer reports something or closes the connection.
    pub(crate) fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.connection.as_fd()].into_iter().chain(self.channel.as_ref().map(AsFd::as_fd))
    }

    /// Writes to the device configuration, and reads it back. A peer without one, which may have replaced one that had
    /// it, gets no request.
    pub(crate) fn write_config(&mut self, offset: u32, data: &[u8]) -> Result<(), PeerError> {
        if !has(self.protocol, PROTOCOL_F_CONFIG) {
            return Ok(());
        }
        self.connection.allow(NEGOTIATION);
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        match self.set(Request::SET_CONFIG, &[numbers(&[offset, len, 0]), data.to_vec()].concat(), &[]) {
            // Fields that it does not let a driver write stay unchanged.
            Ok(()) | Err(PeerError { fault: Fault::Refused, .. }) => self.read_config(),
            Err(error) => Err(error),
        }
    }

    /// Reads as much of the device configuration as there is, up to the length that its role needs.
    fn find_config(&mut self) -> Result<(), PeerError> {
        if !has(self.protocol, PROTOCOL_F_CONFIG) {
            return Ok(());
        }
        self.config = self.get_config(self.role.config_len())?;
        if !self.config.is_empty() || matches!(self.role, VhostUserRole::Nic { .. }) {
            return Ok(());
        }
        // A peer refuses requests beyond the end: the longest part that it does not refuse is all.
        let (mut some, mut too_much) = (0, self.role.config_len());
        while too_much - some > 1 {
            let middle = some + (too_much - some) / 2;
            let config = self.get_config(middle)?;
            if config.is_empty() {
                too_much = middle;
            } else {
                (some, self.config) = (middle, config);
            }
        }
        Ok(())
    }

    /// Reads the device configuration again. Keeps the old one if it can no longer be read.
    fn read_config(&mut self) -> Result<(), PeerError> {
        let len = u32::try_from(self.config.len()).unwrap_or(0);
        if len != 0 {
            let config = self.get_config(len)?;
            if !config.is_empty() {
                self.config = config;
            }
        }
        Ok(())
    }

    /// Reads the first `len` bytes of the device configuration; none if the peer has fewer.
    fn get_config(&mut self, len: u32) -> Result<Vec<u8>, PeerError> {
        let payload = [numbers(&[0, len, 0]), vec![0; len as usize]].concat();
        let mut answer = self.get(Request::GET_CONFIG, &payload)?.payload;
        // Offset, size and flags come first. A peer that refuses answers with a size of 0.
        let is_all = u32_at(&answer, 4) == Some(len) && answer.len() == 12 + len as usize;
        Ok(if is_all { answer.split_off(12) } else { Vec::new() })
    }

    fn open_channel(&mut self) -> Result<(), PeerError> {
        let request = Request::SET_BACKEND_REQ_FD;
        let pair = Channel::new().map_err(|error| PeerError { request, fault: Fault::System(error) });
        let (near, far) = pair?;
        self.set(request, &[], &[far.as_fd()])?;
        self.channel = Some(near);
        Ok(())
    }

    /// Makes a request, and waits for its acknowledgement if the peer sends one.
    pub(super) fn set(&mut self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PeerError> {
        if !self.acknowledges() {
            return self.connection.send(request, 0, payload, fds);
        }
        let turn = self.connection.turn();
        let _turn = turn.lock();
        self.connection.send(request, NEED_REPLY, payload, fds)?;
        self.acknowledged(request)
    }

    /// True if the peer acknowledges requests.
    pub(super) fn acknowledges(&self) -> bool {
        has(self.protocol, PROTOCOL_F_REPLY_ACK)
    }

    /// Waits until the peer acknowledges `request`.
    pub(super) fn acknowledged(&mut self, request: Request) -> Result<(), PeerError> {
        self.connection.acknowledged(request)
    }

    /// Waits until the peer has processed all requests, if it sends no acknowledgements.
    pub(super) fn barrier(&mut self) -> Result<(), PeerError> {
        if !self.acknowledges() {
            self.get_u64(Request::GET_FEATURES)?;
        }
        Ok(())
    }

    pub(super) fn get(&mut self, request: Request, payload: &[u8]) -> Result<Answer, PeerError> {
        let turn = self.connection.turn();
        let _turn = turn.lock();
        self.connection.send(request, 0, payload, &[])?;
        self.connection.answer(request)
    }

    pub(super) fn get_u64(&mut self, request: Request) -> Result<u64, PeerError> {
        let answer = self.get(request, &[])?;
        u64_at(&answer.payload, 0).ok_or(PeerError { request, fault: Fault::Nonsense })
    }
}
