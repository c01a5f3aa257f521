//! Ports that the host announces behind the uplink.

use super::rig::*;
use crate::HostNic;
use crate::frames::policy::{Policy, PortVlan, VlanProtocol};
use crate::testing::driver_queue::eventually;

#[test]
fn port_is_announced_only_on_the_uplink_and_in_its_vlan() {
    let mut lan = Lan::of(&Config::open(3), |port, spec| {
        let vlan = PortVlan { id: 100, priority: 0, protocol: VlanProtocol::Customer };
        if port == 2 {
            spec.policy = Policy { port_vlan: Some(vlan), ..untrusted() };
        }
    });
    for nic in &mut lan.nics {
        nic.start(FEATURES);
        nic.provide(8, 2048);
    }
    lan.settle();
    for (port, tag) in [(1, &[][..]), (2, &[0x81, 0, 0, 100])] {
        assert!(lan.nics[usize::from(port)].net.announce_here());
        let mut came = Vec::new();
        eventually("an announcement", || {
            came.extend(lan.at_uplink());
            !came.is_empty()
        });
        let begins = [&BROADCAST[..], &mac(port), tag, &[0x80, 0x35]].concat();
        assert_eq!((came.len(), &came[0][..begins.len()]), (1, &begins[..]));
    }
    lan.nics[1].net.set_link(false).wait().unwrap();
    assert!(!lan.nics[1].net.announce_here());
    assert!(lan.nics.iter_mut().all(|nic| nic.received().is_empty()));
}
