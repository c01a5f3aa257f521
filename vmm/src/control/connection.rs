//! The connection of a backend to a function without one, which is planned once: before the backend is opened.

use std::sync::Arc;

use pci::VfIndex;
use virtio_devices::{Cancel, GuestMap, Memory};
use vm_memory::GuestAddressSpace as _;

use crate::api::Failure;
use crate::config::{DevicePlan, NicPlan, PlannedVm, RestoredBackend};
use crate::devices::connect::{self, Connecting};
use crate::devices::vhost_user_backends::VhostUserBackends;
use crate::error::Error;
use crate::landlock;
use crate::vm::VmError;

/// A planned connection, and the backend that was opened for it.
pub(crate) struct Connection {
    /// The VM without the backend. It is shared with the instance, so that any change of the VM replaces the
    /// instance's.
    before: Arc<PlannedVm>,
    given: RestoredBackend,
    /// The VM with the backend, or the reason why it cannot have it.
    pub planned: Result<WithBackend, Failure>,
    /// The backend, once it was opened on another thread.
    pub opened: Option<Result<Opened, Error>>,
}

impl Connection {
    /// Creates the connection of `given` in the VM `before`, of which the plan is `planned`.
    pub(super) fn new(given: RestoredBackend, before: &Arc<PlannedVm>, planned: Result<WithBackend, Failure>) -> Self {
        Self { before: Arc::clone(before), given, planned, opened: None }
    }

    /// True if this connects `given`, and the VM is `now` as it was planned for.
    pub(super) fn is_of(&self, given: &RestoredBackend, now: &Arc<PlannedVm>) -> bool {
        Arc::ptr_eq(&self.before, now) && self.given == *given
    }

    /// True unless guest memory has changed since the backend was opened for it.
    pub(crate) fn suits(&self, memory: &Memory) -> bool {
        match &self.opened {
            Some(Ok(opened)) => Arc::ptr_eq(&opened.memory, &memory.memory().into_inner()),
            _ => true,
        }
    }
}

/// Plan of a VM with the new backend of a function.
pub(crate) struct WithBackend {
    pub planned: PlannedVm,
    pub device: DevicePlan,
    pub nic: NicPlan,
    pub vf: Option<VfIndex>,
}

impl WithBackend {
    /// Opens the backend, on any thread.
    pub(super) fn open(&self, memory: &Memory, cancel: Option<&Cancel>) -> Result<Opened, Error> {
        // The VM's Landlock rules must allow what is opened here.
        landlock::follow()?;
        let map = memory.memory().into_inner();
        let peers = VhostUserBackends::connect(std::slice::from_ref(&self.device), memory, cancel);
        let peers = peers.map_err(|error| VmError::from(crate::devices::DeviceError::from(error)))?;
        let backend =
            connect::open(&self.device, self.vf, &self.nic, memory, peers, self.planned.plan().iommu().is_some());
        let backend = backend.map_err(VmError::from)?;
        Ok(Opened { backend, memory: map })
    }
}

/// A backend that was opened for a function, and the guest memory it was opened for.
pub(crate) struct Opened {
    pub backend: Connecting,
    memory: Arc<GuestMap>,
}
