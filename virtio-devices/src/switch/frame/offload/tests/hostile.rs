//! Headers that no honest driver sends.

use proptest::prelude::*;

use super::segmentation::check;
use super::*;
use crate::switch::frame::offload::segments::MAX_SEGMENTS;

fn refused(header: [u8; HEADER], frame: &[u8]) -> Malformed {
    Segments::new(&header, frame).unwrap_err()
}

#[test]
fn a_kind_that_the_packet_is_not_of_is_malformed() {
    let kinds = [TCP4, TCP6, USO, 3, 0, 2, 77];
    for (v6, tcp, fitting) in [(false, true, TCP4), (true, true, TCP6), (false, false, USO), (true, false, USO)] {
        let made = Made::of(v6, tcp, 100);
        for kind in kinds {
            let header = header(0, kind, 0, 10, 0, 0);
            assert_eq!(Segments::new(&header, &made.frame()).is_ok(), kind == fitting, "{kind}");
            if kind != fitting {
                assert_eq!(refused(header, &made.frame()), Malformed::Kind);
            }
        }
    }
}

#[test]
fn headers_that_contradict_themselves_are_malformed() {
    let four = Made::of(false, true, 100);
    let six = Made::of(true, true, 100);
    for (made, at, value, why) in [
        (&four, 12, 9, "another protocol"),
        (&four, 14, 0x65, "version"),
        (&four, 14, 0x44, "a header of 16 bytes"),
        (&four, 20, 0x20, "more fragments follow"),
        (&four, 21, 1, "a later fragment"),
        (&four, 23, 47, "another protocol in it"),
        (&four, 46, 0x40, "a TCP header of 16 bytes"),
        (&six, 14, 0x45, "version"),
        (&six, 20, 44, "a fragment"),
        (&six, 20, 59, "nothing in it"),
        (&six, 20, 43, "stops ahead"),
        (&six, 66, 0x00, "no TCP header"),
    ] {
        let mut frame = made.frame();
        frame[at] = value;
        let header = header(0, if made.v6 { TCP6 } else { TCP4 }, 0, 10, 0, 0);
        assert_eq!(Segments::new(&header, &frame).map(|_| ()), Err(Malformed::Headers), "{why}");
    }
    for made in [&four, &six] {
        let frame = made.frame();
        for len in 0..made.headers() {
            assert_eq!(refused(made.header(10), &frame[..len]), Malformed::Headers, "{len}");
        }
        assert!(Segments::new(&made.header(10), &frame[..made.headers()]).is_ok());
    }
}

#[test]
fn a_checksum_that_is_not_the_packets_is_malformed() {
    let made = Made::of(false, true, 100);
    for (start, offset) in [(33, 16), (34, 6), (35, 15), (0, 50), (65_535, 16)] {
        let header = header(NEEDS, TCP4, 54, 10, start, offset);
        assert_eq!(refused(header, &made.frame()), Malformed::Checksum);
    }
}

#[test]
fn tiny_segments_do_not_keep_the_switch_busy() {
    let made = Made::of(false, true, 512);
    assert_eq!(Segments::new(&made.header(1), &made.frame()).unwrap().left(), 512);
    let more = Made::of(false, true, 513);
    assert_eq!(refused(more.header(1), &more.frame()), Malformed::TooMany);
    assert_eq!(Segments::new(&more.header(2), &more.frame()).unwrap().left(), 257);
    assert_eq!(refused(made.header(0), &made.frame()), Malformed::Kind);
}

#[test]
fn a_segment_longer_than_a_packet_can_be_is_malformed() {
    let made = Made::of(false, true, 65_535 - 40);
    assert_eq!(Segments::new(&made.header(65_535), &made.frame()).unwrap().left(), 1);
    let longer = [made.frame(), vec![0]].concat();
    assert_eq!(refused(made.header(65_535), &longer), Malformed::Headers);
    assert_eq!(Segments::new(&made.header(1448), &longer).unwrap().left(), 46);
}

#[test]
fn extension_headers_without_end_are_malformed() {
    let made = Made { options: [60, 0, 1, 4, 0, 0, 0, 0].repeat(20), ..Made::of(true, true, 100) };
    assert_eq!(refused(made.header(10), &made.frame()), Malformed::Headers);
    let long = Made { options: [&[6, 59, 1, 4][..], &[0; 476]].concat(), ..Made::of(true, true, 100) };
    assert_eq!(refused(long.header(10), &long.frame()), Malformed::Headers, "more than 512 bytes of headers");
}

fn packets() -> impl Strategy<Value = Made> {
    let tags = prop::collection::vec(prop_oneof![Just([0x81, 0, 0, 5]), Just([0x88, 0xa8, 0, 9])], 0..4);
    (tags, any::<bool>(), any::<bool>(), 0..3000_usize, 0..10_usize, any::<u8>()).prop_map(
        |(tags, v6, tcp, data, words, flags)| {
            let tcp_options = vec![1; if tcp { 4 * words } else { 0 }];
            Made { tags, tcp_options, flags, ..Made::of(v6, tcp, data) }
        },
    )
}

proptest! {
    #[test]
    fn any_packet_is_its_segments(mut made in packets(), size in 3..3000_usize) {
        made.data.truncate(MAX_SEGMENTS * size);
        check(&made, size);
    }

    /// Bytes of a packet are replaced: the segments have the announced length, or the packet is refused.
    #[test]
    fn nothing_that_a_guest_writes_does_harm(
        made in packets(),
        changes in prop::collection::vec((0..90_usize, any::<u8>()), 0..6),
        header_changes in prop::collection::vec((0..HEADER, any::<u8>()), 0..4),
        cut_to in prop_oneof![3 => Just(usize::MAX), 1 => 0..120_usize],
        size in 1..100_usize,
    ) {
        let (mut frame, mut header) = (made.frame(), made.header(size));
        for (at, value) in changes {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        frame.truncate(cut_to);
        for (at, value) in header_changes {
            header[at] = value;
        }
        if let Ok(mut segments) = Segments::new(&header, &frame) {
            let (left, bytes) = (segments.left(), segments.bytes_left());
            prop_assert!((1..=1024).contains(&left));
            let mut buffer = vec![0; frame.len()];
            let lengths: Vec<_> = std::iter::from_fn(|| segments.next_into(&mut buffer)).take(2000).collect();
            prop_assert_eq!((lengths.len(), lengths.iter().sum()), (left, bytes));
            prop_assert!(lengths.iter().all(|len| *len <= frame.len()));
        }
        let before = frame.len();
        let _ = complete(&mut header, &mut frame);
        prop_assert_eq!(frame.len(), before);
        for bits in [0, u32::MAX] {
            let _ = work(&header, Offloads::from_bits_truncate(bits));
        }
    }
}
