//! A driver over a peer that runs its queues, dies and comes back.

use std::time::{Duration, Instant};

use virtio_bindings::virtio_net::*;
use virtio_queue::QueueT;

use super::super::message::*;
use super::peer::CONFIG;
use super::*;
use crate::{QueueRunner, VirtioDevice};

/// The configuration with the link down.
fn link_down() -> [u8; 12] {
    let mut config = CONFIG;
    config[6] = 0;
    config
}

/// A guest whose driver runs over a peer with one pair.
fn run(rig: &Rig, script: Script) -> (TestPeer, Guest) {
    let peer = rig.peer(script);
    let mut guest = rig.guest(rig.connect(1).unwrap(), 1);
    peer.heard();
    guest.start_with(guest.device.features());
    (peer, guest)
}

fn positions(guest: &Guest) -> [(u16, u16); 2] {
    [0, 1].map(|n: usize| {
        let queue = guest.queues[n].queue.lock();
        (queue.next_avail(), queue.next_used())
    })
}

#[test]
fn rings_are_set_up_then_enabled_and_disabled_then_stopped() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    // VERSION_1 and protocol features, checksums, MTU, address, merged buffers and link; not the control queue.
    let mut expected = vec!["SET_FEATURES 0x140018029", "STATUS 11", "GET_STATUS"];
    expected.extend(["GET_INFLIGHT queues=2 of 16", "SET_INFLIGHT queues=2 of 16 size=4096 fds=1"]);
    expected.extend(["NUM 0=16", "BASE 0=0", "ADDR 0", "CALL 0", "ERR 0"]);
    expected.extend(["NUM 1=16", "BASE 1=0", "ADDR 1", "CALL 1", "ERR 1"]);
    expected.extend(["KICK 0", "KICK 1", "ENABLE 0=1", "ENABLE 1=1", "STATUS 15"]);
    assert_eq!(peer.await_heard("STATUS 15"), expected);
    guest.stop();
    assert_eq!(peer.heard(), ["ENABLE 0=0", "GET_BASE 0", "ENABLE 1=0", "GET_BASE 1", "STATUS 0"]);
}

#[test]
fn without_acknowledgements_a_last_request_confirms_the_setup() {
    let rig = Rig::new();
    let script = Script::new(1).without(&[PROTOCOL_F_REPLY_ACK, PROTOCOL_F_STATUS, PROTOCOL_F_INFLIGHT_SHMFD]);
    let (peer, mut guest) = run(&rig, script);
    let heard = peer.await_heard("GET_FEATURES");
    assert_eq!(heard[0], "SET_FEATURES 0x140018029");
    assert_eq!(heard.len(), 1 + 12 + 2 + 1);
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn frames_pass_both_ways_and_after_a_stop_without_a_reset() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    for round in 0..20 {
        rig.check_traffic(&mut guest, 60 + usize::from(round));
        guest.stop();
        assert_eq!(positions(&guest), [(round + 1, round + 1); 2]);
        peer.heard();
        guest.start_with(guest.device.features());
        assert!(peer.await_heard("STATUS 15").contains(&format!("BASE 1={}", round + 1)));
    }
    guest.device.reset();
    assert_eq!(peer.connections(), 1);
}

#[test]
fn buffers_that_a_peer_holds_when_it_stops_are_not_taken_again() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script { keeps_buffers: true, ..Script::new(1) });
    guest.queues[1].send(BUFFERS, &with_header(&frame(OTHER, 60)), &[12]);
    guest.kick(1);
    eventually("the buffer's taking", || peer.kept() == 1);
    guest.stop();
    assert_eq!(positions(&guest), [(0, 0), (1, 0)]);
}

