//! Backends without a dirty log, which are stopped while memory is copied.

use std::io;

use virtio_devices::MemoryUser;

use super::page_set::PageSet;
use super::source::DirtySource;

/// Backends whose links were taken down, and that write nothing from [`DirtySource::start`] until their links are up
/// again.
pub struct StoppedBackends(Vec<(String, MemoryUser)>);

impl StoppedBackends {
    /// Takes these backends, with their options.
    pub fn new(users: Vec<(String, MemoryUser)>) -> Self {
        Self(users)
    }
}

impl DirtySource for StoppedBackends {
    fn name(&self) -> &'static str {
        "stopped backends write"
    }

    fn start(&mut self) -> io::Result<()> {
        self.0.iter().try_for_each(|(option, user)| {
            user.stand().map_err(|error| {
                let line = format!("{option}: {error}; pause the guest first (vm.pause)");
                io::Error::new(error.source.kind(), line)
            })
        })
    }

    fn collect(&mut self, _pages: &mut PageSet) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self) {}
}
