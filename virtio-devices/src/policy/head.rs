//! The beginning of a frame: addresses, tags and a type.

use super::cause::Cause;
use super::protocol::VlanProtocol;
use crate::net_protocol::ethernet::{ETHERNET_HEADER, Mac};

/// The length of a tag in bytes.
const TAG: usize = 4;
/// By how much offsets behind a tag move.
pub(super) const STEP: u16 = TAG as u16;
/// The most tags that are looked at.
const TAGS: usize = 2;
/// The length of both addresses.
const ADDRESSES: usize = 12;
/// The most bytes of a frame that are looked at: an Ethernet header and two tags.
pub(crate) const HEAD: usize = ETHERNET_HEADER + TAGS * TAG;

/// A private copy of a frame's first bytes, whose tags are whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    bytes: [u8; HEAD],
    len: usize,
    tags: usize,
}

impl Head {
    /// The beginning of the frame whose first bytes are `front`: its first [`HEAD`], or all of a shorter frame.
    ///
    /// # Errors
    ///
    /// [`Cause::BadVlan`], when it ends within the Ethernet header or a tag.
    pub(crate) fn of(front: &[u8]) -> Result<Self, Cause> {
        let len = front.len().min(HEAD);
        let mut bytes = [0; HEAD];
        bytes[..len].copy_from_slice(&front[..len]);
        let head = Self { bytes, len, tags: 0 };
        let tags = (0..TAGS).take_while(|tag| head.protocol(*tag).is_some()).count();
        if len < ETHERNET_HEADER + tags * TAG { Err(Cause::BadVlan) } else { Ok(Self { tags, ..head }) }
    }

    /// Where the frame goes.
    pub(crate) fn destination(&self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.bytes;
        [a, b, c, d, e, f]
    }

    /// Where it comes from.
    pub(crate) fn source(&self) -> Mac {
        let [_, _, _, _, _, _, a, b, c, d, e, f, ..] = self.bytes;
        [a, b, c, d, e, f]
    }

    /// How many tags it has; the second of more than two is the last that counts.
    pub(crate) const fn tags(&self) -> usize {
        self.tags
    }

    /// The length of the Ethernet header, with its tags.
    pub(crate) const fn header_len(&self) -> usize {
        ETHERNET_HEADER + self.tags * TAG
    }

    /// The protocol and the VLAN ID of its outer tag.
    pub(crate) fn outer(&self) -> Option<(VlanProtocol, u16)> {
        let protocol = self.protocol(0).filter(|_| self.tags > 0)?;
        Some((protocol, u16::from_be_bytes([self.bytes[ADDRESSES + 2], self.bytes[ADDRESSES + 3]]) & 0xfff))
    }

    fn protocol(&self, tag: usize) -> Option<VlanProtocol> {
        let at = ADDRESSES + tag * TAG;
        VlanProtocol::of([self.bytes[at], self.bytes[at + 1]])
    }

    fn front(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// As it is.
    pub(crate) fn unchanged(&self) -> NewHead {
        NewHead::made_of(&[self.front()], self.header_len(), Shift::None)
    }

    /// With `tag` before its own.
    pub(super) fn pushed(&self, tag: [u8; TAG]) -> NewHead {
        let (addresses, rest) = self.front().split_at(ADDRESSES);
        NewHead::made_of(&[addresses, &tag, rest], self.header_len(), Shift::Longer)
    }

    /// With `tag` in place of its outer one, which it has.
    pub(super) fn rewritten(&self, tag: [u8; TAG]) -> NewHead {
        let (addresses, rest) = self.front().split_at(ADDRESSES);
        let rest = rest.get(TAG..).unwrap_or_default();
        NewHead::made_of(&[addresses, &tag, rest], self.header_len(), Shift::None)
    }

    /// Without its outer tag, which it has.
    pub(super) fn popped(&self) -> NewHead {
        let (addresses, rest) = self.front().split_at(ADDRESSES);
        let rest = rest.get(TAG..).unwrap_or_default();
        NewHead::made_of(&[addresses, rest], self.header_len(), Shift::Shorter)
    }
}

/// How much longer a head has become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shift {
    /// By nothing.
    None,
    /// By a tag.
    Longer,
    /// By a tag less.
    Shorter,
}

/// The most bytes that go on in place of the first [`HEAD`].
pub(crate) const NEW_HEAD: usize = HEAD + TAG;

/// What goes on in place of the bytes that were looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewHead {
    bytes: [u8; NEW_HEAD],
    len: usize,
    /// The length of the Ethernet header that was checked, with its tags.
    pub(super) checked: usize,
    pub(super) shift: Shift,
}

impl NewHead {
    fn made_of(parts: &[&[u8]], checked: usize, shift: Shift) -> Self {
        let (mut bytes, mut len) = ([0; NEW_HEAD], 0);
        for part in parts {
            let end = (len + part.len()).min(NEW_HEAD);
            bytes[len..end].copy_from_slice(&part[..end - len]);
            len = end;
        }
        Self { bytes, len, checked, shift }
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// How much longer than `len` the frame has become.
    pub(crate) const fn new_len(&self, len: usize) -> usize {
        match self.shift {
            Shift::None => len,
            Shift::Longer => len + TAG,
            Shift::Shorter => len - TAG,
        }
    }
}
