//! What of a port's frames its policy lets through, and that what was checked is what arrives.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vm_memory::{Bytes, GuestAddress};

use super::rig::*;
use crate::policy::{Policy, PortVlan, VlanProtocol};
use crate::{Counter, Port};

fn tagged(frame: &[u8], protocol: u16, vlan: u16) -> Vec<u8> {
    let tag = [protocol.to_be_bytes(), vlan.to_be_bytes()].concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

fn port_vlan(id: u16, protocol: VlanProtocol) -> Policy {
    Policy { port_vlan: Some(PortVlan { id, priority: 0, protocol }), ..untrusted() }
}

#[test]
fn a_spoofed_frame_reaches_nobody_and_is_counted() {
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
    // A group as source is nobody's, whoever is trusted.
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
fn frames_to_groups_and_to_nobody_known_are_limited_by_the_storm_limit() {
    let mut lan = Lan::running(&Config::closed(3));
    lan.nics[1].set_policy(Policy { storm: NonZeroU32::new(2), ..untrusted() });
    // The PF is trusted.
    lan.nics[0].set_promiscuous(true);
    lan.settle();
    for to in [BROADCAST, [2; 6], BROADCAST, [2; 6], mac(2)] {
        lan.nics[1].send(&frame(mac(1), to, 64));
    }
    assert_eq!((lan.count(1, Counter::StormDropped), lan.count(1, Counter::TxFlooded)), (2, 1));
    assert_eq!((lan.nics[0].received().len(), lan.nics[2].received().len()), (2, 2));
}

#[test]
fn frames_for_the_world_are_no_storm_also_if_the_pf_hears_them() {
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

/// As the MAC address of a gateway, which others send to.
#[test]
fn a_vf_that_is_given_an_address_gets_no_frames_for_others_that_its_driver_claims() {
    let mut lan = Lan::running(&Config::open(4));
    let gateway = [2; 6];
    // VIRTIO_NET_CTRL_MAC_TABLE_SET: one unicast address, no group.
    let claim = [&[1, 0][..], &1u32.to_le_bytes(), &gateway, &0u32.to_le_bytes()].concat();
    lan.nics[1].set_policy(Policy { address: Some(mac(1)), ..untrusted() });
    assert_eq!(lan.nics[1].command(&claim), 0, "the standard has it as best effort");
    lan.settle();
    lan.nics[2].send(&frame(mac(2), gateway, 64));
    assert_eq!((lan.nics[1].received().len(), lan.at_uplink().len()), (0, 1));
    // With trust it has them, as without an address of the host's.
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
    // Its own is refused where the host has given another.
    lan.nics[3].set_policy(Policy { address: Some(mac(3)), ..untrusted() });
    assert_eq!(lan.nics[3].command(&[&[1, 1][..], &mac(7)].concat()), 1);
    assert_eq!(lan.nics[3].command(&[&[1, 1][..], &mac(3)].concat()), 0);
    lan.settle();
    lan.nics[0].send(&frame(mac(0), mac(3), 64));
    assert_eq!(lan.nics[3].received().len(), 1);
}

#[test]
fn the_host_changes_an_address_under_a_driver_whose_old_one_is_then_spoofed() {
    let mut lan = Lan::running(&Config::closed(3));
    lan.nics[1].net.set_mac(mac(7)).unwrap().wait();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!((lan.count(1, Counter::TxSpoofedMac), lan.nics[2].received().len()), (1, 0));
    lan.nics[0].send(&frame(mac(0), mac(7), 64));
    assert_eq!(lan.nics[1].received().len(), 1);
}

/// The guest changes the source, the destination and the type of its frames all the time.
#[test]
fn what_was_checked_is_what_arrives_whatever_the_guest_writes_meanwhile() {
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
                    // Another destination than the one that was looked up shows in the wrong place.
                    assert!(got[..6] != mac(if nic == 2 { 3 } else { 2 }), "a destination that was not looked up");
                    arrived += 1;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(arrived > 0 && lan.count(1, Counter::TxSpoofedMac) > 0, "{arrived} of {rounds}");
}
