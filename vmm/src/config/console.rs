//! The plan of the virtio console.

use vm_api::config::console::{ConsoleConfig, ConsoleMode};

use crate::config::device::{DeviceKind, DevicePlan};

/// The id of the virtio console.
const ID: &str = "__console";

/// Plans the virtio console, unless it is off. [`machine`](crate::config::machine) has checked its end.
pub(crate) fn plan(config: &ConsoleConfig) -> Option<DevicePlan> {
    (config.mode != ConsoleMode::Off).then(|| DevicePlan {
        flag: "--console",
        id: ID.to_string(),
        pci_device_id: None,
        kind: DeviceKind::Console,
    })
}
