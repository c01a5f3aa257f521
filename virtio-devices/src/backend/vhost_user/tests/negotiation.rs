//! The negotiation with a peer before a driver runs, and the peers that are refused.

use std::time::{Duration, Instant};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::*;

use super::super::message::*;
use super::*;
use crate::transport::features::has;
use crate::{GuestMap, GuestRegion, QueueRunner};

#[test]
fn a_peer_is_asked_what_it_can_do_before_it_is_given_anything() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let ability = rig.connect(1).unwrap().ability();
    let expected = [
        "GET_FEATURES",
        "GET_PROTOCOL_FEATURES",
        "SET_PROTOCOL_FEATURES 0x9922f",
        "SET_OWNER",
        "GET_MAX_MEM_SLOTS",
        "GET_CONFIG",
        "SET_BACKEND_REQ_FD",
        "GET_QUEUE_NUM",
        "SET_MEM_TABLE 1 fds=1",
    ];
    assert_eq!(peer.heard(), expected);
    assert_eq!((ability.name.as_str(), ability.queue_pairs), (rig.path().to_str().unwrap(), 1));
    assert_eq!((ability.mac, ability.mtu), (Some([0x52, 0x54, 0, 0, 0, 9]), Some(1400)));
    assert!(has(ability.features, VIRTIO_F_VERSION_1) && has(ability.features, VIRTIO_NET_F_CSUM));
    assert!(has(ability.features, VIRTIO_NET_F_CTRL_VQ), "the NIC serves it");
    assert!(!has(ability.features, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS), "offloads follow from features");
    assert!(!ability.control_queue && !ability.switches_offloads);
}

#[test]
fn a_peer_without_protocol_features_gets_none_and_runs_one_pair() {
    let rig = Rig::new();
    let mut script = Script::new(2);
    script.features &= !(1 << F_PROTOCOL_FEATURES);
    let peer = rig.peer(script);
    let ability = rig.connect(1).unwrap().ability();
    // The answer to the last request is the only sign that memory has been mapped.
    assert_eq!(peer.heard(), ["GET_FEATURES", "SET_OWNER", "SET_MEM_TABLE 1 fds=1", "GET_FEATURES"]);
    assert_eq!((ability.mac, ability.mtu), (None, None));
    assert!(matches!(
        rig.connect(2),
        Err(VhostUserError::TooFewQueues { role: VhostUserRole::Nic { queue_pairs: 2 }, .. })
    ));
}

#[test]
fn a_peer_without_a_configuration_is_not_asked_to_change_it() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1).without(&[PROTOCOL_F_CONFIG]));
    let mut backend = rig.connect(1).unwrap();
    backend.write_config(0, &[1]).unwrap();
    backend.set_active_pairs(1).unwrap();
    let heard = peer.heard();
    assert!(!heard.iter().any(|request| request.contains("CONFIG")), "{heard:?}");
}

#[test]
fn a_channel_is_opened_only_if_the_peer_reports_link_changes() {
    let rig = Rig::new();
    let mut no_link = Script::new(1);
    no_link.features &= !(1 << VIRTIO_NET_F_STATUS);
    for script in [no_link, Script::new(1).without(&[PROTOCOL_F_CONFIG])] {
        let peer = rig.peer(script);
        rig.connect(1).unwrap();
        assert!(!peer.heard().iter().any(|heard| heard == "SET_BACKEND_REQ_FD"));
    }
}

#[test]
fn a_number_of_queues_is_one_of_queues_or_of_pairs() {
    let rig = Rig::new();
    let connect = |queue_num, queues, pairs, without: &[u32]| {
        let peer = rig.peer(Script { queue_num, queues, ..Script::new(1).without(without) });
        let connected = match rig.connect(pairs) {
            Ok(_) => true,
            Err(VhostUserError::TooFewQueues { role: VhostUserRole::Nic { queue_pairs }, .. })
                if queue_pairs == pairs =>
            {
                false
            }
            Err(error) => panic!("{error}"),
        };
        (connected, peer.heard().iter().any(|heard| heard.ends_with(" none")))
    };
    for without in [&[][..], &[PROTOCOL_F_REPLY_ACK]] {
        assert_eq!(connect(4, 4, 2, without), (true, false));
        assert_eq!(connect(2, 4, 2, without), (true, true), "it counts pairs");
        assert_eq!(connect(2, 2, 2, without), (false, true), "it counts queues");
        assert_eq!(connect(3, 3, 2, without), (false, true), "it lacks one");
        assert_eq!(connect(1, 1, 1, without), (false, true), "it lacks one");
        assert_eq!(connect(1, 2, 2, without), (false, false));
        assert_eq!(connect(4, 4, 1, without), (true, false));
    }
    let _peer = rig.peer(Script { queue_num: 1, ..Script::new(1) });
    let refused = rig.connect(4).unwrap_err().to_string();
    assert!(refused.ends_with("fewer than 4 pairs of queues; give num_queues=6 or less, or start it with more"));
    let _peer = rig.peer(Script { queue_num: 0, ..Script::new(1) });
    assert_eq!(rig.refusal(), "socket=PATH: the backend has fewer than one pair of queues; start it with more");
}

#[test]
fn a_peer_that_never_answers_is_refused_in_time() {
    let rig = Rig::new();
    for (request, without) in [(Request::GET_FEATURES, &[][..]), (Request::SET_OWNER, &[]), (Request::GET_CONFIG, &[3])]
    {
        let _peer = rig.peer(Script { mute: vec![request], ..Script::new(1).without(without) });
        let start = Instant::now();
        let refused = rig.refusal();
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        let expected = format!(
            "socket=PATH: {request}: no answer within 2 s; check that a vhost-user backend is listening there and not \
             stuck"
        );
        assert_eq!(refused, expected);
    }
}

#[test]
fn a_peer_that_is_none_for_this_nic_is_refused_in_one_line() {
    let rig = Rig::new();
    let mut legacy = Script::new(1);
    legacy.features &= !(1 << VIRTIO_F_VERSION_1);
    let peer = rig.peer(legacy);
    assert!(rig.refusal().starts_with("socket=PATH: the backend does not offer VIRTIO_F_VERSION_1,"));
    drop(peer);
    let _peer = rig.peer(Script { refused: vec![Request::SET_OWNER], ..Script::new(1) });
    assert!(rig.refusal().starts_with("socket=PATH: SET_OWNER: the peer refuses it;"));
}

#[test]
fn memory_the_peer_cannot_map_is_refused_before_any_message() {
    let rig = Rig::new();
    let peer = rig.peer(Script::new(1));
    let connect = |map: GuestMap| {
        let refused = VhostUser::connect(rig.spec(1), &Memory::new(map)).unwrap_err().to_string();
        refused.replace(rig.path().to_str().unwrap(), "PATH")
    };
    let expected = "socket=PATH: the backend cannot reach guest memory; add --memory shared=on";
    assert_eq!(connect(memory()), expected);
    let file = FileOffset::new(tempfile::tempfile().unwrap(), 0);
    file.file().set_len(MEMORY).unwrap();
    let private = vm_memory::MmapRegion::build(
        Some(file),
        MEMORY as usize,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_NORESERVE,
    );
    let private = GuestRegion::new(private.unwrap(), GuestAddress(0)).unwrap();
    assert_eq!(connect(GuestMap::from_regions(vec![private]).unwrap()), expected);
    assert_eq!((peer.connections(), peer.heard().len()), (0, 0));
}
