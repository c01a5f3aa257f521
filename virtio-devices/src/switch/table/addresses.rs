//! The owners of addresses in VLANs.

use super::index::Key;
use super::memory::Memory;
use super::port::{Entry, PortIndex};
use super::vlan::{Outer, vlan_code};
use crate::frames::net_protocol::ethernet::Mac;

/// The origin of a port's address; the first variant wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Set by the host.
    Given,
    /// The function's own address, which its driver may have set.
    Current,
    /// Added by its driver.
    Further,
}

/// Of ports with many VLANs, the most that are checked for one address. Further ones are conflicts.
const MOST: usize = 16;

/// A port's claim to an address. The smaller of two with one key wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    key: Key,
    by_driver: bool,
    /// The table that first had it.
    since: u64,
    further: bool,
    port: PortIndex,
}

impl Claim {
    /// A new claim.
    pub(super) fn of(key: Key, how: How, port: PortIndex) -> Self {
        Self { key, by_driver: how != How::Given, since: 0, further: how == How::Further, port }
    }

    fn wins_against(&self, other: &Self) -> bool {
        let rank = |claim: &Self| (claim.by_driver, claim.since, claim.further, claim.port);
        rank(self) < rank(other)
    }
}

/// The addresses of all ports.
#[derive(Debug)]
pub(super) struct AddressBook {
    /// Sorted by key. Of ports with the same port VLAN, one has an address; of those with many VLANs, a few.
    claims: Box<[Claim]>,
    /// The number of earlier tables.
    number: u64,
}

impl AddressBook {
    /// Settles claims, and counts lost ones at their ports. The age of drivers' claims is from `memory`, unless that is
    /// empty.
    pub(super) fn new(
        mut claims: Vec<Claim>,
        ports: &mut [Entry],
        before: Option<&Self>,
        memory: Option<&Memory>,
    ) -> Self {
        let memory = memory.filter(|memory| !memory.is_empty());
        let number = before.map_or(0, |before| before.number.wrapping_add(1)).max(memory.map_or(0, Memory::next));
        for claim in &mut claims {
            let since = match memory {
                Some(memory) if claim.by_driver => memory.since(claim.port, claim.key.mac()),
                _ => before.and_then(|before| before.since(claim)),
            };
            claim.since = since.unwrap_or(number);
        }
        claims.sort_unstable();
        let mut kept = Vec::with_capacity(claims.len());
        for claims in claims.chunk_by(|one, other| one.key.without_vlan() == other.key.without_vlan()) {
            let (many, fixed) = claims.split_at(claims.partition_point(|claim| claim.key.vlan() == 0));
            let many = settle_many(many, ports);
            kept.extend_from_slice(&many);
            for rivals in fixed.chunk_by(|one, other| one.key == other.key) {
                let Some((first, losers)) = rivals.split_first() else { continue };
                losers.iter().filter(|loser| loser.port != first.port).for_each(|loser| lose(ports, loser));
                for rival in &many {
                    if entry(ports, rival).is_some_and(|port| port.has_vlan(first.key.vlan())) {
                        lose(ports, if first.wins_against(rival) { rival } else { first });
                    }
                }
                kept.push(*first);
            }
        }
        Self { claims: kept.into_boxed_slice(), number }
    }

    /// The port that frames for `mac` with this VLAN tag go to.
    pub(super) fn owner(&self, mac: &Mac, outer: Outer, ports: &[Entry]) -> Option<PortIndex> {
        let many = self.at(Key::of(mac, 0)).find(|claim| entry(ports, claim).is_some_and(|port| port.has(outer)));
        let fixed =
            Some(vlan_code(outer)).filter(|vlan| *vlan != 0).and_then(|vlan| self.at(Key::of(mac, vlan)).next());
        let first = match (many, fixed) {
            (Some(many), Some(fixed)) => {
                if fixed.wins_against(many) {
                    fixed
                } else {
                    many
                }
            }
            (many, fixed) => many.or(fixed)?,
        };
        Some(first.port)
    }

    /// The addresses that drivers have set, with the numbers of the tables that first had them.
    pub(super) fn of_drivers(&self) -> impl Iterator<Item = (PortIndex, Mac, u64)> {
        self.claims.iter().filter(|claim| claim.by_driver).map(|claim| (claim.port, claim.key.mac(), claim.since))
    }

    fn at(&self, key: Key) -> impl Iterator<Item = &Claim> {
        let from = self.claims.partition_point(|claim| claim.key < key);
        self.claims.iter().skip(from).take_while(move |claim| claim.key == key)
    }

    /// The table that first had the port's claim.
    fn since(&self, new: &Claim) -> Option<u64> {
        self.at(new.key).find(|claim| claim.port == new.port).map(|claim| claim.since)
    }
}

/// The relevant claims of ports with many VLANs to one address.
fn settle_many(claims: &[Claim], ports: &mut [Entry]) -> Vec<Claim> {
    let mut kept: Vec<Claim> = Vec::new();
    for claim in claims {
        if kept.iter().any(|other| other.port == claim.port) {
            continue;
        }
        let full = kept.len() == MOST;
        let all_taken = kept.iter().any(|other| entry(ports, other).is_some_and(Entry::has_all));
        let meets = |other| entry(ports, claim).zip(entry(ports, other)).is_some_and(|(one, other)| one.meets(other));
        if full || kept.iter().any(meets) {
            lose(ports, claim);
        }
        if !full && !all_taken {
            kept.push(*claim);
        }
    }
    kept
}

fn entry<'p>(ports: &'p [Entry], claim: &Claim) -> Option<&'p Entry> {
    ports.get(usize::from(claim.port))
}

fn lose(ports: &mut [Entry], claim: &Claim) {
    if let Some(port) = ports.get_mut(usize::from(claim.port)) {
        port.conflicts = port.conflicts.saturating_add(1);
    }
}
