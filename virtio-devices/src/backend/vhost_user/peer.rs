//! A connected peer: its abilities, and the features agreed with it.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP};

use super::channel::{Channel, Heard};
use super::connection::{Answer, Connection, Fault, PeerError};
use super::message::*;
use crate::features::has;

/// How long all of the negotiation may take.
const NEGOTIATION: Duration = Duration::from_secs(5);
/// The part of the device configuration that is read: up to the MTU (`virtio 1.4 §5.1.4`).
const CONFIG: u32 = 12;
/// Protocol features that are used where the peer has them.
const WANTED: u64 = 1 << PROTOCOL_F_MQ
    | 1 << PROTOCOL_F_REPLY_ACK
    | 1 << PROTOCOL_F_CONFIG
    | 1 << PROTOCOL_F_INFLIGHT_SHMFD
    | 1 << PROTOCOL_F_STATUS;

/// A connected peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(super) connection: Connection,
    /// The feature bits that it offers.
    pub(super) features: u64,
    /// The protocol features in use.
    pub(super) protocol: u64,
    config: Option<[u8; CONFIG as usize]>,
    channel: Option<Channel>,
}

impl Peer {
    /// Negotiates the protocol with the peer at the other end of `stream`, and learns its abilities.
    pub(crate) fn negotiate(stream: UnixStream) -> Result<Self, PeerError> {
        let fault = |fault| PeerError { request: Request::GET_FEATURES, fault };
        let mut connection = Connection::new(stream).map_err(|error| fault(Fault::System(error)))?;
        connection.allow(NEGOTIATION);
        let mut peer = Self { connection, features: 0, protocol: 0, config: None, channel: None };
        peer.features = peer.get_u64(Request::GET_FEATURES)?;
        if has(peer.features, F_PROTOCOL_FEATURES) {
            let offered = peer.get_u64(Request::GET_PROTOCOL_FEATURES)?;
            let mut taken = offered & WANTED;
            // The backend channel only reports changes of the link.
            if has(taken, PROTOCOL_F_CONFIG) && has(peer.features, VIRTIO_NET_F_STATUS) {
                taken |= offered & 1 << PROTOCOL_F_BACKEND_REQ;
            }
            // Nothing can be acknowledged before this is done.
            peer.connection.send(Request::SET_PROTOCOL_FEATURES, 0, &longs(&[taken]), &[])?;
            peer.protocol = taken;
        }
        peer.set(Request::SET_OWNER, &[], &[])?;
        peer.read_config()?;
        if has(peer.protocol, PROTOCOL_F_BACKEND_REQ) {
            peer.open_channel()?;
        }
        Ok(peer)
    }

    /// Whether the peer runs `pairs` pairs of queues.
    pub(crate) fn runs(&mut self, pairs: u16) -> Result<bool, PeerError> {
        if !has(self.protocol, PROTOCOL_F_MQ) {
            return Ok(pairs <= 1);
        }
        let (count, pairs) = (self.get_u64(Request::GET_QUEUE_NUM)?, u64::from(pairs));
        if count >= 2 * pairs || count < pairs {
            return Ok(count >= pairs);
        }
        // Some count queues and others, such as DPDK, pairs. Naming the last queue shows which.
        let last = longs(&[(2 * pairs - 1) | NO_FD]);
        match self.set(Request::SET_VRING_CALL, &last, &[]).and_then(|()| self.barrier()) {
            Ok(()) => Ok(true),
            Err(PeerError { fault: Fault::Refused | Fault::Closed, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Its Ethernet address, if it has one.
    pub(crate) fn mac(&self) -> Option<[u8; 6]> {
        self.config.filter(|_| has(self.features, VIRTIO_NET_F_MAC)).and_then(|config| config.first_chunk().copied())
    }

    /// Its MTU in bytes, if it has one.
    pub(crate) fn mtu(&self) -> Option<u16> {
        self.config
            .filter(|_| has(self.features, VIRTIO_NET_F_MTU))
            .map(|config| u16::from_le_bytes([config[10], config[11]]))
    }

    /// Whether its link is up, which it is if the peer has no link status.
    pub(crate) fn link_up(&self) -> bool {
        let status = self.config.filter(|_| has(self.features, VIRTIO_NET_F_STATUS));
        status.is_none_or(|config| u16::from_le_bytes([config[6], config[7]]) & VIRTIO_NET_S_LINK_UP as u16 != 0)
    }

    /// Receives what the peer reports, without waiting.
    pub(crate) fn hear(&mut self) -> Result<(), PeerError> {
        match self.channel.as_mut().map(Channel::hear) {
            Some(Heard::ConfigChange) => {
                self.connection.allow(NEGOTIATION);
                self.read_config()?;
            }
            // The peer can live without its channel.
            Some(Heard::End) => self.channel = None,
            Some(Heard::Nothing) | None => {}
        }
        Ok(())
    }

    /// Whether it is still there.
    pub(crate) fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// What is readable when the peer reports something or is gone.
    pub(crate) fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.connection.as_fd()].into_iter().chain(self.channel.as_ref().map(AsFd::as_fd))
    }

    fn read_config(&mut self) -> Result<(), PeerError> {
        if !has(self.protocol, PROTOCOL_F_CONFIG) {
            return Ok(());
        }
        let payload = [numbers(&[0, CONFIG, 0]), vec![0; CONFIG as usize]].concat();
        let answer = self.get(Request::GET_CONFIG, &payload)?.payload;
        // Offset, size and flags come first. A peer that has no configuration after all answers with a size of 0.
        let config = answer.get(12..).and_then(|config| config.first_chunk().copied());
        self.config = config.filter(|_| u32_at(&answer, 4) == Some(CONFIG));
        Ok(())
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
        self.connection.send(request, NEED_REPLY, payload, fds)?;
        self.acknowledged(request)
    }

    /// Whether it says when it has done a request.
    pub(super) fn acknowledges(&self) -> bool {
        has(self.protocol, PROTOCOL_F_REPLY_ACK)
    }

    /// Waits until the peer acknowledges `request`.
    pub(super) fn acknowledged(&mut self, request: Request) -> Result<(), PeerError> {
        let answer = self.connection.answer(request)?;
        match u64_at(&answer.payload, 0) {
            Some(0) => Ok(()),
            Some(_) => Err(PeerError { request, fault: Fault::Refused }),
            None => Err(PeerError { request, fault: Fault::Nonsense }),
        }
    }

    /// Waits until the peer has processed all requests, if it sends no acknowledgements.
    pub(super) fn barrier(&mut self) -> Result<(), PeerError> {
        if !self.acknowledges() {
            self.get_u64(Request::GET_FEATURES)?;
        }
        Ok(())
    }

    pub(super) fn get(&mut self, request: Request, payload: &[u8]) -> Result<Answer, PeerError> {
        self.connection.send(request, 0, payload, &[])?;
        self.connection.answer(request)
    }

    pub(super) fn get_u64(&mut self, request: Request) -> Result<u64, PeerError> {
        let answer = self.get(request, &[])?;
        u64_at(&answer.payload, 0).ok_or(PeerError { request, fault: Fault::Nonsense })
    }
}
