//! A peer with IOTLB messages whose function is behind an IOMMU.
//!
//! The peer has mapped all of the guest's memory and accesses the parts that it has translations for (vhost-user
//! protocol, "IOMMU support"). It gets each mapping when that is made, before it asks, and acknowledges that it has
//! dropped a removed one before the driver gets its answer. The function's worker answers its misses. No record of what
//! was sent is kept here, so that a driver's or a peer's numbers take no memory.
//!
//! A peer may also read what it may write: DPDK asks for both wherever it writes, and drivers map receive buffers as
//! write-only.
//!
//! A peer that does not acknowledge an invalidation in time is disconnected and counts as lost. Attaching to a domain
//! is refused then; removing memory cannot be refused.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use log::error;
use vm_memory::{Address, Permissions};

use super::channel::ChannelMessage;
use super::connection::{ANSWER, Connection, Fault, PeerError};
use super::message::{NEED_REPLY, Request};
use super::peer::Peer;
use crate::GuestMap;
use crate::backend::RunnerQueue;
use crate::backend::iotlb::{self, Miss};
use crate::backend::mapping::Mapping;
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};
use crate::queue::ring::areas;

/// The most mappings that are sent when there is a new set of them. The peer asks for the rest.
const PRELOADED: usize = 1024;
/// The time limit for that. A vCPU may wait for it.
const PRELOADING: Duration = Duration::from_secs(1);
/// The most misses of an earlier start that are answered at once: about the capacity of a channel.
const EARLIER: usize = 1024;
/// The time that a driver waits for earlier requests to the peer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A peer whose queues may run, and which gets its function's mappings until this is dropped.
pub(super) struct Translated {
    iommu: Arc<dyn Translate>,
    told: Arc<PeerMappings>,
}

/// The follower that sends mappings to the peer.
struct PeerMappings {
    /// The name of the peer's socket.
    name: String,
    connection: Connection,
    /// The guest's memory, as the peer has it. It does not change while the queues run.
    memory: GuestMap,
    /// The reason why the peer was disconnected.
    failure: OnceLock<PeerError>,
    /// True once it was logged that the peer may still access memory that was unmapped.
    is_suspect: AtomicBool,
}

impl Translated {
    /// Sends the function's mappings of `memory` to the peer at `connection`, whose name is `name`, and from now on
    /// their changes.
    ///
    /// # Errors
    ///
    /// Fails if the peer does not accept them. It is lost then.
    pub(super) fn begin(
        iommu: &Arc<dyn Translate>,
        (name, connection): (String, &Connection),
        memory: &GuestMap,
    ) -> io::Result<Self> {
        let told = Arc::new(PeerMappings {
            name,
            connection: connection.again(Instant::now()),
            memory: memory.clone(),
            failure: OnceLock::new(),
            is_suspect: AtomicBool::new(false),
        });
        iommu.follow(Some(Arc::clone(&told) as Arc<dyn DmaFollower>)).map_err(io::Error::other)?;
        Ok(Self { iommu: Arc::clone(iommu), told })
    }

    /// The reason why the peer was disconnected, if it was.
    pub(super) fn failure(&self) -> Option<String> {
        self.told.failure.get().map(ToString::to_string)
    }

    /// Answers misses that `peer` sent before its queues stopped. An address without a mapping was unmapped since; from
    /// queues that run, such a miss would stop them.
    ///
    /// # Errors
    ///
    /// As [`Self::answer`], or if the peer's channel is closed.
    pub(super) fn answer_earlier(&self, peer: &mut Peer) -> io::Result<()> {
        let until = Instant::now() + ANSWER;
        // Its queues do not run, so it should send no more. One that does gets its answer later.
        for _ in 0..EARLIER {
            match peer.hear().map_err(io::Error::other)? {
                ChannelMessage::Miss(miss) => drop(self.answer(miss, until)?),
                ChannelMessage::ConfigChange => {}
                ChannelMessage::Nothing => break,
                ChannelMessage::End => return Err(io::Error::other("the backend can no longer ask")),
            }
        }
        Ok(())
    }

    /// Sends the translations of the rings, before the peer asks, as far as they are mapped.
    ///
    /// # Errors
    ///
    /// As [`Self::answer`].
    pub(super) fn preload(&self, queues: &[RunnerQueue]) -> io::Result<()> {
        if self.iommu.is_bypassed() {
            // The peer has the identity mapping.
            return Ok(());
        }
        let until = Instant::now() + ANSWER;
        for queue in queues {
            let bases = [queue.descriptors, queue.available, queue.used].map(|base| base.raw_value());
            let accesses = [Permissions::Read, Permissions::Read, Permissions::Write];
            for ((base, len), access) in bases.into_iter().zip(areas(queue.size)).zip(accesses) {
                let last = base.saturating_add(len.saturating_sub(1));
                let mut next = Some(base);
                while let Some(address) = next.filter(|address| *address <= last) {
                    let told = self.answer(Miss { address, access }, until)?;
                    next = told.and_then(|last| last.checked_add(1));
                }
            }
        }
        Ok(())
    }

