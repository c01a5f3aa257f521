//! VLANs as numbers: a customer's by its ID, a provider's above those, and 0 for none.

use crate::frames::policy::VlanProtocol;

/// The tag that puts a frame into a VLAN, without its priority.
pub(super) type Outer = Option<(VlanProtocol, u16)>;

/// The offset of the ID of a provider's VLAN.
const SERVICE: u16 = 0x1000;

/// The VLAN of frames with this tag: 0 for those without one.
pub(super) const fn vlan_code(outer: Outer) -> u16 {
    match outer {
        None | Some((_, 0)) => 0,
        Some((VlanProtocol::Customer, id)) => id & 0xfff,
        Some((VlanProtocol::Service, id)) => SERVICE | id & 0xfff,
    }
}

/// The tag of frames in this VLAN.
pub(super) const fn outer(vlan: u16) -> Outer {
    match (vlan, vlan & SERVICE) {
        (0, _) => None,
        (_, 0) => Some((VlanProtocol::Customer, vlan)),
        _ => Some((VlanProtocol::Service, vlan & 0xfff)),
    }
}
