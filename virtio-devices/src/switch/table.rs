//! The forwarding table: a snapshot of the switch's ports, built from the configuration and the drivers' settings.
//! Nothing is learned: every address that is not local is behind the uplink, so nothing ages, and no guest can flood
//! the table.

mod addresses;
mod destinations;
mod index;
mod memory;
mod port;
mod ports;
mod spec;
mod vlan;

#[cfg(test)]
mod tests;

use addresses::{AddressBook, Claim};
pub(crate) use destinations::Destinations;
use index::{Index, Key};
pub(crate) use memory::Memory;
pub(crate) use port::{PortIndex, Role};
use ports::Ports;
pub(crate) use spec::PortSpec;

use super::mode::SwitchMode;
use crate::frames::net_protocol::ethernet::{Mac, is_multicast};
use crate::frames::policy::{Head, is_reserved};

const BROADCAST: Mac = [0xff; 6];

/// The route of a frame.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Route<'t> {
    /// To the open port that has its address.
    One(PortIndex),
    /// To open ports of a group, or to all that may have its address. A frame for a group may have no destination.
    Many(Destinations<'t>),
}

/// The reason why a frame has no route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The destination is the function that sent it (`tx_own_address` of its sender). Or it is the reflection of such a
    /// frame, from the uplink.
    OwnAddress,
    /// The destination is an address that no port has or accepts (`rx_unknown` of its source).
    Unknown,
    /// The destination is a port that accepts no frames now, where it is counted.
    Closed(PortIndex),
    /// The destination is a function that its sender may not reach, because one of the two is isolated.
    Isolated,
}

/// The forwarding table, immutable.
#[derive(Debug)]
pub(crate) struct Table {
    mode: SwitchMode,
    /// Each port receives what it sends, and nothing else.
    loops_back: bool,
    ports: Ports,
    addresses: AddressBook,
    /// The open ports except the uplink.
    everyone: Index,
    /// The ports that joined a group, and do not accept all.
    groups: Index,
    /// The ports that accept the frames of all groups.
    all_groups: Index,
    /// The ports that accept frames for unknown addresses.
    promiscuous: Index,
}

