//! The devices that a VM has or has not, and of which nothing else can be chosen.

use vm_api::config::VmConfig;

use crate::config::device::{DeviceKind, DevicePlan};

/// Plans the watchdog and the pvpanic device.
pub(crate) fn plan(config: &VmConfig) -> impl Iterator<Item = DevicePlan> {
    let device = |flag, id: &str, kind| {
        let id = id.to_string();
        DevicePlan { flag, id, pci_segment: 0, pci_device_id: None, iommu: false, kind }
    };
    let watchdog = config.watchdog.then(|| device("--watchdog", "__watchdog", DeviceKind::Watchdog));
    let pvpanic = config.pvpanic.then(|| device("--pvpanic", "__pvpanic", DeviceKind::Pvpanic));
    watchdog.into_iter().chain(pvpanic)
}
