//! State of a migration in the control thread, and its checks of requests and of the VM.

use std::path::Path;

use vm_api::migration::{MemoryMode, SendMigration};
use vmm_sys_util::eventfd::EventFd;

use crate::api::Failure;
use crate::control::instance::Instance;
use crate::control::queue::WaitingClient;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::migration::offer::Offer;
use crate::migration::orders::{Orders, SourceOrder, TargetOrder};
use crate::migration::progress::Progress;
use crate::migration::receiving::Receiving;
use crate::migration::sending::Sending;
use crate::migration::transport::Address;
use crate::migration::wire::MAX_CONNECTIONS;
use crate::snapshot::overrides;

/// A migration in progress, or with an unknown outcome.
pub(super) enum Live {
    /// An outgoing migration.
    Sending {
        sending: Sending,
        orders: Orders<SourceOrder>,
        progress: Progress,
        /// True if the guest runs, or ran until the migration stopped it.
        runs: bool,
        /// True if the migration has stopped the guest.
        is_stopped: bool,
        /// True if the owner of the guest is unknown.
        is_unknown: bool,
        /// Reason why the guest stays paused here instead of resuming.
        stays_paused: Option<String>,
    },
    /// An incoming migration.
    Receiving {
        /// The restored VM, until the guest may run. Dropped first, so that its locks are free when the source receives
        /// the failure.
        held: Option<Box<Instance>>,
        receiving: Receiving,
        orders: Orders<TargetOrder>,
        progress: Progress,
        /// True if the guest ran at the source.
        runs: bool,
        /// True if the memory is the source's.
        is_local: bool,
        /// Client that waits for the guest's arrival.
        client: Option<WaitingClient>,
        /// Reason why the arrived guest does not run.
        stays_paused: Option<String>,
    },
}

/// Error prefix of a migration that could not start.
pub(super) const NOT_SENT: &str = "the VM cannot be sent";
pub(super) const NOT_RECEIVED: &str = "no VM can be received";

impl Live {
    /// Returns an eventfd that is readable when the migration needs the control thread.
    pub(super) fn event(&self) -> &EventFd {
        match self {
            Self::Sending { orders, .. } => orders.event(),
            Self::Receiving { orders, .. } => orders.event(),
        }
    }

    /// True for an outgoing migration.
    pub(super) const fn is_sending(&self) -> bool {
        matches!(self, Self::Sending { .. })
    }
}

pub(super) fn conflict(what: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Conflict, what)
}

pub(super) fn invalid(what: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Invalid, what)
}

pub(super) fn host(error: std::io::Error) -> Failure {
    Failure::new(ErrorKind::Host, format!("the host has no thread or descriptor for it: {error}"))
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
        return Err(invalid("downtime_ms=0: a guest cannot move without standing still; give at least 1"));
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
            return Err(conflict(format!("{id}: a device of this host cannot go with the VM; remove it (--device)")));
        }
        if let Some(disk) = config.disks.iter().find(|disk| disk.vhost_user && !disk.readonly) {
            let id = disk.id.as_deref().unwrap_or_default();
            let what = "what another program writes cannot go over: nobody knows when it is on the disk";
            return Err(conflict(format!("{id}: {what}; make it readonly=on, or remove it")));
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
