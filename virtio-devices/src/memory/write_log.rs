//! Collects the writes of this process's threads to guest memory.

use std::io;

use rustix::thread::MembarrierCommand;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::map::GuestMap;

/// Writes are collected already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the dirty log is already on")]
pub struct LogBusy;

/// The dirty log of this process's threads: their writes to guest memory while it exists. A map has at most one.
#[derive(Debug)]
pub struct WriteLog {
    map: GuestMap,
}

impl WriteLog {
    /// Starts logging writes to `map`. Writes before this returns are visible to the caller, and all later ones are
    /// logged.
    ///
    /// # Errors
    ///
    /// - [`LogBusy`], as [`io::ErrorKind::ResourceBusy`].
    /// - When the kernel has no `membarrier`.
    pub fn new(map: &GuestMap) -> io::Result<Self> {
        if map.iter().any(|region| region.bitmap().is_armed()) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, LogBusy));
        }
        let log = Self { map: map.clone() };
        log.map.iter().for_each(|region| region.bitmap().whole().arm());
        // A processor may check the flag before its last write is visible to others. So all processors that run threads
        // of this process now make their writes visible; later checks find the flag set.
        barrier()?;
        Ok(log)
    }

    /// The map whose writes are logged.
    pub fn map(&self) -> &GuestMap {
        &self.map
    }

    /// Adds the pages of a region written since the last call to `pages`, a bit for each, from the region's beginning,
    /// and clears them here. Returns their number. `region` is its index in the map's order.
    pub fn take(&self, region: usize, pages: &mut [u64]) -> u64 {
        self.map.iter().nth(region).map_or(0, |region| region.bitmap().whole().take(pages))
    }
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        self.map.iter().for_each(|region| region.bitmap().whole().disarm());
    }
}

/// Makes all writes of this process's threads visible.
fn barrier() -> io::Result<()> {
    rustix::thread::membarrier(MembarrierCommand::RegisterPrivateExpedited)?;
    Ok(rustix::thread::membarrier(MembarrierCommand::PrivateExpedited)?)
}
