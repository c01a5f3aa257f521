//! The kind of device that a peer serves, and its consequences: queues, features, configuration.

use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_MQ, VIRTIO_NET_F_STATUS};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::frames::net_protocol::Offloads;
use crate::frames::net_protocol::features::{offered_by, served_for_any};
use crate::transport::features::has;

/// The feature bits about rings that a device over a peer can offer (`virtio 1.4 §6`). The others in the range of bits
/// 24 to 49 are the transport's, or need more of this process than a doorbell and an interrupt for each queue.
pub(crate) const RING_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_F_IN_ORDER;
/// The feature bits whose meaning depends on the type of device (`virtio 1.4 §2.2`).
pub(crate) const DEVICE_FEATURES: u64 = ((1 << 24) - 1) | (u64::MAX << 50);
/// The part of a NIC's device configuration that is read: up to the MTU (`virtio 1.4 §5.1.4`).
const NIC_CONFIG: u32 = 12;

/// The device that a peer serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VhostUserRole {
    /// A NIC, which serves the control queue itself and has a configuration of its own.
    Nic {
        /// The pairs of queues that the peer must run.
        queue_pairs: u16,
    },
    /// Another device, which leaves everything to the peer.
    Device {
        /// The queues that the peer must run.
        queues: u16,
        /// The feature bits that drivers are offered if the peer has them.
        features: u64,
        /// The most bytes of device configuration that are requested from the peer; 0 for none.
        config: u32,
    },
}

impl VhostUserRole {
    /// The features that a device over a peer with these features can offer. A NIC serves the control queue, and the
    /// peer's own commands do not count: it never gets any.
    pub(super) fn able(self, features: u64) -> u64 {
        match self {
            Self::Nic { .. } => features & !(1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) | served_for_any(),
            Self::Device { features: offered, .. } => features & offered,
        }
    }

    /// All features that drivers can be offered over a backend that is [`Self::able`] to do `able`.
    pub(super) fn every_offer(self, able: u64) -> u64 {
        match self {
            Self::Nic { .. } => offered_by(able, Offloads::all(), true, true),
            Self::Device { .. } => able,
        }
    }

    /// The features that a driver negotiates with this process, and that are hidden from the peer.
    pub(super) fn served_here(self) -> u64 {
        match self {
            Self::Nic { .. } => served_for_any() & !(1 << VIRTIO_NET_F_MQ),
            Self::Device { .. } => 0,
        }
    }

    /// The pairs of queues of a NIC, and 0 for another device.
    pub(super) fn pairs(self) -> u16 {
        match self {
            Self::Nic { queue_pairs } => queue_pairs,
            Self::Device { .. } => 0,
        }
    }

    /// The most bytes of the device configuration that are read.
    pub(super) fn config_len(self) -> u32 {
        match self {
            Self::Nic { .. } => NIC_CONFIG,
            Self::Device { config, .. } => config,
        }
    }

    /// True if a change of the device configuration matters. For a NIC, only the link status does.
    pub(super) fn hears_config(self, features: u64) -> bool {
        match self {
            Self::Nic { .. } => has(features, VIRTIO_NET_F_STATUS),
            Self::Device { config, .. } => config != 0,
        }
    }

    /// The queues that the peer must run, in words.
    pub(super) fn queues(self) -> String {
        match self {
            Self::Nic { queue_pairs: 1 } => "one pair of queues".into(),
            Self::Nic { queue_pairs } => format!("{queue_pairs} pairs of queues"),
            Self::Device { queues: 1, .. } => "one queue".into(),
            Self::Device { queues, .. } => format!("{queues} queues"),
        }
    }
}
