//! Why a vDPA device cannot be used.

use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use thiserror::Error;

use super::locking::Locking;
use crate::ErrorKind;

/// What the kernel says of a device without an IOMMU; no number of programs' own.
const ENOTSUPP: i32 = 524;

/// Why a vDPA device cannot be used: one line, to follow the option's name.
#[derive(Debug, Error)]
#[error("vdpa={}: {fault}", path.display())]
pub struct VdpaError {
    /// The device.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: VdpaFault,
}

/// What is wrong with a vDPA device.
#[derive(Debug, Error)]
pub enum VdpaFault {
    /// There is none.
    #[error(
        "no such device; create one (vdpa dev add name NAME mgmtdev DEVICE) and load the module vhost_vdpa (modprobe \
         vhost_vdpa)"
    )]
    Missing,
    /// Another program has it open.
    #[error("the device is in use and can have only one user; stop the other one, or name another device")]
    InUse,
    /// This user may not use it.
    #[error("no permission to open it; give this user read and write access to it")]
    NoRight,
    /// It does not answer.
    #[error("the device does not answer; its driver is gone or hangs (for VDUSE: its daemon)")]
    Silent,
    /// It reaches memory by itself, and nothing keeps it from the host's.
    #[error("no IOMMU of the host serves the device; enable it in the firmware and in the kernel (intel_iommu=on)")]
    NoIommu,
    /// It is something else.
    #[error("this is not a vhost-vdpa device; name one of /dev/vhost-vdpa-*")]
    NotVdpa,
    /// It is another kind of virtio device.
    #[error("this is a virtio device of type {0}; name a network device (type 1)")]
    NotNet(u32),
    /// It is a device of before virtio 1, or one that bypasses the host's protection of memory.
    #[error("the device does not offer {0}, which every vDPA device needs")]
    Feature(&'static str),
    /// It has fewer queues.
    #[error(
        "num_queues={}: the device has {has} pair(s) of queues; give num_queues={} or less",
        2 * u32::from(*.wanted), 2 * u32::from(*.has)
    )]
    Queues {
        /// The pairs that were asked for.
        wanted: u16,
        /// The pairs that it has.
        has: u16,
    },
    /// Its control queue has an index that follows from its own number of pairs.
    #[error(
        "num_queues={}: the device's control queue comes after its {has} pairs; give num_queues={} or num_queues=2",
        2 * u32::from(*.wanted), 2 * u32::from(*.has)
    )]
    ControlQueue {
        /// The pairs that were asked for.
        wanted: u16,
        /// The pairs that it has.
        has: u16,
    },
    /// It says that it has more queues than it has.
    #[error(
        "the device has {count} queues, where {pairs} pair(s){} are {needed}; {}",
        if *.needed > 2 * u32::from(*.pairs) { " and a control queue" } else { "" },
        if *.pairs > 1 { "give num_queues=2" } else { "name another device" }
    )]
    QueueCount {
        /// How many it has.
        count: u32,
        /// The pairs that were asked for.
        pairs: u16,
        /// How many these need.
        needed: u32,
    },
    /// The guest's memory is this process's alone.
    #[error("the guest's memory is not shared, so the device cannot reach it; add shared=on to --memory")]
    NotShared,
    /// It cannot reach all of the guest's memory.
    #[error(
        "the device reaches addresses {:#x} to {:#x}, and the guest's memory is at {:#x} to {:#x}; give the guest \
         less memory",
        .device.start(), .device.end(), .guest.start(), .guest.end()
    )]
    IovaRange {
        /// What it reaches.
        device: RangeInclusive<u64>,
        /// Where the guest has memory.
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
    /// It refuses the guest's memory.
    #[error("the device rejects the guest's memory ({0}); --memory hugepages=on gives it fewer and larger pieces")]
    Map(#[source] io::Error),
    /// It has an address that cannot be changed.
    #[error(
        "mac={}: the device has the address {} and keeps it; leave mac out, or set the address at the device",
        mac(.wanted), mac(.has)
    )]
    Mac {
        /// The address that was asked for.
        wanted: [u8; 6],
        /// The device's.
        has: [u8; 6],
    },
    /// It came back as another one.
    #[error("the device came back with different queues, features or address")]
    Changed,
    /// It does not do something else.
    #[error("cannot {what}: {source}")]
    Request {
        /// The request, to follow "cannot".
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Why a device does not reach other memory.
#[derive(Debug)]
pub(crate) struct MemoryFault {
    /// What is wrong.
    pub fault: VdpaFault,
    /// It reaches what it reached before.
    pub is_as_before: bool,
}

impl VdpaError {
    /// Who has to act on it.
    pub const fn kind(&self) -> ErrorKind {
        self.fault.kind()
    }
}

impl VdpaFault {
    /// Who has to act on it.
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

    /// Why a device cannot be opened.
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

    /// Why it does not do `what`, for `map_err`.
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
