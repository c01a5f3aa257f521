//! The policy and the receive filter of a port, from the registers of an X550's pool.

use std::num::NonZeroU32;

use x550::{Destination, Mac, Nic, Place, Pool, Rss, Switching};

use crate::RateLimits;
use crate::frames::policy::{Policy, PortVlan, Trunk, VlanProtocol, VlanSet};
use crate::net::{Addresses, CarriedNic, Filter, Mode};
use crate::switch::mode::SwitchMode;

/// VLANs: 0 to 4095.
const VLANS: u16 = 4096;

/// The rules of a port.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PoolRules {
    policy: Policy,
    filter: Filter,
    is_up: bool,
}

/// The forwarding mode.
pub(super) fn mode(switching: &Switching) -> SwitchMode {
    // Without pools there is one port, which the mode does not matter to.
    if switching.pools > 1 && !switching.is_veb { SwitchMode::Vepa } else { SwitchMode::Veb }
}

/// The pool of a function.
pub(super) fn pool_of(switching: &Switching, place: Place) -> u16 {
    match place {
        Place::Pf => switching.pf_pool.into(),
        Place::Vf(index) => index,
    }
}

/// The first queue of a function's pool.
pub(super) fn first_queue(nic: &Nic, place: Place) -> u16 {
    nic.pool(pool_of(&nic.switching(), place)).queues.start
}

/// True if a pool receives the frames to an address.
pub(super) fn wants_address(nic: &Nic, pool: &Pool, address: [u8; 6]) -> bool {
    match nic.destination(pool, Mac(address)) {
        Destination::Own | Destination::Broadcast => true,
        Destination::HashedGroup => pool.hashed_groups || pool.all_groups,
        Destination::OtherGroup => pool.all_groups,
        Destination::HashedUnicast | Destination::OtherUnicast => pool.all_unicast,
    }
}

/// The distribution of a function's frames to its queues.
pub(super) fn rss(nic: &Nic, place: Place) -> Rss {
    nic.rss(pool_of(&nic.switching(), place))
}

impl PoolRules {
    /// The rules of a function: those of its pool.
    pub(super) fn of(nic: &Nic, place: Place) -> Self {
        let switching = nic.switching();
        let index = pool_of(&switching, place);
        // Without pools, the PF is the whole NIC.
        let exists = place == Place::Pf || switching.pools > 1;
        Self::of_pool(&nic.pool(index), exists)
    }

    fn of_pool(pool: &Pool, exists: bool) -> Self {
        let is_up = exists && pool.sends;
        let policy = Policy {
            port_vlan: pool.port_vlan.map(|vlan| PortVlan {
                id: vlan.vlan,
                priority: vlan.priority,
                protocol: VlanProtocol::Customer,
            }),
            trunk: (pool.checks_vlan && pool.port_vlan.is_none()).then(|| Trunk {
                // The check concerns tags: frames without one pass.
                vlans: VlanSet::of(
                    (0..VLANS).filter(|vlan| *vlan == 0 || pool.has_vlan(*vlan)).map(|vlan| vlan..=vlan),
                ),
                protocol: VlanProtocol::Customer,
            }),
            spoof_check: pool.checks_mac,
            max_tx_rate: pool.rate.and_then(NonZeroU32::new),
            ..Policy::default()
        };
        let filter = if exists && pool.receives { filter_of(pool) } else { closed(pool) };
        Self { policy, filter, is_up }
    }

    /// Applies the rules to a port's NIC. What has not changed stays: buckets keep their levels.
    /// The link is down while the NIC's is.
    pub(super) fn apply(self, nic: &CarriedNic, has_link: bool) {
        let Self { policy, filter, is_up } = self;
        if **nic.state.filter() != filter {
            nic.state.set_filter(filter);
        }
        if nic.policy.load().policy != policy {
            drop(nic.policy.replace(policy, RateLimits::default()));
        }
        nic.state.set_link_up(is_up && has_link);
    }
}

/// The filter that accepts what the pool does.
fn filter_of(pool: &Pool) -> Filter {
    let own = pool.addresses.iter().map(|mac| mac.0);
    let mut filter = closed(pool);
    filter.set_mode(Mode::NoUnicast, false);
    filter.set_mode(Mode::NoMulticast, false);
    filter.set_mode(Mode::NoBroadcast, !pool.broadcast);
    filter.set_mode(Mode::AllUnicast, pool.all_unicast);
    // The port looks at the hashes of groups itself.
    filter.set_mode(Mode::AllMulticast, pool.all_groups || pool.hashed_groups);
    for mac in own {
        if mac[0] & 1 == 0 { filter.unicast.add(mac) } else { filter.multicast.add(mac) }
    }
    if pool.vlans.iter().any(|bits| *bits != u32::MAX) {
        filter.enable_vlans();
        (0..VLANS).filter(|vlan| pool.has_vlan(*vlan)).for_each(|vlan| _ = filter.set_vlan(vlan, true));
    }
    filter
}

/// The filter of a pool that accepts nothing.
fn closed(pool: &Pool) -> Filter {
    let mut filter = Filter::new(pool.addresses.first().map_or([0; 6], |mac| mac.0));
    // A pool may have all addresses of the NIC, and there are exact entries for each.
    let room = pool.addresses.len();
    (filter.unicast, filter.multicast) = (Addresses::with_room(room), Addresses::with_room(room));
    filter.set_mode(Mode::Promiscuous, false);
    filter.set_mode(Mode::NoUnicast, true);
    filter.set_mode(Mode::NoMulticast, true);
    filter.set_mode(Mode::NoBroadcast, true);
    filter
}
