//! A driver that announces its addresses at its new place (`virtio 1.4 §5.1.6.5.4`).

use virtio_bindings::virtio_net::*;

use super::super::testing::*;
use crate::{DeviceSpecific, HostNic, VirtioDevice};

/// The configuration's status: bit 0 is the link, bit 1 the announcement.
fn status(guest: &Guest) -> u16 {
    let mut status = [0; 2];
    guest.net.config_read(6, &mut status);
    u16::from_le_bytes(status)
}

fn was_told(guest: &Guest) -> bool {
    guest.interrupts.take_isr() & 2 != 0
}

#[test]
fn announce_status_stays_set_until_the_driver_acknowledges() {
    let mut guest = Guest::new(1, 64);
    guest.start(guest.net.features());
    was_told(&guest);
    let generation = guest.net.config_generation();
    assert_eq!(status(&guest), 1);
    assert!(guest.net.announce());
    assert_eq!((status(&guest), was_told(&guest)), (3, true));
    assert_ne!(guest.net.config_generation(), generation);
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, 1]), VIRTIO_NET_ERR as u8);
    assert_eq!(status(&guest), 3);
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, 0]), VIRTIO_NET_OK as u8);
    assert_eq!(status(&guest), 1);
}

#[test]
fn announce_is_not_requested_without_negotiation_or_link() {
    let mut guest = Guest::new(1, 64);
    assert!(!guest.net.announce(), "no driver");
    guest.start(guest.net.features() & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE));
    was_told(&guest);
    assert!(!guest.net.announce() && !was_told(&guest));
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, 0]), VIRTIO_NET_ERR as u8);
    guest.stop();
    guest.net.reset();
    guest.start(guest.net.features());
    guest.net.set_link(false).wait().unwrap();
    assert!(!guest.net.announce());
    assert_eq!(status(&guest), 0);
}

#[test]
fn pending_announcement_is_restored_and_cleared_by_a_reset() {
    let mut guest = Guest::new(1, 64);
    let features = guest.net.features();
    guest.start(features);
    guest.net.announce();
    guest.stop();
    let saved = guest.net.save();
    assert!(matches!(&saved, DeviceSpecific::Net(state) if state.announce), "{saved:?}");
    let mut other = Guest::new(1, 64);
    let unable = features & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE);
    assert!(other.net.restore(&saved, Some(unable)).unwrap_err().to_string().contains("announcement"));
    other.net.restore(&saved, Some(features)).unwrap();
    other.start(features);
    assert_eq!((status(&other), was_told(&other)), (3, true));
    other.stop();
    other.net.reset();
    assert_eq!(status(&other), 1);
}

#[test]
fn a_restored_function_is_asked_before_its_queues_run() {
    let mut guest = Guest::new(1, 64);
    let features = guest.net.features();
    guest.net.restore(&DeviceSpecific::PowerOn, Some(features)).unwrap();
    assert!(guest.net.announce());
    guest.start(features);
    assert_eq!((status(&guest), was_told(&guest)), (3, true));
}

#[test]
fn host_announces_a_driver_without_the_announce_feature() {
    let mut guest = Guest::new(1, 64);
    let features = guest.net.features();
    assert!(!guest.net.announce_here(), "no driver");
    guest.start(features & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE));
    for _ in 0..2 {
        assert!(guest.net.announce_here());
        eventually("a frame", || receive(&guest.peers[0]).is_some_and(|frame| frame[24..26] == [0x80, 0x35]));
    }
    assert!(receive(&guest.peers[0]).is_none(), "once each time");
    guest.net.set_link(false).wait().unwrap();
    assert!(!guest.net.announce_here());
    guest.stop();
    guest.net.reset();
    guest.net.set_link(true).wait().unwrap();
    guest.start(features);
    assert!(!guest.net.announce_here(), "its driver does it itself");
}
