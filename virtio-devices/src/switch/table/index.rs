//! Ports by address and VLAN.

use super::port::PortIndex;
use crate::frames::net_protocol::ethernet::Mac;

/// An address and a VLAN, 48 and 16 bits. The VLAN is 0 for every port without a port VLAN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(u64);

impl Key {
    pub(super) const fn of(mac: &Mac, vlan: u16) -> Self {
        let [a, b, c, d, e, f] = *mac;
        let [g, h] = vlan.to_be_bytes();
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// The key of all ports in the VLAN.
    pub(super) const fn anyone(vlan: u16) -> Self {
        Self::of(&[0; 6], vlan)
    }

    /// The address.
    pub(super) const fn mac(self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.0.to_be_bytes();
        [a, b, c, d, e, f]
    }

    /// The VLAN.
    pub(super) const fn vlan(self) -> u16 {
        self.0 as u16
    }

    /// The same address, for ports without a port VLAN.
    pub(super) const fn without_vlan(self) -> Self {
        Self(self.0 & !0xffff)
    }
}

/// Ports by address and VLAN. Sorted instead of hashed: guests choose addresses, and no choice makes a sorted index
/// slow.
#[derive(Debug)]
pub(super) struct Index(Box<[(Key, PortIndex)]>);

impl Index {
    pub(super) fn of(mut entries: Vec<(Key, PortIndex)>) -> Self {
        entries.sort_unstable();
        entries.dedup();
        Self(entries.into_boxed_slice())
    }

    /// The ports with this key.
    pub(super) fn at(&self, key: Key) -> &[(Key, PortIndex)] {
        let from = self.0.partition_point(|(other, _)| *other < key);
        let rest = self.0.get(from..).unwrap_or_default();
        let len = rest.partition_point(|(other, _)| *other == key);
        rest.get(..len).unwrap_or_default()
    }
}
