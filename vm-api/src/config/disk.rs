//! Disks: `--disk`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::affinity;
use crate::config::rate::RateLimiterConfig;
use crate::config::value::Value;

/// A disk: an image file, a block device of the host, or a vhost-user backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--disk")]
pub struct DiskConfig {
    /// Device name, unique in the VM. It must not start with two underscores. By default _diskN, where
    /// N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// Image file or block device.
    #[option("path=<path>", bare)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Make the disk read-only.
    #[option("readonly=on|off")]
    pub readonly: bool,
    /// Bypass the host's page cache (O_DIRECT).
    #[option("direct=on|off")]
    pub direct: bool,
    /// Number of queues, at most one per vCPU.
    #[option("num_queues=<number>", default = 1)]
    #[schema(minimum = 1, maximum = 254)]
    pub num_queues: u16,
    /// Entries in each queue, a power of two from 2 to 32768.
    #[option("queue_size=<number>", default = 128)]
    #[schema(limits = QUEUE_SIZE)]
    pub queue_size: u16,
    /// Image format. By default qcow2 if the image begins like one and names no other file, otherwise raw. Without
    /// image_type=raw, an image that begins with another format's signature is refused.
    #[option("image_type=raw|qcow2")]
    pub image_type: ImageType,
    /// Allow a qcow2 image to name other images as its base. It can name any file, so the image must be trusted.
    #[option("backing_files=on|off")]
    pub backing_files: bool,
    /// Serial number that the guest reads, at most 20 bytes.
    #[option("serial=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 20)]
    pub serial: Option<String>,
    /// PCI segment.
    #[option("pci_segment=<number>")]
    pub pci_segment: u16,
    /// Device number on bus 0, 1 to 31, or 0 on another segment than 0. By default the lowest free one.
    #[option("pci_device_id=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SLOT)]
    pub pci_device_id: Option<u8>,
    /// Put the device behind the virtual IOMMU, which the VM then has.
    #[option("iommu=on|off")]
    pub iommu: bool,
    /// Use a disk of another process (vhost-user), instead of path; needs socket.
    #[option("vhost_user=on|off")]
    #[schema(about = "Use a disk of another process (vhost-user), instead of path; needs vhost_socket.")]
    pub vhost_user: bool,
    /// Unix socket that the vhost-user backend listens on.
    #[option("socket=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SOCKET)]
    pub vhost_socket: Option<PathBuf>,
    /// Limits of reads and writes of all queues together.
    #[option(part)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// Id of a --rate-limit-group, whose limits the disk shares with others, instead of limits of its own.
    #[option("rate_limit_group=<id>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "Id of one of rate_limit_groups, whose limits the disk shares with others, instead of limits \
                      of its own.")]
    pub rate_limit_group: Option<String>,
    /// Let the guest return unused space. With off, all space of a raw image is allocated when the disk is opened.
    #[option("sparse=on|off", default = true)]
    pub sparse: bool,
    /// Range that is locked against other programs: the bytes of the image, or the whole file at any size.
    #[option("lock_granularity=byte-range|full", default = LockGranularity::ByteRange)]
    pub lock_granularity: LockGranularity,
    /// Host CPUs that the queues run on. Other queues run on any.
    #[option("queue_affinity=[<queue>@[<cpu>,<cpu>-<cpu>,...],...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queue_affinity: Vec<VirtQueueAffinity>,
    /// Do not use io_uring: each queue then has one request at a time.
    #[option("_disable_io_uring=on|off")]
    pub disable_io_uring: bool,
    /// No effect: Linux AIO is never used.
    #[option("_disable_aio=on|off")]
    pub disable_aio: bool,
}

/// The host CPUs that a queue runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct VirtQueueAffinity {
    /// The queue, below num_queues. It is listed once.
    pub queue_index: u16,
    /// The CPUs of the host.
    #[schema(min_items = 1, items(maximum = 1023))]
    pub host_cpus: Vec<u32>,
}

/// A list such as `[0@[0-3],1@[2,5]]`.
impl Value for Vec<VirtQueueAffinity> {
    fn parse(text: &str) -> Result<Self, String> {
        let elements = affinity::parse(text)?.into_iter();
        Ok(elements.map(|(queue_index, host_cpus)| VirtQueueAffinity { queue_index, host_cpus }).collect())
    }

    fn print(&self) -> Option<String> {
        affinity::print(self.iter().map(|affinity| (affinity.queue_index, &affinity.host_cpus[..])))
    }
}

/// Rate limits that several disks share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--rate-limit-group")]
pub struct RateLimitGroupConfig {
    /// Name of the group, given to disks as rate_limit_group.
    #[option("id=<name>", required, bare)]
    pub id: String,
    /// Limits of its disks together.
    #[option(part)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
}

/// Range of an image that is locked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum LockGranularity {
    /// The bytes of the image.
    #[default]
    ByteRange,
    /// The whole file, including space that is added later.
    Full,
}

impl Value for LockGranularity {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "byte-range" => Ok(Self::ByteRange),
            "full" => Ok(Self::Full),
            _ => Err("give byte-range or full".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        let text = match self {
            Self::ByteRange => "byte-range",
            Self::Full => "full",
        };
        Some(text.to_string())
    }
}

/// The format of an image. Raw and Qcow2 are supported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum ImageType {
    /// The disk's contents and nothing else.
    Raw,
    /// Not specified: qcow2 if the image begins like one and names no other file, otherwise raw, unless the image
    /// starts with another format's signature.
    #[default]
    Unknown,
    /// QEMU's format.
    Qcow2,
    /// Virtual PC's format.
    FixedVhd,
    /// Hyper-V's format.
    Vhdx,
}

impl Value for ImageType {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "raw" => Ok(Self::Raw),
            "unknown" => Ok(Self::Unknown),
            "qcow2" => Ok(Self::Qcow2),
            "vhd" => Ok(Self::FixedVhd),
            "vhdx" => Ok(Self::Vhdx),
            _ => Err("give raw or qcow2".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(self.name().to_string())
    }
}

impl ImageType {
    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Unknown => "unknown",
            Self::Qcow2 => "qcow2",
            Self::FixedVhd => "vhd",
            Self::Vhdx => "vhdx",
        }
    }
}
