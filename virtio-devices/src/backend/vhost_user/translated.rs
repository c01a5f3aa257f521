//! A peer of a function behind an IOMMU that asks what addresses stand for.
//!
//! The peer has mapped all of the guest's memory and reaches of it what it is told, by messages on the connection
//! (vhost-user protocol, "IOMMU support"). It is told of each mapping that is made, before it asks, and has forgotten
//! those that are taken away when the driver is answered, which it says. What it asks is answered by the function's
//! worker. Nothing is kept here of what it was told, so that a driver's or a peer's numbers take no memory.
//!
//! What a peer may write it may read, too: DPDK asks for both wherever it writes, and drivers map buffers for frames
//! that they receive to be written only.
//!
//! A peer that does not say in time that it has forgotten something is hung up on and counts as lost. A domain is
//! refused then; what takes memory away cannot be refused.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use log::error;
use vm_memory::{Address, Permissions};

use super::channel::Heard;
use super::connection::{ANSWER, Connection, Fault, PeerError};
use super::message::{NEED_REPLY, Request};
use super::peer::Peer;
use crate::GuestMap;
use crate::backend::RunnerQueue;
use crate::backend::iotlb::{self, Miss};
use crate::backend::mapping::Mapping;
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};
use crate::ring::areas;

/// As many mappings are told when there is a new set of them. The rest is told when it is asked for.
const PRELOADED: usize = 1024;
/// How long that may take. A vCPU may wait for it.
const PRELOADING: Duration = Duration::from_secs(1);
/// As many questions of an earlier start are answered at once: about as many as there is room for on a channel.
const EARLIER: usize = 1024;
/// How long a driver is kept waiting for what the peer was asked before.
const PATIENCE: Duration = Duration::from_secs(10);

/// A peer whose queues may run, which is told what its function reaches until this is dropped.
pub(super) struct Translated {
    iommu: Arc<dyn Translate>,
    told: Arc<Told>,
}

/// What reaches the peer.
struct Told {
    /// The name of the peer's socket.
    name: String,
    connection: Connection,
    /// The guest's memory, as the peer has it. It stays like this while the queues run.
    memory: GuestMap,
    /// Why the peer has been hung up on.
    failure: OnceLock<PeerError>,
    /// It has been said that the peer may still reach what was taken away.
    is_suspect: AtomicBool,
}

impl Translated {
    /// Tells the peer at `connection`, which is called `name`, what its function reaches of `memory`, and from now on
    /// what changes of it.
    ///
    /// # Errors
    ///
    /// When the peer does not take it. It is lost then.
    pub(super) fn begin(
        iommu: &Arc<dyn Translate>,
        (name, connection): (String, &Connection),
        memory: &GuestMap,
    ) -> io::Result<Self> {
        let told = Arc::new(Told {
            name,
            connection: connection.again(Instant::now()),
            memory: memory.clone(),
            failure: OnceLock::new(),
            is_suspect: AtomicBool::new(false),
        });
        iommu.follow(Some(Arc::clone(&told) as Arc<dyn DmaFollower>)).map_err(io::Error::other)?;
        Ok(Self { iommu: Arc::clone(iommu), told })
    }

    /// Why the peer has been hung up on, if it has.
    pub(super) fn failure(&self) -> Option<String> {
        self.told.failure.get().map(ToString::to_string)
    }

    /// Answers what `peer` has asked before its queues stood still. What stands for nothing by now was taken away
    /// since; asked for by queues that run, it would stop them.
    ///
    /// # Errors
    ///
    /// As [`Self::answer`], or when the peer can ask nothing more.
    pub(super) fn answer_earlier(&self, peer: &mut Peer) -> io::Result<()> {
        let until = Instant::now() + ANSWER;
        // Its queues do not run, so it asks nothing more. One that does is answered later.
        for _ in 0..EARLIER {
            match peer.hear().map_err(io::Error::other)? {
                Heard::Miss(miss) => drop(self.answer(miss, until)?),
                Heard::ConfigChange => {}
                Heard::Nothing => break,
                Heard::End => return Err(io::Error::other("the backend cannot ask any more")),
            }
        }
        Ok(())
    }

