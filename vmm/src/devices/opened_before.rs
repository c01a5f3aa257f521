//! Resources of a device that are opened on another thread, before the device is plugged in.

use std::sync::Arc;

use virtio_devices::{Cancel, GuestMap, Memory};
use vm_memory::GuestAddressSpace as _;

use crate::devices::vhost_user_backends::{PeerError, VhostUserBackends};
use crate::vfio::{OpenDevice, VfioError};

/// Resources that were opened for a device, or the reason why they could not be.
#[derive(Default)]
pub(crate) enum OpenedBefore {
    /// None.
    #[default]
    Nothing,
    /// vhost-user backends.
    VhostUserBackends(Result<VhostUserBackends, PeerError>),
    /// The host device, and the guest memory that it was opened for.
    HostDevice(Box<Result<OpenDevice, VfioError>>, Arc<GuestMap>),
}

/// Opener of a device's resources on any thread, with cancellation.
pub(crate) type OpenBefore = Box<dyn FnOnce(&Cancel) -> OpenedBefore + Send>;

impl OpenedBefore {
    /// True if the resources can be used in a guest whose memory is `memory` now. Its memory may have changed since
    /// they were opened.
    pub(crate) fn suits(&self, memory: &Memory) -> bool {
        match self {
            Self::VhostUserBackends(Ok(peers)) => peers.have(memory),
            Self::HostDevice(device, map) if device.is_ok() => Arc::ptr_eq(map, &memory.memory().into_inner()),
            Self::Nothing | Self::VhostUserBackends(_) | Self::HostDevice(..) => true,
        }
    }
}
