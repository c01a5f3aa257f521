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
    /// Its ID, 1 to [`MAX_VLAN`].
    pub id: u16,
    /// The priority of the frames that the function sends, 0 to 7.
    pub priority: u8,
    /// What its tags are.
    pub protocol: VlanProtocol,
}

impl PortVlan {
    /// Its tag, as frames of the function have it.
    pub(crate) fn tag(self) -> [u8; 4] {
        let [a, b] = self.protocol.kind();
        let [c, d] = (u16::from(self.priority & 7) << 13 | self.id & 0xfff).to_be_bytes();
        [a, b, c, d]
    }

    /// Puts a frame that the function sends into the VLAN. A provider's tag goes before any. Into a customer's VLAN no
    /// frame comes that has a VLAN already; a tag that is a priority only is replaced.
    pub(super) fn tagged(self, head: &Head) -> Result<NewHead, Cause> {
        match (self.protocol, head.outer()) {
            (VlanProtocol::Service, _) | (VlanProtocol::Customer, None) => Ok(head.pushed(self.tag())),
            (VlanProtocol::Customer, Some((VlanProtocol::Customer, 0))) if head.tags() == 1 => {
                Ok(head.rewritten(self.tag()))
            }
            (VlanProtocol::Customer, Some(_)) => Err(Cause::BadVlan),
        }
    }

    /// Takes a frame for the function out of the VLAN.
    pub(super) fn untagged(self, head: &Head) -> Result<NewHead, Cause> {
        if self.is_of(head.outer()) { Ok(head.popped()) } else { Err(Cause::OtherVlan) }
    }

    /// Whether frames with this outer tag are in the VLAN.
    pub(crate) fn is_of(self, outer: Option<(VlanProtocol, u16)>) -> bool {
        outer == Some((self.protocol, self.id))
    }
}

/// The VLANs that a driver may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trunk {
    /// Which. 0 stands for frames without a VLAN.
    pub vlans: VlanSet,
    /// What the outer tags of frames are. A frame whose outer tag is another's is in none of the VLANs, because a
    /// bridge that knows only one kind would take it for one without a tag.
    pub protocol: VlanProtocol,
}

impl Trunk {
    /// Whether frames with this outer tag are in one of the VLANs.
    pub(crate) fn contains(&self, outer: Option<(VlanProtocol, u16)>) -> bool {
        match outer {
            None => self.vlans.contains(0),
            Some((protocol, id)) => protocol == self.protocol && self.vlans.contains(id),
        }
    }

    /// Whether there may be a frame that is in a VLAN of both.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        let both = |at: usize| self.vlans.0[at] & other.vlans.0[at];
        both(0) & 1 != 0 || self.protocol == other.protocol && (0..VLANS / 64).any(|at| both(at) != 0)
    }
}

/// A set of VLAN IDs, 0 to [`MAX_VLAN`]. A copy of it shares its 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VlanSet(Arc<[u64; VLANS / 64]>);

impl VlanSet {
    /// The IDs in these ranges. What no frame can have is left out.
    pub fn of(ranges: impl IntoIterator<Item = RangeInclusive<u16>>) -> Self {
        let mut words = [0; VLANS / 64];
        for range in ranges {
            for id in *range.start()..=(*range.end()).min(MAX_VLAN) {
                words[usize::from(id) / 64] |= 1_u64 << (id % 64);
            }
        }
        Self(Arc::new(words))
    }

    /// Whether `id` is in it.
    pub fn contains(&self, id: u16) -> bool {
        self.0.get(usize::from(id) / 64).is_some_and(|word| word & 1 << (id % 64) != 0)
    }
}
