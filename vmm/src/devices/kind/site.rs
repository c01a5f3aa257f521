//! The place and the surroundings of a device that is opened.

use pci::Placement;
use virtio_devices::{VirtioDevice, VirtioFunction, VirtioPci};

use crate::config::DevicePlan;
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::devices::host::HostResources;
use crate::error_kind::ErrorKind;

/// An open device, and the host's handle of it.
pub(crate) type Opened = (Box<dyn VirtioPci>, Handle);

/// A device that is opened: its plan, its place, and what the machine gives to it.
pub(crate) struct Site<'a> {
    pub plan: &'a DevicePlan,
    pub placement: Placement,
    pub host: &'a HostResources,
}

impl Site<'_> {
    /// Option that names the device.
    pub(super) fn option(&self) -> String {
        self.plan.option()
    }

    /// The error of a device that cannot be opened.
    pub(super) fn failed<E>(&self, kind: impl Into<ErrorKind>, error: E) -> DeviceError
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        DeviceError::open(self.option(), kind, error)
    }

    /// The only function of a device that has no VFs.
    pub(super) fn function<D: VirtioDevice + 'static>(&self, device: D) -> Result<Box<dyn VirtioPci>, DeviceError> {
        let Self { plan, placement, host } = *self;
        let function = VirtioFunction::plain(device, placement.rid, host.memory.clone());
        let function = function.map_err(|error| DeviceError::Function { option: plan.option(), error })?;
        let attachment = if plan.iommu { host.iommu_attachment(placement, placement.rid) } else { None };
        Ok(Box::new(match attachment {
            Some(attachment) => function.with_iommu(attachment),
            None => function,
        }))
    }
}
