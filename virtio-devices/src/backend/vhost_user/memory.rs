//! Guest memory as the peer sees it: files to map, and the addresses of this process by which rings are named.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

use super::connection::{ANSWER, Fault, PeerError};
use super::error::VhostUserError;
use super::message::{MAX_FDS, NEED_REPLY, Request, longs, numbers};
use super::peer::Peer;
use crate::backend::vhost_common::is_shared;

/// How long a peer may take to map guest memory, whatever its size.
const MAPPING: Duration = Duration::from_secs(30);
/// How long it may take for each GiB of it.
const MAPPING_A_GIB: Duration = Duration::from_secs(2);

/// How long a peer may take to map all of `memory`. One that locks its memory, as DPDK does by default, touches each
/// page of it first.
pub(crate) fn patience(memory: &GuestMemoryMmap) -> Duration {
    let bytes: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
    MAPPING + MAPPING_A_GIB.saturating_mul(u32::try_from(bytes >> 30).unwrap_or(u32::MAX))
}

impl Peer {
    /// Has the peer map all of `memory`, which may take long: [`Self::has_mapped`] reports when it has. It is asked for
    /// nothing else before.
    pub(crate) fn map(&mut self, memory: &GuestMemoryMmap) -> Result<(), PeerError> {
        let request = Request::SET_MEM_TABLE;
        let (table, files) = table(memory).ok_or(PeerError { request, fault: unmappable() })?;
        self.connection.allow(ANSWER);
        if self.acknowledges() {
            return self.connection.send(request, NEED_REPLY, &table, &files);
        }
        self.connection.send(request, 0, &table, &files)?;
        // It does one request after the other.
        self.connection.send(Request::GET_FEATURES, 0, &[], &[])
    }

    /// Waits up to `time` until the peer has mapped the memory of [`Self::map`]. Returns whether it has.
    pub(crate) fn has_mapped(&mut self, time: Duration) -> Result<bool, PeerError> {
        if !self.connection.is_readable_within(time) {
            return Ok(false);
        }
        self.connection.allow(ANSWER);
        match self.acknowledges() {
            true => self.acknowledged(Request::SET_MEM_TABLE)?,
            false => drop(self.connection.answer(Request::GET_FEATURES)?),
        }
        Ok(true)
    }
}

/// Checks that the peer at `path` can map all of `memory`.
pub(crate) fn check(memory: &GuestMemoryMmap, path: &str) -> Result<(), VhostUserError> {
    if !is_shared(memory) {
        return Err(VhostUserError::NotShared(path.to_owned()));
    }
    match memory.num_regions() {
        regions if regions > MAX_FDS => Err(VhostUserError::TooManyRegions { path: path.to_owned(), regions }),
        _ => Ok(()),
    }
}

/// The payload of `SET_MEM_TABLE`, and the files that go with it. `None` for memory that [`check`] refuses.
fn table(memory: &GuestMemoryMmap) -> Option<(Vec<u8>, Vec<BorrowedFd<'_>>)> {
    let regions = u32::try_from(memory.num_regions()).ok().filter(|regions| *regions as usize <= MAX_FDS)?;
    let (mut payload, mut files) = (numbers(&[regions, 0]), Vec::new());
    for region in memory.iter() {
        let file = region.file_offset()?;
        let address = region.get_host_address(MemoryRegionAddress(0)).ok()?;
        payload.extend(longs(&[region.start_addr().raw_value(), region.len(), address as u64, file.start()]));
        files.push(file.file().as_fd());
    }
    Some((payload, files))
}

fn unmappable() -> Fault {
    Fault::System(io::Error::new(io::ErrorKind::InvalidInput, "guest memory is not shared, or in too many regions"))
}

/// The address in this process of `len` bytes of guest memory, if they lie in one region.
pub(crate) fn address(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> Option<u64> {
    let (region, offset) = memory.to_region_addr(at)?;
    if region.len() - offset.raw_value() < len {
        return None;
    }
    region.get_host_address(offset).ok().map(|address| address as u64)
}
