//! The tap of a NIC and its settings.

use std::net::IpAddr;

/// The tap to use, and its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapSpec {
    /// The name, at most 15 bytes. A tap that does not exist is created; without a name, a new one is.
    pub name: Option<String>,
    /// The host's address on it.
    pub ip: Option<IpAddr>,
    /// The mask of that address, of the same family. Without one, the prefix covers this address only.
    pub mask: Option<IpAddr>,
    /// The host's Ethernet address on it.
    pub host_mac: Option<[u8; 6]>,
    /// The MTU in bytes.
    pub mtu: Option<u16>,
    /// The number of its queues, 1 to 256. More than one makes it a multi-queue tap.
    pub queue_pairs: u16,
}
