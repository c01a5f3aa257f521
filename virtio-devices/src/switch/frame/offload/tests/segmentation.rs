//! Segments.

use super::*;

/// All segments.
pub(super) fn cut(made: &Made, size: usize) -> Vec<Vec<u8>> {
    let frame = made.frame();
    let mut segments = Segments::new(&made.header(size), &frame).unwrap();
    let (count, bytes) = (segments.left(), segments.bytes_left());
    let mut buffer = vec![0xee; frame.len()];
    let mut cut = Vec::new();
    while let Some(len) = segments.next_into(&mut buffer) {
        cut.push(buffer[..len].to_vec());
    }
    assert_eq!((segments.left(), segments.bytes_left()), (0, 0));
    assert_eq!((cut.len(), cut.iter().map(Vec::len).sum()), (count, bytes));
    cut
}

fn number(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

fn sequence(made: &Made, segment: &[u8]) -> u32 {
    u32::from_be_bytes(segment[made.l4() + 4..][..4].try_into().unwrap())
}

/// Checks the invariants of the segments of any packet.
pub(super) fn check(made: &Made, size: usize) {
    let (frame, segments) = (made.frame(), cut(made, size));
    let (ip, l4, headers) = (made.ip(), made.l4(), made.headers());
    let data: Vec<u8> = segments.iter().flat_map(|segment| &segment[headers..]).copied().collect();
    assert_eq!(data, made.data, "the stream");
    let last = segments.len() - 1;
    for (at, segment) in segments.iter().enumerate() {
        assert!(is_right(made, segment, true), "{at}: checksums");
        assert_eq!(segment.len() - headers, if at < last { size } else { made.data.len() - last * size });
        // Everything except the fields that differ between segments.
        assert_eq!(segment[..ip], frame[..ip], "addresses and tags");
        if made.v6 {
            assert_eq!(number(segment, ip + 4), segment.len() - ip - 40);
            assert_eq!((&segment[ip..ip + 4], &segment[ip + 6..l4]), (&frame[ip..ip + 4], &frame[ip + 6..l4]));
        } else {
            assert_eq!(number(segment, ip + 2), segment.len() - ip);
            assert_eq!(number(segment, ip + 4), (number(&frame, ip + 4) + at) & 0xffff);
            assert_eq!(
                (&segment[ip + 6..ip + 10], &segment[ip + 12..l4]),
                (&frame[ip + 6..ip + 10], &frame[ip + 12..l4])
            );
        }
        assert_eq!(segment[l4..l4 + 4], frame[l4..l4 + 4], "ports");
        if made.tcp {
            assert_eq!(sequence(made, segment), sequence(made, &frame).wrapping_add((at * size) as u32));
            let mut flags = made.flags;
            flags &= if at < last { !0x09 } else { 0xff };
            flags &= if at > 0 { !0x80 } else { 0xff };
            assert_eq!(segment[l4 + 13], flags, "{at} of {last}");
            assert_eq!(segment[l4 + 8..l4 + 13], frame[l4 + 8..l4 + 13], "acknowledgement and length");
            assert_eq!(
                (&segment[l4 + 14..l4 + 16], &segment[l4 + 18..headers]),
                (&frame[l4 + 14..l4 + 16], &frame[l4 + 18..headers])
            );
        } else {
            assert_eq!(number(segment, l4 + 4), segment.len() - l4);
        }
    }
}

#[test]
fn segments_are_the_packet() {
    for v6 in [false, true] {
        for tcp in [false, true] {
            for (data, size) in
                [(0, 1), (1, 1), (1447, 1448), (1448, 1448), (1449, 1448), (2896, 1448), (60_000, 1460), (500, 1)]
            {
                for tags in [vec![], vec![[0x81, 0, 0, 5]], vec![[0x88, 0xa8, 0, 9], [0x81, 0, 0, 5], [0x81, 0, 0, 6]]]
                {
                    check(&Made { tags, flags: 0xff, ..Made::of(v6, tcp, data) }, size);
                }
            }
        }
    }
}

#[test]
fn options_and_extension_headers_are_in_every_segment() {
    let options = vec![1, 1, 1, 0];
    let tcp_options = vec![1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
    check(&Made { options, tcp_options: tcp_options.clone(), ..Made::of(false, true, 5000) }, 1200);
    // Destination options, and a routing header without segments left.
    let extensions = [[43, 0, 1, 4, 0, 0, 0, 0], [6, 0, 2, 0, 0, 0, 0, 0]].concat();
    check(&Made { options: extensions, tcp_options, ..Made::of(true, true, 5000) }, 1200);
}

#[test]
fn a_whole_stream_of_segments_has_the_flags_where_they_belong() {
    let made = Made { flags: 0x80 | 0x10 | 0x08 | 0x01, ..Made::of(false, true, 300) };
    let flags: Vec<_> = cut(&made, 100).iter().map(|segment| segment[made.l4() + 13]).collect();
    assert_eq!(flags, [0x90, 0x10, 0x19], "CWR on the first only, FIN and PSH on the last only");
}

#[test]
fn a_buffer_that_is_too_small_gets_nothing() {
    let made = Made::of(false, true, 300);
    let frame = made.frame();
    let mut segments = Segments::new(&made.header(100), &frame).unwrap();
    assert_eq!((segments.next_into(&mut [0; 153]), segments.left()), (None, 3));
    assert_eq!((segments.next_into(&mut [0; 154]), segments.left()), (Some(154), 2));
}
