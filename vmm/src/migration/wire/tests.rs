use proptest::prelude::*;

use super::bounds::{RANGE, TABLE};
use super::*;

fn greeting() -> Greeting {
    Greeting {
        version: VERSION,
        oldest: OLDEST,
        role: Role::Pages(3),
        connections: 8,
        features: Features::LOCAL,
        session: *b"0123456789abcdef",
    }
}

#[test]
fn a_greeting_reads_back_and_another_program_is_named() {
    for role in [Role::Control, Role::Pages(0), Role::Pages(MAX_CONNECTIONS - 1)] {
        let greeting = Greeting { role, ..greeting() };
        assert_eq!(Greeting::read(&greeting.bytes()), Ok(greeting));
    }
    // What Cloud Hypervisor sends first: a command, and a length.
    let mut start = [0; GREETING];
    start[0] = 1;
    let line = Greeting::read(&start).unwrap_err().to_string();
    assert!(line.contains("Cloud Hypervisor's is another") && !line.contains('\n'), "{line}");
    for (at, value) in [(12, 2), (12, 0), (13, 255), (14, 255), (10, 9)] {
        let mut bytes = greeting().bytes();
        bytes[at] = value;
        assert!(Greeting::read(&bytes).is_err(), "{at}");
    }
}

#[test]
fn the_newest_version_of_both_is_spoken_and_none_is_refused() {
    let with = |oldest, version| Greeting { oldest, version, ..greeting() };
    assert_eq!(with(1, 1).common_version(), Ok(1));
    assert_eq!(with(1, VERSION + 5).common_version(), Ok(VERSION));
    let refused = with(VERSION + 1, VERSION + 2).common_version().unwrap_err();
    assert_eq!(refused, WireError::Version { oldest: VERSION + 1, version: VERSION + 2 });
    assert_eq!(with(0, 0).common_version(), Err(WireError::Version { oldest: 0, version: 0 }));
}

#[test]
fn features_of_a_newer_version_are_left_out() {
    let greeting = Greeting { features: Features(0xffff_ffff), ..greeting() };
    assert_eq!(Greeting::read(&greeting.bytes()).unwrap().features, Features::KNOWN);
}

fn frames() -> Vec<Frame> {
    let part = |is_last, len| Part { is_last, bytes: vec![7; len] };
    vec![
        Frame::Offer(part(false, MAX_PART)),
        Frame::Offer(part(true, 0)),
        Frame::State(part(true, 5)),
        Frame::Prepared,
        Frame::Flush(3),
        Frame::Ready,
        Frame::Go(None),
        Frame::Go(Some(23_125)),
        Frame::Running(1234),
        Frame::Failed("disk0: the image is locked".to_string()),
        Frame::Cancel,
        Frame::Keepalive,
    ]
}

#[test]
fn a_frame_reads_back_as_it_was_sent() {
    for frame in frames() {
        let bytes = frame.bytes();
        let header = Header::read(bytes[..HEADER].try_into().unwrap()).unwrap();
        assert_eq!((header.kind, header.len as usize), (frame.kind(), bytes.len() - HEADER));
        assert_eq!(Frame::read(header.kind, &bytes[HEADER..]), Ok(frame));
    }
}

#[test]
fn overlong_frame_is_refused_before_its_body_is_read() {
    for kind in Kind::ALL {
        let most = kind.most() as u32;
        assert!(Header::read(Header { kind, len: most }.bytes()).is_ok());
        let refused = Header::read(Header { kind, len: most + 1 }.bytes()).unwrap_err();
        assert_eq!(refused, WireError::Long { len: most + 1, most: most as usize });
    }
    assert_eq!(Header::read([0; HEADER]), Err(WireError::Kind(0)));
    assert_eq!(Header::read([11, 0, 1, 0, 0, 0, 0, 0]), Err(WireError::Field("header")));
}

#[test]
fn a_peers_line_is_one_line_and_short() {
    let Ok(Frame::Failed(line)) = Frame::read(Kind::Failed, b"a\nb\x1b[31m\xff") else { panic!() };
    assert_eq!(line, "a b [31m\u{fffd}");
    let Ok(Frame::Failed(line)) = Frame::read(Kind::Failed, &[0xff; MAX_LINE]) else { panic!() };
    assert!(line.len() <= MAX_LINE);
    let long = Frame::Failed("é".repeat(MAX_LINE)).bytes();
    assert!(long.len() <= HEADER + MAX_LINE);
    assert!(Frame::read(Kind::Failed, &long[HEADER..]).is_ok());
}

