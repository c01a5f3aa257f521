//! The protocol of virtio-net (`virtio 1.4 §5.1`): the part that both a NIC and its backends need.

pub(crate) mod ethernet;
pub(crate) mod features;
pub(crate) mod header;
mod offloads;

pub use offloads::Offloads;

/// The longest frame in bytes: a TCP or UDP packet of 64 KiB (`virtio 1.4 §5.1.6.3.1`), an Ethernet header and two VLAN
/// tags.
pub(crate) const MAX_FRAME: usize = 65_550 + 8;
/// The most bytes that are read for one frame: its header and itself.
pub(crate) const MAX_READ: usize = header::HEADER + MAX_FRAME;
/// The smallest MTU in bytes that a device may report to its driver (`virtio 1.4 §5.1.4.1`).
pub(crate) const MIN_MTU: u16 = 68;
/// The largest size of a virtqueue (`virtio 1.4 §2.7`).
pub(crate) const MAX_QUEUE_SIZE: u16 = 32_768;
