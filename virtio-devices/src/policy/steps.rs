//! The rules of a policy for one frame, for fuzz targets.

use std::sync::{Arc, OnceLock};

use super::{Cause, HEAD, Head, Holder, NewHead, Policy, Replaced, Retired, changed};
use crate::net_protocol::ethernet::Mac;
use crate::net_protocol::header::HEADER;

/// What a policy makes of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyStep {
    /// It goes on, with this header.
    Passes([u8; HEADER], Vec<u8>),
    /// Its source is not its sender's.
    SpoofedAddress,
    /// Its tags are not what its sender may use, or are cut off.
    BadVlan,
    /// It is for a group that bridges keep for themselves.
    ReservedGroup,
    /// It is in none of the receiver's VLANs.
    OtherVlan,
    /// Its header has a checksum put where something was checked, or offsets that cannot be moved.
    BadHeader,
}

/// Something that was replaced, and that a batch never stops using.
pub fn never_replaced() -> Replaced {
    static USED: OnceLock<Arc<()>> = OnceLock::new();
    Retired::new(Holder::Nic).retire(Arc::clone(USED.get_or_init(Arc::default)))
}

/// What becomes of `frame`, with its header, that a driver sends whose function has the address `current` and whose
/// further addresses are `further`.
pub fn police_sent(policy: &Policy, current: Mac, further: &[Mac], header: [u8; HEADER], frame: &[u8]) -> PolicyStep {
    step(header, frame, |head| policy.ingress(head, current, |mac| further.contains(mac)))
}

/// What becomes of `frame`, with its header, on its way to a driver.
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
