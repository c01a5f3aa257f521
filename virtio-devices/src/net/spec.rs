//! The parameters of a NIC, and the errors of creating one.

use thiserror::Error;

use crate::frames::policy::Policy;
use crate::{ErrorKind, RateLimits};

/// The parameters of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetSpec {
    /// The id, which its threads are named after.
    pub id: String,
    /// The Ethernet address, a unicast one.
    pub mac: [u8; 6],
    /// The MTU reported to the driver, in bytes. Without one it is the backend's.
    pub mtu: Option<u16>,
    /// The number of queue pairs, which is also the number of the backend's queues.
    pub queue_pairs: u16,
    /// The size of the queues, a power of two up to 32,768.
    pub queue_size: u16,
    /// Offers TCP segmentation offload in both directions, if checksums are offloaded.
    pub offload_tso: bool,
    /// Offers UDP fragmentation and segmentation offload in both directions, if checksums are offloaded.
    pub offload_ufo: bool,
    /// Offers checksum offload in both directions.
    pub offload_csum: bool,
    /// Offers to be used only while the guest has no other NIC with the same address (`VIRTIO_NET_F_STANDBY`).
    pub standby: bool,
    /// Limits of received frames, and the same for sent ones, by frames and by bytes from the destination address on.
    /// The queue pairs share them. Only a tap's frames are limited, because others do not pass this program.
    pub limits: RateLimits,
    /// The policy for sent and received frames. Except for an address that the driver cannot change, only a tap's
    /// frames are checked, because others do not pass this program.
    pub policy: Policy,
    /// True if the link is up when the NIC is plugged in.
    pub link_up: bool,
    /// True if the link is down while the host has set the NIC's own tap down.
    pub follows_tap: bool,
}

impl NetSpec {
    /// A NIC with one pair of queues of 256 descriptors, all offloads, its link up, and neither limits nor a policy.
    pub fn new(id: &str, mac: [u8; 6]) -> Self {
        Self {
            id: id.to_owned(),
            mac,
            mtu: None,
            queue_pairs: 1,
            queue_size: 256,
            offload_tso: true,
            offload_ufo: true,
            offload_csum: true,
            standby: false,
            limits: RateLimits::default(),
            policy: Policy::default(),
            link_up: true,
            follows_tap: true,
        }
    }
}

/// The reason why a NIC cannot be created: one line, to follow the option's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NetError {
    /// The address is a group's or zero.
    #[error("mac={} is not an address for a NIC: its first byte must be even, and not all bytes zero", Hex(.0))]
    Mac([u8; 6]),
    /// The queue size is out of range or not a power of two.
    #[error("queue_size={0}: must be a power of two from 2 to 32768")]
    QueueSize(u16),
    /// The numbers of queue pairs differ.
    #[error("{pairs} queue pairs need as many tap queues; the tap has {queues}")]
    QueuePairs {
        /// The NIC's.
        pairs: u16,
        /// The backend's.
        queues: usize,
    },
    /// The backend has too few queues.
    #[error(
        "num_queues={}: {name} has {has} pairs of queues; give num_queues={} or less",
        2 * u32::from(*.pairs), 2 * u32::from(*.has)
    )]
    TooFewPairs {
        /// The backend.
        name: String,
        /// The NIC's.
        pairs: u16,
        /// The backend's.
        has: u16,
    },
    /// The backend's queues are too small.
    #[error("queue_size={size}: {name} has queues of at most {has}; give queue_size={has} or less")]
    TooLarge {
        /// The backend.
        name: String,
        /// The NIC's.
        size: u16,
        /// The backend's.
        has: u16,
    },
    /// The backend's MTU is smaller.
    #[error("mtu={mtu}: {name} has an MTU of {has}; give {has} or less, or leave mtu out")]
    Mtu {
        /// The backend.
        name: String,
        /// The NIC's.
        mtu: u16,
        /// The backend's.
        has: u16,
    },
    /// The backend cannot run the queues of a modern driver.
    #[error("{0} does not offer VIRTIO_F_VERSION_1, which a virtio 1 device needs")]
    Legacy(String),
}

impl NetError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Mac(_) | Self::QueueSize(_) => ErrorKind::Invalid,
            Self::QueuePairs { .. }
            | Self::TooFewPairs { .. }
            | Self::TooLarge { .. }
            | Self::Mtu { .. }
            | Self::Legacy(_) => ErrorKind::Unsuitable,
        }
    }
}

struct Hex<'a>(&'a [u8; 6]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}
