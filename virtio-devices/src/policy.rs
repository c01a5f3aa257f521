//! What a network function may send and receive, as the host decides.
//!
//! The rules are pure functions of a frame's beginning: a private copy, of which what goes on is made. So what was
//! checked is what goes on, whatever a driver writes to its buffers meanwhile. They are the same on every wire.

mod cause;
mod head;
mod offload;
mod protocol;
mod replaced;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;
mod tags;
mod vlan;

#[cfg(test)]
mod tests;

use std::num::NonZeroU32;

pub(crate) use cause::Cause;
pub(crate) use head::{HEAD, Head, NEW_HEAD, NewHead};
pub(crate) use offload::changed;
pub use protocol::VlanProtocol;
pub(crate) use replaced::{Holder, Retired};
pub use replaced::{NotYetReplaced, Replaced};
pub(crate) use tags::{TAGS, Tags};
pub use vlan::{MAX_VLAN, PortVlan, Trunk, VlanSet};

use crate::net_protocol::ethernet::{Mac, is_multicast};

/// What the host has decided for a network function. The default is none of it: every frame passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The address that the host gave the function. A driver that is not trusted cannot change it.
    pub address: Option<Mac>,
    /// The VLAN that all of its frames are in, without its driver knowing.
    pub port_vlan: Option<PortVlan>,
    /// The VLANs that its driver may use; all without one. Not together with a port VLAN.
    pub trunk: Option<Trunk>,
    /// Drops frames that it sends from an address that is not its own.
    pub spoof_check: bool,
    /// Its driver may change its address, send from further ones, send to groups that bridges keep for themselves, and
    /// receive all frames.
    pub trusted: bool,
    /// The broadcast and multicast frames that it may send in a second. More are dropped.
    pub storm: Option<NonZeroU32>,
    /// What it may send, in Mbit/s (10^6 bits), from the destination address on. More waits in its queues.
    pub max_tx_rate: Option<NonZeroU32>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            address: None,
            port_vlan: None,
            trunk: None,
            spoof_check: false,
            trusted: true,
            storm: None,
            max_tx_rate: None,
        }
    }
}

/// The most further unicast addresses of a driver that the host does not trust. If it sets more, none of them counts.
const MAX_UNTRUSTED: usize = 16;

impl Policy {
    /// The address that its driver cannot change.
    pub(crate) fn fixed_address(&self) -> Option<Mac> {
        self.address.filter(|_| !self.trusted)
    }

    /// Whether the driver gets frames for further unicast addresses that it has set, `count` of them: if it is not
    /// trusted, only without an address that the host gave, and only a few.
    pub(crate) fn counts_further(&self, count: usize) -> bool {
        self.trusted || (self.address.is_none() && count <= MAX_UNTRUSTED)
    }

    /// Whether [`Self::ingress`] may do anything but pass a frame as it is.
    pub(crate) fn checks_sent(&self) -> bool {
        let Self { port_vlan, trunk, spoof_check, trusted, storm, .. } = self;
        port_vlan.is_some() || trunk.is_some() || *spoof_check || !trusted || storm.is_some()
    }

    /// Whether [`Self::egress`] may do anything but pass a frame as it is.
    pub(crate) fn checks_received(&self) -> bool {
        self.port_vlan.is_some() || self.trunk.is_some()
    }

    /// Whether it asks for nothing that only who carries the frames can do.
    pub fn is_open(&self) -> bool {
        let Self { address: _, max_tx_rate, .. } = self;
        !self.checks_sent() && !self.checks_received() && max_tx_rate.is_none()
    }

    /// The rules for a frame that the function's driver sends. The function has the address `current` now, and its
    /// driver has set further ones, of which `is_further` knows.
    ///
    /// # Errors
    ///
    /// Why the frame is dropped.
    pub(crate) fn ingress(
        &self,
        head: &Head,
        current: Mac,
        is_further: impl FnOnce(&Mac) -> bool,
    ) -> Result<NewHead, Cause> {
        let source = head.source();
        if is_multicast(&source) {
            return Err(Cause::SpoofedAddress);
        }
        if !self.trusted && is_reserved(&head.destination()) {
            return Err(Cause::ReservedGroup);
        }
        if self.spoof_check {
            let own = self.fixed_address().unwrap_or(current);
            if source != own && !(self.trusted && is_further(&source)) {
                return Err(Cause::SpoofedAddress);
            }
        }
        match (self.port_vlan, &self.trunk) {
            (Some(vlan), _) => vlan.tagged(head),
            (None, Some(trunk)) => trunk.passed(head).ok_or(Cause::BadVlan),
            (None, None) => Ok(head.unchanged()),
        }
    }

    /// The rules for a frame on its way to the function's driver.
    ///
    /// # Errors
    ///
    /// Why the frame is dropped.
    pub(crate) fn egress(&self, head: &Head) -> Result<NewHead, Cause> {
        match (self.port_vlan, &self.trunk) {
            (Some(vlan), _) => vlan.untagged(head),
            (None, Some(trunk)) => trunk.passed(head).ok_or(Cause::OtherVlan),
            (None, None) => Ok(head.unchanged()),
        }
    }
}

/// Whether `mac` is a group that bridges keep for themselves (`IEEE 802.1Q §8.6.3`).
pub(crate) fn is_reserved(mac: &Mac) -> bool {
    matches!(mac, [0x01, 0x80, 0xc2, 0, 0, 0..=0x0f])
}
