//! Frames with offloads left to the switch.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MRG_RXBUF,
};

use super::rig::*;
use crate::Counter;
use crate::frames::policy::{Policy, PortVlan, VlanProtocol};
use crate::testing::driver_queue::{WRITE, eventually};

const SENDS: u64 = FEATURES | 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_TSO4;
const TAKES: u64 = FEATURES | 1 << VIRTIO_NET_F_GUEST_CSUM | 1 << VIRTIO_NET_F_GUEST_TSO4;

fn sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])));
    words.sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A TCP segment over IPv4 without its checksum, and the matching virtio header.
fn segment(data: usize) -> (Vec<u8>, Vec<u8>) {
    let mut frame = frame(mac(1), mac(2), 54 + data);
    let len = (40 + data) as u16;
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame[16..18].copy_from_slice(&len.to_be_bytes());
    let checksum = !fold(sum(&frame[14..34]));
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame[34..54].copy_from_slice(&[0, 80, 4, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    let pseudo = fold(sum(&frame[26..34]) + 6 + u32::from(len) - 20);
    frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
    let size = 1448_u16.to_le_bytes();
    (vec![1, u8::from(data > 1448), 54, 0, size[0], size[1], 34, 0, 16, 0, 0, 0], frame)
}

/// The TCP data of a frame whose checksums must be right.
fn checked_data(frame: &[u8]) -> Vec<u8> {
    assert_eq!(fold(sum(&frame[14..34])), 0xffff, "the IP header's");
    let tcp = &frame[34..14 + usize::from(u16::from_be_bytes([frame[16], frame[17]]))];
    assert_eq!(fold(sum(tcp) + sum(&frame[26..34]) + 6 + tcp.len() as u32), 0xffff, "TCP's");
    tcp[20..].to_vec()
}

fn lan(receiver: u64) -> Lan {
    let mut lan = Lan::new(&Config::closed(3));
    for (nic, features) in lan.nics.iter_mut().zip([FEATURES, SENDS, receiver]) {
        nic.start(features);
        nic.provide(128, 2048);
    }
    lan.settle();
    lan
}

#[test]
fn a_segment_of_64_kib_without_a_checksum_crosses_untouched() {
    let mut lan = lan(TAKES);
    let (header, frame) = segment(60_000);
    lan.nics[1].queue_raw(&[&header[..], &frame].concat(), &[12, 54]);
    lan.nics[1].kick();
    lan.nics[1].wait_sent(1);
    let got = lan.nics[2].received_raw();
    assert_eq!(got.len(), 1);
    assert_eq!(got[0][..10], header[..10]);
    assert_eq!(u16::from_le_bytes([got[0][10], got[0][11]]), 60_066_u16.div_ceil(2048));
    assert!(got[0][12..] == frame);
}

#[test]
fn large_frames_are_segmented_for_receivers_without_offloads() {
    for receiver in [FEATURES, FEATURES & !(1 << VIRTIO_NET_F_MRG_RXBUF)] {
        let mut lan = lan(receiver);
        let (header, frame) = segment(60_000);
        lan.nics[1].queue_raw(&[&header[..], &frame].concat(), &[12, 54]);
        lan.nics[1].kick();
        lan.nics[1].wait_sent(1);
        let got = lan.nics[2].received_raw();
        assert_eq!(got.len(), 60_000_usize.div_ceil(1448));
        assert!(got.iter().all(|frame| frame[..10] == [0; 10] && frame[10..12] == [1, 0]));
        let data: Vec<u8> = got.iter().flat_map(|frame| checked_data(&frame[12..])).collect();
        assert!(data == frame[54..]);
        assert_eq!((lan.count(2, Counter::SwSegmented), lan.count(1, Counter::TxFrames)), (1, 1));
    }
}

#[test]
fn a_receiver_without_checksum_offload_gets_a_checksum() {
    let mut lan = lan(FEATURES);
    let (header, frame) = segment(1000);
    lan.nics[1].queue_raw(&[&header[..], &frame].concat(), &[12, 54]);
    lan.nics[1].kick();
    lan.nics[1].wait_sent(1);
    let got = lan.nics[2].received_raw();
    assert_eq!(got[0][..2], [0; 2]);
    assert!(checked_data(&got[0][12..]) == frame[54..]);
    assert_eq!(lan.count(2, Counter::SwChecksummed), 1);
}

#[test]
fn a_tag_on_one_side_moves_what_the_header_points_to() {
    let mut lan = lan(TAKES);
    let vlan = PortVlan { id: 5, priority: 0, protocol: VlanProtocol::Customer };
    lan.nics[1].set_policy(Policy { port_vlan: Some(vlan), ..untrusted() });
    let (header, frame) = segment(3000);
    let send = |lan: &mut Lan| {
        lan.nics[1].queue_raw(&[&header[..], &frame].concat(), &[12, 54]);
        lan.nics[1].kick();
        lan.nics[1].wait_sent(1);
        lan.nics[2].received_raw().remove(0)
    };
    let tagged = send(&mut lan);
    assert_eq!(tagged[..10], [1, 1, 58, 0, header[4], header[5], 38, 0, 16, 0]);
    assert!(tagged[12 + 18..] == frame[14..]);
    lan.nics[2].set_policy(Policy { port_vlan: Some(vlan), ..untrusted() });
    let untagged = send(&mut lan);
    assert!(untagged[..10] == header[..10] && untagged[12..] == frame);
}

/// Sends segments of `size` bytes, 65,000 bytes in a frame.
fn send_segments_of(lan: &mut Lan, size: u16) {
    let (mut header, frame) = segment(65_000);
    header[4..6].copy_from_slice(&size.to_le_bytes());
    lan.nics[1].queue_raw(&[&header[..], &frame].concat(), &[12, 54]);
    lan.nics[1].kick();
    lan.nics[1].wait_sent(1);
}

/// The sender decides how many segments there are, and the receiver how many descriptors a chain has.
#[test]
fn short_segments_break_no_receiver_with_long_chains() {
    const CHAINS: usize = 200;
    let mut lan = lan(FEATURES & !(1 << VIRTIO_NET_F_MRG_RXBUF));
    lan.nics[2].reset();
    lan.nics[2].start(FEATURES & !(1 << VIRTIO_NET_F_MRG_RXBUF));
    lan.settle();
    let at = lan.nics[2].send_area();
    let mut chain = [(at + 4096, 8, WRITE); 19];
    chain[18].1 = 2048;
    (0..CHAINS).for_each(|_| _ = lan.nics[2].rx.add_indirect(at, &chain));
    send_segments_of(&mut lan, 500);
    assert_eq!((lan.nics[2].rx.take_used().len(), lan.count(2, Counter::RxNoBuffers)), (130, 0));
    while lan.nics[2].rx.outstanding() < CHAINS {
        lan.nics[2].rx.add_indirect(at, &chain);
    }
    // All of them would be 9,500 descriptors.
    send_segments_of(&mut lan, 130);
    assert_eq!((lan.nics[2].rx.take_used().len(), lan.count(2, Counter::RxNoBuffers)), (161, 1));
    assert!(!lan.nics[2].interrupts.needs_reset());
    // It gets frames again when a worker has paid for its long chains.
    eventually("a frame", || {
        lan.nics[1].send(&frame(mac(1), mac(2), 64));
        !lan.nics[2].rx.take_used().is_empty()
    });
}

/// If the receiver has a limit, its packets count there.
#[test]
fn a_frame_of_more_than_512_packets_is_its_senders_fault() {
    let mut lan = lan(TAKES);
    send_segments_of(&mut lan, 127);
    send_segments_of(&mut lan, 1);
    assert_eq!((lan.count(1, Counter::TxBadHeaders), lan.nics[2].received().len()), (1, 1));
    let lan = Lan::running(&Config::open(3));
    let (mut header, frame) = segment(65_000);
    header[4..6].copy_from_slice(&1_u16.to_le_bytes());
    crate::net::testing::send(lan.peer.as_ref().unwrap(), &[header, frame].concat());
    let counters = lan.switch.uplink_counters().unwrap();
    eventually("the loss of the frame", || counters.get(Counter::RxBadOffloads) == 1);
    assert_eq!(counters.get(Counter::RxFrames), 0);
}
