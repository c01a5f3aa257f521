//! The device configuration of a NIC's peer.

use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP};

use super::peer::Peer;
use crate::transport::features::has;

impl Peer {
    /// The peer's Ethernet address, if it has one.
    pub(crate) fn mac(&self) -> Option<[u8; 6]> {
        self.config.first_chunk().copied().filter(|_| has(self.features, VIRTIO_NET_F_MAC))
    }

    /// The peer's MTU in bytes, if it has one.
    pub(crate) fn mtu(&self) -> Option<u16> {
        self.config_u16(10).filter(|_| has(self.features, VIRTIO_NET_F_MTU))
    }

    /// True if the link is up, which is always so without a link status.
    pub(crate) fn link_up(&self) -> bool {
        let status = self.config_u16(6).filter(|_| has(self.features, VIRTIO_NET_F_STATUS));
        status.is_none_or(|status| status & VIRTIO_NET_S_LINK_UP as u16 != 0)
    }

    fn config_u16(&self, offset: usize) -> Option<u16> {
        self.config.get(offset..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
    }
}
