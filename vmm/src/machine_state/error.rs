//! Errors of saving and restoring a machine, each in one line.

use virtio_devices::StateError;

use crate::error_kind::ErrorKind;
use crate::kvm::KvmError;
use crate::machine_state::compatibility::Incompatible;
use crate::machine_state::version::MACHINE_STATE_VERSION;

/// Failure to save a machine, which stays as it was.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The guest runs, or does not exist.
    #[error("the VM is not paused; pause it first (vm.pause)")]
    NotPaused,
    /// The guest has shut down.
    #[error("the guest has stopped and cannot continue; there is nothing to save")]
    Stopped,
    /// A part of the VM does not support saving.
    #[error("{option}: {why}")]
    Refused {
        /// Option that names the device.
        option: String,
        /// Cause, and remedy.
        why: &'static str,
    },
    /// A device cannot be saved.
    #[error("{option}: {error}")]
    Device {
        /// The device.
        option: String,
        /// Cause.
        error: StateError,
    },
    /// A vCPU cannot be saved.
    #[error("vCPU {vcpu}: {error}")]
    Vcpu {
        /// The vCPU.
        vcpu: u32,
        /// Cause.
        error: KvmError,
    },
    /// KVM fails.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

impl SaveError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotPaused | Self::Stopped | Self::Refused { .. } => ErrorKind::Conflict,
            Self::Device { .. } | Self::Vcpu { .. } | Self::Kvm(_) => ErrorKind::Host,
        }
    }
}

/// Failure to restore a machine, which must be dropped.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The state's version is not supported.
    #[error("saved state of version {0}; this program reads version {MACHINE_STATE_VERSION}")]
    Version(u16),
    /// The guest has seen CPU features that this host lacks.
    #[error("saved state of a guest with another CPU: {0}")]
    Cpu(#[from] Incompatible),
    /// The configuration describes another machine.
    #[error(
        "saved state of a machine with {state}; the configuration has {config}; give the configuration that was saved"
    )]
    Shape {
        /// Value in the state.
        state: String,
        /// Value in the configuration.
        config: String,
    },
    /// The configuration has another memory size.
    #[error("memory.size: {config} in the configuration, but the VM was saved with {saved}; give {saved}")]
    MemorySize {
        /// Value in the configuration.
        config: String,
        /// Value when the machine was saved.
        saved: String,
    },
    /// The configuration has another value of an option that the guest has seen.
    #[error("{option}: {now} in the configuration, but the guest was started with {then}; give {then}")]
    Told {
        /// The option.
        option: &'static str,
        /// Value when the machine was saved.
        then: String,
        /// Value here.
        now: String,
    },
    /// The state has a value that is impossible.
    #[error("saved state with an impossible value in {0}")]
    Value(&'static str),
    /// A device cannot be restored.
    #[error("{option}: {error}")]
    Device {
        /// The device.
        option: String,
        /// Cause.
        error: StateError,
    },
    /// A vCPU cannot be restored.
    #[error("vCPU {vcpu}: {error}")]
    Vcpu {
        /// The vCPU.
        vcpu: u32,
        /// Cause.
        error: KvmError,
    },
    /// KVM fails.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The VM cannot be created.
    #[error("{0}")]
    Vm(String, ErrorKind),
    /// The VM cannot be created, because another program uses what it needs of the host.
    #[error("{text}")]
    Taken {
        /// The resource that is taken.
        what: Taken,
        /// Cause, with the way out of a new VM after the last semicolon.
        text: String,
        /// The kind of the cause.
        kind: ErrorKind,
    },
}

/// A tap or socket of the host that another program uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    /// The tap of the network function of this name in `backends`.
    Tap(String),
    /// The socket at which the network function of this name in `backends` waits for its backend.
    BackendSocket(String),
    /// The socket of a console or of vsock.
    Socket,
}

impl RestoreError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Version(_)
            | Self::Cpu(_)
            | Self::Shape { .. }
            | Self::MemorySize { .. }
            | Self::Told { .. }
            | Self::Value(_)
            | Self::Device { .. } => ErrorKind::Invalid,
            Self::Vcpu { .. } | Self::Kvm(_) => ErrorKind::Host,
            Self::Vm(_, kind) | Self::Taken { kind, .. } => *kind,
        }
    }
}
