//! Frames that an X550's driver leaves for the NIC to cut.

use super::*;

fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// X25: transmit descriptors.
#[test]
fn a_long_segment_is_cut_and_each_part_has_its_checksums() {
    let mut card = Card::new();
    let long = uncut(4000);
    let at = card.store(0, &long);
    let context = [14 << 9 | 20, 0, 2 << 20 | 1 << 29 | 1 << 11 | 1 << 10, 1448 << 16 | 20 << 8];
    let first = [at, 0, data(4054) | 1 << 31, 4000 << 14 | 1 << 9 | 1 << 8 | 1 << 7];
    card.send_descriptors(0, &[context, first]);
    let frames = card.frames(2);
    assert_eq!(frames.iter().map(Vec::len).collect::<Vec<_>>(), [1502, 1502, 54 + 4000 - 2 * 1448]);
    for (n, frame) in frames.iter().enumerate() {
        let total = u16::from_be_bytes([frame[16], frame[17]]);
        assert_eq!(usize::from(total), frame.len() - 14);
        assert_eq!(sum(&frame[14..34]), 0xffff, "IP header of {n}");
        let pseudo = [&frame[26..34], &[0, 6], &(total - 20).to_be_bytes(), &frame[34..]].concat();
        assert_eq!(sum(&pseudo), 0xffff, "TCP of {n}");
        assert_eq!(frame[54..], long[54 + 1448 * n..][..frame.len() - 54]);
    }
}

/// X25: transmit descriptors.
#[test]
fn a_segment_in_a_tunnel_is_refused() {
    let mut card = Card::new();
    // VXLAN, whose outer headers count as the IP header up to the inner TCP: 20, 8, 8, 14 and 20 bytes.
    let inner = uncut(4000);
    let mut outer = frame(mac(0), mac(1), 50 + inner.len());
    outer[14..34].copy_from_slice(&[0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0, 10, 1, 0, 1, 10, 1, 0, 2]);
    outer[50..].copy_from_slice(&inner);
    let at = card.store(0, &outer);
    let len = outer.len() as u32;
    let first = [at, 0, data(len) | 1 << 31, 4000 << 14 | 1 << 9 | 1 << 8 | 1 << 7];
    // The same with the header of IPv4 alone, which is not followed by TCP, and as IPv6.
    for (ip_len, is_ipv4, n) in [(70, 1 << 10, 1), (20, 1 << 10, 2), (70, 0, 3)] {
        let context = [14 << 9 | ip_len, 0, 2 << 20 | 1 << 29 | 1 << 11 | is_ipv4, 1448 << 16 | 20 << 8];
        card.send_descriptors(0, &[context, first]);
        assert_eq!((card.frames(2).len(), card.counter(Place::Vf(0), Counter::TxBadHeaders)), (0, n));
    }
    // The next frame is not affected.
    card.send(0, &frame(mac(0), mac(1), 60));
    assert_eq!(card.frames(2).len(), 1);
}

#[test]
fn a_queue_that_is_added_repeats_no_frame() {
    let mut card = Card::new();
    // It is cut into 7 parts of 4 buffers, and costs more than a turn before all have it.
    let mut long = uncut(56_000);
    long[..6].copy_from_slice(&[0xff; 6]);
    let at = card.store(0, &long);
    let context = [14 << 9 | 20, 0, 2 << 20 | 1 << 29 | 1 << 11 | 1 << 10, 8138 << 16 | 20 << 8];
    let first = [at, 0, data(56_054) | 1 << 31, 56_000 << 14 | 1 << 9 | 1 << 8 | 1 << 7];
    for (n, descriptor) in [context, first].into_iter().enumerate() {
        let bytes = descriptor.map(u32::to_le_bytes).concat();
        card.memory.write_slice(&bytes, GuestAddress(area(0) + 0x1000 + 16 * n as u64)).unwrap();
    }
    card.write(0x6018, 2);
    card.worker.step(Some(Duration::ZERO));
    let received = |card: &mut Card| [2, 4, 6, 8].map(|queue| card.frames(queue).len());
    let mut got = received(&mut card);
    assert_eq!((got.iter().filter(|parts| **parts == 7).count(), card.read(0x6010)), (3, 0), "{got:?}");
    // The driver enables a further queue of the pool, so its port is opened again.
    card.start(1);
    card.run();
    got.iter_mut().zip(received(&mut card)).for_each(|(got, more)| *got += more);
    assert_eq!((got.iter().max(), card.read(0x6010)), (Some(&7), 2), "{got:?}");
}
