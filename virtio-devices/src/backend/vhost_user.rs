//! A backend in another process, over a socket (vhost-user protocol).
//!
//! The process maps guest memory and runs the queues, with the driver's doorbells and interrupts as eventfds: no thread of this process
//! is on the way of a frame. It may die and be replaced while a driver runs: its successor has to be able to do as much, and
//! goes on behind the last buffer that was given back, or by the notes that its predecessor has left in shared memory.

mod channel;
mod connection;
mod error;
mod memory;
mod message;
mod peer;
mod rings;
mod socket;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use log::warn;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Ability, Attention, Backend, BackendKind, Offload, OffloadError, OffloadRun, Offloads};
use crate::Memory;
use crate::eventfd::borrow;
use crate::features::has;
use crate::net::{MAX_QUEUE_SIZE, offered_by, served_for_any};
use connection::PeerError;
pub use error::VhostUserError;
use peer::Peer;
use rings::Inflight;
use socket::{PATIENCE, Socket};

/// Where a vhost-user backend is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserSpec {
    /// The path of the socket.
    pub socket: PathBuf,
    /// This process listens on the socket, and the backend connects. Otherwise it is the other way round.
    pub server: bool,
    /// The pairs of queues that the backend has to run.
    pub queue_pairs: u16,
}

/// A vhost-user backend.
#[derive(Debug)]
pub struct VhostUser {
    socket: Socket,
    ability: Ability,
    /// The peer, unless it is lost.
    peer: Option<Peer>,
    /// What the peer has taken and not given back, where it keeps that.
    inflight: Option<Inflight>,
    /// Signalled when a ring makes no sense to the peer.
    broken: EventFd,
    /// The queues that were started, in their order.
    started: Vec<u16>,
    /// The link as it was told.
    told_link: Option<bool>,
    /// How many peers that can do too little have come.
    unfit: u64,
    /// Who came last as a successor could not be taken, or not even let in: others that wait have to wait on.
    discouraged: bool,
}

impl VhostUser {
    /// Connects to the backend, or waits up to 10 s for it to connect, and finds out what it can do.
    ///
    /// # Errors
    ///
    /// One line that says what to do; see [`VhostUserError`]. A socket that was listened on is gone then.
    pub fn connect(spec: VhostUserSpec, memory: &Memory) -> Result<Self, VhostUserError> {
        let name = spec.socket.display().to_string();
        memory::check(&memory.memory(), &name)?;
        let eventfd = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let broken = eventfd.map_err(|source| VhostUserError::Socket { path: name.clone(), source })?;
        let socket = if spec.server { Socket::listen(spec.socket)? } else { Socket::of_peer(spec.socket) };
        let fault = |error| VhostUserError::of_peer(&name, error);
        let mut peer = Peer::negotiate(socket.first(PATIENCE)?).map_err(fault)?;
        if !has(peer.features, VIRTIO_F_VERSION_1) {
            return Err(VhostUserError::Legacy(name));
        }
        if !peer.runs(spec.queue_pairs).map_err(fault)? {
            return Err(VhostUserError::TooFewQueues { path: name, wanted: spec.queue_pairs });
        }
        let ability = Ability {
            kind: BackendKind::VhostUser,
            name,
            features: able(peer.features),
            queue_pairs: spec.queue_pairs,
            // There is no way to ask.
            queue_size: MAX_QUEUE_SIZE,
            mac: peer.mac(),
            mtu: peer.mtu(),
            control_queue: false,
            switches_offloads: false,
        };
        Ok(Self {
            socket,
            ability,
            peer: Some(peer),
            inflight: None,
            broken,
            started: Vec::new(),
            told_link: None,
            unfit: 0,
            discouraged: false,
        })
    }

    /// What a peer that came later can do less than the first one, or `None` if it can do as much.
    fn lacks(&self, peer: &mut Peer) -> Result<Option<String>, PeerError> {
        let offered = |features| offered_by(features, Offloads::all(), false, false);
        let missing = offered(self.ability.features) & !offered(able(peer.features));
        if missing != 0 {
            let bits: Vec<_> = (0..u64::BITS).filter(|bit| has(missing, *bit)).map(|bit| bit.to_string()).collect();
            return Ok(Some(format!("the feature bits {}", bits.join(", "))));
        }
        if let (Some(told), Some(mtu)) = (self.ability.mtu, peer.mtu())
            && mtu < told
        {
            return Ok(Some(format!("an MTU of {told}: its own is {mtu}")));
        }
        let pairs = self.ability.queue_pairs;
        Ok((!peer.runs(pairs)?).then(|| format!("{pairs} pairs of queues")))
    }

