//! vhost-user: another process runs the queues, over a socket.
//!
//! The process maps guest memory and runs the queues, with doorbells and interrupts as eventfds, so no thread of this
//! process touches a frame. The process may die and be replaced while a driver runs. Its successor must have the same
//! abilities; it continues after the last buffer that was returned, or from the records that its predecessor left in
//! shared memory.
//!
//! **Behind an IOMMU** a process with IOTLB messages gets its function's mappings ([`translated`]). Queues of one
//! without them run in bypass only ([`confined`]).

mod cancel;
mod channel;
mod confined;
mod connection;
mod device_state;
mod dirty_log;
mod error;
mod memory;
mod message;
mod nic_config;
mod peer;
mod rings;
mod role;
mod socket;
#[cfg(any(test, feature = "testing"))]
mod steps;
mod translated;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::warn;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{GuestAddressSpace, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Ability, Attention, BackendKind, LOG, QueueRun, QueueRunner, RunnerError, SharedLog, StartError};
use crate::frames::net_protocol::MAX_QUEUE_SIZE;
use crate::os::eventfd::borrow;
use crate::transport::features::has;
use crate::{GuestMap, Memory};
pub use cancel::Cancel;
use channel::ChannelMessage;
use confined::{Confined, confined};
use connection::{ANSWER, Fault, PeerError};
pub use device_state::MAX_DEVICE_STATE;
pub use error::VhostUserError;
pub(crate) use message::MAX_CONFIG;
use message::{MAX_FDS, Request};
use peer::Peer;
use rings::Inflight;
pub use role::VhostUserRole;
pub(crate) use role::{DEVICE_FEATURES, RING_FEATURES};
pub use socket::VhostUserSocket;
#[cfg(any(test, feature = "testing"))]
pub use steps::VhostUserSteps;
use translated::Translated;

/// The most misses of a peer that are answered per call. The rest is answered in the next.
const QUESTIONS: usize = 64;

/// The vhost-user backend to use.
#[derive(Debug)]
pub struct VhostUserSpec {
    /// The socket.
    pub socket: VhostUserSocket,
    /// The role of the backend.
    pub role: VhostUserRole,
    /// The deadline for a backend that is expected to connect.
    pub until: Instant,
    /// Ends the wait for the backend's answers earlier.
    pub cancel: Option<Cancel>,
}

/// A vhost-user backend.
#[derive(Debug)]
pub struct VhostUser {
    socket: VhostUserSocket,
    role: VhostUserRole,
    /// The guest's memory that the peer or its successor maps.
    memory: GuestMap,
    ability: Ability,
    /// The feature bits and the MTU that drivers were offered.
    promised: (u64, Option<u16>),
    /// The peer, unless it is lost.
    peer: Option<Peer>,
    /// A successor that is still mapping guest memory, and its deadline.
    mapping: Option<(Peer, Instant)>,
    /// The dirty log for the peer's writes to guest memory.
    log: Option<Arc<SharedLog>>,
    /// The peer's record of buffers that it took and has not returned.
    inflight: Option<Inflight>,
    /// Signalled by the peer when a ring is invalid.
    broken: EventFd,
    /// The queues that were started, in their order.
    started: Vec<u16>,
    /// The connection was closed before the peer's queues had stopped, and no peer has replaced it: it may still be at
    /// work.
    unstopped: bool,
    /// The link as last reported.
    told_link: Option<bool>,
    /// The number of peers that lacked abilities.
    rejected: u64,
    /// Set from the first start of a function behind an IOMMU whose peer has IOTLB messages: its successors need them,
    /// too.
    translates: bool,
    /// The peer's translations, while the queues run.
    translated: Option<Translated>,
    /// Set from the first start of a function behind an IOMMU whose peer has no IOTLB messages.
    confined: Option<Confined>,
    /// The last successor was refused or could not be accepted, so others keep waiting.
    backing_off: bool,
}

