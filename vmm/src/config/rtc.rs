//! The rules for the clock, and its plan.

use virtio_devices::RtcSpec;
use vm_api::config::RtcConfig;
use vm_api::config::error::ConfigError;

use crate::config::common_keys::CommonKeys;
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;

const FLAG: &str = "--rtc";
/// The default id of the clock.
const ID: &str = "__rtc";

/// Plans the clock, if there is one.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(config: Option<&RtcConfig>) -> Result<Option<DevicePlan>, ConfigError> {
    let Some(config) = config else { return Ok(None) };
    let keys = CommonKeys {
        id: config.id.as_deref().filter(|id| *id != ID),
        slot: (config.pci_segment, config.pci_device_id),
    };
    keys.check(FLAG, &Subject::device(FLAG, None, 0, 1))?;
    let id = config.id.clone().unwrap_or_else(|| ID.to_string());
    let spec = RtcSpec { id: id.clone() };
    let RtcConfig { pci_segment, pci_device_id, .. } = *config;
    Ok(Some(DevicePlan {
        flag: FLAG,
        id,
        pci_segment,
        pci_device_id,
        iommu: config.iommu,
        kind: DeviceKind::Rtc(spec),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Result<DevicePlan, String> {
        let planned = text.parse::<RtcConfig>().and_then(|config| plan(Some(&config)));
        planned.map(Option::unwrap).map_err(|error| error.to_string())
    }

    #[test]
    fn rtc_exists_only_if_requested_and_has_its_own_id() {
        let rtc = |id: &str, pci_segment, pci_device_id| DevicePlan {
            flag: "--rtc",
            id: id.to_string(),
            pci_segment,
            pci_device_id,
            iommu: false,
            kind: DeviceKind::Rtc(RtcSpec { id: id.to_string() }),
        };
        assert_eq!(plan(None), Ok(None));
        // The printed form can be given.
        assert_eq!([planned(""), planned("id=__rtc")], [Ok(rtc("__rtc", 0, None)), Ok(rtc("__rtc", 0, None))]);
        assert_eq!(planned("id=clock,pci_segment=1,pci_device_id=5").unwrap(), rtc("clock", 1, Some(5)));
    }

    #[test]
    fn an_impossible_clock_is_refused_with_a_way_out() {
        for (text, expected) in [
            ("id=__x", "--rtc id=__x: not a device name"),
            ("pci_device_id=32", "--rtc pci_device_id=32: bus 0 has slots 1 to 31 for devices; give one of them"),
        ] {
            let said = planned(text).unwrap_err();
            assert!(said.starts_with(expected), "{said}");
        }
    }
}
