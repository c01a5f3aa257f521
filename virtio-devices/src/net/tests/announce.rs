//! A driver that announces its addresses at its new place (`virtio 1.4 §5.1.6.5.4`).

use virtio_bindings::virtio_net::*;

use super::super::testing::*;
use crate::{DeviceSpecific, HostNic, VirtioDevice};

/// The configuration's status: bit 0 is the link, bit 1 the announcement.
fn status(guest: &Guest) -> u16 {
    let mut status = [0; 2];
    guest.device.config_read(6, &mut status);
    u16::from_le_bytes(status)
}

fn was_told(guest: &Guest) -> bool {
    guest.interrupts.take_isr() & 2 != 0
}

#[test]
fn announce_status_stays_set_until_the_driver_acknowledges() {
    let mut guest = Guest::new(1, 64);
    guest.start_fresh(guest.device.features());
    was_told(&guest);
    let generation = guest.device.config_generation();
    assert_eq!(status(&guest), 1);
    assert!(guest.device.announce());
    assert_eq!((status(&guest), was_told(&guest)), (3, true));
    assert_ne!(guest.device.config_generation(), generation);
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, 1]), VIRTIO_NET_ERR as u8);
    assert_eq!(status(&guest), 3);
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, 0]), VIRTIO_NET_OK as u8);
    assert_eq!(status(&guest), 1);
}

#[test]
fn announce_is_not_requested_without_negotiation_or_link() {
    let mut guest = Guest::new(1, 64);
    assert!(!guest.device.announce(), "no driver");
    guest.start_fresh(guest.device.features() & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE));
    was_told(&guest);
    assert!(!guest.device.announce() && !was_told(&guest));
    assert_eq!(guest.command(2, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, 0]), VIRTIO_NET_ERR as u8);
    guest.stop();
    guest.device.reset();
    guest.start_fresh(guest.device.features());
    guest.device.set_link(false).wait().unwrap();
    assert!(!guest.device.announce());
    assert_eq!(status(&guest), 0);
}

#[test]
fn pending_announcement_is_restored_and_cleared_by_a_reset() {
    let mut guest = Guest::new(1, 64);
    let features = guest.device.features();
    guest.start_fresh(features);
    guest.device.announce();
    guest.stop();
    let saved = guest.device.save();
    assert!(matches!(&saved, DeviceSpecific::Net(state) if state.announce), "{saved:?}");
    let mut other = Guest::new(1, 64);
    let unable = features & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE);
    assert!(other.device.restore(&saved, Some(unable)).unwrap_err().to_string().contains("announcement"));
    other.device.restore(&saved, Some(features)).unwrap();
    other.start_fresh(features);
    assert_eq!((status(&other), was_told(&other)), (3, true));
    other.stop();
    other.device.reset();
    assert_eq!(status(&other), 1);
}

#[test]
fn a_restored_function_is_asked_before_its_queues_run() {
    let mut guest = Guest::new(1, 64);
    let features = guest.device.features();
    guest.device.restore(&DeviceSpecific::PowerOn, Some(features)).unwrap();
    assert!(guest.device.announce());
    guest.start_fresh(features);
    assert_eq!((status(&guest), was_told(&guest)), (3, true));
}

#[test]
fn host_announces_a_driver_without_the_announce_feature() {
    let mut guest = Guest::new(1, 64);
    let features = guest.device.features();
    assert!(!guest.device.announce_here(), "no driver");
    guest.start_fresh(features & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE));
    for _ in 0..2 {
        assert!(guest.device.announce_here());
        eventually("a frame", || receive(&guest.host[0]).is_some_and(|frame| frame[24..26] == [0x80, 0x35]));
    }
    assert!(receive(&guest.host[0]).is_none(), "once each time");
    guest.device.set_link(false).wait().unwrap();
    assert!(!guest.device.announce_here());
    guest.stop();
    guest.device.reset();
    guest.device.set_link(true).wait().unwrap();
    guest.start_fresh(features);
    assert!(!guest.device.announce_here(), "its driver does it itself");
}
