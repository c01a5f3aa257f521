//! vDPA devices: `--vdpa`.

use std::path::PathBuf;

use crate::config_error::{ConfigError, Problem};
use crate::config_net::NetConfig;
use crate::config_nic::Subject;
use crate::config_value::options;

options! {
    /// A vDPA device of the host.
    pub struct VdpaConfig for "--vdpa" {
        /// Name of the device, unique in the VM; not starting with two underscores; if it is left out, _vdpa0, _vdpa1 and so on.
        "id" = "<name>" => id: Option<String> = None;
        /// The host's device, as /dev/vhost-vdpa-0.
        "path" = "<path>" => path: PathBuf = PathBuf::new(), required;
        /// Number of queues, the control queue counted or not: each two are a pair, and there is always one.
        "num_queues" = "<number>" => num_queues: u16 = 1;
        /// PCI segment; only 0 so far.
        "pci_segment" = "<number>" => pci_segment: u16 = 0;
        /// Device number on bus 0, 1 to 31; if it is left out, the lowest that is free.
        "pci_device_id" = "<number>" => pci_device_id: Option<u8> = None;
        /// Whether the device is behind a virtual IOMMU; only off so far.
        "iommu" = "on|off" => iommu: bool = false;
    }
    later {}
}

impl VdpaConfig {
    /// What it is: a plain NIC, whose MAC address is its device's.
    pub(crate) fn to_net(&self) -> NetConfig {
        NetConfig {
            id: self.id.clone(),
            vdpa: Some(self.path.clone()),
            num_queues: (self.num_queues & !1).max(2),
            pci_segment: self.pci_segment,
            pci_device_id: self.pci_device_id,
            iommu: self.iommu,
            ..NetConfig::default()
        }
    }

    /// Checks what its NIC's rules do not know.
    pub(crate) fn check(&self, subject: &Subject) -> Result<(), ConfigError> {
        if self.path.as_os_str().is_empty() {
            let what = "no path; give the device, as /dev/vhost-vdpa-0".to_string();
            return Err(ConfigError::new(subject.key("path", ""), Problem::Value(what)));
        }
        if self.num_queues == 0 {
            let what = "a NIC needs queues; give 1 or more, or leave num_queues out".to_string();
            return Err(ConfigError::new(subject.key("num_queues", 0), Problem::Value(what)));
        }
        Ok(())
    }
}
