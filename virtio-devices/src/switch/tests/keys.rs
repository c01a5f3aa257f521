//! Each setting of the host for a port, and its effect on frames: set at the start or while the driver runs, and after
//! resets, which stand for a function level reset, VF Enable and a restart of the guest.

use std::num::NonZeroU32;
use std::time::Duration;

use virtio_bindings::virtio_net::{VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET};

use super::rig::*;
use crate::frames::policy::{Policy, PortVlan, Trunk, VlanProtocol, VlanSet};
use crate::switch::PortSettings;
use crate::{Counter, HostNic, NetSpec, RateLimit, RateLimits};

/// An address behind the uplink.
const WORLD: [u8; 6] = [0x52, 0x54, 0, 0, 0x99, 1];
/// An address that no port was given.
const STRANGER: [u8; 6] = [0x52, 0x54, 0, 0, 0x99, 2];
/// The group of the link layer discovery protocol.
const BRIDGES: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 0x0e];

/// A setting, and a check that it affects the frames of port 1.
struct Key {
    name: &'static str,
    set: fn(&mut NetSpec, &mut PortSettings),
    is_in_force: fn(&mut Lan) -> bool,
}

const KEYS: [Key; 14] = [
    Key {
        name: "vlan",
        set: |spec, _| vlan(spec, 0, VlanProtocol::Customer),
        is_in_force: |lan| tag(lan) == [0x81, 0, 0, 5],
    },
    Key {
        name: "vlan_qos",
        set: |spec, _| vlan(spec, 3, VlanProtocol::Customer),
        is_in_force: |lan| tag(lan) == [0x81, 0, 0x60, 5],
    },
    Key {
        name: "vlan_proto",
        set: |spec, _| vlan(spec, 0, VlanProtocol::Service),
        is_in_force: |lan| tag(lan) == [0x88, 0xa8, 0, 5],
    },
    Key {
        name: "trunk",
        set: |spec, _| {
            let vlans = VlanSet::of([7..=7]);
            spec.policy.trunk = Some(Trunk { vlans, protocol: VlanProtocol::Customer });
        },
        is_in_force: |lan| counts(lan, Counter::TxBadVlan, &frame(mac(1), WORLD, 60)),
    },
    Key {
        name: "mac",
        set: |spec, _| (spec.policy.address, spec.policy.trusted) = (Some(mac(1)), false),
        is_in_force: |lan| {
            let change = [&[VIRTIO_NET_CTRL_MAC as u8, VIRTIO_NET_CTRL_MAC_ADDR_SET as u8][..], &STRANGER].concat();
            let refused = lan.nics[1].command(&change) == 1;
            let own = [&[VIRTIO_NET_CTRL_MAC as u8, VIRTIO_NET_CTRL_MAC_ADDR_SET as u8][..], &mac(1)].concat();
            assert_eq!(lan.nics[1].command(&own), 0, "the one that was given");
            refused
        },
    },
    Key {
        name: "spoofchk",
        set: |spec, _| spec.policy.spoof_check = true,
        is_in_force: |lan| counts(lan, Counter::TxSpoofedMac, &frame(STRANGER, WORLD, 60)),
    },
    Key {
        name: "trust",
        set: |spec, _| spec.policy.trusted = false,
        is_in_force: |lan| counts(lan, Counter::TxReservedGroup, &frame(mac(1), BRIDGES, 60)),
    },
    Key {
        name: "storm",
        set: |spec, _| spec.policy.storm = NonZeroU32::new(1),
        is_in_force: |lan| {
            (0..3).filter(|_| counts(lan, Counter::StormDropped, &frame(mac(1), BROADCAST, 60))).count() > 0
        },
    },
    Key { name: "max_tx_rate", set: |spec, _| spec.policy.max_tx_rate = NonZeroU32::new(10), is_in_force: waits },
    Key {
        name: "rate_limiter_config",
        set: |spec, _| {
            let refill = Duration::from_millis(400);
            spec.limits.ops = Some(RateLimit { size: 1, one_time_burst: 0, refill });
        },
        is_in_force: waits,
    },
    Key {
        name: "link",
        set: |spec, _| spec.link_up = false,
        is_in_force: |lan| counts(lan, Counter::TxLinkDown, &frame(mac(1), WORLD, 60)),
    },
    Key {
        name: "isolated",
        set: |_, settings| settings.isolated = true,
        is_in_force: |lan| counts(lan, Counter::TxIsolated, &frame(mac(1), mac(2), 60)),
    },
    Key {
        name: "mirror",
        set: |_, settings| settings.mirror = Some(2),
        is_in_force: |lan| {
            lan.nics[2].received();
            lan.nics[1].send(&frame(mac(1), WORLD, 60));
            lan.nics[2].received() == [frame(mac(1), WORLD, 60)]
        },
    },
    // The effect on frames is tested in `pressure.rs`.
    Key {
        name: "weight",
        set: |_, settings| settings.weight = 1,
        is_in_force: |lan| lan.switch.0.core().settings(1).weight == 1,
    },
];

