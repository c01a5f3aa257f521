//! A frame on its way through the switch.

pub(super) mod body;
pub(super) mod offload;

use self::body::Body;
use super::table::{PortIndex, Route};
use crate::frames::net_protocol::header::{self, HEADER};
use crate::frames::policy::{HEAD, Head, NEW_HEAD, NewHead};
use crate::net::Counter;

/// The most first bytes of a frame: the policies of its sender and of the uplink add a tag each.
pub(super) const MAX_FRONT: usize = NEW_HEAD + (NEW_HEAD - HEAD);

/// A frame: its header and first bytes as they were checked, and its route. The rest is its source's
/// [`Body`](body::Body).
#[derive(Clone, Copy)]
pub(crate) struct Frame<'t> {
    /// The virtio header, for a receiver behind no VLAN tag.
    pub header: [u8; HEADER],
    /// The parsed beginning, by which receivers are selected.
    pub head: Head,
    front: [u8; MAX_FRONT],
    front_len: usize,
    /// The length from the destination address on.
    pub len: usize,
    /// The route, or the reason why there is none; a copy may be made even then.
    pub route: Result<Route<'t>, Counter>,
    /// The port that gets a copy.
    pub mirror: Option<PortIndex>,
    /// The receive queue of its receiver, if a rule of a driver has chosen one.
    pub queue: Option<usize>,
}

impl<'t> Frame<'t> {
    /// A frame that has `len` bytes with the new beginning `new`, whose [`Head`] is `head`.
    pub(crate) fn new(
        header: [u8; HEADER],
        new: &NewHead,
        head: Head,
        len: usize,
        route: Result<Route<'t>, Counter>,
    ) -> Self {
        let mut front = [0; MAX_FRONT];
        let bytes = new.bytes();
        let front_len = bytes.len().min(MAX_FRONT);
        front[..front_len].copy_from_slice(&bytes[..front_len]);
        Self { header, head, front, front_len, len, route, mirror: None, queue: None }
    }

    /// The frame with another header, and with `new` in place of the bytes that [`Self::head`] was parsed from. `len`
    /// is its new length.
    pub(super) fn beginning_with(&self, header: [u8; HEADER], new: &NewHead, len: usize) -> Self {
        let (mut front, mut front_len) = ([0; MAX_FRONT], 0);
        let bytes = new.bytes().iter().chain(self.front().get(HEAD..).unwrap_or_default());
        for (to, from) in front.iter_mut().zip(bytes) {
            *to = *from;
            front_len += 1;
        }
        Self { header, head: new.head(), front, front_len, len, ..*self }
    }

    /// The number of packets that it becomes.
    pub(crate) fn packets(&self) -> u32 {
        header::packets(&self.header, self.len)
    }

    /// The first bytes.
    pub(crate) fn front(&self) -> &[u8] {
        &self.front[..self.front_len]
    }

    /// Copies the beginning of the frame to `head`. Returns what it has of it.
    pub(crate) fn first_bytes<'h>(&self, body: &Body<'_, '_, '_>, head: &'h mut [u8]) -> &'h [u8] {
        let len = self.len.min(head.len());
        let front = self.front_len.min(len);
        let head = head.get_mut(..len).unwrap_or_default();
        let (known, rest) = head.split_at_mut(front);
        known.copy_from_slice(self.front().get(..front).unwrap_or_default());
        body.read(rest);
        head
    }

    /// The number of bytes that follow the first.
    pub(crate) fn rest(&self) -> usize {
        self.len.saturating_sub(self.front_len)
    }
}
