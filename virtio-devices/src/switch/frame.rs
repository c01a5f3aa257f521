//! A frame on its way through the switch.

use super::table::{PortIndex, Route};
use crate::net::Counter;
use crate::net_protocol::header::{self, HEADER};
use crate::policy::{Head, NEW_HEAD, NewHead};

/// A frame: its header and first bytes as they were checked, and where it goes. The rest is its source's
/// [`Body`](super::body::Body).
#[derive(Clone, Copy)]
pub(crate) struct Frame<'t> {
    /// The virtio header, for a receiver behind no VLAN tag.
    pub header: [u8; HEADER],
    /// Its beginning, as receivers are told apart by.
    pub head: Head,
    front: [u8; NEW_HEAD],
    front_len: usize,
    /// Its length from the destination address on.
    pub len: usize,
    /// Where it goes; or why nowhere, but for a copy.
    pub route: Result<Route<'t>, Counter>,
    /// Where a copy of it goes.
    pub mirror: Option<PortIndex>,
}

impl<'t> Frame<'t> {
    /// A frame that has `len` bytes once it begins with `new`, whose [`Head`] is `head`.
    pub(crate) fn new(
        header: [u8; HEADER],
        new: &NewHead,
        head: Head,
        len: usize,
        route: Result<Route<'t>, Counter>,
    ) -> Self {
        let mut front = [0; NEW_HEAD];
        let bytes = new.bytes();
        let front_len = bytes.len().min(NEW_HEAD);
        front[..front_len].copy_from_slice(&bytes[..front_len]);
        Self { header, head, front, front_len, len, route, mirror: None }
    }

    /// The packets that it becomes.
    pub(crate) fn packets(&self) -> u32 {
        header::packets(&self.header, self.len)
    }

    /// Its first bytes.
    pub(crate) fn front(&self) -> &[u8] {
        &self.front[..self.front_len]
    }

    /// How many bytes follow the first.
    pub(crate) fn rest(&self) -> usize {
        self.len.saturating_sub(self.front_len)
    }
}