impl VhostUser {
    /// Connects to the backend, or waits for it to connect, learns its abilities, and makes it map the guest's memory.
    ///
    /// # Errors
    ///
    /// Fails with the remedy in one line; see [`VhostUserError`]. A listening socket is removed then.
    pub fn connect(spec: VhostUserSpec, memory: &Memory) -> Result<Self, VhostUserError> {
        let VhostUserSpec { socket, role, until, cancel } = spec;
        let name = socket.name();
        let map = GuestMap::clone(&memory.memory());
        memory::check(&map, &name)?;
        let eventfd = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let broken = eventfd.map_err(|source| VhostUserError::Socket { path: name.clone(), source })?;
        let fault = |error| VhostUserError::of_peer(&name, error);
        let mut peer = Peer::negotiate(socket.first(until, cancel.as_ref())?, role, cancel).map_err(fault)?;
        if !has(peer.features, VIRTIO_F_VERSION_1) {
            return Err(VhostUserError::Legacy(name));
        }
        if !peer.runs_all().map_err(fault)? {
            return Err(VhostUserError::TooFewQueues { path: name, role });
        }
        if !peer.takes(&map) {
            let (regions, most) = (map.num_regions(), peer.memory_slots.max(MAX_FDS));
            return Err(VhostUserError::TooManyRegions { path: name, regions, most });
        }
        peer.map(&map).map_err(fault)?;
        let patience = memory::patience(&map);
        if !peer.has_mapped(patience).map_err(fault)? {
            return Err(fault(too_slow(patience)));
        }
        peer.connection.forget_cancel();
        let ability = Ability {
            kind: BackendKind::VhostUser,
            name,
            features: role.able(peer.features),
            queue_pairs: role.pairs(),
            // The protocol has no request for it.
            queue_size: MAX_QUEUE_SIZE,
            mac: peer.mac(),
            mtu: peer.mtu(),
            control_queue: false,
            switches_offloads: false,
            logs_writes: peer.can_log(),
            has_state: peer.has_state(),
        };
        Ok(Self {
            socket,
            role,
            memory: map,
            promised: (role.every_offer(ability.features), ability.mtu),
            ability,
            peer: Some(peer),
            mapping: None,
            log: None,
            inflight: None,
            broken,
            started: Vec::new(),
            unstopped: false,
            told_link: None,
            rejected: 0,
            translates: false,
            translated: None,
            confined: None,
            backing_off: false,
        })
    }

    /// The ability that drivers were offered and a successor lacks; `None` if it lacks none.
    fn lacks(&self, peer: &mut Peer) -> Result<Option<String>, PeerError> {
        let (promised, mtu) = self.promised;
        let missing = promised & !self.role.every_offer(self.role.able(peer.features));
        if missing != 0 {
            let bits: Vec<_> = (0..u64::BITS).filter(|bit| has(missing, *bit)).map(|bit| bit.to_string()).collect();
            return Ok(Some(format!("the feature bits {}", bits.join(", "))));
        }
        if let (Some(told), Some(mtu)) = (mtu, peer.mtu())
            && mtu < told
        {
            return Ok(Some(format!("an MTU of {told}: its own is {mtu}")));
        }
        if !peer.takes(&self.memory) {
            return Ok(Some(format!("room for {} regions of memory", self.memory.num_regions())));
        }
        if self.log.is_some() && !peer.can_log() {
            return Ok(Some("a dirty log".to_owned()));
        }
        if self.translates && !peer.translates() {
            return Ok(Some("IOTLB messages".to_owned()));
        }
        Ok((!peer.runs_all()?).then(|| self.role.queues()))
    }

    /// Negotiates with a successor at the other end of `stream`, which must have the abilities of the lost peer, and
    /// asks it to map guest memory.
    fn successor(&mut self, stream: UnixStream) -> Result<Peer, RunnerError> {
        let what = "negotiate with the backend";
        let negotiated =
            Peer::negotiate(stream, self.role, None).and_then(|mut peer| Ok((self.lacks(&mut peer)?, peer)));
        let failed = |error| RunnerError { what, source: io::Error::other(error) };
        let (lacks, mut peer) = negotiated.map_err(failed)?;
        if let Some(lacks) = lacks {
            self.rejected += 1;
            // Logged at powers of two, so that a peer cannot fill the log.
            if self.rejected.is_power_of_two() {
                let (path, times) = (self.socket.name(), self.rejected);
                warn!("{path}: the backend that came back is refused ({times} so far): it lacks {lacks}");
            }
            return Err(RunnerError { what, source: io::Error::other(format!("it lacks {lacks}")) });
        }
        peer.map(&self.memory).map_err(failed)?;
        Ok(peer)
    }

