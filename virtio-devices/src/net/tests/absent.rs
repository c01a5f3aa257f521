//! A NIC whose backend is missing, and is added later.

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::*;

use super::super::counters::Counter;
use super::super::new_backend;
use super::super::testing::*;
use crate::backend::{Absent, Tap};
use crate::transport::features::has;
use crate::{BackendKind, ConnectError, DeviceSpecific, HostNic, NewBackend, VirtioDevice};

fn absent() -> Absent {
    Absent { reason: "t: there is no such tap".into(), queue_pairs: 1, of_kernel: true, has_own_mac: false }
}

/// A NIC without a backend, with a driver from before that has these features.
fn came(features: u64, state: &DeviceSpecific) -> Guest {
    let mut guest = Guest::over(spec(1, 16), absent());
    guest.device.adopt(features, state);
    guest.device.restore(state, Some(features)).unwrap();
    guest
}

/// A tap, and the other end of it.
fn tap(pairs: u16) -> (NewBackend, Vec<std::os::fd::OwnedFd>) {
    let (near, peers): (Vec<_>, Vec<_>) = (0..pairs).map(|_| sockets()).unzip();
    (new_backend(&spec(pairs, 16), Tap::over_sockets(near)).unwrap(), peers)
}

#[test]
fn without_backend_the_link_is_down_and_only_commands_run() {
    let mut guest = Guest::over(spec(1, 16), absent());
    let features = guest.device.features();
    guest.start_with(features);
    assert_eq!((guest.device.backend_kind(), guest.device.link_up()), (BackendKind::Absent, false));
    assert_eq!(guest.device.backend_missing(), Some("t: there is no such tap"));
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_RX as u8, VIRTIO_NET_CTRL_RX_PROMISC as u8, 1]), VIRTIO_NET_OK as u8);
    guest.queues[1].add(&[(BUFFERS, 80, 0)]);
    guest.kick(1);
    guest.device.set_link(false).wait().unwrap();
    guest.device.set_link(true).wait().unwrap();
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_RX as u8, VIRTIO_NET_CTRL_RX_PROMISC as u8, 0]), VIRTIO_NET_OK as u8);
    assert!(!guest.device.link_up() && guest.queues[1].take_used().is_empty());
    assert_eq!(guest.count(Counter::TxFrames), 0);
    guest.stop();
    guest.device.reset();
    assert!(!guest.device.link_up(), "a reset gives it no backend");
}

#[test]
fn absent_backend_offers_the_features_of_its_kind() {
    let of_kernel = Guest::over(spec(1, 16), absent()).device.features();
    let unknown = Guest::over(spec(1, 16), Absent { of_kernel: false, ..absent() }).device.features();
    assert!(has(of_kernel, VIRTIO_NET_F_CTRL_VQ) && has(of_kernel, VIRTIO_NET_F_CSUM));
    for bit in [VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_GUEST_ANNOUNCE] {
        assert!(!has(unknown, bit), "{bit}");
    }
    assert!(has(unknown, VIRTIO_F_VERSION_1) && has(unknown, VIRTIO_NET_F_STATUS) && unknown & !of_kernel == 0);
}

#[test]
fn queues_continue_over_the_new_backend_from_their_position() {
    let mut before = Guest::new(1, 16);
    let features = before.device.features();
    before.start_fresh(features);
    assert_eq!(before.command(2, &[VIRTIO_NET_CTRL_RX as u8, VIRTIO_NET_CTRL_RX_ALLMULTI as u8, 1]), 0);
    before.stop();
    let saved = before.device.save();
    let mut guest = came(features, &saved);
    assert_eq!(guest.device.features(), features, "what was promised, and no more");
    guest.start_with(features);
    guest.interrupts.take_isr();
    guest.queues[1].add(&[(BUFFERS, 80, 0)]);
    guest.stop();
    let (mut new, peers) = tap(1);
    guest.device.connect(&mut new, Some(features)).unwrap();
    assert_eq!(
        (guest.device.backend_kind(), guest.device.link_up(), guest.device.backend_missing()),
        (BackendKind::Tap, true, None)
    );
    assert_ne!(guest.interrupts.take_isr() & 2, 0, "the driver is notified of its link");
    guest.start_with(features);
    guest.kick(1);
    eventually("the frame", || guest.queues[1].take_used().len() == 1);
    assert_eq!(receive(&peers[0]).unwrap().len(), 80);
    guest.stop();
    assert_eq!(guest.device.save(), saved_with_generation_of(&guest, &saved), "what the driver commanded is kept");
}

fn saved_with_generation_of(guest: &Guest, saved: &DeviceSpecific) -> DeviceSpecific {
    let DeviceSpecific::Net(state) = saved.clone() else { panic!("{saved:?}") };
    DeviceSpecific::Net(crate::NicState { generation: guest.device.config_generation(), ..state })
}

#[test]
fn backend_lacking_promised_features_is_refused_without_effect() {
    let features = Guest::new(1, 16).device.features();
    let mut guest = came(features, &DeviceSpecific::PowerOn);
    let fewer = crate::NetSpec { offload_csum: false, ..spec(1, 16) };
    let (near, _peer) = sockets();
    let mut new = new_backend(&fewer, Tap::over_sockets(vec![near])).unwrap();
    let error = guest.device.connect(&mut new, Some(features)).unwrap_err();
    assert!(matches!(error, ConnectError::Features { missing, .. } if has(missing, VIRTIO_NET_F_CSUM)), "{error}");
    assert_eq!((guest.device.backend_kind(), guest.device.link_up()), (BackendKind::Absent, false));
    // Without a driver there are no promises.
    guest.device.reset();
    guest.device.connect(&mut new, None).unwrap();
    assert!(!has(guest.device.features(), VIRTIO_NET_F_CSUM) && guest.device.link_up());
    let error = guest.device.connect(&mut tap(1).0, None).unwrap_err();
    assert!(matches!(error, ConnectError::Present(_)), "{error}");
}

#[test]
fn link_set_down_by_the_host_stays_down_with_a_new_backend() {
    let features = Guest::new(1, 16).device.features();
    let mut guest = came(features, &DeviceSpecific::PowerOn);
    guest.device.set_link(false).wait().unwrap();
    let (mut backend, _peers) = tap(1);
    guest.device.connect(&mut backend, Some(features)).unwrap();
    assert!(!guest.device.link_up());
    guest.device.set_link(true).wait().unwrap();
    assert!(guest.device.link_up());
}
