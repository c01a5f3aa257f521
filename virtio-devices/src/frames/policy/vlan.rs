//! VLANs: tags, the VLAN of a port, and the VLANs of a trunk (`IEEE 802.1Q §9`).

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::cause::Cause;
use super::head::{Head, NewHead};
use super::protocol::VlanProtocol;

/// The highest VLAN ID that frames can have; 4095 is reserved (`IEEE 802.1Q §9.6`).
pub const MAX_VLAN: u16 = 4094;
const VLANS: usize = 4096;

/// The VLAN of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortVlan {
    /// The VLAN ID, 1 to [`MAX_VLAN`].
    pub id: u16,
    /// The priority of the frames that the function sends, 0 to 7.
    pub priority: u8,
    /// The protocol of its tags.
    pub protocol: VlanProtocol,
}

impl PortVlan {
    /// The tag for frames of the function.
    pub(crate) fn tag(self) -> [u8; 4] {
        let [a, b] = self.protocol.kind();
        let [c, d] = (u16::from(self.priority & 7) << 13 | self.id & 0xfff).to_be_bytes();
        [a, b, c, d]
    }

    /// Puts a frame that the function sends into the VLAN. A provider's tag goes before any other. A customer's VLAN
    /// accepts no frame that has a VLAN already, or may have one; priority-only tags are replaced.
    pub(super) fn tagged(self, head: &Head) -> Result<NewHead, Cause> {
        match (self.protocol, head.vlan()) {
            (VlanProtocol::Service, _) => Ok(head.pushed(self.tag())),
            (VlanProtocol::Customer, None) if head.is_clear() => Ok(head.put_into(self.tag())),
            (VlanProtocol::Customer, _) => Err(Cause::BadVlan),
        }
    }

    /// Takes a frame for the function out of the VLAN.
    pub(super) fn untagged(self, head: &Head) -> Result<NewHead, Cause> {
        if self.is_of(head.vlan()) { Ok(head.taken_out()) } else { Err(Cause::OtherVlan) }
    }

    /// True if frames in `vlan` are in this one.
    fn is_of(self, vlan: Option<(VlanProtocol, u16)>) -> bool {
        vlan == Some((self.protocol, self.id))
    }
}

/// The VLANs that a driver may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trunk {
    /// The VLAN IDs. 0 stands for frames without a VLAN.
    pub vlans: VlanSet,
    /// The kind of the VLANs. A frame in a VLAN of the other kind is in none of them, because a bridge that supports
    /// only one kind would treat it as untagged.
    pub protocol: VlanProtocol,
}

impl Trunk {
    /// True if frames in `vlan` are in one of the VLANs; `None` stands for frames in no VLAN.
    pub(crate) fn contains(&self, vlan: Option<(VlanProtocol, u16)>) -> bool {
        match vlan {
            None => self.vlans.contains(0),
            Some((protocol, id)) => protocol == self.protocol && self.vlans.contains(id),
        }
    }

    /// Passes a frame that is in one of the VLANs for every reader of its tags; `None` for any other.
    pub(super) fn passed(&self, head: &Head) -> Option<NewHead> {
        (head.is_clear() && self.contains(head.vlan())).then(|| head.plain())
    }

    /// True if a frame can be in a VLAN of both.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        let both = |at: usize| self.vlans.0[at] & other.vlans.0[at];
        both(0) & 1 != 0 || self.protocol == other.protocol && (0..VLANS / 64).any(|at| both(at) != 0)
    }
}

/// A set of VLAN IDs, 0 to [`MAX_VLAN`]. Clones share its 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VlanSet(Arc<[u64; VLANS / 64]>);

impl VlanSet {
    /// The set of IDs in these ranges, without IDs that no frame can have.
    pub fn of(ranges: impl IntoIterator<Item = RangeInclusive<u16>>) -> Self {
        let mut words = [0; VLANS / 64];
        for range in ranges {
            for id in *range.start()..=(*range.end()).min(MAX_VLAN) {
                words[usize::from(id) / 64] |= 1_u64 << (id % 64);
            }
        }
        Self(Arc::new(words))
    }

    /// True if `id` is in the set.
    pub fn contains(&self, id: u16) -> bool {
        self.0.get(usize::from(id) / 64).is_some_and(|word| word & 1 << (id % 64) != 0)
    }
}
