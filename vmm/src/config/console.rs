//! The rules for the virtio console, and its plan.

use vm_api::config::console::{ConsoleConfig, ConsoleMode};
use vm_api::config::error::ConfigError;

use crate::config::common_keys::CommonKeys;
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;

/// The default id of the virtio console.
const ID: &str = "__console";

/// Plans the virtio console, unless it is off. [`machine`](crate::config::machine) has checked its end.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(config: &ConsoleConfig) -> Result<Option<DevicePlan>, ConfigError> {
    if config.mode == ConsoleMode::Off {
        return Ok(None);
    }
    let keys = CommonKeys {
        id: config.id.as_deref().filter(|id| *id != ID),
        slot: (config.pci_segment, config.pci_device_id),
    };
    keys.check("--console", &Subject::device("--console", None, 0, 1))?;
    let id = config.id.clone().unwrap_or_else(|| ID.to_string());
    let ConsoleConfig { pci_segment, pci_device_id, .. } = *config;
    Ok(Some(DevicePlan {
        flag: "--console",
        id,
        pci_segment,
        pci_device_id,
        iommu: config.iommu,
        kind: DeviceKind::Console,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Result<Option<DevicePlan>, String> {
        plan(&text.parse().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_console_has_a_name_of_its_own_and_the_keys_of_a_device() {
        let console = |id: &str, pci_segment, pci_device_id| {
            let (flag, id) = ("--console", id.to_string());
            Ok(Some(DevicePlan { flag, id, pci_segment, pci_device_id, iommu: false, kind: DeviceKind::Console }))
        };
        assert_eq!(planned("tty"), console("__console", 0, None));
        assert_eq!(planned("null,id=__console"), console("__console", 0, None));
        assert_eq!(planned("pty,id=c,pci_segment=1,pci_device_id=7"), console("c", 1, Some(7)));
        assert_eq!(planned("off,id=c,pci_device_id=99,iommu=on"), Ok(None));
    }

    #[test]
    fn an_impossible_console_is_refused_with_a_way_out() {
        for (text, expected) in [
            (
                "tty,id=__x",
                "--console id=__x: not a device name; use printable characters, and do not start with two underscores",
            ),
            (
                "tty,pci_device_id=32",
                "--console pci_device_id=32: bus 0 has slots 1 to 31 for devices; give one of them",
            ),
        ] {
            assert_eq!(planned(text).unwrap_err(), expected);
        }
    }
}
