//! A port in a switch's table.

use super::vlan::{Outer, outer, vlan_code};
use crate::frames::policy::{Head, Trunk};

/// The number of a port in its switch's table.
pub(crate) type PortIndex = u16;

/// The role of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The network behind the switch.
    Uplink,
    /// The PF.
    Pf,
    /// A VF.
    Vf,
}

/// A port of a table.
#[derive(Debug)]
pub(super) struct Entry {
    pub role: Role,
    pub open: bool,
    pub isolated: bool,
    pub mirror: Option<PortIndex>,
    /// The port VLAN, or 0.
    pub vlan: u16,
    pub trunk: Option<Trunk>,
    /// The number of claims to an address that the port lost to another.
    pub conflicts: u32,
}

impl Entry {
    /// True if frames of this VLAN are in a VLAN of the port.
    pub(super) fn has(&self, vlan: Outer) -> bool {
        match (self.vlan, &self.trunk) {
            (0, None) => true,
            (0, Some(trunk)) => trunk.contains(vlan),
            (own, _) => vlan_code(vlan) == own,
        }
    }

    /// True if the port may have the frame that begins with `head`, to which no egress policy applies.
    pub(super) fn sees(&self, head: &Head) -> bool {
        self.has(head.vlan()) && (head.is_clear() || self.has_all())
    }

    /// True if the port is in the VLAN of a port VLAN.
    pub(super) fn has_vlan(&self, vlan: u16) -> bool {
        self.has(outer(vlan))
    }

    /// True if the port has all VLANs.
    pub(super) const fn has_all(&self) -> bool {
        self.vlan == 0 && self.trunk.is_none()
    }

    /// True if a frame can be in a VLAN of both ports, neither of which has a port VLAN.
    pub(super) fn meets(&self, other: &Self) -> bool {
        match (&self.trunk, &other.trunk) {
            (Some(one), Some(other)) => one.meets(other),
            _ => true,
        }
    }
}
