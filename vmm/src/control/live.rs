//! A live migration as the control thread keeps it, and what it takes of a request and of a VM for one.

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

/// A migration that is under way, or whose outcome is unknown.
pub(super) enum Live {
    /// The VM is sent.
    Sending {
        sending: Sending,
        orders: Orders<SourceOrder>,
        progress: Progress,
        /// True if the guest runs, or ran when it was stopped for this.
        runs: bool,
        /// True if it was stopped for this.
        is_stopped: bool,
        /// True if it is unknown which side has it.
        is_unknown: bool,
        /// Reason why the guest, which should have been resumed here, stays paused.
        stays_paused: Option<String>,
    },
    /// A VM is received.
    Receiving {
        /// The VM, from when its machine is restored until it may run. Dropped first, so that its locks are free when
        /// the source learns that the guest never runs here.
        held: Option<Box<Instance>>,
        receiving: Receiving,
        orders: Orders<TargetOrder>,
        progress: Progress,
        /// True if it ran at the source.
        runs: bool,
        /// True if its memory is the source's.
        is_local: bool,
        /// The client that waits until the guest has arrived.
        client: Option<WaitingClient>,
        /// Reason why the guest, which is here, does not run.
        stays_paused: Option<String>,
    },
}

/// Error prefix of a migration that could not start.
pub(super) const NOT_SENT: &str = "the VM cannot be sent";
pub(super) const NOT_RECEIVED: &str = "no VM can be received";

impl Live {
    /// Readable when there is something to do.
    pub(super) fn event(&self) -> &EventFd {
        match self {
            Self::Sending { orders, .. } => orders.event(),
            Self::Receiving { orders, .. } => orders.event(),
        }
    }

    /// True while the guest is at this side, and is being sent.
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

/// Checks what both sides refuse.
pub(super) fn check_modes(memory_mode: MemoryMode) -> Result<(), Failure> {
    if memory_mode == MemoryMode::Postcopy {
        return Err(invalid("memory_mode=Postcopy: memory is copied before the guest moves; leave it out"));
    }
    Ok(())
}

/// Result of `read` for the files in `tls_dir`, if that is given.
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

/// Address of the target.
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
    /// Description by which a target makes its VM.
    ///
    /// # Errors
    ///
    /// It has something that cannot go.
    pub(super) fn offer(&self) -> Result<Offer, Failure> {
        let vm = self.vm().ok_or_else(|| conflict("the VM is not booted; boot it first (vm.boot)"))?;
        // Until then a page that does not exist is not zero.
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
