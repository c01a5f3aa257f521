//! The addition of a device, which is planned once: before its backends are opened.

use std::sync::Arc;

use crate::api::NewDevice;
use crate::config::{ConfigError, DevicePlan, PlannedVm, VmConfig, guest_channel, iommu};
use crate::devices::kind;
use crate::devices::opened_before::OpenedBefore;
use crate::error::Error;
use crate::landlock;

/// A planned addition of a device, and what was opened for the device.
pub(crate) struct Addition {
    /// The VM without the device. It is shared with the instance, so that any change of the VM replaces the instance's.
    before: Arc<PlannedVm>,
    /// The configuration with the device, before it was planned. `None` if the VM cannot have another such device.
    asked: Option<VmConfig>,
    /// True if the VM was booted, so that the checks of a boot were made.
    was_booted: bool,
    /// The VM with the device, or the reason why it cannot have it.
    pub planned: Result<PlannedVm, Error>,
    /// Resources that were opened on another thread.
    pub opened: OpenedBefore,
}

impl Addition {
    /// Plans the addition of `device` to the VM `before`. The device of a booted VM is plugged in at once, so the
    /// checks of a boot are made here.
    pub(crate) fn plan(device: &NewDevice, before: &Arc<PlannedVm>, is_booted: bool) -> Self {
        let asked = with_device(device, before);
        let planned = asked.clone().map_err(Error::from).and_then(|config| plan(config, before, is_booted));
        let (before, opened) = (Arc::clone(before), OpenedBefore::Nothing);
        Self { before, asked: asked.ok(), was_booted: is_booted, planned, opened }
    }

    /// The plan of the device, if it can be added.
    pub(crate) fn device(&self) -> Option<&DevicePlan> {
        self.planned.as_ref().ok()?.added_to(self.before.plan())
    }

    /// True if this adds `device`, the VM is `now` as it was planned for, and booted if it was then.
    pub(crate) fn is_of(&self, device: &NewDevice, now: &Arc<PlannedVm>, is_booted: bool) -> bool {
        Arc::ptr_eq(&self.before, now)
            && self.was_booted == is_booted
            && self.asked == with_device(device, &self.before).ok()
    }
}

/// The configuration of the VM `before` with one more device.
fn with_device(device: &NewDevice, before: &PlannedVm) -> Result<VmConfig, ConfigError> {
    let mut config = before.config().clone();
    device.push(&mut config)?;
    Ok(config)
}

/// Plans `config`, that of the VM `before` with one more device.
fn plan(config: VmConfig, before: &PlannedVm, is_booted: bool) -> Result<PlannedVm, Error> {
    let mut planned = PlannedVm::with_device_of_document(config)?;
    planned.keep_slots(before.plan());
    if is_booted && let Some(device) = planned.added_to(before.plan()) {
        guest_channel::check_added(&before.plan().devices, &planned.plan().devices)?;
        iommu::check_added(before.plan().iommu(), device)?;
        landlock::check_device(|| kind::files(device))?;
    }
    Ok(planned)
}
