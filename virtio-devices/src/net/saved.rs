//! A NIC's saved state.

use virtio_bindings::virtio_net::*;

use super::filter::{Addresses, Filter, Mac, Mode, is_multicast};
use super::state::NetState;
use crate::frames::net_protocol::features::{guest_offload_bits, guest_offload_features, guest_offloads};
use crate::state::{AddressesState, BucketsState, HeldAddress, NicState, StateError};
use crate::transport::features::has;

/// A number that no switch's tables ever reach.
const MAX_SINCE: u64 = 1 << 62;

/// The power-on state of a NIC with this address.
pub(crate) fn power_on(mac: Mac) -> NicState {
    save(&NetState::new(mac, true, 0))
}

/// The state that the driver has set; without the levels of limits, which are the host's.
pub(crate) fn save(state: &NetState) -> NicState {
    let filter = state.filter();
    let addresses =
        |table: &Addresses| AddressesState { addresses: table.addresses().to_vec(), overflow: table.overflow() };
    NicState {
        mac: state.mac(),
        link_up: state.link().is_wanted(),
        generation: state.generation(),
        active_pairs: state.active_pairs(),
        offloads: guest_offload_features(state.offloads()),
        modes: Mode::ALL.map(|mode| filter.mode(mode)),
        unicast: addresses(&filter.unicast),
        multicast: addresses(&filter.multicast),
        vlans: filter.vlans(),
        announce: state.announces(),
        buckets: BucketsState::default(),
        held: Vec::new(),
    }
}

/// Checks that `state` is possible without any command of a driver: only the link and the generation may differ, and
/// limits outlive resets.
pub(crate) fn check_reset(state: &NicState, power_on: &NicState) -> Result<(), StateError> {
    let (link_up, buckets) = (state.link_up, state.buckets.clone());
    check_held(state)?;
    let held = state.held.clone();
    let reset = NicState { link_up, generation: state.generation, buckets, held, ..power_on.clone() };
    if *state == reset { Ok(()) } else { Err(StateError::Value("a NIC that was not started")) }
}

/// Checks that a driver with these features and `pairs` queue pairs could have set `state` by commands.
pub(crate) fn check(state: &NicState, power_on: &NicState, features: u64, pairs: u16) -> Result<(), StateError> {
    let claim = |holds, what| if holds { Ok(()) } else { Err(StateError::Value(what)) };
    let NicState { mac, active_pairs, offloads, modes, unicast, multicast, vlans, announce, held: _, .. } = state;
    let is_address = !is_multicast(mac) && *mac != [0; 6];
    claim(*mac == power_on.mac || has(features, VIRTIO_NET_F_CTRL_MAC_ADDR) && is_address, "a NIC's address")?;
    claim((1..=pairs).contains(active_pairs), "a NIC's queue pairs")?;
    claim(offloads & !(features & guest_offload_bits()) == 0, "a NIC's offloads")?;
    let (basic, extra) = modes.split_at(Mode::AllUnicast as usize);
    let (basic_reset, extra_reset) = power_on.modes.split_at(basic.len());
    let filtered = basic != basic_reset || *unicast != power_on.unicast || *multicast != power_on.multicast;
    claim(!filtered || has(features, VIRTIO_NET_F_CTRL_RX), "a NIC's receive filter")?;
    claim(extra == extra_reset || has(features, VIRTIO_NET_F_CTRL_RX_EXTRA), "a NIC's receive modes")?;
    claim(vlans.is_none() || has(features, VIRTIO_NET_F_CTRL_VLAN), "a NIC's VLANs")?;
    check_held(state)?;
    claim(!announce || has(features, VIRTIO_NET_F_GUEST_ANNOUNCE), "a NIC's announcement")
}

/// True if an address on a switch is the NIC's own or set by its driver.
pub(crate) fn is_own(mac: Mac, unicast: &AddressesState, held: &HeldAddress) -> bool {
    held.address == mac || unicast.addresses.contains(&held.address)
}

/// Checks that the NIC's addresses on a switch are its own, each once, and of possible age.
fn check_held(state: &NicState) -> Result<(), StateError> {
    let mut held = (0..).zip(&state.held);
    let holds = held.all(|(at, held)| {
        let is_first = !state.held.iter().take(at).any(|other| other.address == held.address);
        is_own(state.mac, &state.unicast, held) && held.since < MAX_SINCE && is_first
    });
    if holds { Ok(()) } else { Err(StateError::Value("a NIC's addresses on a switch")) }
}

/// Restores a NIC from `state`, with the commands of a driver.
pub(crate) fn restored(state: &NicState) -> Result<NetState, StateError> {
    let mut filter = Filter::new(state.mac);
    for (mode, on) in Mode::ALL.into_iter().zip(state.modes) {
        filter.set_mode(mode, on);
    }
    filter.unicast = table(&state.unicast);
    filter.multicast = table(&state.multicast);
    if let Some(vlans) = &state.vlans {
        filter.enable_vlans();
        for id in vlans {
            filter.set_vlan(*id, true);
        }
    }
    let new = NetState::new(state.mac, state.link_up, state.generation).with_filter(filter);
    new.set_active_pairs(state.active_pairs);
    new.set_offloads(guest_offloads(state.offloads));
    let new = new.with_announce(state.announce);
    let saved = NicState { buckets: state.buckets.clone(), held: state.held.clone(), ..save(&new) };
    if saved == *state { Ok(new) } else { Err(StateError::Value("a NIC's receive filter")) }
}

fn table(state: &AddressesState) -> Addresses {
    let mut addresses = Addresses::new();
    state.addresses.iter().for_each(|address| addresses.add(*address));
    if state.overflow {
        // An address beyond the room sets the flag; if there was room, the comparison with the saved state finds it.
        addresses.add([0; 6]);
    }
    addresses
}
