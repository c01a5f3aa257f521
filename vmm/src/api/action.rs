//! The actions of clients and their results, independent of HTTP.
//!
//! Pure functions turn a request into an [`Action`]. A [`Handler`] applies it and returns a [`Reply`] or a [`Failure`].

use std::os::fd::OwnedFd;

use vm_api::body::{InjectFault, RemoveDevice, Resize, ResizeDisk, ResizeZone, SetVf, SnapshotConfig};
use vm_api::config::{RestoreConfig, VmConfig};
use vm_api::migration::{ReceiveMigration, ResumeOptions, SendMigration};

use crate::api::new_device::NewDevice;
use crate::error_kind::ErrorKind;

/// A client's action.
#[derive(Debug)]
pub enum Action {
    /// `vmm.ping`.
    Ping,
    /// `vmm.shutdown`: shuts the VM down and ends the program.
    ShutdownVmm,
    /// `vm.create`.
    Create(Box<VmConfig>),
    /// `vm.boot`.
    Boot,
    /// `vm.delete`. Also succeeds without a VM.
    Delete,
    /// `vm.info`.
    Info,
    /// `vm.counters`.
    Counters,
    /// `vm.pause`.
    Pause,
    /// `vm.resume`, which may be forced.
    Resume(ResumeOptions),
    /// `vm.shutdown`: shuts the VM down immediately. It can be booted again.
    Shutdown,
    /// `vm.reboot`.
    Reboot,
    /// `vm.power-button`: asks the guest to power off.
    PowerButton,
    /// `vm.nmi`: sends each vCPU a non-maskable interrupt.
    Nmi,
    /// `vm.add-*`.
    Add(NewDevice),
    /// `vm.remove-device`.
    RemoveDevice(RemoveDevice),
    /// `vm.resize`.
    Resize(Resize),
    /// `vm.resize-zone`.
    ResizeZone(ResizeZone),
    /// `vm.resize-disk`.
    ResizeDisk(ResizeDisk),
    /// `vm.set-vf`, with the descriptors from the request.
    SetVf(Box<SetVf>, Vec<OwnedFd>),
    /// `vm.inject-fault`.
    InjectFault(InjectFault),
    /// `vm.snapshot`.
    Snapshot(SnapshotConfig),
    /// `vm.restore`, with the descriptors from the request, whose numbers are in the configuration.
    Restore(Box<RestoreConfig>, Vec<OwnedFd>),
    /// `vm.send-migration`.
    SendMigration(Box<SendMigration>),
    /// `vm.receive-migration`, with the tap file descriptors from the request.
    ReceiveMigration(Box<ReceiveMigration>, Vec<OwnedFd>),
    /// `vm.cancel-migration`.
    CancelMigration,
    /// `vm.migration-progress`.
    MigrationProgress,
    /// `GET /metrics`.
    Metrics,
}

/// The result of a successful action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// No content: status 204.
    Done,
    /// An empty body with status 200, as for `vmm.shutdown`.
    Ok,
    /// A JSON document: status 200.
    Json(String),
    /// Metrics in Prometheus' text format: status 200.
    Metrics(String),
}

/// Failure of an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind, which determines the status.
    pub kind: ErrorKind,
    /// Action that failed, and causes: one line each, the outermost first.
    pub chain: Vec<String>,
}

impl Failure {
    /// A failure with a single reason.
    pub fn new(kind: ErrorKind, reason: impl Into<String>) -> Self {
        Self { kind, chain: vec![reason.into()] }
    }

    /// Adds `what`, the action that failed because of this, before the causes. The kind stays.
    #[must_use]
    pub fn in_context(mut self, what: impl Into<String>) -> Self {
        self.chain.insert(0, what.into());
        self
    }
}

/// Applies actions. Called from many threads; each call waits for its turn.
pub trait Handler: Send + Sync {
    /// Applies `action`.
    ///
    /// # Errors
    ///
    /// Fails if the action fails. Nothing of it remains then.
    fn handle(&self, action: Action) -> Result<Reply, Failure>;
}
