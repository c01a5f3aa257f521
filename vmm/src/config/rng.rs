//! The rules for the entropy device, and its plan.

use virtio_devices::RngSpec;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::id::check_id;
use vm_api::config::rng::RngConfig;
use vm_api::config::unsupported::{PCI_SEGMENT, VIRTUAL_IOMMU};

use crate::config::capacity::check_slot;
use crate::config::subject::Subject;

/// The default id of the entropy device.
const ID: &str = "__rng";

/// The entropy device with everything decided that was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RngPlan {
    /// The device number on bus 0, 1 to 31; `None` for the lowest that is free.
    pub pci_device_id: Option<u8>,
    /// The device.
    pub spec: RngSpec,
}

impl RngPlan {
    /// Plans the device.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn of(config: &RngConfig) -> Result<Self, ConfigError> {
        let error = |key: &str, value: &str, problem| ConfigError::new(format!("--rng {key}={value}"), problem);
        let not_yet = |key: &str, value: &str, what: &str| {
            Err(error(key, value, Problem::NotYet { what: what.to_string(), remedy: format!("leave {key} out") }))
        };
        if let Some(id) = config.id.as_deref().filter(|id| *id != ID) {
            check_id(id).map_err(|problem| error("id", id, problem))?;
        }
        if config.src.as_os_str().is_empty() {
            return Err(error(
                "src",
                "",
                Problem::Value("the path is empty; leave src out for /dev/urandom".to_string()),
            ));
        }
        if config.iommu {
            return not_yet("iommu", "on", VIRTUAL_IOMMU);
        }
        if config.pci_segment != 0 {
            return not_yet("pci_segment", &config.pci_segment.to_string(), PCI_SEGMENT);
        }
        if let Some(slot) = config.pci_device_id {
            check_slot(slot, &Subject::device("--rng", None, 0, 1))?;
        }
        let id = config.id.clone().unwrap_or_else(|| ID.to_string());
        Ok(Self { pci_device_id: config.pci_device_id, spec: RngSpec { id, source: config.src.clone() } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<RngPlan, String> {
        text.parse::<RngConfig>().and_then(|config| RngPlan::of(&config)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_entropy_device_reads_urandom_and_has_a_name_of_its_own() {
        let rng = |id: &str, source: &str, pci_device_id| RngPlan {
            pci_device_id,
            spec: RngSpec { id: id.to_string(), source: source.into() },
        };
        let expected = rng("__rng", "/dev/urandom", None);
        assert_eq!(plan("").unwrap(), expected);
        let chosen = rng("dice", "/dev/hwrng", Some(5));
        assert_eq!(plan("src=/dev/hwrng,id=dice,pci_device_id=5").unwrap(), chosen);
        // As it is printed, it can be given.
        assert_eq!(plan("id=__rng").unwrap(), expected);
    }

    #[test]
    fn what_it_cannot_have_is_refused_with_a_way_out() {
        for (text, expected) in [
            (
                "id=__x",
                "--rng id=__x: not a device name; use printable characters, and do not start with two underscores",
            ),
            ("iommu=on", "--rng iommu=on: virtual IOMMUs are not supported yet; leave iommu out"),
            (
                "pci_segment=2",
                "--rng pci_segment=2: additional PCI segments are not supported yet; leave pci_segment out",
            ),
            ("pci_device_id=32", "--rng pci_device_id=32: bus 0 has slots 1 to 31 for devices; give one of them"),
        ] {
            assert_eq!(plan(text).unwrap_err(), expected);
        }
        let config: RngConfig = serde_json::from_str(r#"{"src": ""}"#).unwrap();
        assert_eq!(
            RngPlan::of(&config).unwrap_err().to_string(),
            "--rng src=: the path is empty; leave src out for /dev/urandom"
        );
    }
}
