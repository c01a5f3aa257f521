//! The transfer of a peer's own state from one peer to another.

use super::super::message::*;
use super::peer::Saves;
use super::*;
use crate::{MAX_DEVICE_STATE, MemoryUser, RunnerError, VirtioDevice};

/// Long enough for a peer that behaves.
const LONG: Duration = Duration::from_secs(30);
/// The time limit for peers that do not.
const SHORT: Duration = Duration::from_secs(3);

/// A NIC over such a peer, whose queues have run and are stopped.
fn stopped(rig: &Rig, script: Script) -> (TestPeer, Guest, MemoryUser) {
    let peer = rig.peer(script);
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    guest.stop();
    peer.heard();
    let user = guest.device.memory_user().unwrap();
    (peer, guest, user)
}

fn save(user: &MemoryUser, time: Duration) -> Result<Option<Vec<u8>>, RunnerError> {
    user.save_state(Instant::now() + time)
}

fn error<T: std::fmt::Debug>(result: Result<T, RunnerError>) -> String {
    result.unwrap_err().to_string()
}

/// Checks that the peer's rings continue over the same connection.
fn goes_on(rig: &Rig, (peer, guest): (&TestPeer, &mut Guest)) {
    guest.start_with(guest.device.features());
    rig.check_traffic(guest, 61);
    assert_eq!(peer.connections(), 1);
}

#[test]
fn a_stopped_peers_state_is_loaded_before_anothers_rings_run() {
    // More than a pipe holds.
    let state: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
    let rig = Rig::new();
    let (peer, mut guest, user) = stopped(&rig, Script { state: (state.clone(), Saves::All), ..Script::new(1) });
    assert!(user.has_state());
    assert_eq!(save(&user, LONG).unwrap().as_deref(), Some(&state[..]));
    assert_eq!(peer.heard(), ["STATE save"], "it is not asked yet whether that was all: it might end then");
    user.confirm_state(Instant::now() + LONG).unwrap();
    assert_eq!(peer.heard(), ["CHECK"]);
    goes_on(&rig, (&peer, &mut guest));

    let there = Rig::new();
    let target = there.peer(Script::new(1));
    let mut guest = there.guest(there.connect(1).unwrap(), 1);
    target.heard();
    guest.device.memory_user().unwrap().load_state(&state, Instant::now() + LONG).unwrap();
    assert_eq!((target.heard(), target.loaded()), (vec!["STATE load".into(), "CHECK".into()], Some(state)));
    goes_on(&there, (&target, &mut guest));
}

#[test]
fn the_queues_of_a_peer_whose_state_is_taken_do_not_run() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    guest.start_with(guest.device.features());
    peer.await_heard("STATUS 15");
    rig.check_traffic(&mut guest, 60);
    peer.heard();
    let said = error(save(&guest.device.memory_user().unwrap(), SHORT));
    assert_eq!(said, "cannot reach the backend's own state: its queues run");
    assert!(peer.heard().is_empty());
    rig.check_traffic(&mut guest, 61);
}

#[test]
fn a_peer_that_cannot_save_continues_afterwards() {
    let script = Script::new(1);
    let huge = vec![1; MAX_DEVICE_STATE + 1];
    for (script, expected) in [
        (Script { refused: vec![Request::SET_DEVICE_STATE_FD], ..script.clone() }, "the peer refuses it"),
        (Script { state: (vec![1; 9], Saves::WithoutEnd), ..script.clone() }, "not complete in time"),
        (Script { state: (huge, Saves::All), ..script.clone() }, "more than 16777216 bytes come"),
        (Script { state: (vec![1; 9], Saves::ByOwnPipe), ..script }, "the peer wants to use a pipe of its own"),
    ] {
        let rig = Rig::new();
        let time = if script.state.1 == Saves::WithoutEnd { SHORT } else { LONG };
        let (peer, mut guest, user) = stopped(&rig, script);
        let begun = Instant::now();
        let said = error(save(&user, time));
        assert!(said.starts_with("cannot save the backend's own state: SET_DEVICE_STATE_FD: "), "{said}");
        assert!(said.contains(expected), "{said}");
        assert!(begun.elapsed() < time + Duration::from_secs(10), "{:?}", begun.elapsed());
        goes_on(&rig, (&peer, &mut guest));
    }
}