    /// Takes `stream`'s peer for the one that was lost.
    fn take_back(&mut self, stream: UnixStream) -> Result<(), OffloadError> {
        let what = "negotiate with the backend";
        let negotiated = Peer::negotiate(stream).and_then(|mut peer| Ok((self.lacks(&mut peer)?, peer)));
        let (lacks, peer) = negotiated.map_err(|error| OffloadError { what, source: io::Error::other(error) })?;
        if let Some(lacks) = lacks {
            self.unfit += 1;
            // A peer can come as often as it likes; the log grows with the logarithm of that.
            if self.unfit.is_power_of_two() {
                let (path, times) = (self.socket.name(), self.unfit);
                warn!("{path}: the backend that came back is refused ({times} times so far): it lacks {lacks}");
            }
            return Err(OffloadError { what, source: io::Error::other(format!("it lacks {lacks}")) });
        }
        self.peer = Some(peer);
        Ok(())
    }

    /// Asks the peer. One that does not do it is lost: what it answers later would be taken for something else.
    fn ask<T>(
        &mut self,
        what: &'static str,
        request: impl FnOnce(&mut Peer) -> Result<T, PeerError>,
    ) -> Result<T, OffloadError> {
        let peer =
            self.peer.as_mut().ok_or_else(|| OffloadError { what, source: io::ErrorKind::NotConnected.into() })?;
        request(peer).map_err(|error| {
            self.peer = None;
            OffloadError { what, source: io::Error::other(error) }
        })
    }
}

/// What a NIC over a peer with these features can offer. The NIC serves the control queue, and the peer's own commands do not count: it
/// is never asked for them.
fn able(features: u64) -> u64 {
    features & !(1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) | served_for_any()
}

impl Offload for VhostUser {
    fn ability(&self) -> Ability {
        self.ability.clone()
    }

    fn start(&mut self, run: &OffloadRun<'_>) -> Result<(), OffloadError> {
        // It may have gone and come back while no driver was there to notice.
        if !self.peer.as_ref().is_some_and(Peer::is_alive) {
            self.recover()?;
        }
        // A signal of before that is no word about these rings.
        let _ = self.broken.read();
        let mut inflight = self.inflight.take().filter(|_| !run.untouched);
        let broken = self.broken.try_clone().map_err(OffloadError::of("get an eventfd"))?;
        let started = self.ask("start the queues", |peer| peer.start(run, &mut inflight, &broken));
        self.inflight = inflight;
        started?;
        self.started = run.queues.iter().map(|queue| queue.index).collect();
        Ok(())
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        let queues = std::mem::take(&mut self.started);
        if let Some(peer) = &mut self.peer {
            peer.prepare_stop();
        }
        let stop = |queue: &u16| self.ask("stop a queue", |peer| peer.stop(*queue)).ok();
        let positions: Vec<_> = queues.iter().map(stop).collect();
        if !positions.contains(&None) {
            // All that it took has been given back.
            self.inflight = None;
            // If that fails, the peer is lost, and its queues stand still all the same.
            let _ = self.ask("finish a stop", Peer::finish_stop);
        }
        positions
    }

    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), OffloadError> {
        self.ask("move an interrupt", |peer| peer.set_call(queue, call))
    }

    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), OffloadError> {
        let queues = self.started.clone();
        self.ask("change the number of queues in use", |peer| peer.set_active_pairs(&queues, pairs))
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        let Some(peer) = &self.peer else {
            return self.socket.listener().filter(|_| !self.discouraged).into_iter().collect();
        };
        let broken = borrow(&self.broken);
        peer.watched().chain([broken]).collect()
    }

    fn attend(&mut self) -> Result<Attention, OffloadError> {
        let what = "go on";
        if self.peer.as_ref().is_some_and(|peer| !peer.is_alive()) {
            self.peer = None;
            return Err(OffloadError { what, source: io::Error::other("the backend closed the connection") });
        }
        let link_up = self.ask(what, |peer| peer.hear().map(|()| peer.link_up()))?;
        if self.told_link != Some(link_up) {
            self.told_link = Some(link_up);
            return Ok(Attention::Link(link_up));
        }
        Ok(if self.broken.read().is_ok() { Attention::BrokenRing } else { Attention::Nothing })
    }

    fn recover(&mut self) -> Result<(), OffloadError> {
        // The old connection ends before there is another.
        self.peer = None;
        // Who comes again and again keeps nobody busy.
        self.discouraged = true;
        let stream = self.socket.connect().inspect_err(|error| {
            self.discouraged = error.kind() != io::ErrorKind::WouldBlock;
        });
        self.take_back(stream.map_err(OffloadError::of("connect to the backend"))?)?;
        self.discouraged = false;
        Ok(())
    }
}

impl From<VhostUser> for Backend {
    fn from(backend: VhostUser) -> Self {
        Self::Offload(Box::new(backend))
    }
}
