//! What a client can ask for, and what it can be told.
//!
//! A request becomes an [`Action`] by pure functions; whoever has the virtual machine applies it, one at a time, and answers with a
//! [`Reply`] or a [`Failure`]. Nothing here knows HTTP.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::config::{DiskConfig, MacAddress, NetConfig, VdpaConfig, VmConfig};

/// What a client asks for.
#[derive(Debug)]
pub enum Action {
    /// `vmm.ping`: who are you?
    Ping,
    /// `vmm.shutdown`: end the VM and this program.
    ShutdownVmm,
    /// `vm.create`.
    Create(Box<VmConfig>),
    /// `vm.boot`.
    Boot,
    /// `vm.delete`; there need not be a VM.
    Delete,
    /// `vm.info`.
    Info,
    /// `vm.counters`.
    Counters,
    /// `vm.pause`.
    Pause,
    /// `vm.resume`.
    Resume,
    /// `vm.shutdown`: switch the VM off at once. It can be booted again.
    Shutdown,
    /// `vm.reboot`.
    Reboot,
    /// `vm.power-button`: ask the guest to switch itself off.
    PowerButton,
    /// `vm.nmi`: a non-maskable interrupt for each vCPU.
    Nmi,
    /// `vm.add-net`, and the tap file descriptors that came with it, one for each pair of queues.
    AddNet(Box<NetConfig>, Vec<OwnedFd>),
    /// `vm.add-disk`.
    AddDisk(Box<DiskConfig>),
    /// `vm.add-vdpa`.
    AddVdpa(Box<VdpaConfig>),
    /// `vm.remove-device`.
    RemoveDevice(RemoveDevice),
    /// `vm.resize`.
    Resize(Resize),
    /// `vm.set-vf`.
    SetVf(SetVf),
    /// `GET /metrics`.
    Metrics,
}

/// The body of `vm.remove-device`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveDevice {
    /// The device's id, as given or as `vm.info` tells it.
    pub id: String,
}

/// The body of `vm.resize`. What is left out stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resize {
    /// How many vCPUs there should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// How much memory there should be, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
    /// How much of it the guest should give back, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_balloon: Option<u64>,
}

/// The body of `vm.set-vf`. What is left out stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetVf {
    /// The PF's id.
    pub pf: String,
    /// Which of its VFs, from 0.
    pub index: u16,
    /// Whether the VF has a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// The VF's MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
}

/// Whether a network function has a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// Frames pass, as far as the backend takes them.
    Up,
    /// The guest sees no carrier, and no frame passes.
    Down,
}

/// What a client is told when all went well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Nothing but that: status 204.
    Done,
    /// Nothing but that, with status 200, as `vmm.shutdown` answers.
    Ok,
    /// A JSON document: status 200.
    Json(String),
    /// Metrics in Prometheus' text form: status 200.
    Metrics(String),
}

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Whose fault it is.
    pub kind: FailureKind,
    /// What failed, and below it why: outermost first, a line each.
    pub chain: Vec<String>,
}

impl Failure {
    /// A failure with one reason.
    pub fn new(kind: FailureKind, reason: impl Into<String>) -> Self {
        Self { kind, chain: vec![reason.into()] }
    }

    /// This failure as the reason of another one, `what`, of the same kind.
    #[must_use]
    pub fn in_context(mut self, what: impl Into<String>) -> Self {
        self.chain.insert(0, what.into());
        self
    }
}

/// Whose fault it is, which a client reads from the status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The request's: 400.
    BadRequest,
    /// It asks for something that does not exist: 404.
    NotFound,
    /// It uses a name or a path that another device has: 409.
    Conflict,
    /// An earlier request of the kind is not finished: 429.
    TooManyRequests,
    /// The VM's state or the host's: 500.
    Internal,
    /// This version cannot do it: 501.
    NotImplemented,
}

/// Who applies actions. Called from many threads; each call waits for its turn.
pub trait Handler: Send + Sync {
    /// Applies `action`.
    ///
    /// # Errors
    ///
    /// Why it was not applied. It has left nothing behind then.
    fn handle(&self, action: Action) -> Result<Reply, Failure>;
}
