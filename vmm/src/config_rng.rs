//! The entropy device: `--rng`.

use std::path::PathBuf;

use crate::config_error::{ConfigError, Problem};
use crate::config_names::check_id;
use crate::config_value::options;

/// What the entropy device is called if nobody says otherwise. There is one in every VM.
const ID: &str = "__rng";
/// Slots of bus 0 for devices.
const SLOTS: std::ops::RangeInclusive<u8> = 1..=31;

options! {
    /// The entropy device, which every VM has.
    pub struct RngConfig for "--rng" {
        /// Device that gives random bytes.
        "src" = "<path>" => src: PathBuf = PathBuf::from("/dev/urandom");
        /// Name of the device, unique in the VM; not starting with two underscores; if it is left out, __rng.
        "id" = "<name>" => id: Option<String> = None;
        /// PCI segment; only 0 so far.
        "pci_segment" = "<number>" => pci_segment: u16 = 0;
        /// Device number on bus 0, 1 to 31; if it is left out, the lowest that is free.
        "pci_device_id" = "<number>" => pci_device_id: Option<u8> = None;
        /// Whether the device is behind a virtual IOMMU; only off so far.
        "iommu" = "on|off" => iommu: bool = false;
    }
    later {}
}

/// The entropy device, with all that was left out decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RngPlan {
    /// The device's name in the VM: what the user gave, or `__rng`.
    pub id: String,
    /// The device number on bus 0, 1 to 31; `None` for the lowest that is free.
    pub pci_device_id: Option<u8>,
    /// The device of the host that gives random bytes.
    pub source: PathBuf,
}

impl RngConfig {
    /// Plans the device.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn plan(&self) -> Result<RngPlan, ConfigError> {
        let error = |key: &str, value: &str, problem| ConfigError::new(format!("--rng {key}={value}"), problem);
        let not_yet = |key: &str, value: &str, what: &str| {
            Err(error(key, value, Problem::NotYet { what: what.to_string(), remedy: format!("leave {key} out") }))
        };
        if let Some(id) = self.id.as_deref().filter(|id| *id != ID) {
            check_id(id).map_err(|problem| error("id", id, problem))?;
        }
        if self.src.as_os_str().is_empty() {
            return Err(error("src", "", Problem::Value("no path; leave src out for /dev/urandom".to_string())));
        }
        if self.iommu {
            return not_yet("iommu", "on", "virtual IOMMUs are");
        }
        if self.pci_segment != 0 {
            return not_yet("pci_segment", &self.pci_segment.to_string(), "further PCI segments are");
        }
        if let Some(slot) = self.pci_device_id.filter(|slot| !SLOTS.contains(slot)) {
            let what = format!("bus 0 has slots {} to {} for devices; give one of them", SLOTS.start(), SLOTS.end());
            return Err(error("pci_device_id", &slot.to_string(), Problem::Value(what)));
        }
        Ok(RngPlan {
            id: self.id.clone().unwrap_or_else(|| ID.to_string()),
            pci_device_id: self.pci_device_id,
            source: self.src.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<RngPlan, String> {
        text.parse::<RngConfig>().and_then(|config| config.plan()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_entropy_device_reads_urandom_and_has_a_name_of_its_own() {
        let expected = RngPlan { id: "__rng".to_string(), pci_device_id: None, source: "/dev/urandom".into() };
        assert_eq!(plan("").unwrap(), expected);
        let chosen = RngPlan { id: "dice".to_string(), pci_device_id: Some(5), source: "/dev/hwrng".into() };
        assert_eq!(plan("src=/dev/hwrng,id=dice,pci_device_id=5").unwrap(), chosen);
        // As it is printed, it can be given.
        assert_eq!(plan("id=__rng").unwrap(), expected);
    }

    #[test]
    fn what_it_cannot_have_is_refused_with_a_way_out() {
        for (text, expected) in [
            ("id=__x", "--rng id=__x: not a name for a device; two underscores at the start are kept for the VM's own"),
            ("iommu=on", "--rng iommu=on: virtual IOMMUs are not in this version yet; leave iommu out"),
            (
                "pci_segment=2",
                "--rng pci_segment=2: further PCI segments are not in this version yet; leave pci_segment out",
            ),
            ("pci_device_id=32", "--rng pci_device_id=32: bus 0 has slots 1 to 31 for devices; give one of them"),
        ] {
            assert_eq!(plan(text).unwrap_err(), expected);
        }
        let config: RngConfig = serde_json::from_str(r#"{"src": ""}"#).unwrap();
        assert_eq!(config.plan().unwrap_err().to_string(), "--rng src=: no path; leave src out for /dev/urandom");
    }
}
