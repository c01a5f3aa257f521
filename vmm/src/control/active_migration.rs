//! State of a migration in the control thread, and its checks of requests and of the VM.

use std::path::Path;

use virtio_devices::SocketHandle;
use vm_api::migration::{MemoryMode, SendMigration};
use vmm_sys_util::eventfd::EventFd;

use crate::api::Failure;
use crate::control::instance::Instance;
use crate::control::queue::WaitingClient;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::migration::commands::{CommandReceiver, SourceCommand, TargetCommand};
use crate::migration::offer::Offer;
use crate::migration::progress::Progress;
use crate::migration::source_thread::SourceHandle;
use crate::migration::target_thread::TargetHandle;
use crate::migration::transport::Address;
use crate::migration::wire::MAX_CONNECTIONS;
use crate::snapshot::overrides;

/// A migration in progress, or with an unknown outcome.
pub(super) enum ActiveMigration {
    Outgoing(OutgoingMigration),
    Incoming(IncomingMigration),
}

/// An outgoing migration.
pub(super) struct OutgoingMigration {
    pub thread: SourceHandle,
    pub commands: CommandReceiver<SourceCommand>,
    pub progress: Progress,
    /// True if the guest runs, or ran until the migration stopped it.
    pub runs: bool,
    /// Listening sockets that are passed to the target; empty unless it is on this host.
    pub sockets: Vec<SocketHandle>,
    /// Address of the target; `None` with `local=on`.
    pub away: Option<String>,
    /// True if the migration has stopped the guest.
    pub is_stopped: bool,
    /// True if the owner of the guest is unknown.
    pub is_unknown: bool,
    /// Reason why the guest stays paused here instead of resuming.
    pub stays_paused: Option<String>,
}

/// An incoming migration.
pub(super) struct IncomingMigration {
    /// The restored VM, until the guest may run. Dropped first, so that its locks are free when the source receives the
    /// failure.
    pub restored: Option<Box<Instance>>,
    pub thread: TargetHandle,
    pub commands: CommandReceiver<TargetCommand>,
    pub progress: Progress,
    /// True if the guest ran at the source.
    pub runs: bool,
    /// True if the memory is the source's.
    pub is_local: bool,
    /// Client that waits for the guest's arrival.
    pub client: Option<WaitingClient>,
    /// Reason why the arrived guest does not run.
    pub stays_paused: Option<String>,
}

/// Error prefix of a migration that could not start.
pub(super) const NOT_SENT: &str = "the VM cannot be sent";
pub(super) const NOT_RECEIVED: &str = "no VM can be received";

impl ActiveMigration {
    /// Returns an eventfd that is readable when the migration needs the control thread.
    pub(super) fn event(&self) -> &EventFd {
        match self {
            Self::Outgoing(sent) => sent.commands.event(),
            Self::Incoming(received) => received.commands.event(),
        }
    }

    /// True for an outgoing migration.
    pub(super) const fn is_sending(&self) -> bool {
        matches!(self, Self::Outgoing(_))
    }
}

pub(super) fn conflict(what: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Conflict, what)
}

pub(super) fn invalid(what: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Invalid, what)
}

pub(super) fn host(error: std::io::Error) -> Failure {
    Failure::new(ErrorKind::Host, format!("the host has no thread or descriptor left: {error}"))
}

/// Refuses modes that neither side supports.
pub(super) fn check_modes(memory_mode: MemoryMode) -> Result<(), Failure> {
    if memory_mode == MemoryMode::Postcopy {
        return Err(invalid("memory_mode=Postcopy: memory is copied before the guest moves; leave it out"));
    }
    Ok(())
}

/// Loads TLS files with `read`, if `tls_dir` is given.
pub(super) fn tls<T>(
    address: &Address,
    tls_dir: Option<&Path>,
    read: impl FnOnce(&Path) -> Result<T, String>,
) -> Result<Option<T>, Failure> {
    let Some(folder) = tls_dir else { return Ok(None) };
    if address.is_unix() {
        let what = "a Unix socket is not encrypted; leave it out, or use tcp";
        return Err(invalid(format!("tls_dir={}: {what}", folder.display())));
    }
    landlock::check_tls(folder).map_err(Error::from)?;
    read(folder).map(Some).map_err(invalid)
}

/// Checks a request, and returns the target's address.
pub(super) fn check_send(config: &SendMigration) -> Result<Address, Failure> {
    let address = Address::parse("destination_url", &config.destination_url).map_err(invalid)?;
    check_modes(config.memory_mode)?;
    let connections = config.connections;
    if config.local && !address.is_unix() {
        return Err(invalid("local=true: memory is passed over a Unix socket only; leave it out, or use unix:<path>"));
    }
    if config.downtime_ms == 0 {
        return Err(invalid("downtime_ms=0: a guest cannot move without a pause; give at least 1"));
    }
    if connections == 0 || connections > MAX_CONNECTIONS.into() {
        return Err(invalid(format!("connections={connections}: give 1 to {MAX_CONNECTIONS}")));
    }
    if connections > 1 && address.is_unix() {
        return Err(invalid(format!("connections={connections}: a Unix socket has one; leave it out, or use tcp")));
    }
    Ok(address)
}

impl Instance {
    /// Describes the VM for the target.
    ///
    /// # Errors
    ///
    /// Fails if a part of the VM cannot be migrated.
    pub(super) fn offer(&self) -> Result<Offer, Failure> {
        let vm = self.vm().ok_or_else(|| conflict("the VM is not booted; boot it first (vm.boot)"))?;
        // Until then, missing pages are not zero.
        if vm.filling().is_some_and(|filling| !filling.is_done()) {
            let what = "the guest's memory is still read from its snapshot; try again when that is done";
            return Err(conflict(what));
        }
        let config = self.config();
        if let Some(device) = config.devices.first() {
            let id = device.id.as_deref().unwrap_or_default();
            return Err(conflict(format!("{id}: a VFIO device cannot be migrated; remove it (--device)")));
        }
        if let Some(disk) = config.disks.iter().find(|disk| disk.vhost_user && !disk.readonly) {
            let id = disk.id.as_deref().unwrap_or_default();
            let what =
                "a writable vhost-user disk cannot be migrated: its backend does not report when writes are durable";
            return Err(conflict(format!("{id}: {what}; use readonly=on, or remove it")));
        }
        if let Some((option, why)) =
            vm.devices().iter().find_map(|device| Some((device.plan().option(), device.lost()?)))
        {
            return Err(conflict(format!("{option}: {why}")));
        }
        let (mut config, links) = (self.config().clone(), self.saved_links());
        let taken = overrides::take_descriptors(&mut config);
        let descriptors = [taken, self.awaited_descriptors()].concat();
        let config = serde_json::to_value(&config)
            .map_err(|error| Failure::new(ErrorKind::Host, format!("the configuration cannot be JSON: {error}")))?;
        let program = concat!("cloud-hypervisor-sriov ", env!("CARGO_PKG_VERSION")).to_string();
        let stateful = vm.devices().memory_users().stateful().into_iter().map(|backend| backend.of).collect();
        let (outline, runs) = (vm.outline(), !vm.is_paused());
        Ok(Offer { program, config, descriptors, links, outline, runs, passed: None, stateful })
    }
}