#[test]
fn a_dead_peer_takes_the_link_down_until_a_successor_takes_over() {
    let rig = Rig::new();
    let (mut peer, mut guest) = run(&rig, Script::new(1));
    for round in 1..4 {
        rig.check_traffic(&mut guest, 60);
        drop(peer);
        await_loss(&guest, true);
        assert!(!guest.device.link_up());
        peer = rig.peer(Script::new(1));
        await_loss(&guest, false);
        assert!(guest.device.link_up());
        rig.check_traffic(&mut guest, 1000);
        assert!(peer.heard().contains(&format!("BASE 0={}", 2 * round - 1)));
    }
}

#[test]
fn a_successor_completes_buffers_that_a_dead_peer_had_taken() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script { keeps_buffers: true, ..Script::new(1) });
    guest.queues[1].send(BUFFERS, &with_header(&frame(OTHER, 77)), &[12]);
    guest.kick(1);
    eventually("the buffer's taking", || peer.kept() == 1);
    drop(peer);
    await_loss(&guest, true);
    while guest.interrupts.eventfd(0).unwrap().read().is_ok() {}
    let successor = rig.peer(Script::new(1));
    eventually("the frame", || receive(&rig.wire) == Some(with_header(&frame(OTHER, 77))));
    eventually("the buffer's return", || guest.queues[1].take_used().len() == 1);
    let heard = successor.heard();
    assert!(!heard.iter().any(|heard| heard.starts_with("GET_INFLIGHT")), "{heard:?}");
    assert!(heard.contains(&"SET_INFLIGHT queues=2 of 16 size=4096 fds=1".to_owned()));
    eventually("a word for what may have gone unsaid", || guest.interrupts.eventfd(0).unwrap().read().is_ok());
}

#[test]
fn a_successor_gets_the_inflight_state_of_a_failed_start() {
    let rig = Rig::new();
    let (peer, guest) = run(&rig, Script { refused: vec![Request::SET_VRING_ENABLE], ..Script::new(1) });
    await_loss(&guest, true);
    assert!(peer.heard().contains(&"GET_INFLIGHT queues=2 of 16".to_owned()));
    drop(peer);
    let successor = rig.peer(Script::new(1));
    let heard = successor.await_heard("STATUS 15");
    assert!(!heard.iter().any(|heard| heard.starts_with("GET_INFLIGHT")), "{heard:?}");
}

#[test]
fn memory_for_what_is_in_flight_is_new_for_a_new_driver() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    peer.await_heard("STATUS 15");
    drop(peer);
    await_loss(&guest, true);
    guest.stop();
    guest.device.reset();
    let successor = rig.peer(Script::new(1));
    guest.start_with(guest.device.features());
    let heard = successor.await_heard("STATUS 15");
    assert!(heard.contains(&"GET_INFLIGHT queues=2 of 16".to_owned()), "{heard:?}");
}

