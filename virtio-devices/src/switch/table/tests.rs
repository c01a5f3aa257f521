//! Reachability, VLANs and conflicts.

mod conflicts;
mod matrix;
mod properties;
mod vlans;

use super::*;
use crate::frames::policy::Policy;

/// The ports of most tests.
pub(super) const UPLINK: PortIndex = 0;
pub(super) const PF: PortIndex = 1;
pub(super) const VF: [PortIndex; 3] = [2, 3, 4];

/// The address of a port.
pub(super) const fn mac(port: PortIndex) -> Mac {
    [0x52, 0x54, 0, 0, 0, port as u8]
}

/// An address behind the uplink.
pub(super) const FAR: Mac = [0x52, 0x54, 0, 0, 1, 0];
pub(super) const GROUP: Mac = [0x33, 0x33, 0, 0, 0, 5];

/// A port of `role` with the address of `port`, whose driver accepts its own frames only.
pub(super) fn spec(role: Role, port: PortIndex, policy: &Policy) -> PortSpec<'_> {
    PortSpec { role, policy, current: mac(port), ..PortSpec::uplink(true) }
}

/// The beginning of a frame.
pub(super) fn head(source: Mac, destination: Mac, tags: &[u16]) -> Head {
    let mut bytes = [destination, source].concat();
    for tag in tags {
        bytes.extend([0x81, 0]);
        bytes.extend(tag.to_be_bytes());
    }
    bytes.extend([8, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    Head::of(&bytes).unwrap()
}

/// The destinations of a frame, in ascending order; or the reason why there are none.
pub(super) fn route(table: &Table, from: PortIndex, head: &Head) -> Result<Vec<PortIndex>, Miss> {
    table.route(from, head).map(|route| match route {
        Route::One(port) => vec![port],
        Route::Many(ports) => {
            let mut ports: Vec<_> = ports.collect();
            ports.sort_unstable();
            ports
        }
    })
}
