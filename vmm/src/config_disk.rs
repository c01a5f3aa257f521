//! Disks: `--disk`.

use std::path::PathBuf;

use crate::config_net::RateLimiterConfig;
use crate::config_value::options;

options! {
    /// A disk: a raw image in a file, or a block device of the host.
    pub struct DiskConfig for "--disk" {
        /// Name of the device, unique in the VM; not starting with two underscores; if it is left out, _disk0, _disk1 and so on.
        "id" = "<name>" => id: Option<String> = None;
        /// The image, or the block device.
        "path" = "<path>" => path: Option<PathBuf> = None;
        /// Whether the guest can only read it.
        "readonly" = "on|off" => readonly: bool = false;
        /// Whether it is read and written around the host's page cache.
        "direct" = "on|off" => direct: bool = false;
        /// Number of queues: one for each vCPU at most.
        "num_queues" = "<number>" => num_queues: u16 = 1;
        /// Entries of each queue: a power of two from 2 to 32768.
        "queue_size" = "<number>" => queue_size: u16 = 128;
        /// Serial number that the guest reads, at most 20 bytes.
        "serial" = "<text>" => serial: Option<String> = None;
        /// PCI segment; only 0 so far.
        "pci_segment" = "<number>" => pci_segment: u16 = 0;
        /// Device number on bus 0, 1 to 31; if it is left out, the lowest that is free.
        "pci_device_id" = "<number>" => pci_device_id: Option<u8> = None;
        /// Whether the device is behind a virtual IOMMU; only off so far.
        "iommu" = "on|off" => iommu: bool = false;
        /// How much may be read and written.
        rate_limiter_config: Option<RateLimiterConfig> = None;
    }
    later {
        "vhost_user" | "socket" => "disks behind vhost-user are";
        "rate_limit_group" => "groups of rate limits are";
        "queue_affinity" => "pinning of queues is";
        "backing_files" | "image_type" | "lock_granularity" => "images that are not raw, and locks of them, are";
        "sparse" => "a choice of sparse images is";
    }
}