#[test]
fn a_state_of_the_greatest_length_is_taken() {
    let rig = Rig::new();
    let state = vec![7; MAX_DEVICE_STATE];
    let (_peer, _guest, user) = stopped(&rig, Script { state: (state.clone(), Saves::All), ..Script::new(1) });
    assert!(save(&user, LONG).unwrap() == Some(state));
}

#[test]
fn a_peer_reporting_an_incomplete_save_fails_it_and_continues() {
    let rig = Rig::new();
    let (peer, mut guest, user) = stopped(&rig, Script { verdict: 1, ..Script::new(1) });
    assert!(save(&user, LONG).unwrap().is_some());
    let said = error(user.confirm_state(Instant::now() + LONG));
    assert_eq!(said, "cannot save all of the backend's own state: CHECK_DEVICE_STATE: the peer refuses it");
    goes_on(&rig, (&peer, &mut guest));
}

#[test]
fn a_peer_that_dies_meanwhile_has_not_saved_its_state() {
    let rig = Rig::new();
    let (peer, guest, user) = stopped(&rig, Script { state: (vec![1; 9], Saves::AndDies), ..Script::new(1) });
    let saved = save(&user, LONG);
    // The end of its pipe may arrive a moment before that of its connection.
    let all = saved.and_then(|_| user.confirm_state(Instant::now() + LONG));
    assert!(error(all).contains("the peer closed the connection"));
    drop(peer);
    // Without a peer there is nothing to be saved, and it is no error.
    assert_eq!(save(&user, LONG).unwrap(), None);
    drop(guest);
}

#[test]
fn a_peer_that_does_not_confirm_its_state_in_time_is_lost() {
    let rig = Rig::new();
    let (peer, mut guest, user) = stopped(&rig, Script { mute: vec![Request::CHECK_DEVICE_STATE], ..Script::new(1) });
    assert!(save(&user, LONG).unwrap().is_some());
    let begun = Instant::now();
    let said = error(user.confirm_state(begun + SHORT));
    assert!(said.contains("CHECK_DEVICE_STATE: no answer within"), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    // A late answer would be mistaken for another: the connection is made again.
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 61);
    assert_eq!(peer.connections(), 2);
}

#[test]
fn a_peer_that_does_not_load_a_state_fails_the_restore() {
    let script = Script::new(1);
    let without = script.clone().without(&[PROTOCOL_F_DEVICE_STATE]);
    for (script, expected) in [
        (Script { refused: vec![Request::SET_DEVICE_STATE_FD], ..script.clone() }, "SET_DEVICE_STATE_FD: the peer"),
        (Script { verdict: 5, ..script }, "CHECK_DEVICE_STATE: the peer refuses it"),
        (without, "SET_DEVICE_STATE_FD: the peer refuses it"),
    ] {
        let rig = Rig::new();
        let peer = rig.peer(script);
        let guest = rig.guest(rig.connect(1).unwrap(), 1);
        let user = guest.device.memory_user().unwrap();
        let said = error(user.load_state(b"a state", Instant::now() + LONG));
        assert!(said.starts_with("cannot load the backend's own state: ") && said.contains(expected), "{said}");
        assert_eq!(peer.connections(), 1);
    }
}

#[test]
fn a_peer_without_such_a_state_is_asked_for_none() {
    let rig = Rig::new();
    let script = Script::new(1).without(&[PROTOCOL_F_DEVICE_STATE]);
    let (peer, mut guest, user) = stopped(&rig, script);
    assert!(!user.has_state());
    assert_eq!(save(&user, LONG).unwrap(), None);
    assert!(peer.heard().is_empty());
    goes_on(&rig, (&peer, &mut guest));
}