    /// Takes the successor if it has mapped guest memory within `time`.
    fn take_mapped(&mut self, time: Duration) -> Result<(), RunnerError> {
        let what = "have the backend map the guest's memory";
        let (mut peer, until) =
            self.mapping.take().ok_or_else(|| RunnerError { what, source: io::ErrorKind::NotConnected.into() })?;
        let failed = |error| RunnerError { what, source: io::Error::other(error) };
        if peer.has_mapped(time).map_err(failed)? {
            self.peer = Some(peer);
            (self.backing_off, self.unstopped) = (false, false);
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(failed(too_slow(memory::patience(&self.memory))));
        }
        self.mapping = Some((peer, until));
        Err(RunnerError { what, source: io::Error::new(io::ErrorKind::TimedOut, "it is not done yet") })
    }

    /// Starts the queues at a peer that may run them.
    fn start_rings(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        self.revive()?;
        // An earlier signal is about other rings.
        let _ = self.broken.read();
        let what = "start the queues";
        let peer =
            self.peer.as_mut().ok_or_else(|| RunnerError { what, source: io::ErrorKind::NotConnected.into() })?;
        if run.untouched {
            self.inflight = None;
        }
        let iommu = run.dma.iommu().filter(|_| self.translates);
        let agreed = peer.agree(run, self.log.as_deref(), iommu.is_some());
        let failed = |error: PeerError| RunnerError { what, source: io::Error::other(error) };
        let agreed = agreed.map_err(failed).and_then(|agreed| {
            if let Some(iommu) = iommu {
                // This comes before the rings: the peer's translations of an earlier start are invalidated.
                let told = Translated::begin(iommu, (self.socket.name(), &peer.connection), &self.memory);
                let translated = told.map_err(RunnerError::of(what))?;
                translated.answer_earlier(peer).map_err(RunnerError::of(what))?;
                translated.preload(run.queues).map_err(RunnerError::of(what))?;
                self.translated = Some(translated);
            }
            Ok(agreed)
        });
        let agreed = agreed.inspect_err(|_| self.peer = None)?;
        let Some(peer) = self.peer.as_mut() else { return Ok(()) };
        if let Err(error) = peer.start(run, &mut self.inflight, &self.broken, agreed) {
            let (refused, is_closed) = (error.is_about_a_ring(), matches!(error.fault, Fault::Closed));
            let error = RunnerError { what, source: io::Error::other(error) };
            if refused {
                return Err(StartError::Refused(error));
            }
            // Some queues may run.
            (self.peer, self.unstopped) = (None, !is_closed);
            return Err(error.into());
        }
        self.started = run.queues.iter().map(|queue| queue.index).collect();
        Ok(())
    }

    /// Gets a peer if the last one is lost: it may have been replaced while there was no driver.
    fn revive(&mut self) -> Result<(), RunnerError> {
        if self.peer.as_ref().is_some_and(Peer::is_alive) { Ok(()) } else { self.recover() }
    }

    /// Ends the queues' ties to the IOMMU once they have stopped.
    fn end_bounds(&mut self) {
        self.translated = None;
        self.confined.iter().for_each(Confined::end);
    }

    /// Checks that the queues may run if the function is behind an IOMMU. If so, they count as running.
    fn confine(&mut self, run: &QueueRun<'_>) -> Result<(), RunnerError> {
        let Some(iommu) = run.dma.iommu() else { return Ok(()) };
        if self.confined.is_none() && !self.translates {
            self.revive()?;
            self.translates = self.peer.as_ref().is_some_and(Peer::translates);
        }
        if self.translates {
            return Ok(());
        }
        let confined = match self.confined.take() {
            Some(confined) => confined,
            None => Confined::new(iommu).map_err(RunnerError::of("follow the virtual IOMMU"))?,
        };
        self.confined.insert(confined).begin()
    }

    /// Makes a request. A peer that fails is lost, because a late answer would be mistaken for another.
    fn ask<T>(
        &mut self,
        what: &'static str,
        request: impl FnOnce(&mut Peer) -> Result<T, PeerError>,
    ) -> Result<T, RunnerError> {
        self.ask_keeping(what, request, |_| false)
    }

    /// Makes a request that the peer may refuse without being lost.
    fn ask_gently<T>(
        &mut self,
        what: &'static str,
        request: impl FnOnce(&mut Peer) -> Result<T, PeerError>,
    ) -> Result<T, RunnerError> {
        self.ask_keeping(what, request, Fault::keeps_peer)
    }

