//! The rules for the entropy device, and its plan.

use virtio_devices::RngSpec;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::virtio::rng::RngConfig;

use crate::config::common_keys::CommonKeys;
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;

/// The default id of the entropy device.
const ID: &str = "__rng";

/// Plans the entropy device.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(config: &RngConfig) -> Result<DevicePlan, ConfigError> {
    let keys = CommonKeys {
        id: config.id.as_deref().filter(|id| *id != ID),
        slot: (config.pci_segment, config.pci_device_id),
    };
    keys.check("--rng", &Subject::device("--rng", None, 0, 1))?;
    if config.src.as_os_str().is_empty() {
        let what = "the path is empty; leave src out for /dev/urandom".to_string();
        return Err(ConfigError::new("--rng src=", Problem::Value(what)));
    }
    let id = config.id.clone().unwrap_or_else(|| ID.to_string());
    let spec = RngSpec { id: id.clone(), source: config.src.clone() };
    let RngConfig { pci_segment, pci_device_id, .. } = *config;
    Ok(DevicePlan { flag: "--rng", id, pci_segment, pci_device_id, iommu: config.iommu, kind: DeviceKind::Rng(spec) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Result<DevicePlan, String> {
        text.parse::<RngConfig>().and_then(|config| plan(&config)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_entropy_device_reads_urandom_and_has_a_name_of_its_own() {
        let rng = |id: &str, source: &str, pci_device_id| DevicePlan {
            flag: "--rng",
            id: id.to_string(),
            pci_segment: 0,
            pci_device_id,
            iommu: false,
            kind: DeviceKind::Rng(RngSpec { id: id.to_string(), source: source.into() }),
        };
        let expected = rng("__rng", "/dev/urandom", None);
        assert_eq!(planned("").unwrap(), expected);
        let chosen = rng("dice", "/dev/hwrng", Some(5));
        assert_eq!(planned("src=/dev/hwrng,id=dice,pci_device_id=5").unwrap(), chosen);
        // The printed form can be given.
        assert_eq!(planned("id=__rng").unwrap(), expected);
    }

    #[test]
    fn an_impossible_rng_is_refused_with_a_way_out() {
        for (text, expected) in [
            (
                "id=__x",
                "--rng id=__x: not a device name; use printable characters, and do not start with two underscores",
            ),
            ("pci_device_id=32", "--rng pci_device_id=32: bus 0 has slots 1 to 31 for devices; give one of them"),
        ] {
            assert_eq!(planned(text).unwrap_err(), expected);
        }
        let config: RngConfig = serde_json::from_str(r#"{"src": ""}"#).unwrap();
        assert_eq!(
            plan(&config).unwrap_err().to_string(),
            "--rng src=: the path is empty; leave src out for /dev/urandom"
        );
    }
}
