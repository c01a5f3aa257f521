//! Checksums that senders leave out.

use super::*;

const C: [u8; 4] = [0x81, 0, 0x60, 5];
const S: [u8; 4] = [0x88, 0xa8, 0, 9];

#[test]
fn a_checksum_is_completed_whatever_is_before_it() {
    for v6 in [false, true] {
        for tcp in [false, true] {
            for tags in [vec![], vec![C], vec![S, C], vec![S, C, C]] {
                for data in [0, 1, 2, 3, 4, 5, 999, 1460, 65_000] {
                    let made = Made { tags: tags.clone(), ..Made::of(v6, tcp, data) };
                    let (mut header, mut frame) = (made.header(0), made.frame());
                    header[GSO_TYPE] = 0;
                    assert!(!is_right(&made, &frame, false), "{made:?}");
                    let before = frame.clone();
                    complete(&mut header, &mut frame).unwrap();
                    assert!(is_right(&made, &frame, false));
                    assert_eq!((header[FLAGS], &header[CSUM_START..]), (0, &[0; 6][..]));
                    let at = made.l4() + made.checksum_offset();
                    assert_eq!((&before[..at], &before[at + 2..]), (&frame[..at], &frame[at + 2..]), "nothing else");
                }
            }
        }
    }
}

#[test]
fn a_checksum_of_zero_is_sent_as_the_other_zero() {
    // Data that make the sum all ones: the checksum would be 0, which is none in UDP.
    let made = Made { data: vec![0, 0], ..Made::of(false, false, 0) };
    let mut frame = made.frame();
    let rest = !fold(&frame[made.l4()..]);
    let end = frame.len();
    frame[end - 2..].copy_from_slice(&rest.to_be_bytes());
    let mut header = header(NEEDS, 0, 0, 0, made.l4(), 6);
    complete(&mut header, &mut frame).unwrap();
    assert_eq!(frame[made.l4() + 6..][..2], [0xff, 0xff]);
    assert!(is_right(&made, &frame, false));
}

#[test]
fn a_frame_that_needs_nothing_stays_as_it_is() {
    let made = Made::of(false, true, 100);
    let (mut frame, mut plain) = (made.frame(), header(0, 0, 54, 0, 34, 16));
    complete(&mut plain, &mut frame).unwrap();
    assert_eq!((frame, plain), (made.frame(), header(0, 0, 54, 0, 34, 16)));
}

#[test]
fn a_checksum_beyond_the_frame_is_malformed_and_changes_nothing() {
    let made = Made::of(false, false, 10);
    let len = made.frame().len();
    for (start, offset) in [(len + 1, 0), (0, len - 1), (len - 1, 0), (34, len), (65_535, 65_535)] {
        let (mut frame, mut bad) = (made.frame(), header(NEEDS, 0, 0, 0, start, offset));
        assert_eq!(complete(&mut bad, &mut frame), Err(Malformed::Checksum), "{start} {offset}");
        assert_eq!((frame, bad), (made.frame(), header(NEEDS, 0, 0, 0, start, offset)));
    }
    let (mut frame, mut last) = (made.frame(), header(NEEDS, 0, 0, 0, len - 2, 0));
    complete(&mut last, &mut frame).unwrap();
}

#[test]
fn the_features_of_a_receiver_decide_the_work_that_is_left() {
    let all = Offloads::all() - Offloads::UFO;
    let csum = Offloads::CHECKSUM;
    let of = |flags, kind| header(flags, kind, 54, 1448, 34, 16);
    for (flags, kind, offloads, expected) in [
        (0, 0, Offloads::empty(), None),
        (VALID, 0, Offloads::empty(), None),
        (NEEDS, 0, Offloads::empty(), Some(Work::Checksum)),
        (NEEDS, 0, csum, None),
        (NEEDS, TCP4, all, None),
        (NEEDS, TCP4, csum, Some(Work::Segments)),
        (NEEDS, TCP4, csum | Offloads::TSO6, Some(Work::Segments)),
        (NEEDS, TCP4, csum | Offloads::TSO4, None),
        (NEEDS, TCP4 | ECN, csum | Offloads::TSO4, Some(Work::Segments)),
        (NEEDS, TCP4 | ECN, csum | Offloads::TSO4 | Offloads::ECN, None),
        (NEEDS, TCP6, csum | Offloads::TSO4, Some(Work::Segments)),
        (NEEDS, TCP6, csum | Offloads::TSO6, None),
        (NEEDS, USO, csum | Offloads::USO4, Some(Work::Segments)),
        (NEEDS, USO, csum | Offloads::USO4 | Offloads::USO6, None),
        (NEEDS, 3, all, Some(Work::Segments)),
        (NEEDS, 77, all, Some(Work::Segments)),
        (0, TCP4, Offloads::TSO4, None),
    ] {
        assert_eq!(work(&of(flags, kind), offloads), expected, "{flags} {kind} {offloads:?}");
    }
}
