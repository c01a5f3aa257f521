//! A peer's log of its writes to guest memory.

use super::super::message::*;
use super::*;
use crate::{SharedLog, VirtioDevice};

/// The pages that were written, by number.
fn taken(log: &SharedLog) -> Vec<u64> {
    let mut pages = Vec::new();
    log.take(|first, bits| pages.extend((0..64).filter(|page| bits & 1 << page != 0).map(|page| first + page)));
    pages
}

/// The pages that a frame to the driver changes: a buffer and the used ring.
fn expected() -> [u64; 2] {
    [0xa000 / 4096, BUFFERS / 4096]
}

#[test]
fn a_peers_writes_are_logged_only_while_the_log_is_on() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.start_with(guest.device.features());
    peer.await_heard("STATUS 15");
    rig.check_traffic(&mut guest, 60);
    let (user, log) = (guest.device.memory_user().unwrap(), Arc::new(SharedLog::new(&rig.map).unwrap()));
    assert!(user.logs_writes());
    peer.heard();
    user.set_log(Some(&log)).unwrap();
    let features = "SET_FEATURES 0x144018029";
    let rings = ["ADDR 0 log=0xa000", "ADDR 1 log=0x1a000"];
    assert_eq!(peer.heard(), ["LOG_BASE fds=1", rings[0], rings[1], features]);
    assert!(taken(&log).is_empty(), "what was written before");
    rig.check_traffic(&mut guest, 61);
    assert_eq!(taken(&log), expected());
    assert!(taken(&log).is_empty());

    user.set_log(None).unwrap();
    assert_eq!(peer.heard(), ["ADDR 0", "ADDR 1", "SET_FEATURES 0x140018029"]);
    rig.check_traffic(&mut guest, 62);
    assert!(taken(&log).is_empty());
    assert!(!guest.device.backend_lost());
}

#[test]
fn a_driver_started_while_the_log_is_on_is_logged_at_once() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    let log = Arc::new(SharedLog::new(&rig.map).unwrap());
    guest.device.memory_user().unwrap().set_log(Some(&log)).unwrap();
    peer.heard();
    guest.start_with(guest.device.features());
    let heard = peer.await_heard("STATUS 15");
    assert_eq!(heard[..2], ["LOG_BASE fds=1", "SET_FEATURES 0x144018029"]);
    assert!(heard.contains(&"ADDR 0 log=0xa000".to_owned()), "{heard:?}");
    rig.check_traffic(&mut guest, 60);
    assert_eq!(taken(&log), expected());
    // The log is read last: writes up to the stop are in it.
    guest.provide(0, 1, 2048);
    send(&rig.wire, &with_header(&frame(MAC, 60)));
    eventually("reception", || !guest.queues[0].take_used().is_empty());
    guest.stop();
    assert!(!taken(&log).is_empty());
}

#[test]
fn a_successor_logs_too_and_one_that_cannot_is_refused() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.start_with(guest.device.features());
    let log = Arc::new(SharedLog::new(&rig.map).unwrap());
    guest.device.memory_user().unwrap().set_log(Some(&log)).unwrap();
    drop(peer);
    await_loss(&guest, true);
    let unfit = rig.peer(Script::new(1).without(&[PROTOCOL_F_LOG_SHMFD]));
    eventually("a visit", || unfit.connections() > 0);
    drop(unfit);
    assert!(guest.device.backend_lost());
    let _peer = rig.peer(Script::new(1));
    await_loss(&guest, false);
    taken(&log);
    rig.check_traffic(&mut guest, 60);
    assert_eq!(taken(&log), expected());
}

#[test]
fn a_peer_without_a_dirty_log_is_known_before_any_request() {
    for script in [
        Script::new(1).without(&[PROTOCOL_F_LOG_SHMFD]),
        Script { features: Script::new(1).features & !(1 << 26), ..Script::new(1) },
    ] {
        let rig = Rig::new();
        let peer = rig.peer(script);
        let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
        guest.start_with(guest.device.features());
        peer.await_heard("STATUS 15");
        rig.check_traffic(&mut guest, 60);
        peer.heard();
        let (user, log) = (guest.device.memory_user().unwrap(), Arc::new(SharedLog::new(&rig.map).unwrap()));
        assert!(!user.logs_writes());
        let error = user.set_log(Some(&log)).unwrap_err().to_string();
        assert_eq!(error, "cannot log what the backend writes: the peer has no dirty log");
        assert!(peer.heard().is_empty());
        rig.check_traffic(&mut guest, 60);
    }
}

#[test]
fn drivers_are_not_offered_the_log() {
    let rig = Rig::new();
    let _peer = rig.peer(Script::new(1));
    assert_eq!(rig.guest(rig.connect(1).unwrap(), 1).device.features() & 1 << 26, 0);
}
