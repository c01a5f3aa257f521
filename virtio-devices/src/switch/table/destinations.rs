//! The ports that a frame goes to, one after the other, without an allocation.

use super::index::{Index, Key};
use super::port::{PortIndex, Role};
use super::ports::Ports;
use super::vlan::{Outer, vlan_code};
use crate::frames::net_protocol::ethernet::Mac;

/// Two indexes, each with ports that have many VLANs, and those whose port VLAN is the frame's.
const SLICES: usize = 4;

/// Distinct open ports, in no particular order except that the uplink is first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destinations<'t> {
    ports: &'t Ports,
    from: PortIndex,
    /// The port that first sent a reflected frame.
    source: Option<PortIndex>,
    outer: Outer,
    uplink: Option<PortIndex>,
    pf_only: bool,
    slices: [&'t [(Key, PortIndex)]; SLICES],
}

impl<'t> Destinations<'t> {
    /// No ports, for a frame with this VLAN tag from the port `from`, which was first sent by the port `source`.
    pub(super) const fn new(ports: &'t Ports, from: PortIndex, source: Option<PortIndex>, outer: Outer) -> Self {
        Self { ports, from, source, outer, uplink: None, pf_only: false, slices: [&[]; SLICES] }
    }

    /// Adds the uplink, unless it is closed or the sender.
    pub(super) fn and_uplink(mut self) -> Self {
        self.uplink = self.ports.uplink.filter(|uplink| *uplink != self.from && self.ports.is_open(*uplink));
        self
    }

    /// Restricts the functions to the PF.
    pub(super) fn of_pf(mut self) -> Self {
        self.pf_only = true;
        self
    }

    /// Adds the ports of an index that are in the frame's VLAN.
    pub(super) fn with_all(self, index: &'t Index) -> Self {
        self.with(index, &[0; 6])
    }

    /// Adds the ports of an index that are in the frame's VLAN and have this address.
    pub(super) fn with(mut self, index: &'t Index, mac: &Mac) -> Self {
        let vlan = vlan_code(self.outer);
        let own = if vlan == 0 { &[][..] } else { index.at(Key::of(mac, vlan)) };
        let found = [index.at(Key::of(mac, 0)), own];
        let free = self.slices.iter_mut().filter(|slice| slice.is_empty());
        free.zip(found.into_iter().filter(|slice| !slice.is_empty())).for_each(|(slice, found)| *slice = found);
        self
    }

    /// True if there are none.
    pub(super) fn is_empty(self) -> bool {
        { self }.next().is_none()
    }

    /// True if the uplink is one of them.
    pub(crate) const fn has_uplink(&self) -> bool {
        self.uplink.is_some()
    }

    /// True if the uplink, which has this number, is one of them.
    pub(crate) fn includes(&self, uplink: PortIndex) -> bool {
        self.uplink == Some(uplink)
    }

    fn goes_to(&self, port: PortIndex) -> bool {
        let (ports, source) = (self.ports, self.source);
        let Some(entry) = ports.get(port) else { return false };
        port != self.from
            && Some(port) != source
            && (!self.pf_only || entry.role == Role::Pf)
            && entry.has(self.outer)
            && ports.may_meet(self.from, port)
            && source.is_none_or(|source| ports.may_meet(source, port))
    }
}

impl Iterator for Destinations<'_> {
    type Item = PortIndex;

    fn next(&mut self) -> Option<PortIndex> {
        if let Some(uplink) = self.uplink.take() {
            return Some(uplink);
        }
        for at in 0..SLICES {
            while let Some(((_, port), rest)) = self.slices[at].split_first() {
                self.slices[at] = rest;
                if self.goes_to(*port) {
                    return Some(*port);
                }
            }
        }
        None
    }
}
