//! Guest memory as the peer sees it: files that it maps, and addresses of this process by which rings are named.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

use super::error::VhostUserError;
use super::message::{MAX_FDS, longs, numbers};
use crate::backend::vhost_common::is_shared;

/// Checks that the peer at `path` can map all of `memory`.
pub fn check(memory: &GuestMemoryMmap, path: &str) -> Result<(), VhostUserError> {
    if !is_shared(memory) {
        return Err(VhostUserError::NotShared(path.to_owned()));
    }
    match memory.num_regions() {
        regions if regions > MAX_FDS => Err(VhostUserError::TooManyRegions { path: path.to_owned(), regions }),
        _ => Ok(()),
    }
}

/// The payload of `SET_MEM_TABLE`, and the files that go with it. `None` for memory that [`check`] refuses.
pub fn table(memory: &GuestMemoryMmap) -> Option<(Vec<u8>, Vec<BorrowedFd<'_>>)> {
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

/// The address in this process of `len` bytes of guest memory.
///
/// # Errors
///
/// When they do not lie in one region.
pub fn address(memory: &GuestMemoryMmap, at: GuestAddress, len: u64) -> io::Result<u64> {
    let (region, offset) = memory.to_region_addr(at).ok_or(io::ErrorKind::InvalidInput)?;
    if region.len() - offset.raw_value() < len {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    region.get_host_address(offset).map(|address| address as u64).map_err(io::Error::other)
}
