//! Ethernet frames.

/// An Ethernet address.
pub(crate) type Mac = [u8; 6];

/// An Ethernet header without tags; a frame is at least this long.
pub(crate) const ETHERNET_HEADER: usize = 14;

/// True for a multicast address or the broadcast address.
pub(crate) fn is_multicast(mac: &Mac) -> bool {
    mac[0] & 1 != 0
}
