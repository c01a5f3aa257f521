//! The host's rules for the frames that a network function sends and receives.
//!
//! The rules are pure functions of a private copy of a frame's beginning. The checked copy is forwarded, whatever a
//! driver writes to its buffers in the meantime. The rules are the same for every backend.

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

use crate::frames::net_protocol::ethernet::{Mac, is_multicast};

/// The host's policy for a network function. The default passes every frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The address that the host has set. An untrusted driver cannot change it.
    pub address: Option<Mac>,
    /// The VLAN of all of the function's frames, transparent to its driver.
    pub port_vlan: Option<PortVlan>,
    /// The VLANs that the driver may use; all if `None`. Excludes a port VLAN.
    pub trunk: Option<Trunk>,
    /// Drops frames that the function sends from an address that is not its own.
    pub spoof_check: bool,
    /// The driver may change its address, send from further addresses and to groups that bridges reserve, and receive
    /// all frames.
    pub trusted: bool,
    /// The most broadcast and multicast frames sent per second. Further ones are dropped.
    pub storm: Option<NonZeroU32>,
    /// The transmit rate in Mbit/s (10^6 bits), from the destination address on. Frames beyond it wait in their queues.
    pub max_tx_rate: Option<NonZeroU32>,
}

impl Default for Policy {
    fn default() -> Self {
        Self::OPEN
    }
}

/// The most further unicast addresses of an untrusted driver. If it sets more, none of them counts.
const MAX_UNTRUSTED: usize = 16;

impl Policy {
    /// No restriction.
    pub(crate) const OPEN: Self = Self {
        address: None,
        port_vlan: None,
        trunk: None,
        spoof_check: false,
        trusted: true,
        storm: None,
        max_tx_rate: None,
    };

    /// The address that the driver cannot change.
    pub(crate) fn fixed_address(&self) -> Option<Mac> {
        self.address.filter(|_| !self.trusted)
    }

    /// True if the driver gets frames for the `count` further unicast addresses that it has set: an untrusted one only
    /// without an address of the host, and only a few.
    pub(crate) fn counts_further(&self, count: usize) -> bool {
        self.trusted || (self.address.is_none() && count <= MAX_UNTRUSTED)
    }

    /// True if [`Self::ingress`] may do more than pass a frame unchanged.
    pub(crate) fn checks_sent(&self) -> bool {
        let Self { address: _, port_vlan, trunk, spoof_check, trusted, storm, max_tx_rate: _ } = self;
        port_vlan.is_some() || trunk.is_some() || *spoof_check || !trusted || storm.is_some()
    }

    /// True if [`Self::egress`] may do more than pass a frame unchanged.
    pub(crate) fn checks_received(&self) -> bool {
        let Self { address: _, port_vlan, trunk, spoof_check: _, trusted: _, storm: _, max_tx_rate: _ } = self;
        port_vlan.is_some() || trunk.is_some()
    }

    /// Settings of the rules that need the cooperation of the frames' carrier.
    pub fn restrictions(&self) -> impl Iterator<Item = &'static str> {
        let Self { address: _, port_vlan, trunk, spoof_check, trusted, storm, max_tx_rate } = self;
        let rules = [
            ("vlan", port_vlan.is_some()),
            ("trunk", trunk.is_some()),
            ("spoofchk", *spoof_check),
            ("trust", !trusted),
            ("max_tx_rate", max_tx_rate.is_some()),
            ("storm", storm.is_some()),
        ];
        rules.into_iter().filter_map(|(setting, restricts)| restricts.then_some(setting))
    }

    /// True if no rule needs the cooperation of the frames' carrier.
    pub fn is_open(&self) -> bool {
        self.restrictions().next().is_none()
    }

    /// Applies the rules to a frame that the function's driver sends. The function's address is `current`, and
    /// `is_further` is true for the further ones that its driver has set.
    ///
    /// # Errors
    ///
    /// The reason why the frame is dropped.
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

    /// Applies the rules to a frame on its way to the function's driver.
    ///
    /// # Errors
    ///
    /// The reason why the frame is dropped.
    pub(crate) fn egress(&self, head: &Head) -> Result<NewHead, Cause> {
        match (self.port_vlan, &self.trunk) {
            (Some(vlan), _) => vlan.untagged(head),
            (None, Some(trunk)) => trunk.passed(head).ok_or(Cause::OtherVlan),
            (None, None) => Ok(head.unchanged()),
        }
    }
}

/// True if `mac` is a group that bridges reserve (`IEEE 802.1Q §8.6.3`).
pub(crate) fn is_reserved(mac: &Mac) -> bool {
    matches!(mac, [0x01, 0x80, 0xc2, 0, 0, 0..=0x0f])
}