    /// Tells the peer where its rings are, before it asks, as far as they are within reach.
    ///
    /// # Errors
    ///
    /// As [`Self::answer`].
    pub(super) fn preload(&self, queues: &[RunnerQueue]) -> io::Result<()> {
        if self.iommu.is_bypassed() {
            // All of it is known.
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

    /// Tells the peer what it asked for. Returns the last address of what it was told; `None` if its function does not
    /// reach what it asked for, which the IOMMU has reported.
    ///
    /// # Errors
    ///
    /// When it does not say before `until` that it has heard. It has been hung up on then.
    pub(super) fn answer(&self, miss: Miss, until: Instant) -> io::Result<Option<u64>> {
        let mut connection = self.told.connection.again(until);
        let turn = connection.turn();
        let _turn = turn.lock();
        let last = {
            // Told within the pass: what is unmapped meanwhile is forgotten afterwards, because the peer does one
            // request after the other. Its answer is waited for without the pass, for which a vCPU may wait.
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

/// What a peer is told of `part`.
fn update(part: &Mapping) -> [u8; iotlb::LEN] {
    let writes = part.access().allow(Permissions::Write);
    iotlb::update(part, if writes { Permissions::ReadWrite } else { part.access() })
}

/// A peer that refuses to know something asks for it again when it needs it.
fn heard(told: Result<(), PeerError>) -> Result<(), PeerError> {
    match told {
        Err(PeerError { fault: Fault::Refused, .. }) => Ok(()),
        told => told,
    }
}

impl Told {
    fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Hangs up on the peer, because of `error`, and returns that. By who has the turn or does not get it: a late
    /// answer would be mistaken for another.
    fn fail(&self, error: PeerError) -> io::Error {
        let why = error.to_string();
        // Before it is hung up on: who finds the connection ended would take the peer for gone.
        let _ = self.failure.set(error);
        self.connection.hang_up();
        io::Error::other(why)
    }

    /// Says something to the peer, and waits until it says that it has done it.
    ///
    /// # Errors
    ///
    /// Why it has been hung up on.
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

    /// Tells the peer of a mapping. One that fails is lost.
    fn tell(&self, mapping: DmaMapping) {
        for part in Mapping::of(mapping, &self.memory) {
            if self.has_failed() || self.say(&update(&part), heard).is_err() {
                return;
            }
        }
    }

    /// Has the peer forget what is between two addresses. One that fails is lost.
    fn forget(&self, first: u64, last: u64) {
        if !self.has_failed() {
            // The failure is looked at below, also that of another thread.
            let _ = self.say(&iotlb::invalidate(first, last), |done| done);
        }
        // One that is gone has forgotten everything.
        if let Some(error) = self.failure.get().filter(|error| !matches!(error.fault, Fault::Closed))
            && !self.is_suspect.swap(true, Ordering::Relaxed)
        {
            error!(
                "{}: a vhost-user backend does not forget what its function has lost: {error}; it is hung up on, and \
                 may still reach memory that its guest has taken from it",
                self.name
            );
        }
    }
}

impl DmaFollower for Told {
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed> {
        self.tell(mapping);
        Ok(())
    }

    fn unmapped(&self, mappings: &[DmaMapping]) {
        if let (Some(first), Some(last)) = (mappings.first(), mappings.last()) {
            self.forget(first.first, last.last);
        }
    }

    /// A peer that is gone has forgotten everything; a peer that was hung up on need not have.
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
        // One that is gone reaches nothing; its successor is told when it starts.
        match self.failure.get() {
            None | Some(PeerError { fault: Fault::Closed, .. }) => Ok(()),
            Some(_) => Err(NotFollowed),
        }
    }
}
