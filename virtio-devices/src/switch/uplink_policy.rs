//! The host's rules for all frames between a switch and its uplink, whatever the policies of its ports are: those of a
//! NIC whose guest sets the policies of its ports.

use std::num::NonZeroU32;

use super::frame::Frame;
use crate::RateLimits;
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::ethernet::is_multicast;
use crate::frames::net_protocol::header::HEADER;
use crate::frames::policy::{self, HEAD, Head, NewHead, Policy, PortVlan, Trunk};
use crate::net::{Counter, PolicyCell};

/// The host's rules for all frames between a switch and its uplink. The default passes every frame.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UplinkPolicy {
    /// The VLAN of all frames on the uplink, transparent to the switch's ports: frames get its tag on their way to the
    /// uplink, and lose it on their way back.
    pub port_vlan: Option<PortVlan>,
    /// The VLANs that may pass in either direction; all if `None`. Excludes a port VLAN.
    pub trunk: Option<Trunk>,
    /// The most broadcast and multicast frames that the ports together send to the uplink per second. Further ones are
    /// dropped.
    pub storm: Option<NonZeroU32>,
}

impl UplinkPolicy {
    /// True if it passes every frame unchanged.
    pub fn is_open(&self) -> bool {
        *self == Self::default()
    }
}

/// The rules of an uplink in force, with the bucket of the storm limit.
pub(crate) struct UplinkRules(PolicyCell);

impl UplinkRules {
    /// Rules with a full bucket.
    pub(crate) fn new(policy: UplinkPolicy) -> Self {
        let UplinkPolicy { port_vlan, trunk, storm } = policy;
        Self(PolicyCell::new(Policy { port_vlan, trunk, storm, ..Policy::OPEN }, RateLimits::default()))
    }

    /// The frame that reaches the uplink in place of `frame`, which a port sends.
    ///
    /// # Errors
    ///
    /// The reason why none does.
    pub(crate) fn outgoing<'t>(&self, frame: &Frame<'t>) -> Result<Frame<'t>, Counter> {
        let rules = self.0.load();
        let new = Self::tagged(&rules.policy, &frame.head)?;
        let header = policy::changed(frame.header, &new).map_err(|_| Counter::TxBadHeaders)?;
        let len = new.new_len(frame.len);
        if len > MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        if rules.policy.storm.is_some() && is_multicast(&frame.head.destination()) {
            let packets = frame.packets();
            if !rules.storm.allows(packets) {
                return Err(Counter::StormDropped);
            }
            rules.storm.take(0, packets);
        }
        Ok(frame.beginning_with(header, &new, len))
    }

    /// The beginning that a frame from the uplink has in the switch, and the parsed one, by which it is forwarded.
    ///
    /// # Errors
    ///
    /// The reason why it is dropped.
    pub(crate) fn incoming(&self, head: &Head) -> Result<(NewHead, Head), Counter> {
        let new = self.0.load().policy.egress(head)?;
        // A frame with more tags than are inspected has one less of them: the next may decide its VLAN.
        let head = Head::of(new.bytes()).map_err(|_| Counter::RxVlanFiltered)?;
        Ok((new, head))
    }

    /// The frame that reaches the uplink in place of `frame`, an announcement of the host. Both have a virtio header.
    ///
    /// # Errors
    ///
    /// The reason why none does.
    pub(crate) fn announced(&self, frame: &[u8]) -> Result<Vec<u8>, Counter> {
        let (header, frame) = frame.split_at_checked(HEADER).ok_or(Counter::TxBadHeaders)?;
        let (front, rest) = frame.split_at(HEAD.min(frame.len()));
        let new = Self::tagged(&self.0.load().policy, &Head::of(front)?)?;
        Ok([header, new.bytes(), rest].concat())
    }

    fn tagged(policy: &Policy, head: &Head) -> Result<NewHead, Counter> {
        // The ports' own policies are the ones that check addresses.
        Ok(policy.ingress(head, head.source(), |_| true)?)
    }
}
