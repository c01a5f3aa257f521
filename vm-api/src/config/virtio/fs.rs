//! Shared file systems: `--fs`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// A folder of the host that the guest mounts, over a vhost-user backend such as virtiofsd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--fs")]
pub struct FsConfig {
    /// Tag under which the guest mounts it, 1 to 36 bytes.
    #[option("tag=<name>", required)]
    #[schema(min_length = 1, max_length = 36)]
    pub tag: String,
    /// Unix socket that the backend listens on.
    #[option("socket=<path>", bare, required)]
    #[schema(limits = SOCKET)]
    pub socket: PathBuf,
    /// Number of request queues, at most one per vCPU. A high-priority queue is added.
    #[option("num_queues=<number>", default = 1)]
    #[schema(minimum = 1, maximum = 254)]
    pub num_queues: u16,
    /// Entries in each queue, a power of two from 2 to 32768.
    #[option("queue_size=<number>", default = 1024)]
    #[schema(limits = QUEUE_SIZE)]
    pub queue_size: u16,
    /// Device name, unique in the VM. It must not start with two underscores. By default _fsN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// PCI segment.
    #[option("pci_segment=<number>")]
    pub pci_segment: u16,
    /// Device number on bus 0, 1 to 31, or 0 on another segment than 0. By default the lowest free one.
    #[option("pci_device_id=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SLOT)]
    pub pci_device_id: Option<u8>,
}