#[test]
fn runs_that_continue_each_other_are_one() {
    let run = |page: u64, is_zero| Range { start: page * PAGE, len: PAGE as u32, is_zero };
    let mut pages = Pages::default();
    for run in [run(0, false), run(1, false), run(2, true), run(3, true), run(5, true), run(6, false)] {
        assert!(pages.push(run));
    }
    assert_eq!((pages.ranges().len(), pages.data()), (4, 3 * PAGE as usize));
    let mut full = Pages::default();
    assert!(full.push(Range { start: 0, len: MAX_DATA as u32, is_zero: false }));
    assert!(!full.push(run(MAX_DATA as u64 / PAGE, false)) && full.push(run(1 << 20, true)));
    full.clear();
    assert!(full.is_empty() && full.data() == 0);
}

#[test]
fn a_table_with_an_impossible_range_is_refused() {
    let table = |ranges: &[(u64, u32, u32)]| {
        let entry = |(start, len, zero): &(u64, u32, u32)| {
            [start.to_le_bytes().to_vec(), len.to_le_bytes().to_vec(), zero.to_le_bytes().to_vec()].concat()
        };
        ranges.iter().flat_map(entry).collect::<Vec<u8>>()
    };
    let len = |ranges: usize, data: u32| (TABLE + ranges * RANGE) as u32 + data;
    assert!(Pages::read(&table(&[(0, 4096, 0), (8192, 8192, 1)]), len(2, 4096)).is_ok());
    for ranges in [
        [(0, 4096, 0), (0, 4096, 1)],
        [(8192, 4096, 0), (0, 4096, 1)],
        [(0, 4096, 0), (8192, 0, 1)],
        [(0, 4096, 0), (8193, 4096, 1)],
        [(0, 4096, 0), (8192, 4095, 1)],
        [(0, 4096, 0), (8192, 4096, 2)],
        [(0, 4096, 0), (u64::MAX - 4095, 8192, 1)],
    ] {
        assert_eq!(Pages::read(&table(&ranges), len(2, 4096)), Err(WireError::Field("range")), "{ranges:?}");
    }
    let too_much = [(0, MAX_DATA as u32, 0), (1 << 40, 4096, 0)];
    assert_eq!(Pages::read(&table(&too_much), len(2, 0)), Err(WireError::Field("range")));
    assert_eq!(Pages::read(&table(&[(0, 4096, 0)]), len(1, 0)), Err(WireError::Field("length")));
    assert!(Pages::table_len([0; 8]).is_err() && Pages::table_len([0xff; 8]).is_err());
}

#[test]
fn a_document_grows_only_by_what_has_come_and_ends_once() {
    for len in [0, 1, MAX_PART, MAX_PART + 1, 3 * MAX_PART] {
        let bytes: Vec<u8> = (0..len).map(|n| n as u8).collect();
        let mut document = Document::default();
        for part in parts(&bytes) {
            assert_eq!(document.bytes(), None);
            document.add(&part).unwrap();
        }
        assert_eq!(document.bytes(), Some(&bytes[..]));
        assert!(document.add(&Part { is_last: true, bytes: Vec::new() }).is_err());
    }
    let (mut document, part) = (Document::default(), Part { is_last: false, bytes: vec![0; MAX_PART] });
    for _ in 0..MAX_DOCUMENT / MAX_PART {
        document.add(&part).unwrap();
    }
    assert_eq!(document.add(&part), Err(WireError::Field("document")));
}

proptest! {
    #[test]
    fn no_bytes_panic_and_what_reads_prints_the_same(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        kind in 0..11usize,
    ) {
        let kind = Kind::ALL[kind];
        if let Ok(frame) = Frame::read(kind, &bytes)
            && !matches!(frame, Frame::Failed(_))
        {
            let again = frame.bytes();
            prop_assert!(bytes.starts_with(&again[HEADER..]));
        }
        let _ = Pages::read(&bytes, bytes.len() as u32);
    }

    #[test]
    fn pages_read_back(runs in prop::collection::vec((0..4u64, 1..9u32, any::<bool>()), 1..40)) {
        let (mut pages, mut at) = (Pages::default(), 0);
        for (gap, len, is_zero) in runs {
            let run = Range { start: (at + gap) * PAGE, len: len * PAGE as u32, is_zero };
            at += gap + u64::from(len);
            prop_assert!(pages.push(run));
        }
        let bytes = pages.bytes();
        let header = Header::read(bytes[..HEADER].try_into().unwrap()).unwrap();
        let table = Pages::table_len(bytes[HEADER..HEADER + TABLE].try_into().unwrap()).unwrap();
        prop_assert_eq!(bytes.len(), HEADER + TABLE + table);
        prop_assert_eq!(Pages::read(&bytes[HEADER + TABLE..], header.len), Ok(pages));
    }
}
