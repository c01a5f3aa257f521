//! Taps that are deleted under a NIC's own workers, and what takes their place.

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;
use virtio_devices::{BackendChange, ConnectError, Counter, FailureChange, HostNic, Tap, VirtioDevice, new_backend};

use crate::driver::*;
use crate::frames::*;
use crate::host::*;
use crate::open::fds;
use crate::sample::*;

/// Reports of a NIC about its backend.
type Changes = Arc<Mutex<Vec<BackendChange>>>;

pub(crate) fn changes(machine: &Machine) -> Changes {
    let changes = Changes::default();
    let seen = Arc::clone(&changes);
    machine.net.observe_backend(Box::new(move |change| seen.lock().push(change)));
    changes
}

/// Waits until the NIC's tap is lost or back, and its driver is notified.
pub(crate) fn follow(machine: &Machine, changes: &Changes, expected: &[BackendChange]) {
    let up = expected.last() == Some(&BackendChange::Restored);
    eventually("a change of the tap", || *changes.lock() == expected);
    eventually("the link", || machine.net.link_up() == up);
    eventually("a configuration interrupt", || machine.heard());
    assert_eq!(machine.net.backend_lost(), !up);
}

/// Sends a frame each way.
fn exchange(machine: &mut Machine, len: usize) {
    let wire = Wire::new("tap0");
    let before = machine.count(Counter::RxFrames);
    machine.provide(0, 4, 2048);
    eventually("reception", || {
        wire.send(&frame(MAC, len));
        machine.count(Counter::RxFrames) > before
    });
    machine.transmit(&with_header(&frame(OTHER, len)));
    eventually("a frame of the driver", || {
        std::iter::from_fn(|| wire.receive()).any(|received| received == frame(OTHER, len))
    });
}

const LOST: BackendChange = BackendChange::Lost;
const BACK: BackendChange = BackendChange::Restored;

#[test]
fn a_deleted_tap_is_lost_until_there_is_one_of_its_name() {
    let mut machine = Machine::new(1);
    let changes = changes(&machine);
    machine.start(one_pair(&machine.net));
    exchange(&mut machine, 100);
    ip("link delete tap0");
    follow(&machine, &changes, &[LOST]);
    // What the driver sends now is dropped as by any link that is down, and so is what it sent before.
    machine.transmit(&with_header(&frame(OTHER, 60)));
    assert_eq!(machine.count(Counter::TxLinkDown), 1);
    assert!(machine.count(Counter::TxBackendErrors) == 0 && machine.count(Counter::RxBackendErrors) < 10);
    assert!(!exists("tap0"), "the deletion had a reason");
    ip("tuntap add tap0 mode tap");
    follow(&machine, &changes, &[LOST, BACK]);
    exchange(&mut machine, 200);
    machine.stop();
    assert!(exists("tap0"));
}

#[test]
fn a_tap_is_missed_by_a_driver_that_provides_no_buffers() {
    let mut machine = Machine::new(1);
    let changes = changes(&machine);
    machine.start(one_pair(&machine.net));
    // Its receive queue waits for a doorbell, so that the tap is not waited for.
    Wire::new("tap0").send(&frame(MAC, 100));
    ip("link delete tap0");
    follow(&machine, &changes, &[LOST]);
}

#[test]
fn a_tap_of_several_queues_is_reopened_with_all_of_them() {
    let mut machine = Machine::new(4);
    let changes = changes(&machine);
    assert!(machine.net.features() & 1 << VIRTIO_NET_F_MQ != 0);
    machine.start(machine.net.features());
    assert_eq!(machine.command(8, &[4, 0, 4, 0]), 0);
    (0..4).for_each(|pair| machine.provide(2 * pair, 16, 2048));
    for round in 1..=2 {
        // Under traffic.
        (0..16).for_each(|flow| Wire::new("tap0").send(&flow_frame(flow)));
        ip("link delete tap0");
        let expected: Vec<_> = (0..round).flat_map(|_| [LOST, BACK]).collect();
        follow(&machine, &changes, &expected[..2 * round - 1]);
        ip("tuntap add tap0 mode tap multi_queue");
        follow(&machine, &changes, &expected);
        (0..8).step_by(2).for_each(|queue| drop(machine.queues[queue].take_used()));
        (0..4).for_each(|pair| machine.provide(2 * pair, 8, 2048));
        machine.provide(0, 24, 2048);
        let wire = Wire::new("tap0");
        eventually("frames of several flows in several pairs", || {
            (0..16).for_each(|flow| wire.send(&flow_frame(flow)));
            (1..4).any(|pair| !machine.queues[2 * pair].take_used().is_empty())
        });
    }
}

#[test]
fn a_tap_that_goes_without_a_driver_is_missed_by_the_next() {
    let mut machine = Machine::new(1);
    let changes = changes(&machine);
    ip("link delete tap0");
    assert!(machine.net.backend_lost() && changes.lock().is_empty());
    machine.start(one_pair(&machine.net));
    follow(&machine, &changes, &[LOST]);
    machine.stop();
    machine.net.reset();
    machine.renew();
    assert!(machine.net.backend_lost() && !machine.net.link_up(), "a reset gives nothing back");
    ip("tuntap add tap0 mode tap");
    machine.start(one_pair(&machine.net));
    follow(&machine, &changes, &[LOST, BACK]);
    exchange(&mut machine, 100);
}

#[test]
fn a_passed_tap_that_was_deleted_is_replaced_by_another() {
    new_namespace();
    ip("tuntap add tap0 mode tap");
    let mut machine = Machine::over(Tap::from_fds(fds(&Tap::open(&spec("tap0", 1)).unwrap())).unwrap(), 1);
    let changes = changes(&machine);
    let features = one_pair(&machine.net);
    machine.start(features);
    exchange(&mut machine, 100);
    let other = || new_backend(&nic(1), Tap::open(&spec("other", 1)).unwrap()).unwrap();
    machine.stop();
    let refused = machine.net.connect(&mut other(), Some(features)).unwrap_err();
    assert_eq!(refused, ConnectError::Present("tap0".into()));
    machine.start(features);
    ip("link delete tap0");
    follow(&machine, &changes, &[LOST]);
    // One of its name is not the one that was passed.
    ip("tuntap add tap0 mode tap");
    machine.stop();
    machine.net.connect(&mut other(), Some(features)).unwrap();
    machine.net.backend_replaced();
    assert!(machine.net.link_up() && !machine.net.backend_lost());
    follow(&machine, &changes, &[LOST, BACK]);
    assert_eq!(machine.net.backend_name(), "other");
    ip("link set tap0 down");
    machine.start(features);
    ip("link delete tap0");
    ip("link set other name tap0");
    exchange(&mut machine, 100);
}

#[test]
fn a_tap_that_takes_no_frames_is_reported_once() {
    let mut machine = Machine::new(1);
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    machine.net.observe_failures(Box::new(move |change| seen.lock().push(change)));
    machine.start(one_pair(&machine.net));
    ip("link set tap0 down");
    (0..3).for_each(|_| machine.transmit(&with_header(&frame(OTHER, 60))));
    let failing = FailureChange::Failing(std::io::Error::from_raw_os_error(libc::EIO).to_string());
    assert_eq!(*told.lock(), std::slice::from_ref(&failing));
    ip("link set tap0 up");
    machine.transmit(&with_header(&frame(OTHER, 60)));
    eventually("the end of the failures", || *told.lock() == [failing.clone(), FailureChange::Recovered]);
}
