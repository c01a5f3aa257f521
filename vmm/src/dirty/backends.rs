//! Dirty pages of backends that run queues themselves: the host's kernel, and vhost-user processes.

use std::io;
use std::sync::Arc;

use virtio_devices::{BackendKind, GuestMap, MemoryUser, SharedLog};

use super::page_set::PageSet;
use super::source::DirtySource;

/// Finds the current backends of the VM, each with its option.
pub type FindUsers = Box<dyn Fn() -> Vec<(String, MemoryUser)> + Send>;

/// The backends of one kind, which share a log. Each kind has a log of its own, because a backend process can neither
/// set nor clear the bits that the kernel sets.
pub struct Backends {
    kind: BackendKind,
    users: FindUsers,
    map: GuestMap,
    log: Option<Arc<SharedLog>>,
}

impl Backends {
    /// Selects the backends of `kind` among `users`, which write to `map`.
    pub fn new(kind: BackendKind, users: FindUsers, map: &GuestMap) -> Self {
        Self { kind, users, map: map.clone(), log: None }
    }

    /// Returns the options of `users` without a dirty log: vDPA devices, and some vhost-user peers. Each must be
    /// stopped while memory is copied; otherwise the guest cannot migrate.
    pub fn without_log(users: &[(String, MemoryUser)]) -> Vec<&str> {
        users.iter().filter(|(_, user)| !user.logs_writes()).map(|(option, _)| &**option).collect()
    }

    /// Sets or removes the log of all backends of the kind that can log.
    fn tell(&self, log: Option<&Arc<SharedLog>>) -> io::Result<()> {
        let users = (self.users)();
        let of_kind = |(_, user): &&(String, MemoryUser)| user.kind() == self.kind && user.logs_writes();
        users.iter().filter(of_kind).try_for_each(|(option, user)| {
            user.set_log(log).map_err(|error| io::Error::new(error.source.kind(), format!("{option}: {error}")))
        })
    }
}

impl DirtySource for Backends {
    fn name(&self) -> &'static str {
        match self.kind {
            BackendKind::VhostNet => "vhost-net writes",
            BackendKind::VhostUser => "vhost-user backends write",
            _ => "backends write",
        }
    }

    fn start(&mut self) -> io::Result<()> {
        let log = Arc::new(SharedLog::new(&self.map)?);
        if let Err(error) = self.tell(Some(&log)) {
            self.stop();
            return Err(error);
        }
        self.log = Some(log);
        Ok(())
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        let log = self.log.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        log.take(|first, bits| pages.add(first, bits));
        Ok(())
    }

    fn stop(&mut self) {
        if let Err(error) = self.tell(None) {
            log::warn!("a backend continues to log what it writes: {error}");
        }
        self.log = None;
    }
}
