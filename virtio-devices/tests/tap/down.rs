//! Taps that the host sets down and up again under a NIC's own workers.

use virtio_devices::{BackendChange, Counter, HostNic, VirtioDevice};

use crate::driver::*;
use crate::frames::*;
use crate::host::*;
use crate::lost::{changes, follow};
use crate::sample::*;

/// Waits until the NIC's link is as expected, and its driver is notified.
fn link(machine: &Machine, up: bool) {
    eventually("the link", || machine.net.link_up() == up);
    eventually("a configuration interrupt", || machine.heard());
    let mut status = [0; 2];
    machine.net.config_read(6, &mut status);
    assert_eq!((u16::from_le_bytes(status) & 1 != 0, machine.net.tap_down()), (up, !up));
    assert!(!machine.net.backend_lost());
}

#[test]
fn the_link_follows_a_tap_and_the_first_frame_arrives() {
    let mut machine = Machine::new(1);
    let changes = changes(&machine);
    machine.start(one_pair(&machine.net));
    machine.provide(0, 64, 2048);
    for round in 1..=3 {
        ip("link set tap0 down");
        link(&machine, false);
        let refused = machine.count(Counter::TxBackendErrors);
        machine.transmit(&with_header(&frame(OTHER, 60)));
        assert_eq!(machine.count(Counter::TxBackendErrors), refused + 1);
        ip("link set tap0 up");
        // At once, before the driver can know.
        Wire::new("tap0").send(&frame(MAC, 60));
        eventually("the first frame", || machine.count(Counter::RxFrames) == round);
        link(&machine, true);
        machine.transmit(&with_header(&frame(OTHER, 60)));
    }
    assert_eq!((machine.count(Counter::RxLinkDown), machine.count(Counter::TxLinkDown)), (0, 0));
    assert!(changes.lock().is_empty());
}

#[test]
fn the_link_follows_a_tap_without_receive_buffers_or_traffic() {
    let mut machine = Machine::new(1);
    machine.start(one_pair(&machine.net));
    // Its receive queue waits for a doorbell, so that no frame is waited for.
    Wire::new("tap0").send(&frame(MAC, 100));
    for _ in 0..3 {
        ip("link set tap0 down");
        link(&machine, false);
        ip("link set tap0 up");
        link(&machine, true);
    }
}

#[test]
fn a_link_that_is_to_stay_up_ignores_the_tap() {
    let mut machine = Machine::new(1);
    machine.net.follow_tap(false);
    machine.start(one_pair(&machine.net));
    ip("link set tap0 down");
    eventually("the state of the tap", || machine.net.tap_down());
    assert!(machine.net.link_up() && !machine.heard());
    machine.net.follow_tap(true);
    link(&machine, false);
    machine.net.follow_tap(false);
    assert!(machine.net.link_up() && machine.heard());
}

#[test]
fn a_tap_that_is_down_and_then_deleted_is_lost_alone() {
    let mut machine = Machine::new(1);
    let changes = changes(&machine);
    machine.start(one_pair(&machine.net));
    ip("link set tap0 down");
    link(&machine, false);
    ip("link delete tap0");
    follow(&machine, &changes, &[BackendChange::Lost]);
    assert!(!machine.net.tap_down());
    ip("tuntap add tap0 mode tap");
    follow(&machine, &changes, &[BackendChange::Lost, BackendChange::Restored]);
}

#[test]
fn a_tap_that_is_deleted_without_a_driver_is_link_down() {
    let machine = Machine::new(1);
    assert!(machine.net.link_up());
    ip("link delete tap0");
    assert!(!machine.net.link_up() && machine.net.backend_lost());
}

#[test]
fn a_tap_without_a_driver_is_looked_at_when_asked() {
    let mut machine = Machine::new(1);
    for (state, up) in [("down", false), ("up", true), ("down", false)] {
        ip(&format!("link set tap0 {state}"));
        assert_eq!((machine.net.link_up(), machine.net.tap_down()), (up, !up));
    }
    machine.start(one_pair(&machine.net));
    link(&machine, false);
    machine.stop();
    ip("link set tap0 up");
    assert!(machine.net.link_up());
    machine.start(one_pair(&machine.net));
    link(&machine, true);
}