fn vlan(spec: &mut NetSpec, priority: u8, protocol: VlanProtocol) {
    spec.policy.port_vlan = Some(PortVlan { id: 5, priority, protocol });
}

/// The bytes after the addresses of a frame that the uplink gets.
fn tag(lan: &mut Lan) -> [u8; 4] {
    lan.at_uplink();
    lan.nics[1].send(&frame(mac(1), WORLD, 60));
    lan.at_uplink().first().map_or([0; 4], |frame| frame[12..16].try_into().unwrap())
}

/// True if a frame is dropped for this reason. Otherwise, it goes to the uplink or to port 2.
fn counts(lan: &mut Lan, reason: Counter, frame: &[u8]) -> bool {
    lan.at_uplink();
    lan.nics[2].received();
    let before = lan.count(1, reason);
    lan.nics[1].send(frame);
    let dropped = lan.count(1, reason) > before;
    assert_ne!(dropped, lan.at_uplink().len() + lan.nics[2].received().len() > 0, "{reason:?}");
    dropped
}

/// True if the port's frames wait when it has sent much.
fn waits(lan: &mut Lan) -> bool {
    let before = lan.count(1, Counter::TxRateWaits);
    lan.nics[1].net.use_up(600_000);
    lan.nics[1].send(&frame(mac(1), WORLD, 60));
    lan.count(1, Counter::TxRateWaits) > before
}

/// Three functions. The VFs are unrestricted, except for the settings of the first by `set`.
fn lan(set: fn(&mut NetSpec, &mut PortSettings)) -> Lan {
    let mut settings = PortSettings::default();
    let mut lan = Lan::of(&Config::open(3), |port, spec| {
        spec.policy = Policy::default();
        if port == 1 {
            set(spec, &mut settings);
        }
    });
    lan.switch.set_port(1, settings).wait().unwrap();
    (0..3).for_each(|port| start(&mut lan, port));
    lan
}

fn start(lan: &mut Lan, port: usize) {
    let nic = &mut lan.nics[port];
    nic.start(FEATURES);
    nic.provide(64, 2048);
    nic.set_promiscuous(false);
    lan.settle();
}

/// Changes the settings of the running port 1.
fn change(lan: &mut Lan, set: fn(&mut NetSpec, &mut PortSettings)) {
    let mut spec = crate::net::testing::spec(1, SIZE);
    let mut settings = PortSettings::default();
    (spec.policy, spec.limits, spec.link_up) = (Policy::default(), RateLimits::default(), true);
    set(&mut spec, &mut settings);
    let nic = &mut lan.nics[1];
    nic.net.set_policy(spec.policy, spec.limits).wait().unwrap();
    nic.net.set_link(spec.link_up).wait().unwrap();
    lan.switch.set_port(1, settings).wait().unwrap();
}

fn assert_in_force(lan: &mut Lan, key: &Key, when: &str) {
    assert!((key.is_in_force)(lan), "{} {when}", key.name);
    for reset in 1..=2 {
        lan.nics[1].reset();
        start(lan, 1);
        assert!((key.is_in_force)(lan), "{} {when}, after reset {reset}", key.name);
    }
}

#[test]
fn policy_keys_apply_at_start_live_and_after_every_reset() {
    for key in &KEYS {
        let mut open = lan(|_, _| {});
        assert!(!(key.is_in_force)(&mut open), "{} without it", key.name);
        change(&mut open, key.set);
        assert_in_force(&mut open, key, "live");
        change(&mut open, |_, _| {});
        assert!(!(key.is_in_force)(&mut open), "{} taken back", key.name);
        assert_in_force(&mut lan(key.set), key, "from the start");
    }
}
