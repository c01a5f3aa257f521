//! The policy of a port's frames, and the equality of the checked and the delivered frame.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_USO,
};
use vm_memory::{Bytes, GuestAddress};

use super::rig::*;
use crate::PortSettings;
use crate::frames::policy::{Policy, PortVlan, Trunk, VlanProtocol, VlanSet};
use crate::testing::driver_queue::eventually;
use crate::{Counter, HostNic, RateLimit, RateLimits};

fn tagged(frame: &[u8], protocol: u16, vlan: u16) -> Vec<u8> {
    let tag = [protocol.to_be_bytes(), vlan.to_be_bytes()].concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

fn port_vlan(id: u16, protocol: VlanProtocol) -> Policy {
    Policy { port_vlan: Some(PortVlan { id, priority: 0, protocol }), ..untrusted() }
}

#[test]
fn a_spoofed_frame_is_dropped_and_counted() {
    let mut lan = Lan::running(&Config::open(3));
    let mut group = mac(1);
    group[0] |= 1;
    for source in [mac(2), [2; 6], group] {
        lan.nics[1].send(&frame(source, BROADCAST, 64));
        lan.nics[1].send(&frame(source, mac(2), 64));
    }
    lan.nics[1].send(&frame(mac(1), [0x01, 0x80, 0xc2, 0, 0, 0], 64));
    assert_eq!((lan.count(1, Counter::TxSpoofedMac), lan.count(1, Counter::TxReservedGroup)), (6, 1));
    assert!(lan.at_uplink().is_empty() && lan.nics.iter_mut().all(|nic| nic.received().is_empty()));
    // A group is not a valid source, even with trust.
    lan.nics[0].send(&frame(group, BROADCAST, 64));
    assert_eq!(lan.count(0, Counter::TxSpoofedMac), 1);
}

#[test]
fn ports_with_port_vlans_are_apart_and_the_uplink_sees_the_tags() {
    for (protocol, kind) in [(VlanProtocol::Customer, 0x8100), (VlanProtocol::Service, 0x88a8)] {
        let mut lan = Lan::running(&Config::open(5));
        for (port, vlan) in [(1, 100), (2, 100), (3, 200)] {
            lan.nics[port].set_policy(port_vlan(vlan, protocol));
        }
        let sent = frame(mac(1), BROADCAST, 64);
        lan.nics[1].send(&sent);
        let got: Vec<_> = (1..5).map(|port| lan.nics[port].received()).collect();
        assert_eq!(got[1], std::slice::from_ref(&sent), "without its tag");
        assert!(got[0].is_empty() && got[2].is_empty());
        assert_eq!(got[3], [tagged(&sent, kind, 100)], "a port without a port VLAN has all VLANs");
        assert_eq!(lan.at_uplink(), [tagged(&sent, kind, 100)]);
        lan.send_from_uplink(&tagged(&frame([2; 6], mac(3), 64), kind, 200));
        lan.send_from_uplink(&tagged(&frame([2; 6], mac(3), 64), kind, 100));
        lan.send_from_uplink(&frame([2; 6], mac(3), 64));
        assert_eq!(lan.nics[3].received(), [frame([2; 6], mac(3), 64)]);
        if protocol == VlanProtocol::Customer {
            lan.nics[1].send(&tagged(&sent, 0x8100, 200));
            assert_eq!(lan.count(1, Counter::TxBadVlan), 1);
            assert!(lan.nics[3].received().is_empty());
        }
    }
}

/// Linux removes a priority tag and uses the next one.
#[test]
fn a_vlan_behind_a_priority_tag_is_the_frames_vlan() {
    let trunk = |id| {
        let vlans = VlanSet::of([id..=id]);
        Policy { trunk: Some(Trunk { vlans, protocol: VlanProtocol::Customer }), ..untrusted() }
    };
    for priorities in [&[0x8100][..], &[0x88a8], &[0x8100, 0x88a8]] {
        let mut lan = Lan::running(&Config::open(4));
        lan.nics[1].set_policy(trunk(0));
        lan.nics[2].set_policy(port_vlan(100, VlanProtocol::Customer));
        lan.nics[3].set_policy(trunk(100));
        let hide = |frame: &[u8]| {
            let tagged_frame = tagged(frame, 0x8100, 100);
            priorities.iter().fold(tagged_frame, |frame, kind| tagged(&frame, *kind, 0xe000))
        };
        lan.nics[1].send(&hide(&frame(mac(1), BROADCAST, 64)));
        assert_eq!(lan.count(1, Counter::TxBadVlan), 1);
        assert!(lan.at_uplink().is_empty() && lan.nics.iter_mut().all(|nic| nic.received().is_empty()));

        let plain = frame(mac(3), BROADCAST, 64);
        lan.nics[3].send(&hide(&plain));
        let got: Vec<_> = lan.nics.iter_mut().map(Nic::received).collect();
        let in_vlan = tagged(&plain, 0x8100, 100);
        assert_eq!(got, [vec![in_vlan.clone()], vec![], vec![plain.clone()], vec![]]);
        assert_eq!(lan.at_uplink(), [in_vlan], "no later hop has to look behind a priority");

        let from_far = frame([2; 6], BROADCAST, 64);
        lan.send_from_uplink(&hide(&from_far));
        let got: Vec<_> = lan.nics.iter_mut().map(Nic::received).collect();
        let in_vlan = tagged(&from_far, 0x8100, 100);
        assert_eq!(got, [vec![hide(&from_far)], vec![], vec![from_far.clone()], vec![in_vlan]]);

        let only_priorities = tagged(&frame(mac(1), BROADCAST, 64), 0x8100, 0xe000);
        lan.nics[1].send(&only_priorities);
        assert_eq!(lan.at_uplink(), [only_priorities], "in no VLAN");
        assert!(lan.nics[2].received().is_empty() && lan.nics[3].received().is_empty());
    }
}

#[test]
fn a_tag_hidden_by_a_longer_stack_reaches_no_vlan_port() {
    let mut lan = Lan::running(&Config::open(3));
    lan.nics[1].set_policy(port_vlan(100, VlanProtocol::Customer));
    let vlans = VlanSet::of([0..=4094]);
    lan.nics[2].set_policy(Policy { trunk: Some(Trunk { vlans, protocol: VlanProtocol::Customer }), ..untrusted() });
    let hidden = (0..5).fold(tagged(&frame(mac(0), BROADCAST, 64), 0x8100, 100), |frame, _| tagged(&frame, 0x8100, 0));
    lan.nics[0].send(&hidden);
    assert_eq!((lan.nics[1].received().len(), lan.nics[2].received().len(), lan.at_uplink().len()), (0, 0, 1));
    assert_eq!(lan.count(2, Counter::RxVlanFiltered), 1);
    lan.nics[2].send(&[&hidden[..6], &mac(2), &hidden[12..]].concat());
    assert_eq!((lan.count(2, Counter::TxBadVlan), lan.at_uplink().len()), (1, 0));
}

#[test]
fn a_policy_holds_when_the_call_that_sets_it_returns() {
    let mut lan = Lan::running(&Config::closed(3));
    let spoofed = frame(mac(9), BROADCAST, 64);
    for _ in 0..50 {
        lan.nics[1].set_policy(Policy { trusted: false, ..Policy::default() });
        lan.nics[1].send(&spoofed);
        assert_eq!(lan.nics[2].received().len(), 1);
        lan.nics[1].set_policy(untrusted());
        lan.nics[1].send(&spoofed);
        assert_eq!(lan.nics[2].received().len(), 0);
    }
}

#[test]
fn storm_limit_covers_group_and_unknown_destinations() {
    let mut lan = Lan::running(&Config::closed(3));
    lan.nics[1].set_policy(Policy { storm: NonZeroU32::new(2), ..untrusted() });
    // The PF is trusted.
    lan.nics[0].set_promiscuous(true);
    lan.settle();
    // All at once: the limit refills by the second.
    for to in [BROADCAST, [2; 6], BROADCAST, [2; 6], mac(2)] {
        lan.nics[1].queue(&frame(mac(1), to, 64));
    }
    lan.nics[1].kick();
    lan.nics[1].wait_sent(5);
    assert_eq!((lan.count(1, Counter::StormDropped), lan.count(1, Counter::TxFlooded)), (2, 1));
    assert_eq!((lan.nics[0].received().len(), lan.nics[2].received().len()), (2, 2));
}

/// A header for UDP segments of 300 bytes, and the frame that they are cut from: an IPv4 packet of 60,000 bytes.
fn large_packet(from: [u8; 6], to: [u8; 6]) -> Vec<u8> {
    let mut frame = frame(from, to, 42 + 60_000);
    frame[14..34].copy_from_slice(&[0x45, 0, 0xea, 0x7c, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame[34..42].copy_from_slice(&[0, 80, 0, 80, 0xea, 0x68, 0, 0]);
    [&[1, 5, 42, 0, 44, 1, 34, 0, 6, 0, 0, 0][..], &frame].concat()
}

#[test]
fn a_large_packet_counts_as_its_segments() {
    let mut lan = Lan::new(&Config::closed(3));
    let features = FEATURES | 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_USO;
    lan.nics.iter_mut().for_each(|nic| nic.start(features));
    lan.settle();
    let send = |lan: &mut Lan, storm, to| {
        lan.nics[1].set_policy(Policy { storm: NonZeroU32::new(storm), ..untrusted() });
        lan.nics[1].queue_raw(&large_packet(mac(1), to), &[12]);
        lan.nics[1].kick();
        lan.nics[1].wait_sent(1);
        let received = lan.nics[2].received_raw().len();
        lan.nics[2].provide(received as u64, 2048);
        received
    };
    lan.nics[2].provide(200, 2048);
    assert_eq!([1, 199].map(|storm| send(&mut lan, storm, BROADCAST)), [0, 0]);
    assert_eq!(lan.count(1, Counter::StormDropped), 2);
    assert_eq!(send(&mut lan, 1, mac(2)), 200, "which is for one port");
    assert_eq!(send(&mut lan, 200, BROADCAST), 200);
    assert_eq!(lan.count(1, Counter::StormDropped), 2);
}

/// A mirror's copy and the copies of a long frame end a batch; the frame is inspected again in the next.
#[test]
fn a_frame_that_is_divided_over_batches_counts_once_for_storms() {
    let (mut lan, mut worker) = Lan::stepped(4);
    lan.switch.set_port(1, PortSettings { mirror: Some(0), ..PortSettings::default() }).wait().unwrap();
    lan.nics[1].set_policy(Policy { storm: NonZeroU32::new(4), ..untrusted() });
    let long = frame(mac(1), BROADCAST, 60_000);
    (0..4).for_each(|_| lan.nics[1].queue(&long));
    lan.nics[1].kick();
    let (mut done, mut steps) = (0, 0);
    while done < 4 {
        worker.step(Some(Duration::ZERO));
        done += lan.nics[1].tx.take_used().len();
        steps += 1;
        assert!(steps < 100);
    }
    assert_eq!((lan.count(1, Counter::TxFrames), lan.count(1, Counter::StormDropped)), (4, 0));
}

#[test]
fn limits_of_packets_count_the_segments_at_both_ends() {
    let ops = |size| RateLimits {
        ops: Some(RateLimit { size, one_time_burst: 0, refill: Duration::from_secs(3600) }),
        bandwidth: None,
    };
    let mut lan = Lan::of(&Config::closed(4), |port, spec| match port {
        1 => spec.limits = ops(300),
        2 => spec.limits = ops(250),
        _ => {}
    });
    let sends = FEATURES | 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_USO;
    let takes = FEATURES | 1 << VIRTIO_NET_F_GUEST_CSUM | 1 << VIRTIO_NET_F_GUEST_USO4 | 1 << VIRTIO_NET_F_GUEST_USO6;
    for (nic, features) in lan.nics.iter_mut().zip([FEATURES, sends, takes, sends]) {
        nic.start(features);
        nic.provide(200, 2048);
    }
    lan.settle();
    // Whole, and 200 packets of the 250 that it may receive.
    for frames in [1, 2] {
        lan.nics[3].queue_raw(&large_packet(mac(3), mac(2)), &[12]);
        lan.nics[3].kick();
        lan.nics[3].wait_sent(1);
        assert_eq!(lan.count(2, Counter::RxFrames), frames);
    }
    lan.nics[3].send(&frame(mac(3), mac(2), 64));
    assert_eq!(lan.count(2, Counter::RxRateDropped), 1, "400 of 250");
    for _ in 0..3 {
        lan.nics[1].queue_raw(&large_packet(mac(1), mac(0)), &[12]);
    }
    lan.nics[1].kick();
    lan.nics[1].wait_sent(2);
    eventually("a wait", || lan.count(1, Counter::TxRateWaits) > 0);
    assert_eq!(lan.count(1, Counter::TxFrames), 2, "400 of 300, and the third waits");
}

#[test]
fn frames_for_the_uplink_are_no_storm_if_the_pf_gets_them() {
    let mut lan = Lan::running(&Config::open(3));
    lan.nics[1].set_policy(Policy { storm: NonZeroU32::new(1), ..untrusted() });
    lan.nics[0].set_promiscuous(true);
    lan.settle();
    for to in [[2; 6], [2; 6], [2; 6], BROADCAST, BROADCAST] {
        lan.nics[1].send(&frame(mac(1), to, 64));
    }
    assert_eq!((lan.count(1, Counter::StormDropped), lan.count(1, Counter::TxFlooded)), (1, 0));
    assert_eq!((lan.at_uplink().len(), lan.nics[0].received().len()), (4, 4));
}

/// The claimed address is like the MAC address of a gateway, which others send to.
#[test]
fn vf_with_host_mac_gets_no_frames_for_addresses_it_claims() {
    let mut lan = Lan::running(&Config::open(4));
    let gateway = [2; 6];
    // VIRTIO_NET_CTRL_MAC_TABLE_SET: one unicast address, no group.
    let claim = [&[1, 0][..], &1u32.to_le_bytes(), &gateway, &0u32.to_le_bytes()].concat();
    lan.nics[1].set_policy(Policy { address: Some(mac(1)), ..untrusted() });
    assert_eq!(lan.nics[1].command(&claim), 0, "the standard has it as best effort");
    lan.settle();
    lan.nics[2].send(&frame(mac(2), gateway, 64));
    assert_eq!((lan.nics[1].received().len(), lan.at_uplink().len()), (0, 1));
    // With trust it gets them, as without an address of the host.
    lan.nics[1].set_policy(Policy { trusted: true, ..untrusted() });
    lan.settle();
    lan.nics[2].send(&frame(mac(2), gateway, 64));
    assert_eq!((lan.nics[1].received().len(), lan.at_uplink().len()), (1, 0));
}

#[test]
fn an_address_of_two_ports_is_the_one_that_the_host_gave() {
    let mut lan = Lan::running(&Config::closed(4));
    lan.nics[2].set_policy(Policy { address: Some(mac(2)), ..untrusted() });
    let set = [&[1, 1][..], &mac(2)].concat();
    assert_eq!(lan.nics[3].command(&set), 0, "it has no address of the host");
    lan.settle();
    lan.nics[0].send(&frame(mac(0), mac(2), 64));
    assert_eq!((lan.nics[2].received().len(), lan.nics[3].received().len()), (1, 0));
    assert_eq!((lan.count(2, Counter::MacConflicts), lan.count(3, Counter::MacConflicts)), (0, 1));
    // Its own is refused if the host has set another.
    lan.nics[3].set_policy(Policy { address: Some(mac(3)), ..untrusted() });
    assert_eq!(lan.nics[3].command(&[&[1, 1][..], &mac(7)].concat()), 1);
    assert_eq!(lan.nics[3].command(&[&[1, 1][..], &mac(3)].concat()), 0);
    lan.settle();
    lan.nics[0].send(&frame(mac(0), mac(3), 64));
    assert_eq!(lan.nics[3].received().len(), 1);
}

#[test]
fn frames_from_the_old_mac_are_spoofed_once_host_changes_it() {
    let mut lan = Lan::running(&Config::closed(3));
    lan.nics[1].net.set_mac(mac(7)).unwrap().wait().unwrap();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!((lan.count(1, Counter::TxSpoofedMac), lan.nics[2].received().len()), (1, 0));
    lan.nics[0].send(&frame(mac(0), mac(7), 64));
    assert_eq!(lan.nics[1].received().len(), 1);
}

/// The guest changes the source, the destination and the type of its frames all the time.
#[test]
fn checked_frame_arrives_unchanged_despite_guest_writes() {
    let mut lan = Lan::running(&Config { workers: 2, ..Config::open(4) });
    let good = frame(mac(1), mac(2), 64);
    let stop = AtomicBool::new(false);
    let memory = lan.nics[1].memory().clone();
    let at = lan.nics[1].send_area() + 12;
    let (mut arrived, mut rounds) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let bad = [&mac(3)[..], &mac(9), &[8, 0]].concat();
            while !stop.load(Ordering::Relaxed) {
                for bytes in [&bad[..], &good[..14]] {
                    memory.write_slice(bytes, GuestAddress(at)).unwrap();
                }
            }
        });
        while rounds < 20_000 && (arrived < 100 || lan.count(1, Counter::TxSpoofedMac) < 100) {
            rounds += 1;
            lan.nics[1].queue_again(64 + 12);
            lan.nics[1].kick();
            lan.nics[1].wait_sent(1);
            for nic in [2, 3] {
                for got in lan.nics[nic].received() {
                    assert_eq!(got[6..12], mac(1), "a source that was not checked");
                    // Another destination than the one that was looked up would show at the wrong port.
                    assert!(got[..6] != mac(if nic == 2 { 3 } else { 2 }), "a destination that was not looked up");
                    arrived += 1;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(arrived > 0 && lan.count(1, Counter::TxSpoofedMac) > 0, "{arrived} of {rounds}");
}
