//! The kinds of devices over vhost-user, and their differences.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::{
    VIRTIO_ID_BLOCK, VIRTIO_ID_CONSOLE, VIRTIO_ID_FS, VIRTIO_ID_GPU, VIRTIO_ID_INPUT, VIRTIO_ID_NET, VIRTIO_ID_SCSI,
    VIRTIO_ID_SOUND,
};

use crate::backend::{DEVICE_FEATURES, MAX_CONFIG, RING_FEATURES};
use crate::transport::features::has;

/// Features that a disk can offer if its backend has them: all that its 60 bytes of configuration cover.
const DISK_FEATURES: &[u32] = &[
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_GEOMETRY,
    VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_CONFIG_WCE,
    VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_WRITE_ZEROES,
];
/// The length of a disk's configuration with the fields of these features (`virtio 1.4 §5.2.4`).
const DISK_CONFIG: u32 = 60;

/// Type of a device that a process runs over vhost-user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VhostUserKind {
    /// A shared file system. Its configuration is built here, because virtiofsd has none.
    FileSystem {
        /// The tag under which the guest mounts it, 1 to 36 bytes.
        tag: String,
    },
    /// A disk.
    Disk,
    /// Any other device.
    Other {
        /// Device type (`virtio 1.4 §5`).
        device_type: u16,
    },
}

impl VhostUserKind {
    /// The device type (`virtio 1.4 §5`).
    pub fn device_type(&self) -> u16 {
        match self {
            Self::FileSystem { .. } => VIRTIO_ID_FS as u16,
            Self::Disk => VIRTIO_ID_BLOCK as u16,
            Self::Other { device_type } => *device_type,
        }
    }

    /// True if the backend keeps results of a guest's requests, such as open files, that only it can use. A disk's
    /// results are on the disk.
    pub const fn keeps_state(&self) -> bool {
        match self {
            Self::FileSystem { .. } | Self::Other { .. } => true,
            Self::Disk => false,
        }
    }

    /// The class code of its function: unassigned for types without a class.
    pub(crate) fn class(&self) -> [u8; 3] {
        match u32::from(self.device_type()) {
            VIRTIO_ID_NET => [0x02, 0x00, 0x00],
            VIRTIO_ID_BLOCK | VIRTIO_ID_FS | VIRTIO_ID_SCSI => [0x01, 0x80, 0x00],
            VIRTIO_ID_CONSOLE => [0x07, 0x80, 0x00],
            VIRTIO_ID_GPU => [0x03, 0x80, 0x00],
            VIRTIO_ID_INPUT => [0x09, 0x80, 0x00],
            VIRTIO_ID_SOUND => [0x04, 0x01, 0x00],
            _ => [0xff, 0x00, 0x00],
        }
    }

    /// The feature bits that a device with this many queues offers if its backend has them.
    pub(crate) fn features(&self, queues: u16) -> u64 {
        match self {
            // Notifications would need a further queue and configuration field.
            Self::FileSystem { .. } => RING_FEATURES,
            Self::Disk => {
                let multi_queue = u64::from(queues > 1) << VIRTIO_BLK_F_MQ;
                DISK_FEATURES.iter().fold(RING_FEATURES | multi_queue, |features, bit| features | 1 << bit)
            }
            Self::Other { .. } => RING_FEATURES | DEVICE_FEATURES,
        }
    }

    /// The most bytes of device configuration that are read from the backend.
    pub(crate) fn config_of_backend(&self) -> u32 {
        match self {
            Self::FileSystem { .. } => 0,
            Self::Disk => DISK_CONFIG,
            Self::Other { .. } => MAX_CONFIG,
        }
    }

    /// True if the device is unusable without all of these bytes.
    pub(crate) fn needs_config(&self) -> bool {
        *self == Self::Disk
    }

    /// True if a driver that has negotiated `features` may use the queue `index`.
    pub(crate) fn has_queue(&self, index: u16, features: u64) -> bool {
        *self != Self::Disk || index == 0 || has(features, VIRTIO_BLK_F_MQ)
    }
}