impl Table {
    /// Builds the table of `ports`, which are numbered in this order. If two ports have one address in one VLAN, the
    /// one that got it from the host keeps it; among drivers the one that had it in the table `before`, then the first
    /// of `ports`.
    ///
    /// There is at most one uplink. Ports beyond [`PortIndex::MAX`] are left out.
    pub(crate) fn new(mode: SwitchMode, ports: &[PortSpec<'_>], before: Option<&Self>) -> Self {
        Self::remembering(mode, ports, before, None)
    }

    /// As [`Self::new`]. Drivers had the addresses in `memory` before their ports stopped, and have kept them.
    pub(crate) fn remembering(
        mode: SwitchMode,
        ports: &[PortSpec<'_>],
        before: Option<&Self>,
        memory: Option<&Memory>,
    ) -> Self {
        let specs = || (0..=PortIndex::MAX).zip(ports);
        let mut entries: Box<[_]> = specs().map(|(_, spec)| spec.entry()).collect();
        let uplink = specs().find_map(|(port, spec)| (spec.role == Role::Uplink).then_some(port));
        let (mut claims, mut everyone, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let (mut all_groups, mut promiscuous) = (Vec::new(), Vec::new());
        for (port, spec) in specs().filter(|(_, spec)| spec.role != Role::Uplink) {
            let vlan = spec.vlan_code();
            let anyone = (Key::anyone(vlan), port);
            claims.extend(spec.addresses().map(|(mac, how)| Claim::of(Key::of(&mac, vlan), how, port)));
            if !spec.open {
                continue;
            }
            everyone.push(anyone);
            if spec.takes_all_unicast() {
                promiscuous.push(anyone);
            }
            if spec.takes_all_groups() {
                all_groups.push(anyone);
            } else {
                groups.extend(spec.multicast.iter().map(|mac| (Key::of(mac, vlan), port)));
            }
        }
        let addresses = AddressBook::new(claims, &mut entries, before.map(|before| &before.addresses), memory);
        let [everyone, groups, all_groups, promiscuous] = [everyone, groups, all_groups, promiscuous].map(Index::of);
        let ports = Ports { entries, uplink };
        Self { mode, loops_back: false, ports, addresses, everyone, groups, all_groups, promiscuous }
    }

    /// With `loops_back`, each port receives what it sends, and nothing else.
    pub(crate) fn looping_back(self, loops_back: bool) -> Self {
        Self { loops_back, ..self }
    }

    /// True if each port receives what it sends.
    pub(crate) fn loops_back(&self) -> bool {
        self.loops_back
    }

    /// Finds the route of the frame that begins with `head` and has passed the ingress policy of the port `from`: with
    /// the tag of a port VLAN, if it has one.
    ///
    /// A port that is found is in the frame's VLAN. Its egress policy and its driver's filter apply after this.
    ///
    /// # Errors
    ///
    /// The reason why it has no route.
    pub(crate) fn route(&self, from: PortIndex, head: &Head) -> Result<Route<'_>, Miss> {
        let sender = self.ports.get(from).ok_or(Miss::Unknown)?;
        let (vlan, destination) = (head.vlan(), head.destination());
        let from_uplink = sender.role == Role::Uplink;
        if self.loops_back {
            return if from_uplink { Err(Miss::Unknown) } else { Ok(Route::One(from)) };
        }
        if !from_uplink && self.mode == SwitchMode::Vepa {
            return self.to_uplink();
        }
        // A frame that the switch behind the uplink reflects goes to every port except its source.
        let source = (from_uplink && self.mode == SwitchMode::Vepa)
            .then(|| self.addresses.owner(&head.source(), vlan, &self.ports.entries))
            .flatten();
        let to = Destinations::new(&self.ports, from, source, vlan);
        if is_reserved(&destination) {
            if !from_uplink {
                return self.to_uplink();
            }
            return Ok(Route::Many(to.of_pf().with_all(&self.all_groups).with(&self.groups, &destination)));
        }
        if destination == BROADCAST {
            return Ok(Route::Many(to.and_uplink().with_all(&self.everyone)));
        }
        if is_multicast(&destination) {
            let to = to.and_uplink().with_all(&self.all_groups).with(&self.groups, &destination);
            return Ok(Route::Many(to));
        }
        let Some(owner) = self.addresses.owner(&destination, vlan, &self.ports.entries) else {
            let to = to.and_uplink().with_all(&self.promiscuous);
            return if to.is_empty() { Err(Miss::Unknown) } else { Ok(Route::Many(to)) };
        };
        if owner == from || Some(owner) == source {
            Err(Miss::OwnAddress)
        } else if !self.ports.may_meet(from, owner) || source.is_some_and(|source| !self.ports.may_meet(source, owner))
        {
            Err(Miss::Isolated)
        } else if !self.ports.is_open(owner) {
            Err(Miss::Closed(owner))
        } else {
            Ok(Route::One(owner))
        }
    }

    /// The port that gets a copy of a frame that the port `from` sends: an open one in its VLAN, whatever the frame's
    /// destination.
    pub(crate) fn mirror(&self, from: PortIndex, head: &Head) -> Option<PortIndex> {
        let to = self.ports.get(from)?.mirror?;
        let is_member = self.ports.get(to).is_some_and(|entry| entry.sees(head));
        (to != from && is_member && self.ports.is_open(to)).then_some(to)
    }

    /// The number of claims to an address in a VLAN that the port lost to another, so that it gets no frames for the
    /// address there.
    pub(crate) fn conflicts(&self, port: PortIndex) -> u32 {
        self.ports.get(port).map_or(0, |entry| entry.conflicts)
    }

    /// The addresses of drivers, which no table has while their ports are stopped.
    pub(crate) fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        self.addresses.of_drivers().for_each(|(port, mac, since)| memory.add(port, mac, since));
        memory
    }

    fn to_uplink(&self) -> Result<Route<'_>, Miss> {
        match self.ports.uplink {
            None => Err(Miss::Unknown),
            Some(uplink) if self.ports.is_open(uplink) => Ok(Route::One(uplink)),
            Some(uplink) => Err(Miss::Closed(uplink)),
        }
    }
}