#[test]
fn a_successor_with_fewer_features_is_refused_until_one_fits() {
    let rig = Rig::new();
    let path = rig.path().display().to_string();
    record_log();
    let (peer, mut guest) = run(&rig, Script::new(1));
    rig.check_traffic(&mut guest, 60);
    drop(peer);
    let mut less = Script::new(1);
    less.features &= !(1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_MRG_RXBUF);
    let peer = rig.peer(less);
    eventually("three attempts", || peer.connections() >= 3);
    eventually("a refusal", || logged(&path).len() >= 2);
    let lacks = |times| {
        format!("{path}: the backend that came back is refused ({times} so far): it lacks the feature bits 0, 15")
    };
    assert_eq!(logged(&path)[..2], [lacks(1), lacks(2)]);
    assert!(guest.device.backend_lost());
    drop(peer);
    let _peer = rig.peer(Script::new(1));
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn a_property_that_no_driver_has_read_may_change() {
    let rig = Rig::new();
    let first = rig.peer(Script::new(1));
    let backend = rig.connect(1).unwrap();
    let spec =
        crate::NetSpec { offload_csum: false, offload_tso: false, offload_ufo: false, mtu: Some(1300), ..spec(1, 16) };
    let mut guest = Guest::over_in(spec, backend, rig.map.clone());
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    drop(first);
    await_loss(&guest, true);
    let mut less = Script::new(1);
    less.features &= !(1 << VIRTIO_NET_F_CSUM);
    less.config[10..].copy_from_slice(&1350u16.to_le_bytes());
    let _peer = rig.peer(less);
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn features_pairs_and_mtu_must_be_equal_after_a_restore() {
    let rig = Rig::new();
    let first = rig.peer(Script::new(2));
    let mut backend = rig.connect(2).unwrap();
    drop(first);
    let mut comes_back = |change: fn(&mut Script)| {
        let mut script = Script::new(2);
        change(&mut script);
        let _peer = rig.peer(script);
        backend.recover().map_err(|error| error.to_string())
    };
    let lacks = |what: &str| Err(format!("cannot negotiate with the backend: it lacks {what}"));
    assert_eq!(comes_back(|script| script.features &= !(1 << VIRTIO_NET_F_CSUM)), lacks("the feature bits 0"));
    assert_eq!(comes_back(|script| script.config[10] = 0x77), lacks("an MTU of 1400: its own is 1399"));
    assert_eq!(comes_back(|script| script.queue_num = 1), lacks("2 pairs of queues"));
    // Additional features are accepted, and features that no NIC is offered do not matter.
    assert_eq!(comes_back(|script| script.features |= 1 << 26), Ok(()));
    assert_eq!(comes_back(|script| script.features &= !(1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)), Ok(()));
    assert_eq!(comes_back(|script| script.config[10] = 0x79), Ok(()));
}

#[test]
fn guest_memory_is_mapped_when_a_peer_connects_not_at_a_start() {
    for without in [&[][..], &[PROTOCOL_F_REPLY_ACK]] {
        let rig = Rig::new();
        let peer = rig.peer(Script { maps_late: true, ..Script::new(1).without(without) });
        let backend = std::thread::scope(|scope| {
            let connected = scope.spawn(|| rig.connect(1));
            eventually("the last question before", || peer.heard().iter().any(|heard| heard == "GET_QUEUE_NUM"));
            peer.let_map(true);
            connected.join().unwrap().unwrap()
        });
        let mut guest = rig.guest(backend, 1);
        for _ in 0..2 {
            guest.start_with(guest.device.features());
            rig.check_traffic(&mut guest, 60);
            guest.stop();
        }
        assert_eq!(peer.heard().iter().filter(|heard| heard.starts_with("SET_MEM_TABLE")).count(), 1);
    }
}

#[test]
fn a_successor_slow_to_map_memory_delays_no_command_or_stop() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    rig.check_traffic(&mut guest, 60);
    drop(peer);
    await_loss(&guest, true);
    let successor = rig.peer(Script { maps_late: true, ..Script::new(1) });
    eventually("the last question before", || successor.heard().iter().any(|heard| heard == "GET_QUEUE_NUM"));
    // It is awaited for a moment; then the worker serves other events before it waits again.
    for _ in 0..3 {
        assert_eq!(guest.command(2, &[0, 0, 1]), 0);
        assert!(guest.device.backend_lost());
        guest.stop();
        guest.start_with(guest.device.features());
    }
    assert_eq!(successor.connections(), 1);
    successor.let_map(true);
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn a_successor_that_dies_while_mapping_memory_is_replaced_too() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    drop(peer);
    await_loss(&guest, true);
    let successor = rig.peer(Script { maps_late: true, ..Script::new(1) });
    eventually("the last question before", || successor.heard().iter().any(|heard| heard == "GET_QUEUE_NUM"));
    drop(successor);
    let _peer = rig.peer(Script::new(1));
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn a_ring_that_the_peer_refuses_needs_a_reset_and_is_not_a_loss() {
    let rig = Rig::new();
    let script = Script { refused: vec![Request::SET_VRING_ADDR], ..Script::new(1) };
    let (peer, mut guest) = run(&rig, script);
    eventually("the request for a reset", || guest.interrupts.needs_reset());
    assert!(!guest.device.backend_lost() && guest.device.link_up());
    guest.stop();
    let heard = peer.heard();
    assert!(!heard.iter().any(|heard| heard.starts_with("KICK")), "{heard:?}");
    assert_eq!(peer.connections(), 1);
}

#[test]
fn a_server_keeps_its_socket_for_peers_that_come_later() {
    let rig = Rig::new();
    let call = || TestPeer::call(rig.path(), Script::new(1), Arc::clone(&rig.near));
    let mut peer = call();
    let spec = rig.server_spec();
    let mut guest = rig.guest(VhostUser::connect(spec, &Memory::new(rig.map.clone())).unwrap(), 1);
    guest.start_with(guest.device.features());
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        rig.check_traffic(&mut guest, 60);
        drop(peer);
        await_loss(&guest, true);
        let start = Instant::now();
        peer = call();
        await_loss(&guest, false);
        fastest = fastest.min(start.elapsed());
    }
    // A client is called each second; a server waits for its peer. Some rounds may be those of a busy machine.
    assert!(fastest < Duration::from_millis(900), "it is not waited for: {fastest:?}");
    rig.check_traffic(&mut guest, 60);
    assert!(rig.path().exists());
    drop(guest);
    eventually("the socket's end", || !rig.path().exists());
}

#[test]
fn an_unfit_peer_that_keeps_connecting_is_tried_once_a_second() {
    let rig = Rig::new();
    let call = |script| TestPeer::call(rig.path(), script, Arc::clone(&rig.near));
    let peer = call(Script::new(1));
    let spec = rig.server_spec();
    let mut guest = rig.guest(VhostUser::connect(spec, &Memory::new(rig.map.clone())).unwrap(), 1);
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    drop(peer);
    await_loss(&guest, true);
    let start = Instant::now();
    let unfit = call(Script { features: 0, ..Script::new(1) });
    let questions = || unfit.heard().iter().filter(|heard| *heard == "GET_FEATURES").count();
    let mut asked = 0;
    eventually("three attempts", || {
        asked += questions();
        asked >= 3
    });
    assert!(start.elapsed() > Duration::from_millis(1900), "{:?}", start.elapsed());
    drop(unfit);
    let _peer = call(Script::new(1));
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn a_peer_s_link_is_the_driver_s() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    peer.await_heard("STATUS 15");
    assert!(guest.device.link_up());
    let told = |guest: &Guest| guest.interrupts.eventfd(guest.interrupts.config_vector()).unwrap().read().is_ok();
    peer.set_config(&link_down());
    eventually("the link", || !guest.device.link_up());
    eventually("its interrupt", || told(&guest));
    peer.set_config(&CONFIG);
    eventually("the link", || guest.device.link_up());
    drop(peer);
    await_loss(&guest, true);
    let peer = rig.peer(Script { config: link_down().to_vec(), ..Script::new(1) });
    await_loss(&guest, false);
    eventually("the link", || !guest.device.link_up());
    peer.set_config(&CONFIG);
    eventually("the link", || guest.device.link_up());
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn a_broken_ring_reported_by_the_peer_sets_needs_reset() {
    let rig = Rig::new();
    let (peer, guest) = run(&rig, Script::new(1));
    peer.await_heard("STATUS 15");
    peer.call_rings_broken();
    eventually("the request for a reset", || guest.interrupts.needs_reset());
    assert!(!guest.device.backend_lost());
}

#[test]
fn pairs_that_the_driver_does_not_use_are_disabled() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(2));
    let mut guest = rig.guest(rig.connect(2).unwrap(), 2);
    guest.start_with(guest.device.features());
    let heard = peer.await_heard("STATUS 15");
    assert_eq!(heard[heard.len() - 5..], ["ENABLE 0=1", "ENABLE 1=1", "ENABLE 2=0", "ENABLE 3=0", "STATUS 15"]);
    assert_eq!(guest.command(4, &[4, 0, 2, 0]), 0);
    assert_eq!(peer.await_heard("ENABLE 3=1"), ["ENABLE 0=1", "ENABLE 1=1", "ENABLE 2=1", "ENABLE 3=1"]);
    guest.queues[3].send(BUFFERS, &with_header(&frame(OTHER, 60)), &[12]);
    guest.kick(3);
    eventually("transmission", || receive(&rig.wire).is_some());
}

