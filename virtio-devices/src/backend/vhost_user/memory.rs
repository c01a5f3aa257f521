//! Guest memory as the peer sees it: files to map, and the addresses of rings in this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::connection::{ANSWER, Fault, PeerError};
use super::error::VhostUserError;
use super::message::{MAX_FDS, NEED_REPLY, PROTOCOL_F_CONFIGURE_MEM_SLOTS, Request, longs, numbers};
use super::peer::{Mapping, Peer};
use crate::backend::vhost_common::{is_same, is_shared};
use crate::transport::features::has;
use crate::{GuestMap, GuestRegion};

/// The time limit for a peer to map guest memory, besides [`MAPPING_A_GIB`].
const MAPPING: Duration = Duration::from_secs(30);
/// The additional time for each GiB.
const MAPPING_A_GIB: Duration = Duration::from_secs(2);

/// The time limit for a peer to map all of `memory`. A peer that locks its memory, as DPDK does by default, touches
/// each page of it first.
pub(crate) fn patience(memory: &GuestMap) -> Duration {
    let bytes: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
    MAPPING + MAPPING_A_GIB.saturating_mul(u32::try_from(bytes >> 30).unwrap_or(u32::MAX))
}

impl Peer {
    /// Makes the peer map all of `memory` and nothing else, which may take long: [`Self::has_mapped`] reports when it
    /// is done. The peer gets no other request before.
    pub(crate) fn map(&mut self, memory: &GuestMap) -> Result<(), PeerError> {
        let asked = Request::SET_MEM_TABLE;
        let first = memory.num_regions().min(MAX_FDS);
        let (table, files) = table(memory, first).ok_or(PeerError { request: asked, fault: unmappable() })?;
        self.ask_to_map(asked, &table, &files)?;
        self.mapping = Some(Mapping { memory: memory.clone(), asked, left: first..memory.num_regions() });
        Ok(())
    }

    /// Changes the memory that the peer has mapped from `old` to `new`, whether or not its rings run, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Fault::Refused`] if the peer does not accept it: it keeps `old`. After any other error, it is lost.
    pub(crate) fn remap(&mut self, old: &GuestMap, new: &GuestMap) -> Result<(), PeerError> {
        let request = Request::SET_MEM_TABLE;
        if !self.takes(new) {
            return Err(PeerError { request, fault: Fault::Refused });
        }
        // No other thread makes a request in the meantime.
        let turn = self.connection.turn();
        let _turn = turn.lock();
        let patience = patience(new);
        let grows = old.iter().zip(new.iter()).filter(|(old, new)| is_same(old, new)).count() == old.num_regions();
        if grows && has(self.protocol, PROTOCOL_F_CONFIGURE_MEM_SLOTS) {
            // The old regions stay mapped, so the rings keep running.
            let left = old.num_regions()..new.num_regions();
            self.mapping = Some(Mapping { memory: new.clone(), asked: Request::ADD_MEM_REG, left });
            return match self.map_next()? {
                true => self.await_mapped(patience),
                false => Ok(()),
            };
        }
        self.map(new)?;
        match self.await_mapped(patience) {
            Err(error @ PeerError { fault: Fault::Refused, .. }) => {
                // The protocol does not define if it still has the old table.
                self.map(old)?;
                self.await_mapped(patience)?;
                Err(error)
            }
            done => done,
        }
    }

    /// True if the peer accepts as many regions as `memory` has.
    pub(crate) fn takes(&self, memory: &GuestMap) -> bool {
        memory.num_regions() <= self.memory_slots.max(MAX_FDS)
    }

    fn await_mapped(&mut self, patience: Duration) -> Result<(), PeerError> {
        let request = self.mapping.as_ref().map_or(Request::SET_MEM_TABLE, |mapping| mapping.asked);
        match self.has_mapped(patience)? {
            true => Ok(()),
            false => Err(PeerError { request, fault: Fault::NoAnswer(patience) }),
        }
    }

    fn ask_to_map(&mut self, request: Request, payload: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), PeerError> {
        self.connection.allow(ANSWER);
        if self.acknowledges() {
            return self.connection.send(request, NEED_REPLY, payload, files);
        }
        self.connection.send(request, 0, payload, files)?;
        // The peer processes requests in order.
        self.connection.send(Request::GET_FEATURES, 0, &[], &[])
    }

    /// Asks for the next region of the memory that is being mapped. Returns true if there was one.
    fn map_next(&mut self) -> Result<bool, PeerError> {
        let request = Request::ADD_MEM_REG;
        let Some(mut mapping) = self.mapping.take() else { return Ok(false) };
        let Some(next) = mapping.left.next() else { return Ok(false) };
        let region = mapping.memory.iter().nth(next).and_then(description);
        let (description, file) = region.ok_or(PeerError { request, fault: unmappable() })?;
        self.ask_to_map(request, &[longs(&[0]), description].concat(), &[file])?;
        mapping.asked = request;
        self.mapping = Some(mapping);
        Ok(true)
    }

    /// Waits up to `time` until the peer has mapped the memory of [`Self::map`]. Returns true if it has.
    pub(crate) fn has_mapped(&mut self, time: Duration) -> Result<bool, PeerError> {
        let until = Instant::now() + time;
        while let Some(mapping) = &self.mapping {
            let asked = mapping.asked;
            if !self.connection.is_readable_within(until.saturating_duration_since(Instant::now())) {
                return Ok(false);
            }
            self.connection.allow(ANSWER);
            match self.acknowledges() {
                true => self.acknowledged(asked)?,
                false => drop(self.connection.answer(Request::GET_FEATURES)?),
            }
            self.map_next()?;
        }
        Ok(true)
    }
}

/// Checks that other processes, such as the peer at `path`, can map all of `memory`.
pub(crate) fn check(memory: &GuestMap, path: &str) -> Result<(), VhostUserError> {
    if is_shared(memory) { Ok(()) } else { Err(VhostUserError::NotShared(path.to_owned())) }
}

/// The payload of `SET_MEM_TABLE` for the first `count` regions, and the files that go with it. `None` for memory that
/// [`check`] refuses.
fn table(memory: &GuestMap, count: usize) -> Option<(Vec<u8>, Vec<BorrowedFd<'_>>)> {
    let (mut payload, mut files) = (numbers(&[u32::try_from(count).ok()?, 0]), Vec::new());
    for region in memory.iter().take(count) {
        let (description, file) = description(region)?;
        payload.extend(description);
        files.push(file);
    }
    Some((payload, files))
}

/// The description of a region in requests, and its file.
fn description(region: &GuestRegion) -> Option<(Vec<u8>, BorrowedFd<'_>)> {
    let file = region.file_offset()?;
    let address = region.get_host_address(MemoryRegionAddress(0)).ok()?;
    let description = longs(&[region.start_addr().raw_value(), region.len(), address as u64, file.start()]);
    Some((description, file.file().as_fd()))
}

fn unmappable() -> Fault {
    Fault::System(io::Error::new(io::ErrorKind::InvalidInput, "guest memory is not shared"))
}

/// The address in this process of `len` bytes of guest memory, if they lie in one region.
pub(crate) fn address(memory: &GuestMap, at: GuestAddress, len: u64) -> Option<u64> {
    let (region, offset) = memory.to_region_addr(at)?;
    if region.len() - offset.raw_value() < len {
        return None;
    }
    region.get_host_address(offset).ok().map(|address| address as u64)
}
