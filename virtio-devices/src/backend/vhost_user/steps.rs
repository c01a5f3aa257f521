//! A conversation with a vhost-user peer whose answers are all in the socket already, so that no call waits. For fuzz
//! targets.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::channel::ChannelMessage;
use super::peer::Peer;
use super::rings::Inflight;
use super::role::VhostUserRole;
use crate::GuestMap;
use crate::backend::{QueueRun, RunnerQueue};
use crate::frames::net_protocol::Offloads;

/// A peer. Each call returns `None` if the peer failed; it is useless then.
pub struct VhostUserSteps {
    peer: Peer,
    inflight: Option<Inflight>,
    /// Serves as doorbell, interrupt and error event at once.
    eventfd: Arc<EventFd>,
}

impl VhostUserSteps {
    /// Negotiates with the peer at the other end of `stream`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn negotiate(stream: UnixStream, role: VhostUserRole) -> io::Result<Option<Self>> {
        let eventfd = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        Ok(Peer::negotiate(stream, role, None).ok().map(|peer| Self { peer, inflight: None, eventfd }))
    }

    /// The protocol features in use.
    pub fn protocol(&self) -> u64 {
        self.peer.protocol
    }

    /// The device configuration.
    pub fn config(&self) -> &[u8] {
        &self.peer.config
    }

    /// True if the peer runs all queues of its role.
    pub fn runs_all(&mut self) -> Option<bool> {
        self.peer.runs_all().ok()
    }

    /// Makes the peer map `memory`. Returns true if it has.
    pub fn map(&mut self, memory: &GuestMap) -> Option<bool> {
        self.peer.map(memory).ok()?;
        self.peer.has_mapped(Duration::ZERO).ok()
    }

    /// Starts `queues` queues of 16 descriptors each, a page apart, whose driver negotiated `features`.
    pub fn start(&mut self, memory: &GuestMap, queues: u16, features: u64) -> Option<()> {
        let place = |index: u16| GuestAddress(u64::from(index) << 12);
        let queue = |index| RunnerQueue {
            index,
            size: 16,
            descriptors: place(index),
            available: GuestAddress(place(index).0 + 0x400),
            used: GuestAddress(place(index).0 + 0x800),
            position: 0,
            kick: Arc::clone(&self.eventfd),
            call: Arc::clone(&self.eventfd),
        };
        let queues: Vec<_> = (0..queues).map(queue).collect();
        let run = QueueRun {
            queues: &queues,
            features,
            memory,
            dma: &memory.clone().into(),
            offloads: Offloads::empty(),
            active_pairs: 1,
            fresh: true,
            untouched: true,
        };
        let agreed = self.peer.agree(&run, None, false).ok()?;
        self.peer.start(&run, &mut self.inflight, &self.eventfd, agreed).ok()
    }

    /// Receives a report of the peer. Returns true if the configuration has changed.
    pub fn hear(&mut self) -> Option<bool> {
        self.peer.hear().ok().map(|heard| heard == ChannelMessage::ConfigChange)
    }

    /// Writes to the device configuration.
    pub fn write_config(&mut self, offset: u32, data: &[u8]) -> Option<()> {
        self.peer.write_config(offset, data).ok()
    }

    /// Runs the first `pairs` of the pairs in `queues`.
    pub fn set_active_pairs(&mut self, queues: &[u16], pairs: u16) -> Option<()> {
        self.peer.set_active_pairs(queues, pairs).ok()
    }

    /// Stops a queue. Returns its position.
    pub fn stop(&mut self, queue: u16) -> Option<u16> {
        self.peer.prepare_stop();
        self.peer.stop(queue).ok()
    }

    /// Gets the NIC's address and MTU, and whether its link is up, from the configuration.
    pub fn nic(&self) -> (Option<[u8; 6]>, Option<u16>, bool) {
        (self.peer.mac(), self.peer.mtu(), self.peer.link_up())
    }
}
