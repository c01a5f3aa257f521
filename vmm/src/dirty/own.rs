//! Dirty pages of this process's threads: all workers of devices and of the switch.

use std::io;

use virtio_devices::{GuestMap, WriteLog};
use vm_memory::GuestMemoryBackend;

use super::page_set::PageSet;
use super::source::DirtySource;

/// The threads of this process.
pub struct OwnThreads {
    map: GuestMap,
    log: Option<WriteLog>,
}

impl OwnThreads {
    /// Logs writes to `map`.
    pub fn new(map: &GuestMap) -> Self {
        Self { map: map.clone(), log: None }
    }
}

impl DirtySource for OwnThreads {
    fn name(&self) -> &'static str {
        "devices write"
    }

    fn start(&mut self) -> io::Result<()> {
        self.log = Some(WriteLog::new(&self.map)?);
        Ok(())
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        let log = self.log.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        for region in 0..self.map.num_regions() {
            if let Some(words) = pages.words(region) {
                log.take(region, words);
            }
        }
        Ok(())
    }

    fn stop(&mut self) {
        self.log = None;
    }
}
