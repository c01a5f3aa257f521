//! The host's rules at the uplink of an X550, whose driver cannot loosen them.

use std::num::NonZeroU32;

use super::*;
use crate::frames::policy::{PortVlan, Trunk, VlanProtocol, VlanSet};
use crate::net::testing::nonzero;
use crate::switch::UplinkPolicy;
use crate::switch::forward::Forwarder;
use crate::switch::uplink_rx::UplinkRx;

/// An address behind the uplink.
const WORLD: [u8; 6] = mac(77);
const TO_ALL: [u8; 6] = [0xff; 6];

fn card(policy: UplinkPolicy) -> Card {
    let card = Card::new();
    card.switch.restrict_uplink(policy);
    card
}

fn trunk(vlans: &[u16]) -> UplinkPolicy {
    let vlans = VlanSet::of(vlans.iter().map(|id| *id..=*id));
    UplinkPolicy { trunk: Some(Trunk { vlans, protocol: VlanProtocol::Customer }), ..UplinkPolicy::default() }
}

fn vlan(id: u16, protocol: VlanProtocol) -> UplinkPolicy {
    UplinkPolicy { port_vlan: Some(PortVlan { id, priority: 5, protocol }), ..UplinkPolicy::default() }
}

fn tagged(frame: &[u8], kind: [u8; 2], tag: u16) -> Vec<u8> {
    [&frame[..12], &kind, &tag.to_be_bytes(), &frame[12..]].concat()
}

/// The card receives the frames from its uplink.
fn arrive(card: &Card, frames: &[Vec<u8>]) {
    for frame in frames {
        rustix::io::write(&card.peer, &[&[0; 12], &frame[..]].concat()).unwrap();
    }
    let core = card.switch.0.core();
    let (mut rx, mut forwarder) = (UplinkRx::new(core.uplink_index()).unwrap(), Forwarder::new(Arc::clone(core), 0));
    rx.batch(core.uplink().unwrap(), &core.end, |batch| forwarder.forward(batch, &core.table()));
    forwarder.signal();
}

/// The counters of the uplink, without its traffic.
fn losses(card: &Card) -> Vec<(Counter, u64)> {
    let traffic = [Counter::TxFrames, Counter::TxBytes, Counter::RxFrames, Counter::RxBytes];
    let all = nonzero(&card.switch.uplink_counters().unwrap());
    all.into_iter().filter(|(counter, _)| !traffic.contains(counter)).collect()
}

#[test]
fn only_vlans_of_the_trunk_leave_an_x550() {
    let mut card = card(trunk(&[5, 6]));
    let away = frame(mac(0), WORLD, 100);
    for id in [5, 7] {
        card.send(0, &tagged(&away, [0x81, 0], id));
    }
    card.send(0, &away);
    card.send(0, &tagged(&away, [0x88, 0xa8], 5));
    assert_eq!(card.sent(), [tagged(&away, [0x81, 0], 5)]);
    assert_eq!(losses(&card), [(Counter::TxBadVlan, 3)]);
    // The driver's own VLAN of a VF is one of them, or stays in the NIC.
    for (id, passes) in [(6, true), (7, false)] {
        card.write(0x8000, 1 << 30 | id);
        card.settle();
        card.send(0, &away);
        assert_eq!(card.sent().len(), usize::from(passes), "{id}");
    }
    // Nothing is lost on the way to another VF, and no driver counts a spoofed frame.
    card.send(2, &frame(mac(1), mac(2), 100));
    assert_eq!((card.frames(4).len(), card.counter(Place::Vf(0), Counter::TxBadVlan)), (1, 0));
    assert_eq!((card.counter(Place::Vf(0), Counter::TxFrames), card.read(0x8780)), (6, 0));
}

#[test]
fn only_vlans_of_the_trunk_reach_an_x550() {
    let mut card = card(trunk(&[0]));
    let plain = frame(WORLD, mac(1), 100);
    arrive(&card, &[tagged(&plain, [0x81, 0], 5), plain.clone(), tagged(&plain, [0x88, 0xa8], 5)]);
    assert_eq!((card.frames(2), losses(&card)), (vec![plain], vec![(Counter::RxVlanFiltered, 2)]));
}

