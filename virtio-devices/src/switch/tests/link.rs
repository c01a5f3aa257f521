//! Ports whose links follow the uplink's.

use super::rig::*;
use crate::switch::PortSettings;
use crate::testing::driver_queue::eventually;
use crate::{Counter, HostNic, VirtioDevice};

/// Reads the link status from the configuration as a driver does.
fn status(nic: &Nic) -> u8 {
    let mut status = [0];
    nic.net.config_read(6, &mut status);
    status[0]
}

fn always_up() -> PortSettings {
    PortSettings { follows_uplink: false, ..PortSettings::default() }
}

#[test]
fn links_follow_an_uplink_that_is_gone_unless_they_are_to_be_up() {
    let mut lan = Lan::running(&Config::open(4));
    for port in [2, 3] {
        lan.switch.set_port(port, always_up()).wait().unwrap();
    }
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!(lan.nics[2].received().len(), 1);
    let generation = lan.nics[1].net.config_generation();
    lan.nics[1].interrupts.take_isr();

    drop(lan.peer.take());
    eventually("the link to be down", || !lan.nics[1].net.link_up());
    eventually("the notification of the driver", || lan.nics[1].interrupts.take_isr() & 2 != 0);
    assert_ne!(lan.nics[1].net.config_generation(), generation);
    assert_eq!([0, 1, 2, 3].map(|port| status(&lan.nics[port])), [0, 0, 1, 1]);
    // Ports with the link up reach each other, and no others.
    lan.nics[2].send(&frame(mac(2), mac(3), 64));
    lan.nics[2].send(&frame(mac(2), mac(1), 64));
    assert_eq!((lan.nics[3].received().len(), lan.nics[1].received().len()), (1, 0));
    assert_eq!(lan.count(1, Counter::RxLinkDown), 1);
    lan.nics[1].send(&frame(mac(1), mac(2), 64));
    assert_eq!((lan.nics[2].received().len(), lan.count(1, Counter::TxLinkDown)), (0, 1));

    // The host's setting is kept, and a reset of the driver changes nothing.
    lan.nics[1].net.set_link(false).wait().unwrap();
    lan.switch.set_port(1, always_up()).wait().unwrap();
    assert!(!lan.nics[1].net.link_up());
    lan.nics[1].net.set_link(true).wait().unwrap();
    assert!(lan.nics[1].net.link_up());
    lan.switch.set_port(1, PortSettings::default()).wait().unwrap();
    assert!(!lan.nics[1].net.link_up());
    lan.nics[1].reset();
    assert!(!lan.nics[1].net.link_up());
    let saved = lan.nics[1].net.save();
    lan.nics[1].net.restore(&saved, None).unwrap();
    assert!(!lan.nics[1].net.link_up());
    lan.switch.set_port(1, always_up()).wait().unwrap();
    assert!(lan.nics[1].net.link_up(), "what was saved is what the host wants");
}

#[test]
fn links_of_a_closed_switch_are_up() {
    let lan = Lan::running(&Config::closed(2));
    assert_eq!([0, 1].map(|port| status(&lan.nics[port])), [1, 1]);
}
