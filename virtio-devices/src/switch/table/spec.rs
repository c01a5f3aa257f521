//! The input of a switch's table.

use super::addresses::How;
use super::port::{Entry, PortIndex, Role};
use super::vlan::vlan_code;
use crate::frames::net_protocol::ethernet::Mac;
use crate::frames::policy::Policy;

/// The input for a port of the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortSpec<'a> {
    /// The role of the port.
    pub role: Role,
    /// True if it accepts frames: the function's driver runs, and its link is up.
    pub open: bool,
    /// The host's policy.
    pub policy: &'a Policy,
    /// The function's address now.
    pub current: Mac,
    /// The further unicast addresses that the driver has set: at most 64, or 128 of an X550.
    pub unicast: &'a [Mac],
    /// The groups that the driver has joined: at most 64, or 128 of an X550.
    pub multicast: &'a [Mac],
    /// The driver accepts every unicast frame: promiscuous mode, all-unicast mode, or more addresses than there is room
    /// for.
    pub all_unicast: bool,
    /// The driver accepts the frames of every group: promiscuous mode, all-multicast mode, or more groups than there is
    /// room for.
    pub all_multicast: bool,
    /// The port reaches uplink and PF only.
    pub isolated: bool,
    /// The port that gets a copy of the frames that this one sends.
    pub mirror: Option<PortIndex>,
}

/// No restriction.
static OPEN: Policy = Policy::OPEN;

impl PortSpec<'_> {
    /// The uplink.
    pub(crate) const fn uplink(open: bool) -> Self {
        Self {
            role: Role::Uplink,
            open,
            policy: &OPEN,
            current: [0; 6],
            unicast: &[],
            multicast: &[],
            all_unicast: false,
            all_multicast: false,
            isolated: false,
            mirror: None,
        }
    }

    /// The addresses of the function, and the origin of each. A driver that does not run has only the function's own,
    /// and so has one that cannot change an address of the host: it could get frames for others.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (Mac, How)> {
        let fixed = self.policy.fixed_address();
        let own = fixed.unwrap_or(self.current);
        let how = if self.policy.address == Some(own) { How::Given } else { How::Current };
        let counts = self.open && self.policy.counts_further(self.unicast.len());
        let further = if counts { self.unicast } else { &[] };
        let further = further.iter().filter(move |mac| **mac != own).map(|mac| (*mac, How::Further));
        [(own, how)].into_iter().chain(further)
    }

    pub(super) const fn takes_all_unicast(&self) -> bool {
        self.all_unicast && self.policy.trusted
    }

    pub(super) const fn takes_all_groups(&self) -> bool {
        self.all_multicast && self.policy.trusted
    }

    /// The entry in the table.
    pub(super) fn entry(&self) -> Entry {
        let Self { role, open, policy, isolated, mirror, .. } = *self;
        Entry { role, open, isolated, mirror, vlan: self.vlan_code(), trunk: policy.trunk.clone(), conflicts: 0 }
    }

    /// The VLAN that all of its frames are in, or 0.
    pub(super) fn vlan_code(&self) -> u16 {
        self.policy.port_vlan.map_or(0, |vlan| vlan_code(Some((vlan.protocol, vlan.id))))
    }
}