    /// Answers a miss. Returns the last address of the mapping that was sent; `None` if the function cannot access the
    /// address, which the IOMMU has reported.
    ///
    /// # Errors
    ///
    /// Fails if the peer does not acknowledge it before `until`. It has been disconnected then.
    pub(super) fn answer(&self, miss: Miss, until: Instant) -> io::Result<Option<u64>> {
        let mut connection = self.told.connection.again(until);
        let turn = connection.turn();
        let _turn = turn.lock();
        let last = {
            // Sent within the pass: a mapping that is removed in the meantime is invalidated afterwards, because the
            // peer processes requests in order. The wait for its answer is outside the pass, for which a vCPU may wait.
            let _pass = self.iommu.begin();
            let writes = miss.access.allow(Permissions::Write);
            let access = if writes { Permissions::Write } else { Permissions::Read };
            let Some(mapping) = self.iommu.mapping(miss.address, access) else { return Ok(None) };
            let mut parts = Mapping::of(mapping, &self.told.memory);
            let part = parts.find(|part| (part.iova()..=part.last()).contains(&miss.address));
            let Some(part) = part else { return Ok(None) };
            let sent = connection.send(Request::IOTLB_MSG, NEED_REPLY, &update(&part), &[]);
            sent.map_err(|error| self.told.fail(error))?;
            part.last()
        };
        heard(connection.acknowledged(Request::IOTLB_MSG)).map_err(|error| self.told.fail(error))?;
        Ok(Some(last))
    }
}

impl Drop for Translated {
    fn drop(&mut self) {
        let _ = self.iommu.follow(None);
    }
}

impl std::fmt::Debug for Translated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Translated").field("failure", &self.told.failure.get()).finish_non_exhaustive()
    }
}

/// The message for `part`.
fn update(part: &Mapping) -> [u8; iotlb::LEN] {
    let writes = part.access().allow(Permissions::Write);
    iotlb::update(part, if writes { Permissions::ReadWrite } else { part.access() })
}

/// Ignores a refusal: the peer asks again when it needs the mapping.
fn heard(told: Result<(), PeerError>) -> Result<(), PeerError> {
    match told {
        Err(PeerError { fault: Fault::Refused, .. }) => Ok(()),
        told => told,
    }
}

impl PeerMappings {
    fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Disconnects the peer because of `error`, and returns that. Called with the turn, or when the turn could not be
    /// had: a late answer would be mistaken for another.
    fn fail(&self, error: PeerError) -> io::Error {
        let why = error.to_string();
        // This comes before the disconnect: a thread that finds the connection closed would take the peer for lost.
        let _ = self.failure.set(error);
        self.connection.hang_up();
        io::Error::other(why)
    }

    /// Sends a message to the peer, and waits for its acknowledgement.
    ///
    /// # Errors
    ///
    /// The reason why the peer was disconnected.
    fn say(&self, said: &[u8], is_done: impl Fn(Result<(), PeerError>) -> Result<(), PeerError>) -> io::Result<()> {
        let request = Request::IOTLB_MSG;
        let turn = self.connection.turn();
        let held = turn.try_lock_for(PATIENCE);
        let mut connection = self.connection.again(Instant::now() + 2 * ANSWER);
        let said = match &held {
            None => Err(PeerError { request, fault: Fault::NoAnswer(PATIENCE) }),
            Some(_) => {
                let sent = connection.send(request, NEED_REPLY, said, &[]);
                sent.and_then(|()| is_done(connection.acknowledged(request)))
            }
        };
        said.map_err(|error| self.fail(error))
    }

    /// Sends a mapping to the peer. A peer that fails is lost.
    fn tell(&self, mapping: DmaMapping) {
        for part in Mapping::of(mapping, &self.memory) {
            if self.has_failed() || self.say(&update(&part), heard).is_err() {
                return;
            }
        }
    }

    /// Invalidates the range between two addresses. A peer that fails is lost.
    fn forget(&self, first: u64, last: u64) {
        if !self.has_failed() {
            // The failure is checked below, as is that of another thread.
            let _ = self.say(&iotlb::invalidate(first, last), |done| done);
        }
        // A peer that has closed the connection has dropped everything.
        if let Some(error) = self.failure.get().filter(|error| !matches!(error.fault, Fault::Closed))
            && !self.is_suspect.swap(true, Ordering::Relaxed)
        {
            error!(
                "{}: a vhost-user backend does not forget what its function has lost: {error}; it was disconnected, \
                 and may still reach memory that its guest has taken from it",
                self.name
            );
        }
    }
}

impl DmaFollower for PeerMappings {
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed> {
        self.tell(mapping);
        Ok(())
    }

    fn unmapped(&self, mappings: &[DmaMapping]) {
        if let (Some(first), Some(last)) = (mappings.first(), mappings.last()) {
            self.forget(first.first, last.last);
        }
    }

    /// A peer that has closed the connection has dropped everything; one that was disconnected may not have.
    fn has_forgotten(&self) -> bool {
        self.failure.get().is_none_or(|error| matches!(error.fault, Fault::Closed))
    }

    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed> {
        self.forget(0, u64::MAX);
        match reach {
            DmaReach::Nothing => {}
            DmaReach::Everything => self.tell(DmaMapping::IDENTITY),
            DmaReach::Mapped(mappings) => {
                let until = Instant::now() + PRELOADING;
                for mapping in mappings.take(PRELOADED) {
                    if self.has_failed() || Instant::now() >= until {
                        break;
                    }
                    self.tell(mapping);
                }
            }
        }
        // A peer that has closed the connection accesses nothing; its successor gets the mappings when it starts.
        match self.failure.get() {
            None | Some(PeerError { fault: Fault::Closed, .. }) => Ok(()),
            Some(_) => Err(NotFollowed),
        }
    }
}
