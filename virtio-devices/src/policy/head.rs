//! The beginning of a frame: addresses, tags and a type.

use super::cause::Cause;
use super::protocol::VlanProtocol;
use super::tags::{ADDRESSES, TAG, TAGS, Tags};
use crate::net_protocol::ethernet::{ETHERNET_HEADER, Mac};

/// The most bytes of a frame that are looked at: an Ethernet header and its tags.
pub(crate) const HEAD: usize = ETHERNET_HEADER + TAGS * TAG;

/// A private copy of a frame's first bytes, whose tags are whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    bytes: [u8; HEAD],
    len: usize,
    tags: Tags,
}

impl Head {
    /// The beginning of the frame whose first bytes are `front`: its first [`HEAD`], or all of a shorter frame.
    ///
    /// # Errors
    ///
    /// [`Cause::BadVlan`], when it ends within the Ethernet header or a tag.
    pub(crate) fn of(front: &[u8]) -> Result<Self, Cause> {
        let head = Self::known(front);
        if head.tags.cut { Err(Cause::BadVlan) } else { Ok(head) }
    }

    /// As [`Self::of`], of what is known of a frame: its end may be in a tag behind the one that decides.
    fn known(front: &[u8]) -> Self {
        let len = front.len().min(HEAD);
        let mut bytes = [0; HEAD];
        bytes[..len].copy_from_slice(&front[..len]);
        Self { bytes, len, tags: Tags::of(&front[..len]) }
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

    /// The length of the Ethernet header, with the tags that were looked at.
    pub(crate) const fn header_len(&self) -> usize {
        ETHERNET_HEADER + self.tags.count * TAG
    }

    /// The protocol and the ID of its VLAN: those of its first tag that is not a priority only.
    pub(crate) const fn vlan(&self) -> Option<(VlanProtocol, u16)> {
        self.tags.vlan
    }

    /// True if all who carry the frame find the same VLAN in it, once it is [plain](Self::plain).
    pub(crate) const fn is_clear(&self) -> bool {
        self.tags.clear
    }

    fn front(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// As it is.
    pub(crate) fn unchanged(&self) -> NewHead {
        self.changed(None, 0)
    }

    /// Without the priority tags before the tag of its VLAN, if it has one: a bridge that does not look behind a
    /// priority would take the frame for one without a VLAN.
    pub(super) fn plain(&self) -> NewHead {
        self.changed(None, if self.tags.vlan.is_some() { self.tags.priorities } else { 0 })
    }

    /// With `tag` before its own.
    pub(super) fn pushed(&self, tag: [u8; TAG]) -> NewHead {
        self.changed(Some(tag), 0)
    }

    /// With `tag` in place of its priority tags.
    pub(super) fn put_into(&self, tag: [u8; TAG]) -> NewHead {
        self.changed(Some(tag), self.tags.priorities)
    }

    /// Without the tag of its VLAN, and the priority tags before it.
    pub(super) fn taken_out(&self) -> NewHead {
        self.changed(None, self.tags.priorities + usize::from(self.tags.vlan.is_some()))
    }

    /// With `tag`, if there is one, in place of the first `removed` of its own.
    fn changed(&self, tag: Option<[u8; TAG]>, removed: usize) -> NewHead {
        let (addresses, rest) = self.front().split_at(ADDRESSES.min(self.len));
        let rest = rest.get(removed * TAG..).unwrap_or_default();
        let shift = Shift { added: tag.map_or(0, |tag| tag.len()), removed: removed * TAG };
        NewHead::made_of(&[addresses, tag.as_ref().map_or(&[], |tag| tag), rest], self.header_len(), shift)
    }
}

/// The bytes of tags that a head has gained and lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shift {
    added: usize,
    removed: usize,
}

impl Shift {
    /// True if what follows the tags stays where it is.
    pub(super) const fn is_none(self) -> bool {
        self.added == self.removed
    }

    /// The new offset of something behind the tags that was at `offset`; `None` if it cannot have been there.
    pub(super) const fn of(self, offset: usize) -> Option<usize> {
        (offset + self.added).checked_sub(self.removed)
    }
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

    /// The frame's beginning now, of which there may be fewer bytes than of another frame as long.
    pub(crate) fn head(&self) -> Head {
        Head::known(self.bytes())
    }

    /// The length of the frame, which was `len`.
    pub(crate) fn new_len(&self, len: usize) -> usize {
        self.shift.of(len).unwrap_or(len)
    }
}
