//! Reasons why a device cannot be opened or plugged.

use std::io;

use pci::TopologyError;
use virtio_devices::{
    BlockError, ConnectError, FunctionError, HoldError, NetError, NetSriovError, PmemError, RngError, RunnerError,
    VsockError,
};

use crate::devices::backends::BackendError;
use crate::devices::peers::PeerError;
use crate::error_kind::ErrorKind;
use crate::pci_host::assign_bars::NoRoom;
use crate::vfio::VfioError;

/// Reason why a device cannot be opened or plugged. `option` names it for the user: `--net id=pf0` or `--net-vf
/// pf=pf0,index=3`.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Backend that cannot be used.
    #[error("{option}{error}")]
    Backend {
        /// The network function.
        option: String,
        /// Cause.
        error: BackendError,
    },
    /// A backend cannot be connected to its function.
    #[error("{option}: {error}")]
    Connect {
        /// The network function.
        option: String,
        /// Cause.
        error: ConnectError,
    },
    /// The network function is impossible.
    #[error("{option}: {error}")]
    Net {
        /// The network function.
        option: String,
        /// Cause.
        error: NetError,
    },
    /// The image of a disk cannot be used.
    #[error("{option}: {error}")]
    Disk {
        /// The disk.
        option: String,
        /// Cause.
        error: BlockError,
    },
    /// A device of a virtual IOMMU is planned in a VM without one.
    #[error("--platform iommu=on: the VM was opened without a virtual IOMMU")]
    NoIommu,
    /// A virtio console is planned whose other end was not opened.
    #[error("--console: it is not open")]
    NoConsole,
    /// The source of random bytes cannot be used.
    #[error("{option}: {error}")]
    Rng {
        /// The entropy device.
        option: String,
        /// Cause.
        error: RngError,
    },
    /// A memory device is planned for memory that was not mapped.
    #[error("{option}: its memory is not mapped")]
    NoRegion {
        /// The memory device.
        option: String,
    },
    /// The socket cannot be listened on.
    #[error("{option}: {error}")]
    Vsock {
        /// The socket device.
        option: String,
        /// Cause.
        error: VsockError,
    },
    /// The file cannot be persistent memory.
    #[error("{option}: {error}")]
    Pmem {
        /// The device.
        option: String,
        /// Cause.
        error: PmemError,
    },
    /// The host device cannot be passed through.
    #[error("{option}: {error}")]
    Vfio {
        /// The device.
        option: String,
        /// Cause.
        error: VfioError,
    },
    /// Backend that cannot map the guest's new memory.
    #[error("{option}: {error}; the guest's memory stays as it is")]
    Memory {
        /// The network function.
        option: String,
        /// Cause.
        error: RunnerError,
    },
    /// The host has no thread or file for its queues.
    #[error(
        "{option}: cannot start its queues: {error}; the VM stays paused: have the host give it more open files and \
         threads (ulimit -n, ulimit -u), and try again"
    )]
    NotResumed {
        /// The function.
        option: String,
        /// Cause.
        error: io::Error,
    },
    /// Requests in flight that do not end.
    #[error("{option}: requests in flight did not complete in time; check its disk or backend, and try again")]
    Late {
        /// The device.
        option: String,
    },
    /// The device cannot be a PCI function.
    #[error("{option}: {error}")]
    Function {
        /// The device.
        option: String,
        /// Cause.
        error: FunctionError,
    },
    /// The devices cannot be a PF and its VFs.
    #[error("{option}: {error}")]
    Sriov {
        /// The PF.
        option: String,
        /// Cause.
        error: NetSriovError,
    },
    /// There is no free place for the device.
    #[error("{option}: {error}; {}", place_remedy(.error))]
    Place {
        /// The device.
        option: String,
        /// Cause.
        error: TopologyError,
    },
    /// The host has no address space for pages of configuration space.
    #[error("{option}: cannot reserve addresses for its configuration space: {error}")]
    Pages {
        /// The device.
        option: String,
        /// Cause.
        error: io::Error,
    },
    /// The BARs do not fit.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
}

impl From<PeerError> for DeviceError {
    fn from(PeerError { option, error }: PeerError) -> Self {
        Self::Backend { option, error: error.into() }
    }
}

impl DeviceError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Backend { error, .. } => error.kind(),
            Self::Net { error, .. } => error.kind().into(),
            Self::Connect { error, .. } => error.kind().into(),
            Self::Disk { error, .. } => error.kind().into(),
            Self::Rng { error, .. } => error.kind().into(),
            Self::Vsock { error, .. } => error.kind().into(),
            Self::Pmem { error, .. } => error.kind().into(),
            Self::Vfio { error, .. } => error.kind(),
            Self::Place { .. } | Self::NoRoom(_) | Self::Memory { .. } => ErrorKind::Conflict,
            Self::Function { .. }
            | Self::Sriov { .. }
            | Self::NotResumed { .. }
            | Self::Late { .. }
            | Self::Pages { .. }
            | Self::NoConsole
            | Self::NoIommu
            | Self::NoRegion { .. } => ErrorKind::Host,
        }
    }
}

/// Remedy if there is no place for a device.
const fn place_remedy(error: &TopologyError) -> &'static str {
    match error {
        TopologyError::NoSuchSlot(_) | TopologyError::SlotTaken(_) => "give another, or leave pci_device_id out",
        TopologyError::NoSlot => "remove a device, or give a NIC VFs (sriov_vfs=) in place of more NICs",
        TopologyError::NoBuses { .. } => "reserve fewer",
    }
}

impl From<HoldError> for DeviceError {
    fn from(HoldError { option, error }: HoldError) -> Self {
        Self::Disk { option, error }
    }
}