#[test]
fn an_interrupt_follows_its_vector() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    peer.await_heard("STATUS 15");
    guest.interrupts.set_queue_vector(1, 2);
    guest.workers[0].wake();
    assert_eq!(peer.await_heard("CALL 1"), ["CALL 1"]);
    rig.check_traffic(&mut guest, 60);
    eventually("the interrupt", || guest.interrupts.eventfd(2).unwrap().read().is_ok());
}

#[test]
fn a_peer_that_hangs_when_it_is_to_stop_is_given_up_in_time() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script { mute: vec![Request::GET_VRING_BASE], ..Script::new(1) });
    rig.check_traffic(&mut guest, 60);
    let start = Instant::now();
    guest.stop();
    // Twice as long if each ring were waited for.
    assert!(start.elapsed() < Duration::from_millis(3900), "{:?}", start.elapsed());
    assert_eq!(positions(&guest), [(1, 1); 2]);
    let may_still_write =
        |guest: &Guest| guest.device.memory_user().unwrap().may_still_write(Instant::now() + Duration::from_secs(1));
    assert!(may_still_write(&guest));
    // The connection is made again, without a notification: no driver was there.
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    assert_eq!(peer.connections(), 2);
    // Another comes after it.
    drop(peer);
    await_loss(&guest, true);
    let _successor = rig.peer(Script::new(1));
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
    guest.stop();
    assert!(!may_still_write(&guest));
}

