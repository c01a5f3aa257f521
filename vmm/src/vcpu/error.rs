//! Errors of running a vCPU.

use std::io;

use thiserror::Error;

use crate::kvm::KvmError;
use crate::vcpu::placement::PlacementError;

/// Failure to run a vCPU.
#[derive(Debug, Error)]
pub enum VcpuError {
    /// KVM fails.
    #[error("vCPU {vcpu}: {error}")]
    Kvm {
        /// The vCPU.
        vcpu: u32,
        /// Cause.
        error: KvmError,
    },
    /// KVM cannot continue the guest.
    #[error(
        "vCPU {vcpu}: KVM cannot continue to run the guest (internal error, suberror {suberror}; 1 means an \
         instruction \
         that it cannot emulate); -vv logs the registers"
    )]
    Internal {
        /// The vCPU.
        vcpu: u32,
        /// KVM's suberror.
        suberror: u32,
    },
    /// The CPU refuses to enter the guest.
    #[error("vCPU {vcpu}: the CPU refuses to enter the guest (reason {reason:#x}); -vv logs the registers")]
    FailedEntry {
        /// The vCPU.
        vcpu: u32,
        /// Reason from the CPU.
        reason: u64,
    },
    /// A vCPU's thread cannot be started.
    #[error("vCPU {vcpu}: cannot start its thread: {error}")]
    Spawn {
        /// The vCPU.
        vcpu: u32,
        /// Cause.
        error: io::Error,
    },
    /// A vCPU's thread cannot be placed as configured.
    #[error("vCPU {vcpu}: {error}")]
    Placement {
        /// The vCPU.
        vcpu: u32,
        /// Cause.
        error: PlacementError,
    },
    /// A vCPU's thread panicked: a bug in this program.
    #[error("vCPU {0}: its thread panicked; please report this")]
    Panicked(u32),
    /// The handler of the signal that stops vCPUs cannot be installed.
    #[error("cannot install the handler of the signal that stops vCPUs: {0}")]
    Signal(io::Error),
}
