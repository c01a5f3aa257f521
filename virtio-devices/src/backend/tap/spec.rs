//! Which tap a NIC uses, and how to set it up.

use std::net::IpAddr;

/// Which tap to use, and how to set it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapSpec {
    /// Its name, at most 15 bytes. A tap that does not exist is created; without a name, a new one is.
    pub name: Option<String>,
    /// The host's address on it.
    pub ip: Option<IpAddr>,
    /// The mask of that address, of the same family. Without one, the prefix covers this address only.
    pub mask: Option<IpAddr>,
    /// The host's Ethernet address on it.
    pub host_mac: Option<[u8; 6]>,
    /// Its MTU in bytes.
    pub mtu: Option<u16>,
    /// The number of its queues, 1 to 256. More than one makes it a multi-queue tap.
    pub queue_pairs: u16,
}
