//! Ethernet frames.

/// An Ethernet address.
pub(crate) type Mac = [u8; 6];

/// The length of an Ethernet header without tags, the minimum length of a frame.
pub(crate) const ETHERNET_HEADER: usize = 14;

/// True for a multicast address or the broadcast address.
pub(crate) fn is_multicast(mac: &Mac) -> bool {
    mac[0] & 1 != 0
}
