//! Reachability between ports.

use super::rig::*;
use crate::switch::{PortSettings, SwitchMode};
use crate::{Counter, HostNic};

const JOINED: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const NOT_JOINED: [u8; 6] = [0x33, 0x33, 0, 0, 0, 2];
const UNKNOWN: [u8; 6] = [0x52, 0x54, 0, 0, 9, 9];
const PORTS: u16 = 4;
const UPLINK: u16 = PORTS;
/// The VF that joined a group.
const MEMBER: u16 = 2;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Veb,
    Vepa,
    /// VEB, with the VFs 1 and 2 isolated.
    Isolated,
}

/// The rules of a switch in another form: true if a frame from one port for `to` arrives at another.
fn arrives(kind: Kind, from: u16, at: u16, to: [u8; 6]) -> bool {
    let is_vf = |port| (1..PORTS).contains(&port);
    let isolated = |port: u16| kind == Kind::Isolated && (port == 1 || port == 2);
    if from == at {
        return false;
    }
    if kind == Kind::Vepa && from != UPLINK {
        return at == UPLINK;
    }
    if is_vf(from) && is_vf(at) && (isolated(from) || isolated(at)) {
        return false;
    }
    let owner = (0..PORTS).find(|port| mac(*port) == to);
    match (owner, to) {
        (Some(owner), _) => owner == at,
        (None, BROADCAST) => true,
        (None, JOINED) => at == MEMBER || at == UPLINK,
        _ => at == UPLINK,
    }
}

#[test]
fn each_frame_reaches_the_ports_of_its_mode_and_no_other() {
    for kind in [Kind::Veb, Kind::Vepa, Kind::Isolated] {
        let mode = if kind == Kind::Vepa { SwitchMode::Vepa } else { SwitchMode::Veb };
        let mut lan = Lan::running(&Config { mode, ..Config::open(PORTS) });
        lan.nics[usize::from(MEMBER)].set_tables(&[], &[JOINED]);
        for port in 1..=2 {
            let isolated = kind == Kind::Isolated;
            lan.switch.set_port(port, PortSettings { isolated, ..PortSettings::default() }).wait().unwrap();
        }
        let to: Vec<_> = (0..PORTS).map(mac).chain([BROADCAST, JOINED, NOT_JOINED, UNKNOWN]).collect();
        for from in 0..=UPLINK {
            for to in &to {
                let source = if from == UPLINK { [0x52, 0x54, 0, 0, 8, 8] } else { mac(from) };
                let frame = frame(source, *to, 60 + usize::from(from));
                if from == UPLINK {
                    lan.send_from_uplink(&frame);
                } else {
                    lan.nics[usize::from(from)].send(&frame);
                }
                for at in 0..=UPLINK {
                    let got = if at == UPLINK { lan.at_uplink() } else { lan.nics[usize::from(at)].received() };
                    let expected = if arrives(kind, from, at, *to) { vec![frame.clone()] } else { Vec::new() };
                    assert_eq!(got, expected, "{kind:?}: from {from} at {at} to {to:x?}");
                }
            }
        }
    }
}

#[test]
fn reflected_frames_reach_others_but_not_their_origin_port() {
    let mut lan = Lan::running(&Config { mode: SwitchMode::Vepa, ..Config::open(4) });
    let broadcast = frame(mac(1), BROADCAST, 64);
    lan.send_from_uplink(&broadcast);
    let got: Vec<_> = lan.nics.iter_mut().map(|nic| nic.received().len()).collect();
    assert_eq!(got, [1, 0, 1, 1]);
    lan.send_from_uplink(&frame(mac(1), mac(2), 64));
    let got: Vec<_> = lan.nics.iter_mut().map(|nic| nic.received().len()).collect();
    assert_eq!(got, [0, 0, 1, 0]);
}

#[test]
fn frame_for_a_closed_port_is_dropped_and_counted_there() {
    let mut lan = Lan::running(&Config::open(3));
    lan.nics[2].stop();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    lan.settle();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!((lan.count(2, Counter::RxStale), lan.at_uplink().len()), (2, 0));
    lan.nics[2].start(FEATURES);
    lan.nics[2].net.set_link(false).wait().unwrap();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!((lan.count(2, Counter::RxLinkDown), lan.nics[2].received().len()), (1, 0));
    lan.nics[2].net.set_link(true).wait().unwrap();
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!(lan.nics[2].received().len(), 1);
}

#[test]
fn undeliverable_frames_are_counted_by_cause_at_the_sender() {
    let mut lan = Lan::running(&Config::closed(3));
    lan.switch.set_port(1, PortSettings { isolated: true, ..PortSettings::default() }).wait().unwrap();
    for to in [mac(1), UNKNOWN, mac(2)] {
        lan.nics[1].send(&frame(mac(1), to, 64));
    }
    let causes = [Counter::TxOwnAddress, Counter::TxUnknown, Counter::TxIsolated, Counter::TxFrames];
    assert_eq!(causes.map(|cause| lan.count(1, cause)), [1, 1, 1, 0]);
}

#[test]
fn untrusted_driver_in_promiscuous_mode_gets_no_extra_frames() {
    let mut lan = Lan::running(&Config::open(3));
    lan.nics[1].set_promiscuous(true);
    lan.settle();
    for to in [mac(2), UNKNOWN, JOINED] {
        lan.nics[0].send(&frame(mac(0), to, 64));
        lan.send_from_uplink(&frame(UNKNOWN, to, 64));
    }
    assert_eq!(lan.nics[1].received().len(), 0, "its mode has no effect");
    lan.nics[0].set_promiscuous(true);
    lan.settle();
    lan.nics[0].received();
    lan.send_from_uplink(&frame(mac(9), UNKNOWN, 64));
    assert_eq!(lan.nics[0].received().len(), 1, "the PF is trusted");
}

#[test]
fn a_copy_of_what_passes_its_policy_goes_to_the_mirror() {
    let mut lan = Lan::running(&Config::closed(4));
    lan.switch.set_port(1, PortSettings { mirror: Some(3), ..PortSettings::default() }).wait().unwrap();
    let sent = frame(mac(1), mac(2), 100);
    lan.nics[1].send(&sent);
    // A frame without a route is copied; one that its policy drops is not.
    let own = frame(mac(1), mac(1), 100);
    lan.nics[1].send(&own);
    lan.nics[1].send(&frame(mac(2), mac(2), 100));
    assert_eq!((lan.nics[2].received(), lan.nics[3].received()), (vec![sent.clone()], vec![sent, own]));
    assert_eq!(lan.count(1, Counter::TxOwnAddress), 1);
}
