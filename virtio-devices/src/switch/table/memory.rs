//! The addresses that drivers had before their ports stopped for a while, so that earlier claims have precedence.

use std::collections::BTreeMap;

use super::port::PortIndex;
use crate::frames::net_protocol::ethernet::Mac;

/// Addresses that drivers had set, and the number of the table that first had each.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory(BTreeMap<(PortIndex, Mac), u64>);

impl Memory {
    /// Remembers an address of a port.
    pub(crate) fn add(&mut self, port: PortIndex, mac: Mac, since: u64) {
        self.0.insert((port, mac), since);
    }

    /// The addresses of a port.
    pub(crate) fn of_port(&self, port: PortIndex) -> impl Iterator<Item = (Mac, u64)> {
        self.0.range((port, [0; 6])..=(port, [0xff; 6])).map(|((_, mac), since)| (*mac, *since))
    }

    /// The table that first had an address of a port.
    pub(super) fn since(&self, port: PortIndex, mac: Mac) -> Option<u64> {
        self.0.get(&(port, mac)).copied()
    }

    /// The least number of the next table.
    pub(super) fn next(&self) -> u64 {
        self.0.values().max().map_or(0, |last| last.wrapping_add(1))
    }

    /// True if it has no address.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
