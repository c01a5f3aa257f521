//! Reasons why a device cannot be opened or plugged.

use std::io;

use pci::TopologyError;
use virtio_devices::{ConnectError, FunctionError, NetSriovError, RunnerError, StorageLockError};

use crate::devices::backends::BackendError;
use crate::devices::vhost_user_backends::PeerError;
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
    /// The device cannot be opened.
    #[error("{option}: {error}")]
    Open {
        /// The device, or the network function.
        option: String,
        /// The kind of the cause.
        kind: ErrorKind,
        /// Cause, of the device's own type.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A device of a virtual IOMMU is planned in a VM without one.
    #[error("--platform iommu=on: the VM was opened without a virtual IOMMU")]
    NoIommu,
    /// A NIC is added on a NUMA node whose root bus the VM does not have.
    #[error(
        "{option},numa={node}: the guest has no root bus of this node, because the VM was started without a NIC that \
         has numa=; start it with one, or leave numa out"
    )]
    NoRootBus {
        /// The NIC.
        option: String,
        /// The number of the node.
        node: u32,
    },
    /// A virtio console is planned whose other end was not opened.
    #[error("--console: it is not open")]
    NoConsole,
    /// A guest's channel is planned whose other end was not opened.
    #[error("the guest's channel is not open")]
    NoChannel,
    /// A memory device is planned for memory that was not mapped.
    #[error("{option}: its memory is not mapped")]
    NoRegion {
        /// The memory device.
        option: String,
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
    /// The error of a device that cannot be opened, which `option` names.
    pub(crate) fn open<E>(option: impl Into<String>, kind: impl Into<ErrorKind>, error: E) -> Self
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        Self::Open { option: option.into(), kind: kind.into(), error: Box::new(error) }
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Backend { error, .. } => error.kind(),
            Self::Open { kind, .. } => *kind,
            Self::Connect { error, .. } => error.kind().into(),
            Self::Vfio { error, .. } => error.kind(),
            Self::Place { .. } | Self::NoRootBus { .. } | Self::NoRoom(_) | Self::Memory { .. } => ErrorKind::Conflict,
            Self::Function { .. }
            | Self::Sriov { .. }
            | Self::NotResumed { .. }
            | Self::Late { .. }
            | Self::Pages { .. }
            | Self::NoConsole
            | Self::NoChannel
            | Self::NoIommu
            | Self::NoRegion { .. } => ErrorKind::Host,
        }
    }
}

/// Remedy if there is no place for a device.
const fn place_remedy(error: &TopologyError) -> &'static str {
    match error {
        TopologyError::NoSuchSlot(_) | TopologyError::SlotTaken(_) => "give another, or leave pci_device_id out",
        TopologyError::NoSlot | TopologyError::NoSlotOnRoot(_) => {
            "remove a device, or give a NIC VFs (sriov_vfs=) in place of more NICs"
        }
        TopologyError::NoSuchRoot(_) => "leave numa out",
        TopologyError::NoBuses { .. } => "reserve fewer",
    }
}

impl From<StorageLockError> for DeviceError {
    fn from(StorageLockError { option, error }: StorageLockError) -> Self {
        Self::open(option, error.kind(), error)
    }
}
