//! Reasons why a vDPA device cannot be used.

use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use thiserror::Error;

use super::locking::Locking;
use crate::ErrorKind;

/// The kernel's error for a device without an IOMMU; it has no number in user space.
const ENOTSUPP: i32 = 524;

/// The reason why a vDPA device cannot be used: one line, to follow the option's name.
#[derive(Debug, Error)]
#[error("vdpa={}: {fault}", path.display())]
pub struct VdpaError {
    /// The device.
    pub path: PathBuf,
    /// The fault.
    pub fault: VdpaFault,
}

/// A fault of a vDPA device.
#[derive(Debug, Error)]
pub enum VdpaFault {
    /// The device does not exist.
    #[error(
        "no such device; create one (vdpa dev add name NAME mgmtdev DEVICE) and load the module vhost_vdpa (modprobe \
         vhost_vdpa)"
    )]
    Missing,
    /// Another program has the device open.
    #[error("the device is in use and can have only one user; stop the other one, or name another device")]
    InUse,
    /// This user may not use the device.
    #[error("no permission to open it; give this user read and write access to it")]
    NoRight,
    /// The device does not answer.
    #[error("the device does not answer; its driver is gone or hangs (for VDUSE: its daemon)")]
    Silent,
    /// The device does DMA and no host IOMMU confines it.
    #[error("no IOMMU of the host serves the device; enable it in the firmware and in the kernel (intel_iommu=on)")]
    NoIommu,
    /// The file is not a vDPA device.
    #[error("this is not a vhost-vdpa device; name one of /dev/vhost-vdpa-*")]
    NotVdpa,
    /// The device is another kind of virtio device.
    #[error("this is a virtio device of type {0}; name a network device (type 1)")]
    NotNet(u32),
    /// The device is older than virtio 1, or bypasses the host's protection of memory.
    #[error("the device does not offer {0}, which every vDPA device needs")]
    Feature(&'static str),
    /// The device has fewer queues.
    #[error(
        "num_queues={}: the device has {has} pair(s) of queues; give num_queues={} or less",
        2 * u32::from(*.wanted), 2 * u32::from(*.has)
    )]
    Queues {
        /// The pairs that were requested.
        wanted: u16,
        /// The pairs that it has.
        has: u16,
    },
    /// The index of the device's control queue follows from its own number of pairs.
    #[error(
        "num_queues={}: the device's control queue comes after its {has} pairs; give num_queues={} or num_queues=2",
        2 * u32::from(*.wanted), 2 * u32::from(*.has)
    )]
    ControlQueue {
        /// The pairs that were requested.
        wanted: u16,
        /// The pairs that it has.
        has: u16,
    },
    /// The device has fewer queues than it claims.
    #[error(
        "the device has {count} queues, where {pairs} pair(s){} are {needed}; {}",
        if *.needed > 2 * u32::from(*.pairs) { " and a control queue" } else { "" },
        if *.pairs > 1 { "give num_queues=2" } else { "name another device" }
    )]
    QueueCount {
        /// The number of its queues.
        count: u32,
        /// The pairs that were requested.
        pairs: u16,
        /// The number of queues that these need.
        needed: u32,
    },
    /// The guest's memory is private to this process.
    #[error("the guest's memory is not shared, so the device cannot reach it; add shared=on to --memory")]
    NotShared,
    /// The device cannot access all of the guest's memory.
    #[error(
        "the device reaches addresses {:#x} to {:#x}, and the guest's memory is at {:#x} to {:#x}; give the guest \
         less memory",
        .device.start(), .device.end(), .guest.start(), .guest.end()
    )]
    IovaRange {
        /// The addresses that the device can access.
        device: RangeInclusive<u64>,
        /// The addresses of the guest's memory.
        guest: RangeInclusive<u64>,
    },
    /// Too little memory may be pinned.
    #[error(
        "the device needs {} KiB of locked memory in all, and {} KiB are allowed; raise the limit (ulimit -l {}, \
         LimitMEMLOCK= in a \
         systemd unit)",
        .0.needed.div_ceil(1024), .0.limit.unwrap_or(0) / 1024, .0.needed.div_ceil(1024)
    )]
    MemoryLock(Locking),
    /// The device refuses the guest's memory.
    #[error("the device rejects the guest's memory ({0}); --memory hugepages=on gives it fewer and larger pieces")]
    Map(#[source] io::Error),
    /// The device has an address that cannot be changed.
    #[error(
        "mac={}: the device has the address {} and keeps it; leave mac out, or set the address at the device",
        mac(.wanted), mac(.has)
    )]
    Mac {
        /// The address that was requested.
        wanted: [u8; 6],
        /// The device's.
        has: [u8; 6],
    },
    /// The device came back as another one.
    #[error("the device came back with different queues, features or address")]
    Changed,
    /// Another request failed.
    #[error("cannot {what}: {source}")]
    Request {
        /// The request, to follow "cannot".
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The reason why a device cannot access new memory.
#[derive(Debug)]
pub(crate) struct MemoryFault {
    /// The fault.
    pub fault: VdpaFault,
    /// The device still has its old mappings.
    pub is_as_before: bool,
}

impl VdpaError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        self.fault.kind()
    }
}

impl VdpaFault {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Missing => ErrorKind::Missing,
            Self::NoIommu
            | Self::NotVdpa
            | Self::NotNet(_)
            | Self::Feature(_)
            | Self::Queues { .. }
            | Self::ControlQueue { .. }
            | Self::QueueCount { .. }
            | Self::NotShared
            | Self::IovaRange { .. }
            | Self::Mac { .. } => ErrorKind::Unsuitable,
            Self::InUse => ErrorKind::Busy,
            Self::NoRight => ErrorKind::Denied,
            Self::Silent | Self::Changed => ErrorKind::Peer,
            Self::MemoryLock(_) | Self::Map(_) | Self::Request { .. } => ErrorKind::Host,
        }
    }

    /// Classifies an error of opening a device.
    pub(super) fn opening(source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO | libc::ENOTDIR) => Self::Missing,
            Some(libc::EBUSY) => Self::InUse,
            Some(libc::EACCES | libc::EPERM) => Self::NoRight,
            Some(libc::EIO | libc::ETIMEDOUT) => Self::Silent,
            Some(libc::EISDIR) => Self::NotVdpa,
            Some(ENOTSUPP) => Self::NoIommu,
            _ => Self::Request { what: "open it", source },
        }
    }

    /// Classifies an error of the request `what`, for `map_err`.
    pub(super) fn of(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            Some(libc::ENOTTY) => Self::NotVdpa,
            Some(libc::EIO | libc::ETIMEDOUT) => Self::Silent,
            Some(libc::EBUSY) => Self::InUse,
            _ => Self::Request { what, source },
        }
    }
}

fn mac([a, b, c, d, e, f]: &[u8; 6]) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}
