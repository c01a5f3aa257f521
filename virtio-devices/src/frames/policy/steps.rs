//! The rules of a policy for one frame, for fuzz targets.

use std::sync::{Arc, OnceLock};

use super::{Cause, HEAD, Head, Holder, NewHead, Policy, Replaced, Retired, changed};
use crate::frames::net_protocol::ethernet::Mac;
use crate::frames::net_protocol::header::HEADER;

/// The effect of a policy on a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyStep {
    /// The frame passes, with this header.
    Passes([u8; HEADER], Vec<u8>),
    /// The source is not an address of the sender.
    SpoofedAddress,
    /// The sender may not use the tags, or they are cut off.
    BadVlan,
    /// The destination is a group that bridges reserve.
    ReservedGroup,
    /// The frame is in none of the receiver's VLANs.
    OtherVlan,
    /// The header has a checksum put into checked bytes, or offsets that cannot be moved.
    BadHeader,
}

/// A replacement whose batch never ends.
pub fn never_replaced() -> Replaced {
    static USED: OnceLock<Arc<()>> = OnceLock::new();
    Retired::new(Holder::Nic).retire(Arc::clone(USED.get_or_init(Arc::default)))
}

/// Applies `policy` to `frame`, with its header, from a driver whose function has the address `current` and the further
/// addresses `further`.
pub fn police_sent(policy: &Policy, current: Mac, further: &[Mac], header: [u8; HEADER], frame: &[u8]) -> PolicyStep {
    step(header, frame, |head| policy.ingress(head, current, |mac| further.contains(mac)))
}

/// Applies `policy` to `frame`, with its header, on its way to a driver.
pub fn police_received(policy: &Policy, header: [u8; HEADER], frame: &[u8]) -> PolicyStep {
    step(header, frame, |head| policy.egress(head))
}

fn step(header: [u8; HEADER], frame: &[u8], rules: impl FnOnce(&Head) -> Result<NewHead, Cause>) -> PolicyStep {
    let new = match Head::of(frame).and_then(|head| rules(&head)) {
        Ok(new) => new,
        Err(Cause::SpoofedAddress) => return PolicyStep::SpoofedAddress,
        Err(Cause::BadVlan) => return PolicyStep::BadVlan,
        Err(Cause::ReservedGroup) => return PolicyStep::ReservedGroup,
        Err(Cause::OtherVlan) => return PolicyStep::OtherVlan,
    };
    let Ok(header) = changed(header, &new) else { return PolicyStep::BadHeader };
    PolicyStep::Passes(header, [new.bytes(), frame.get(HEAD..).unwrap_or_default()].concat())
}
