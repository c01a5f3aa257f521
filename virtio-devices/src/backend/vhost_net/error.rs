//! Reasons why vhost-net cannot be used.

use std::io;

use thiserror::Error;

use crate::ErrorKind;

/// The reason why vhost-net cannot be used: one line, to follow the option's name and value.
#[derive(Debug, Error)]
pub enum VhostNetError {
    /// There is no such device.
    #[error("there is no /dev/vhost-net; load the module (modprobe vhost_net), or leave vhost out")]
    Missing,
    /// This user may not use it.
    #[error("no permission to open /dev/vhost-net; give this user read and write access to it, or leave vhost out")]
    NoRight,
    /// Any other error.
    #[error("cannot use /dev/vhost-net: {0}")]
    Device(io::Error),
    /// The kernel is too old.
    #[error("this kernel's vhost-net does not support virtio 1; leave vhost out")]
    Legacy,
    /// The kernel has no IOTLB.
    #[error("this kernel's vhost-net does not follow a virtual IOMMU; leave vhost out")]
    NoIotlb,
}

impl VhostNetError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NoRight => ErrorKind::Denied,
            Self::Missing | Self::Device(_) | Self::Legacy | Self::NoIotlb => ErrorKind::Host,
        }
    }
}

/// The reason why `/dev/vhost-net` cannot be opened.
pub(super) fn unusable(error: io::Error) -> VhostNetError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => VhostNetError::Missing,
        Some(libc::EACCES | libc::EPERM) => VhostNetError::NoRight,
        _ => VhostNetError::Device(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vhost_net_that_is_missing_or_closed_to_us_is_told_apart() {
        let told = |errno| unusable(io::Error::from_raw_os_error(errno)).to_string();
        assert!(told(libc::ENOENT).contains("modprobe vhost_net"));
        assert!(told(libc::EACCES).contains("no permission"));
        assert!(told(libc::EMFILE).contains("Too many open files"));
    }
}
