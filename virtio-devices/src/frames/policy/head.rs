//! The beginning of a frame: addresses, tags and a type.

use super::cause::Cause;
use super::protocol::VlanProtocol;
use super::tags::{ADDRESSES, TAG, TAGS, Tags};
use crate::frames::net_protocol::ethernet::{ETHERNET_HEADER, Mac};

/// The most bytes of a frame that are inspected: an Ethernet header and its tags.
pub(crate) const HEAD: usize = ETHERNET_HEADER + TAGS * TAG;

/// A private copy of a frame's first bytes, with whole tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    bytes: [u8; HEAD],
    len: usize,
    tags: Tags,
}

impl Head {
    /// Parses the first bytes of a frame: its first [`HEAD`], or all of a shorter frame.
    ///
    /// # Errors
    ///
    /// [`Cause::BadVlan`] if the frame ends within the Ethernet header or a tag.
    pub(crate) fn of(front: &[u8]) -> Result<Self, Cause> {
        let head = Self::known(front);
        if head.tags.cut { Err(Cause::BadVlan) } else { Ok(head) }
    }

    /// As [`Self::of`], for a part of a frame, which may end in a tag behind the decisive one.
    fn known(front: &[u8]) -> Self {
        let len = front.len().min(HEAD);
        let mut bytes = [0; HEAD];
        bytes[..len].copy_from_slice(&front[..len]);
        Self { bytes, len, tags: Tags::of(&front[..len]) }
    }

    /// The destination address.
    pub(crate) fn destination(&self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.bytes;
        [a, b, c, d, e, f]
    }

    /// The source address.
    pub(crate) fn source(&self) -> Mac {
        let [_, _, _, _, _, _, a, b, c, d, e, f, ..] = self.bytes;
        [a, b, c, d, e, f]
    }

    /// The length of the Ethernet header, with the inspected tags.
    pub(crate) const fn header_len(&self) -> usize {
        ETHERNET_HEADER + self.tags.count * TAG
    }

    /// The protocol and the ID of the frame's VLAN: those of its first tag that is not priority-only.
    pub(crate) const fn vlan(&self) -> Option<(VlanProtocol, u16)> {
        self.tags.vlan
    }

    /// True if every carrier finds the same VLAN in the frame, once it is [plain](Self::plain).
    pub(crate) const fn is_clear(&self) -> bool {
        self.tags.clear
    }

    fn front(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The head without a change.
    pub(crate) fn unchanged(&self) -> NewHead {
        self.changed(None, 0)
    }

    /// Removes the priority tags before the tag of the VLAN, if there is one: a bridge that does not look behind a
    /// priority tag would treat the frame as untagged.
    pub(super) fn plain(&self) -> NewHead {
        self.changed(None, if self.tags.vlan.is_some() { self.tags.priorities } else { 0 })
    }

    /// Adds `tag` before the others.
    pub(super) fn pushed(&self, tag: [u8; TAG]) -> NewHead {
        self.changed(Some(tag), 0)
    }

    /// Replaces the priority tags by `tag`.
    pub(super) fn put_into(&self, tag: [u8; TAG]) -> NewHead {
        self.changed(Some(tag), self.tags.priorities)
    }

    /// Removes the tag of the VLAN, and the priority tags before it.
    pub(super) fn taken_out(&self) -> NewHead {
        self.changed(None, self.tags.priorities + usize::from(self.tags.vlan.is_some()))
    }

    /// Replaces the first `removed` tags by `tag`, if there is one.
    fn changed(&self, tag: Option<[u8; TAG]>, removed: usize) -> NewHead {
        let (addresses, rest) = self.front().split_at(ADDRESSES.min(self.len));
        let rest = rest.get(removed * TAG..).unwrap_or_default();
        let shift = Shift { added: tag.map_or(0, |tag| tag.len()), removed: removed * TAG };
        NewHead::made_of(&[addresses, tag.as_ref().map_or(&[], |tag| tag), rest], self.header_len(), shift)
    }
}

/// The number of bytes of tags that were added to a head and removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shift {
    added: usize,
    removed: usize,
}

impl Shift {
    /// True if the bytes after the tags keep their offset.
    pub(super) const fn is_none(self) -> bool {
        self.added == self.removed
    }

    /// The new offset of a byte behind the tags that was at `offset`; `None` if it cannot have been there.
    pub(super) const fn of(self, offset: usize) -> Option<usize> {
        (offset + self.added).checked_sub(self.removed)
    }
}

/// The most bytes that replace the first [`HEAD`].
pub(crate) const NEW_HEAD: usize = HEAD + TAG;

/// The bytes that replace the inspected ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewHead {
    bytes: [u8; NEW_HEAD],
    len: usize,
    /// The length of the checked Ethernet header, with its tags.
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

    /// Parses the new beginning, which may have fewer bytes than that of another frame of this length.
    pub(crate) fn head(&self) -> Head {
        Head::known(self.bytes())
    }

    /// The new length of the frame, whose length was `len`.
    pub(crate) fn new_len(&self, len: usize) -> usize {
        self.shift.of(len).unwrap_or(len)
    }
}
