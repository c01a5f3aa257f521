//! Reasons why KVM cannot be used, with remedies.

use std::io;

use thiserror::Error;

/// The version of the KVM API that has been stable since 2007.
pub(crate) const API_VERSION: i32 = 12;

/// Fault of the host's KVM.
#[derive(Debug, Error)]
pub enum KvmError {
    /// There is no `/dev/kvm`.
    #[error(
        "/dev/kvm: there is no such device; load the module kvm_amd or kvm_intel, and check that virtualisation is \
         enabled in the firmware"
    )]
    Absent,
    /// The user may not open `/dev/kvm`.
    #[error("/dev/kvm: no permission to open it; join the group that owns it (usually kvm) or run as root")]
    Permission,
    /// `/dev/kvm` cannot be opened for another reason.
    #[error("/dev/kvm: cannot be opened: {0}")]
    Open(io::Error),
    /// The KVM API is not the stable one.
    #[error("/dev/kvm: has API version {0}; version {API_VERSION} is needed")]
    Version(i32),
    /// A capability is missing.
    #[error("/dev/kvm: lacks {0}; a newer Linux is needed")]
    Capability(&'static str),
    /// More vCPUs than the host can run in one VM.
    #[error("--cpus {key}={requested}: this host runs at most {limit} vCPUs in a VM; give {limit} or fewer")]
    Vcpus {
        /// The key that requests them.
        key: &'static str,
        /// Number requested.
        requested: u32,
        /// The most that are possible.
        limit: u32,
    },
    /// An ioctl failed.
    #[error("KVM: cannot {action}: {error}")]
    Ioctl {
        /// The operation.
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
}
