//! Devices without settings of their own: a VM has them or not.

use vm_api::config::VmConfig;

use crate::config::device::{DeviceKind, DevicePlan};

/// Plans the watchdog, if there is one.
pub(crate) fn watchdog(config: &VmConfig) -> Option<DevicePlan> {
    config.watchdog.then(|| device("--watchdog", "__watchdog", DeviceKind::Watchdog))
}

/// Plans the pvpanic device, if there is one.
pub(crate) fn pvpanic(config: &VmConfig) -> Option<DevicePlan> {
    config.pvpanic.then(|| device("--pvpanic", "__pvpanic", DeviceKind::Pvpanic))
}

fn device(flag: &'static str, id: &str, kind: DeviceKind) -> DevicePlan {
    DevicePlan { flag, id: id.to_string(), pci_segment: 0, pci_device_id: None, iommu: false, kind }
}
