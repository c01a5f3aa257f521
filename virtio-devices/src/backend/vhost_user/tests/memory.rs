//! Guest memory that changes while a peer has it mapped.

use super::super::message::*;
use super::*;
use crate::{GuestMap, VirtioDevice};

const MORE: u64 = 1 << 32;
const LEN: u64 = 1 << 20;

/// The regions of [`grown`] memory, up to `count` further ones.
fn regions(count: u64) -> Vec<(u64, u64)> {
    std::iter::once((0, MEMORY)).chain((0..count).map(|n| (MORE + n * LEN, LEN))).collect()
}

/// `map` with `count` further regions.
fn many(map: &GuestMap, count: u64) -> GuestMap {
    (0..count).fold(map.clone(), |map, n| grown(&map, MORE + n * LEN, LEN))
}

#[test]
fn a_running_peer_gets_new_memory_and_its_rings_continue() {
    for (without, expected) in [
        (&[][..], &["ADD_MEM_REG 0x100000000 fds=1"][..]),
        (&[PROTOCOL_F_CONFIGURE_MEM_SLOTS], &["SET_MEM_TABLE 2 fds=2"]),
        (&[PROTOCOL_F_REPLY_ACK], &["ADD_MEM_REG 0x100000000 fds=1", "GET_FEATURES"]),
    ] {
        let rig = Rig::new();
        let peer = rig.peer(Script::new(1).without(without));
        let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
        guest.start_with(guest.device.features());
        rig.check_traffic(&mut guest, 60);
        peer.heard();
        guest.device.memory_user().unwrap().set(&many(&rig.map, 1)).unwrap();
        // The status of the start is not confirmed, and may arrive late.
        let heard = peer.heard().into_iter().filter(|message| !message.starts_with("STATUS "));
        assert_eq!(heard.collect::<Vec<_>>(), expected);
        assert_eq!(peer.regions(), regions(1));
        rig.check_traffic(&mut guest, 61);
        assert!(!guest.device.backend_lost());
    }
}

#[test]
fn a_peer_whose_driver_is_not_up_is_updated_without_a_worker() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.device.memory_user().unwrap().set(&many(&rig.map, 2)).unwrap();
    assert_eq!(peer.regions(), regions(2));
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn other_memory_replaces_what_a_stopped_peer_has() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.device.memory_user().unwrap().set(&many(&rig.map, 3)).unwrap();
    peer.heard();
    guest.device.memory_user().unwrap().set(&rig.map).unwrap();
    assert_eq!(peer.heard(), ["SET_MEM_TABLE 1 fds=1"]);
    assert_eq!(peer.regions(), regions(0));
}

#[test]
fn a_peer_that_refuses_new_memory_continues_with_the_old() {
    let refuses_slot = Script { refused: vec![Request::ADD_MEM_REG], ..Script::new(1) };
    let too_few = Script { memory_slots: 4, ..Script::new(1) };
    for (script, count) in
        [(refuses_slot, 1), (too_few, 8), (Script::new(1).without(&[PROTOCOL_F_CONFIGURE_MEM_SLOTS]), 8)]
    {
        let rig = Rig::new();
        let peer = rig.peer(script);
        let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
        guest.start_with(guest.device.features());
        let error = guest.device.memory_user().unwrap().set(&many(&rig.map, count)).unwrap_err().to_string();
        assert!(error.starts_with("cannot have the backend map the guest's new memory: "), "{error}");
        assert!(error.ends_with("the peer refuses it"), "{error}");
        assert_eq!(peer.regions(), regions(0));
        rig.check_traffic(&mut guest, 60);
        assert!(!guest.device.backend_lost());
    }
}

#[test]
fn a_successor_maps_current_memory_even_beyond_a_memory_table() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    drop(peer);
    await_loss(&guest, true);
    guest.device.memory_user().unwrap().set(&many(&rig.map, 9)).unwrap();
    let peer = rig.peer(Script::new(1));
    await_loss(&guest, false);
    assert_eq!(peer.regions(), regions(9));
    let heard = peer.heard();
    let added: Vec<_> = heard.iter().filter(|heard| heard.starts_with("ADD_MEM_REG")).collect();
    assert!(heard.contains(&"SET_MEM_TABLE 8 fds=8".to_string()) && added.len() == 2, "{heard:?}");
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn connecting_with_more_regions_than_the_peer_takes_is_refused() {
    let rig = Rig::new();
    let map = many(&rig.map, 8);
    let _peer = rig.peer(Script::new(1).without(&[PROTOCOL_F_CONFIGURE_MEM_SLOTS]));
    let refused = VhostUser::connect(rig.spec(1), &Memory::new(map)).unwrap_err().to_string();
    assert!(refused.ends_with("guest memory has 9 regions, and the backend takes 8; give it fewer"), "{refused}");
}
