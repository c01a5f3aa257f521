//! The ports of a switch, and their isolation.

use super::port::{Entry, PortIndex, Role};

/// The ports of a switch.
#[derive(Debug)]
pub(super) struct Ports {
    /// The ports by number.
    pub entries: Box<[Entry]>,
    /// The number of the uplink.
    pub uplink: Option<PortIndex>,
}

impl Ports {
    pub(super) fn get(&self, port: PortIndex) -> Option<&Entry> {
        self.entries.get(usize::from(port))
    }

    /// True if the port accepts frames.
    pub(super) fn is_open(&self, port: PortIndex) -> bool {
        self.get(port).is_some_and(|entry| entry.open)
    }

    /// True if frames may pass between the two ports: isolated functions reach uplink and PF only.
    pub(super) fn may_meet(&self, one: PortIndex, other: PortIndex) -> bool {
        let (Some(a), Some(b)) = (self.get(one), self.get(other)) else { return false };
        !(a.isolated && b.role == Role::Vf || b.isolated && a.role == Role::Vf)
    }
}