#[test]
fn all_traffic_of_an_x550_is_in_its_vlan_on_the_uplink() {
    let mut card = card(vlan(9, VlanProtocol::Customer));
    let (away, within) = (frame(mac(0), WORLD, 100), frame(mac(0), TO_ALL, 100));
    card.send(0, &away);
    card.send(0, &within);
    assert_eq!(card.sent(), [&away, &within].map(|frame| tagged(frame, [0x81, 0], 5 << 13 | 9)));
    assert_eq!(card.frames(2), [within], "untagged within the NIC");
    // A driver's tag would choose another VLAN.
    card.send(0, &tagged(&away, [0x81, 0], 8));
    assert_eq!((card.sent().len(), losses(&card)), (0, vec![(Counter::TxBadVlan, 1)]));
    let plain = frame(WORLD, mac(1), 60);
    arrive(&card, &[plain.clone(), tagged(&plain, [0x81, 0], 8), tagged(&plain, [0x81, 0], 3 << 13 | 9)]);
    assert_eq!(card.frames(2), [plain]);
    assert_eq!(losses(&card), [(Counter::TxBadVlan, 1), (Counter::RxVlanFiltered, 2)]);
}

#[test]
fn a_providers_vlan_carries_the_vlans_of_the_driver() {
    let mut card = card(vlan(9, VlanProtocol::Service));
    let away = frame(mac(0), WORLD, 100);
    // Within as many tags as are inspected, and the two that the driver's VLAN and the host's add.
    card.write(0x8000, 1 << 30 | 7);
    card.settle();
    card.send(0, &away);
    let in_seven = tagged(&away, [0x81, 0], 7);
    assert_eq!(card.sent(), [tagged(&in_seven, [0x88, 0xa8], 5 << 13 | 9)]);
    card.write(0x8000, 0);
    card.settle();
    let deep = (1..=4).fold(away, |frame, id| tagged(&frame, [0x81, 0], id));
    card.send(0, &deep);
    assert_eq!(card.sent(), [tagged(&deep, [0x88, 0xa8], 5 << 13 | 9)]);
    assert_eq!(losses(&card), []);
    // Without the provider's tag, a frame's VLAN may be behind the inspected tags.
    let hidden = tagged(&frame(WORLD, mac(1), 100), [0x81, 0], 7);
    let hidden = (0..3).fold(hidden, |frame, _| tagged(&frame, [0x81, 0], 0));
    arrive(&card, &[tagged(&hidden, [0x88, 0xa8], 9)]);
    assert_eq!((card.frames(2).len(), losses(&card)), (0, vec![(Counter::RxVlanFiltered, 1)]));
}

#[test]
fn broadcasts_beyond_the_storm_limit_stay_in_the_nic() {
    let clock = crate::os::clock::testing::StoppedClock::new();
    let mut card = card(UplinkPolicy { storm: NonZeroU32::new(3), ..UplinkPolicy::default() });
    for vf in [0, 1, 0, 1, 0] {
        card.send(2 * vf, &frame(mac(vf), TO_ALL, 60));
        card.send(2 * vf, &frame(mac(vf), WORLD, 60));
        // Frames of a stream would be gathered.
        clock.advance(Duration::from_micros(200));
    }
    let sent = card.sent();
    let to_all = sent.iter().filter(|frame| frame[0] == 0xff).count();
    assert_eq!((sent.len(), to_all, losses(&card)), (8, 3, vec![(Counter::StormDropped, 2)]));
    assert_eq!(card.frames(4).len(), 5, "each VF has them all");
}

#[test]
fn an_announcement_of_the_host_is_in_the_vlan_too() {
    let card = card(vlan(9, VlanProtocol::Customer));
    let announced = frame(mac(0), TO_ALL, 60);
    let uplink = card.switch.0.core().uplink().unwrap();
    let with_header = |frame: &[u8]| [&[0; 12], frame].concat();
    uplink.announce(&[with_header(&announced), with_header(&tagged(&announced, [0x81, 0], 4))]);
    assert_eq!(card.sent(), [tagged(&announced, [0x81, 0], 5 << 13 | 9)]);
    assert_eq!(losses(&card), [(Counter::TxBadVlan, 1)]);
}

#[test]
fn the_first_policy_of_an_uplink_remains() {
    let mut card = card(UplinkPolicy::default());
    assert!(card.switch.0.core().uplink().unwrap().rules().is_none(), "frames pay nothing");
    card.switch.restrict_uplink(trunk(&[5]));
    card.switch.restrict_uplink(trunk(&[0]));
    card.send(0, &frame(mac(0), WORLD, 100));
    assert_eq!((card.sent().len(), losses(&card)), (0, vec![(Counter::TxBadVlan, 1)]));
}
