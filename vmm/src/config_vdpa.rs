//! vDPA devices: `--vdpa`.

use std::path::PathBuf;

use crate::config_value::options;

options! {
    /// A vDPA device of the host.
    pub struct VdpaConfig for "--vdpa" {
        /// Name of the device, unique in the VM; not starting with two underscores.
        "id" = "<name>" => id: Option<String> = None;
        /// The host's device, as /dev/vhost-vdpa-0.
        "path" = "<path>" => path: PathBuf = PathBuf::new(), required;
        /// Number of queues.
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
