//! A frame's tags, and the VLAN that they put it into (`IEEE 802.1Q §9.3`, `§9.6`).

use super::protocol::VlanProtocol;
use crate::frames::net_protocol::ethernet::ETHERNET_HEADER;

/// The length of a tag in bytes.
pub(super) const TAG: usize = 4;
/// The most tags of a frame that are inspected.
pub(crate) const TAGS: usize = 4;
/// The length of both addresses.
pub(super) const ADDRESSES: usize = 12;

/// Tags at the beginning of a frame.
///
/// A tag with VLAN ID 0 is priority-only: Linux removes it and uses the next one, so that is decisive here. A frame
/// without a tag after those is in no VLAN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tags {
    /// The number of whole tags.
    pub count: usize,
    /// The number of priority tags before the decisive one, or before the frame's type.
    pub priorities: usize,
    /// The protocol and the ID of the VLAN.
    pub vlan: Option<(VlanProtocol, u16)>,
    /// False if carriers may differ about the VLAN: the decisive tag is beyond the inspected ones, or of a type that
    /// only some carriers treat as a tag.
    pub clear: bool,
    /// True if the frame ends within a tag, or before the type that follows.
    pub cut: bool,
}

impl Tags {
    /// Reads the tags from `front`, the first bytes of a frame: all of it, or as many as [`TAGS`] tags need.
    pub(crate) fn of(front: &[u8]) -> Self {
        let mut tags = Self { count: 0, priorities: 0, vlan: None, clear: true, cut: false };
        loop {
            let at = ADDRESSES + tags.count * TAG;
            let Some([a, b]) = front.get(at..).and_then(<[u8]>::first_chunk) else {
                tags.cut = true;
                return tags;
            };
            let Some(protocol) = VlanProtocol::of([*a, *b]) else {
                tags.clear &= tags.vlan.is_some() || !is_old_type([*a, *b]);
                return tags;
            };
            if tags.count == TAGS {
                tags.clear &= tags.vlan.is_some();
                return tags;
            }
            let Some([c, d]) = front.get(at + 2..at + TAG).and_then(<[u8]>::first_chunk) else {
                tags.cut = true;
                return tags;
            };
            if front.len() < ETHERNET_HEADER + (tags.count + 1) * TAG {
                tags.cut = true;
                return tags;
            }
            let id = u16::from_be_bytes([*c, *d]) & 0xfff;
            tags.count += 1;
            match (tags.vlan, id) {
                (None, 0) => tags.priorities += 1,
                (None, id) => tags.vlan = Some((protocol, id)),
                (Some(_), _) => {}
            }
        }
    }
}

/// True for the types of provider tags from before `IEEE 802.1ad`. Linux treats frames of these types as untagged, but
/// hardware behind an uplink may be set up to find a VLAN in them.
const fn is_old_type(kind: [u8; 2]) -> bool {
    matches!(kind, [0x91..=0x93, 0x00])
}