#[test]
fn a_peer_that_stops_or_is_gone_writes_no_more() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    let user = guest.device.memory_user().unwrap();
    let may_still_write = || user.may_still_write(Instant::now() + Duration::from_secs(1));
    guest.stop();
    assert!(!may_still_write());
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    drop(peer);
    await_loss(&guest, true);
    guest.stop();
    assert!(!may_still_write());
}

#[test]
fn a_peer_that_was_replaced_while_no_driver_ran_is_no_loss() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    rig.check_traffic(&mut guest, 60);
    guest.device.observe_backend(Box::new(|change| panic!("{change:?}")));
    guest.stop();
    drop(peer);
    let _successor = rig.peer(Script::new(1));
    guest.start_with(guest.device.features());
    rig.check_traffic(&mut guest, 60);
    guest.stop();
}

#[test]
fn a_peer_that_dies_while_the_host_has_the_link_down_is_noticed() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script::new(1));
    peer.await_heard("STATUS 15");
    guest.device.set_link(false).wait().unwrap();
    peer.await_heard("STATUS 0");
    drop(peer);
    await_loss(&guest, true);
    let successor = rig.peer(Script::new(1));
    await_loss(&guest, false);
    assert!(!guest.device.link_up());
    assert!(!successor.heard().iter().any(|heard| heard.starts_with("KICK")));
    guest.device.set_link(true).wait().unwrap();
    rig.check_traffic(&mut guest, 60);
}

#[test]
fn a_peer_that_refuses_features_is_lost_until_a_fit_one_comes() {
    let rig = Rig::new();
    let (peer, mut guest) = run(&rig, Script { denies_features: true, ..Script::new(1) });
    await_loss(&guest, true);
    drop(peer);
    let _peer = rig.peer(Script::new(1));
    await_loss(&guest, false);
    rig.check_traffic(&mut guest, 60);
}