    fn ask_keeping<T>(
        &mut self,
        what: &'static str,
        request: impl FnOnce(&mut Peer) -> Result<T, PeerError>,
        keeps_peer: impl FnOnce(&Fault) -> bool,
    ) -> Result<T, RunnerError> {
        let peer =
            self.peer.as_mut().ok_or_else(|| RunnerError { what, source: io::ErrorKind::NotConnected.into() })?;
        request(peer).map_err(|error| {
            if !keeps_peer(&error.fault) {
                self.hang_up(matches!(error.fault, Fault::Closed));
            }
            RunnerError { what, source: io::Error::other(error) }
        })
    }

    /// Closes the connection, which the peer may have closed already.
    fn hang_up(&mut self, is_closed: bool) {
        self.peer = None;
        // A peer without queues does no work.
        self.unstopped |= !is_closed && !self.started.is_empty();
    }
}

/// The error of a peer that did not map guest memory within `patience`.
fn too_slow(patience: Duration) -> PeerError {
    PeerError { request: Request::SET_MEM_TABLE, fault: Fault::NoAnswer(patience) }
}

impl QueueRunner for VhostUser {
    fn ability(&self) -> Ability {
        self.ability.clone()
    }

    fn promise(&mut self, features: u64, mtu: Option<u16>) {
        self.promised = (features, mtu);
    }

    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        self.confine(run)?;
        self.start_rings(run).inspect_err(|_| self.end_bounds())
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        let queues = self.started.clone();
        if let Some(peer) = &mut self.peer {
            peer.prepare_stop();
        }
        let stop = |queue: &u16| self.ask("stop a queue", |peer| peer.stop(*queue)).ok();
        let positions: Vec<_> = queues.iter().map(stop).collect();
        self.started.clear();
        if !positions.contains(&None) {
            // The peer has returned every buffer.
            self.inflight = None;
            // If that fails, the peer is lost, and its queues are stopped anyway.
            let _ = self.ask("finish a stop", Peer::finish_stop);
        }
        self.end_bounds();
        positions
    }

    fn may_still_write(&self) -> bool {
        self.unstopped
    }

    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), RunnerError> {
        self.ask("move an interrupt", |peer| peer.set_call(queue, call))
    }

    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), RunnerError> {
        let queues = self.started.clone();
        self.ask("change the number of queues in use", |peer| peer.set_active_pairs(&queues, pairs))
    }

    fn config(&self) -> &[u8] {
        self.peer.as_ref().map_or(&[], |peer| peer.config.as_slice())
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) -> Result<(), RunnerError> {
        self.ask("write the device configuration", |peer| peer.write_config(offset, data))
    }

    /// True while the peer gets IOTLB messages: the next one would wait until the memory is mapped.
    fn stands_for_memory(&self) -> bool {
        self.translated.is_some()
    }

    fn set_memory(&mut self, memory: &GuestMap) -> Result<(), RunnerError> {
        // A successor that is still mapping the old memory starts over.
        self.mapping = None;
        if let Some(peer) = &mut self.peer
            && let Err(error) = peer.remap(&self.memory, memory)
        {
            match error.fault {
                Fault::Refused => {}
                // Its successor gets the new memory.
                Fault::Closed => {
                    (self.peer, self.memory) = (None, memory.clone());
                    return Ok(());
                }
                // A late answer would be mistaken for another.
                _ => self.hang_up(false),
            }
            let what = "have the backend map the guest's new memory";
            return Err(RunnerError { what, source: io::Error::other(error) });
        }
        self.memory = memory.clone();
        Ok(())
    }

    fn announce(&mut self, mac: [u8; 6], _frames: &[Vec<u8>]) -> Result<(), RunnerError> {
        if self.peer.is_none() {
            return Ok(());
        }
        self.ask("have the peer announce the address", |peer| peer.send_rarp(mac))
    }

    fn set_log(&mut self, log: Option<&Arc<SharedLog>>) -> Result<(), RunnerError> {
        if log.is_some() && !self.ability.logs_writes {
            return Err(RunnerError::of(LOG)(io::Error::new(io::ErrorKind::Unsupported, "the peer has no dirty log")));
        }
        self.log = log.cloned();
        if self.peer.is_none() {
            // Its successor gets the log.
            return Ok(());
        }
        self.ask(LOG, |peer| peer.set_log(log.map(|log| &**log))).inspect_err(|_| self.log = None)
    }

    fn save_state(&mut self, until: Instant) -> Result<Option<Vec<u8>>, RunnerError> {
        // The state of a lost peer is lost with it.
        if !self.peer.as_ref().is_some_and(|peer| peer.has_state() && peer.is_alive()) {
            return Ok(None);
        }
        self.ask_gently("save the backend's own state", |peer| peer.save_state(until)).map(Some)
    }

    fn confirm_state(&mut self, until: Instant) -> Result<(), RunnerError> {
        self.ask_gently("save all of the backend's own state", |peer| peer.check_state(until))
    }

    fn load_state(&mut self, state: &[u8], until: Instant) -> Result<(), RunnerError> {
        self.ask_gently("load the backend's own state", |peer| match peer.has_state() {
            true => peer.load_state(state, until),
            false => Err(PeerError { request: Request::SET_DEVICE_STATE_FD, fault: Fault::Refused }),
        })
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        if let Some((peer, _)) = &self.mapping {
            return vec![peer.connection.as_fd()];
        }
        let Some(peer) = &self.peer else {
            return self.socket.listener().filter(|_| !self.backing_off).into_iter().collect();
        };
        let own = [borrow(&self.broken)].into_iter().chain(self.confined.as_ref().map(Confined::watched));
        peer.watched().chain(own).collect()
    }

    fn attend(&mut self) -> Result<Attention, RunnerError> {
        let what = "continue";
        // In this order: another thread records its failure before it disconnects the peer.
        let is_closed = self.peer.as_ref().is_some_and(|peer| !peer.is_alive());
        if let Some(failure) = self.translated.as_ref().and_then(Translated::failure) {
            self.hang_up(false);
            return Err(RunnerError { what, source: io::Error::other(failure) });
        }
        if is_closed {
            self.hang_up(true);
            return Err(RunnerError { what, source: io::Error::other("the backend closed the connection") });
        }
        if self.confined.as_ref().is_some_and(Confined::is_to_stop) {
            return Ok(Attention::Restart);
        }
        let (mut heard, until) = (ChannelMessage::Nothing, Instant::now() + ANSWER);
        for _ in 0..QUESTIONS {
            heard = self.ask(what, Peer::hear)?;
            let (ChannelMessage::Miss(miss), Some(translated)) = (heard, &self.translated) else { break };
            let told = translated.answer(miss, until).map_err(RunnerError::of(what));
            if told.inspect_err(|_| self.hang_up(false))?.is_none() {
                return Ok(Attention::Unreachable);
            }
        }
        // Checked even while the queues do not run: the peer would be started again, and could not report misses then.
        if heard == ChannelMessage::End && self.translates {
            self.hang_up(false);
            return Err(RunnerError { what, source: io::Error::other("the backend can no longer ask") });
        }
        let link_up = self.peer.as_ref().is_some_and(Peer::link_up);
        match self.role {
            VhostUserRole::Nic { .. } if self.told_link != Some(link_up) => {
                self.told_link = Some(link_up);
                return Ok(Attention::Link(link_up));
            }
            VhostUserRole::Device { .. } if heard == ChannelMessage::ConfigChange => return Ok(Attention::Config),
            _ => {}
        }
        Ok(if self.broken.read().is_ok() { Attention::BrokenRing } else { Attention::Nothing })
    }

    fn recover(&mut self) -> Result<(), RunnerError> {
        if let Some(bounds) = &self.confined {
            if !bounds.allows() {
                return Err(confined());
            }
            if self.peer.as_ref().is_some_and(Peer::is_alive) {
                // The peer was only kept from running.
                return Ok(());
            }
        }
        // The old connection ends before there is another.
        self.peer = None;
        if self.mapping.is_some() {
            return self.take_mapped(Duration::ZERO);
        }
        // A peer that reconnects repeatedly keeps no thread busy.
        self.backing_off = true;
        let stream = self.socket.connect().inspect_err(|error| {
            self.backing_off = error.kind() != io::ErrorKind::WouldBlock;
        });
        let peer = self.successor(stream.map_err(RunnerError::of("connect to the backend"))?)?;
        self.mapping = Some((peer, Instant::now() + memory::patience(&self.memory)));
        // Most peers are done at once. A slower one is not awaited here, so that commands of the driver are served in
        // the meantime.
        self.take_mapped(ANSWER)
    }
}
