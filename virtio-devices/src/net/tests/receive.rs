use std::net::UdpSocket;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_MRG_RXBUF};

use super::super::counters::Counter;
use super::super::filter::Mode;
use super::super::pass::{BATCH, Next};
use super::super::receive::Receive;
use super::super::testing::*;
use crate::memory::effort::counted::Effort;
use crate::queue::ring::BrokenRing;

const MERGED: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
const PLAIN: u64 = 0;

fn rig(size: u16) -> (Rig, DriverQueue) {
    let rig = Rig::new();
    let driver = DriverQueue::new(&rig.memory, 0, size);
    (rig, driver)
}

/// Lets the device receive until there is nothing more to do. A new queue each time: a stop loses no position.
fn run(rig: &mut Rig, driver: &DriverQueue, features: u64) -> Result<Next, BrokenRing> {
    let queue = driver.queue.clone();
    let mut receive = Receive::new(rig.ring(&queue, 0, false), features, spill());
    settle(rig, &mut receive)
}

fn settle(rig: &mut Rig, receive: &mut Receive<'_>) -> Result<Next, BrokenRing> {
    loop {
        match rig.pass(|pass| receive.run(pass)) {
            Ok(Next::More) => {}
            other => return other,
        }
    }
}

fn provide(driver: &mut DriverQueue, count: u64, len: u32) -> Vec<(u64, u16)> {
    (0..count)
        .map(|i| {
            let address = BUFFERS + i * 0x1_0000;
            (address, driver.add(&[(address, len, WRITE)]))
        })
        .collect()
}

/// The header that a driver sees: all zero except for the number of buffers.
fn delivered(frame: &[u8], buffers: u8) -> Vec<u8> {
    let mut data = with_header(frame);
    data[10] = buffers;
    data
}

#[test]
fn buffers_of_too_many_descriptors_for_a_frame_are_invalid() {
    let (mut rig, mut driver) = rig(256);
    let table = BUFFERS + 0x8000;
    for index in 0..1021 {
        driver.set_descriptor(table, index, (BUFFERS, 0, WRITE | NEXT, index + 1));
    }
    driver.set_descriptor(table, 1021, (BUFFERS, 12, WRITE, 0));
    (0..126).for_each(|_| _ = driver.add(&[(table, 1022 * 16, INDIRECT)]));
    send(&rig.peer, &with_header(&frame(MAC, 1514)));
    let before = Effort::so_far();
    assert_eq!(run(&mut rig, &driver, MERGED), Err(BrokenRing));
    let read = Effort::so_far().since(before).descriptors;
    assert!(read <= 1100, "{read}");
}

#[test]
fn a_frame_fills_one_buffer_and_its_header_counts_one() {
    for features in [PLAIN, MERGED] {
        let (mut rig, mut driver) = rig(16);
        let buffers = provide(&mut driver, 2, 2000);
        send(&rig.peer, &with_header(&frame(MAC, 1000)));
        assert_eq!(run(&mut rig, &driver, features), Ok(Next::Frame));
        assert_eq!(driver.take_used(), [(buffers[0].1.into(), 1012)]);
        assert_eq!(driver.bytes(buffers[0].0, 1012), delivered(&frame(MAC, 1000), 1));
        assert!(rig.interrupted(0));
        // The second buffer is still unused.
        send(&rig.peer, &with_header(&frame(MAC, 60)));
        run(&mut rig, &driver, features).unwrap();
        assert_eq!(driver.take_used(), [(buffers[1].1.into(), 72)]);
        assert_eq!((rig.count(Counter::RxFrames), rig.count(Counter::RxBytes)), (2, 1060));
    }
}

#[test]
fn a_long_frame_is_merged_from_as_many_buffers_as_it_needs() {
    for (len, buffers_needed) in [(1488, 1), (1489, 2), (2988, 2), (2989, 3), (9000, 7), (65_550, 44)] {
        let (mut rig, mut driver) = rig(64);
        let buffers = provide(&mut driver, 60, 1500);
        send(&rig.peer, &with_header(&frame(MAC, len)));
        send(&rig.peer, &with_header(&frame(MAC, 60)));
        run(&mut rig, &driver, MERGED).unwrap();
        let used = driver.take_used();
        assert_eq!(used.len(), buffers_needed + 1, "{len}");
        let mut data = Vec::new();
        for ((head, part), (address, expected)) in used.iter().zip(&buffers) {
            assert_eq!(*head, u32::from(*expected), "{len}: in order");
            data.extend(driver.bytes(*address, *part as usize));
        }
        let expected = [delivered(&frame(MAC, len), buffers_needed as u8), delivered(&frame(MAC, 60), 1)].concat();
        assert!(data == expected, "{len}");
        assert!(used[..buffers_needed - 1].iter().all(|(_, part)| *part == 1500), "{len}: full except the last");
    }
}

#[test]
fn a_buffer_in_pieces_is_filled_in_order() {
    let (mut rig, mut driver) = rig(16);
    let pieces: Vec<_> = [5, 0, 6, 1, 3, 20, 1000].map(|len| (len, WRITE)).into();
    let mut address = BUFFERS;
    let mut chain = Vec::new();
    for (len, flags) in pieces {
        chain.push((address, len, flags));
        address += u64::from(len);
    }
    rig.state.change_filter(|filter| filter.set_mode(Mode::Promiscuous, false));
    driver.add(&chain);
    send(&rig.peer, &with_header(&frame(MAC, 500)));
    run(&mut rig, &driver, MERGED).unwrap();
    assert_eq!(driver.bytes(BUFFERS, 512), delivered(&frame(MAC, 500), 1));
}

#[test]
fn without_buffers_frames_wait_in_the_backend() {
    let (mut rig, mut driver) = rig(16);
    send(&rig.peer, &with_header(&frame(MAC, 60)));
    assert_eq!(run(&mut rig, &driver, MERGED), Ok(Next::Doorbell));
    provide(&mut driver, 1, 1500);
    assert_eq!(run(&mut rig, &driver, MERGED), Ok(Next::Doorbell));
    assert_eq!((rig.count(Counter::RxFrames), driver.take_used().len()), (1, 1));
}

#[test]
fn a_frame_longer_than_the_buffers_at_hand_waits_for_more() {
    let (mut rig, mut driver) = rig(16);
    let queue = driver.queue.clone();
    let mut receive = Receive::new(rig.ring(&queue, 0, true), MERGED, spill());
    let mut buffers = provide(&mut driver, 2, 1500);
    send(&rig.peer, &with_header(&frame(MAC, 5000)));
    assert_eq!(settle(&mut rig, &mut receive), Ok(Next::Doorbell));
    assert!(receive.has_waiting());
    assert_eq!(driver.take_used(), [], "all or nothing");
    assert_eq!(driver.avail_event(), 2, "the next buffer rings the doorbell");
    for i in 2..4 {
        let address = BUFFERS + i * 0x1_0000;
        buffers.push((address, driver.add(&[(address, 1500, WRITE)])));
    }
    assert_eq!(settle(&mut rig, &mut receive), Ok(Next::Doorbell));
    assert!(!receive.has_waiting());
    let used = driver.take_used();
    assert_eq!(used.iter().map(|(_, len)| *len).collect::<Vec<_>>(), [1500, 1500, 1500, 512]);
    let data: Vec<u8> =
        used.iter().zip(&buffers).flat_map(|((_, len), (address, _))| driver.bytes(*address, *len as usize)).collect();
    assert!(data == delivered(&frame(MAC, 5000), 4));
}

#[test]
fn a_frame_that_no_ring_full_of_buffers_can_hold_is_dropped() {
    let (mut rig, mut driver) = rig(4);
    provide(&mut driver, 4, 1500);
    send(&rig.peer, &with_header(&frame(MAC, 6000)));
    send(&rig.peer, &with_header(&frame(MAC, 60)));
    run(&mut rig, &driver, MERGED).unwrap();
    assert_eq!((rig.count(Counter::RxTooLong), rig.count(Counter::RxFrames)), (1, 1));
    assert_eq!(driver.take_used().len(), 1);
}

#[test]
fn without_merging_a_too_long_frame_is_dropped_and_buffer_kept() {
    let (mut rig, mut driver) = rig(16);
    let buffers = provide(&mut driver, 3, 1500);
    send(&rig.peer, &with_header(&frame(MAC, 1489)));
    send(&rig.peer, &with_header(&frame(MAC, 1488)));
    run(&mut rig, &driver, PLAIN).unwrap();
    assert_eq!(driver.take_used(), [(buffers[0].1.into(), 1500)]);
    assert_eq!(driver.bytes(buffers[0].0, 1500), delivered(&frame(MAC, 1488), 1));
    assert_eq!(rig.count(Counter::RxTooLong), 1);
}

#[test]
fn unwritable_buffers_return_empty_and_the_frame_uses_the_next() {
    type Build = fn(&mut DriverQueue);
    let cases: [(&str, Build); 6] = [
        ("shorter than the header", |q| _ = q.add(&[(BUFFERS, 11, WRITE)])),
        ("empty", |q| _ = q.add(&[(BUFFERS, 0, WRITE)])),
        ("readable", |q| _ = q.add(&[(BUFFERS, 1500, 0)])),
        ("partly readable", |q| _ = q.add(&[(BUFFERS, 1500, WRITE), (BUFFERS, 100, 0)])),
        ("outside memory", |q| _ = q.add(&[(MEMORY, 1500, WRITE)])),
        ("a loop", |q| {
            q.set_raw(0, (BUFFERS, 60, NEXT | WRITE, 0));
            q.offer(0);
        }),
    ];
    for features in [PLAIN, MERGED] {
        for (what, build) in cases {
            let (mut rig, mut driver) = rig(16);
            driver.build(&[(0, 0, 0)]);
            let first = driver.add(&[(BUFFERS + 0x1_0000, 1500, WRITE)]);
            build(&mut driver);
            let last = driver.add(&[(BUFFERS + 0x2_0000, 1500, WRITE)]);
            (0..2).for_each(|_| send(&rig.peer, &with_header(&frame(MAC, 60))));
            run(&mut rig, &driver, features).unwrap();
            let used = driver.take_used();
            assert_eq!((used.len(), used[1].1), (3, 0), "{what}");
            assert_eq!((used[0], used[2]), ((first.into(), 72), (last.into(), 72)), "{what}");
            assert_eq!((rig.count(Counter::RxBadChains), rig.count(Counter::RxFrames)), (1, 2), "{what}");
        }
    }
}

#[test]
fn a_frame_that_needs_buffers_beyond_a_bad_one_is_dropped() {
    let (mut rig, mut driver) = rig(16);
    driver.add(&[(BUFFERS, 1500, WRITE)]);
    driver.add(&[(BUFFERS, 1500, 0)]);
    driver.add(&[(BUFFERS + 0x1_0000, 1500, WRITE)]);
    send(&rig.peer, &with_header(&frame(MAC, 2000)));
    (0..2).for_each(|_| send(&rig.peer, &with_header(&frame(MAC, 60))));
    run(&mut rig, &driver, MERGED).unwrap();
    assert_eq!(driver.take_used().into_iter().map(|(_, len)| len).collect::<Vec<_>>(), [72, 0, 72]);
    assert_eq!((rig.count(Counter::RxTooLong), rig.count(Counter::RxBadChains)), (1, 1));
}

#[test]
fn frames_that_the_filter_refuses_cost_no_buffer() {
    let (mut rig, mut driver) = rig(16);
    rig.state.change_filter(|filter| filter.set_mode(Mode::Promiscuous, false));
    let buffers = provide(&mut driver, 2, 1500);
    send(&rig.peer, &with_header(&frame(OTHER, 60)));
    send(&rig.peer, &with_header(&frame(MAC, 61)));
    send(&rig.peer, &with_header(&frame([0xff; 6], 62)));
    run(&mut rig, &driver, MERGED).unwrap();
    assert_eq!(driver.take_used(), [(buffers[0].1.into(), 73), (buffers[1].1.into(), 74)]);
    assert_eq!(rig.count(Counter::RxFiltered), 1);
}

#[test]
fn a_runt_and_a_frame_on_a_link_that_is_down_are_dropped() {
    let (mut rig, mut driver) = rig(16);
    provide(&mut driver, 2, 1500);
    send(&rig.peer, &[0; 5]);
    send(&rig.peer, &[0; 25]);
    run(&mut rig, &driver, MERGED).unwrap();
    rig.state.set_link_up(false);
    send(&rig.peer, &with_header(&frame(MAC, 60)));
    run(&mut rig, &driver, MERGED).unwrap();
    assert_eq!((rig.count(Counter::RxTooShort), rig.count(Counter::RxLinkDown)), (2, 1));
    assert_eq!(driver.take_used(), []);
}

/// True if guest memory from the buffers on has only zeros, as in the beginning.
fn untouched(driver: &DriverQueue) -> bool {
    driver.bytes(BUFFERS, (MEMORY - BUFFERS) as usize).iter().all(|byte| *byte == 0)
}

#[test]
fn link_down_drops_frames_without_buffers_or_memory_writes() {
    for (buffers, features) in [(0, PLAIN), (4, PLAIN), (4, MERGED)] {
        let (mut rig, mut driver) = rig(16);
        provide(&mut driver, buffers, 1500);
        rig.state.set_link_up(false);
        for len in [60, 1514, 9000] {
            send(&rig.peer, &with_header(&frame(MAC, len)));
        }
        assert_eq!(run(&mut rig, &driver, features), Ok(Next::Frame));
        assert!(untouched(&driver), "{buffers} buffers");
        assert_eq!((rig.count(Counter::RxLinkDown), driver.take_used().len()), (3, 0));
        rig.state.set_link_up(true);
        provide(&mut driver, 1, 1500);
        send(&rig.peer, &with_header(&frame(MAC, 60)));
        run(&mut rig, &driver, features).unwrap();
        assert_eq!((rig.count(Counter::RxFrames), driver.take_used().len()), (1, 1));
    }
}

#[test]
fn frame_waiting_for_buffers_is_dropped_when_link_goes_down() {
    let (mut rig, mut driver) = rig(16);
    let queue = driver.queue.clone();
    let mut receive = Receive::new(rig.ring(&queue, 0, true), MERGED, spill());
    let buffers = provide(&mut driver, 2, 1500);
    send(&rig.peer, &with_header(&frame(MAC, 5000)));
    settle(&mut rig, &mut receive).unwrap();
    assert!(receive.has_waiting());
    rig.state.set_link_up(false);
    assert_eq!(settle(&mut rig, &mut receive), Ok(Next::Frame));
    assert!(!receive.has_waiting());
    rig.state.set_link_up(true);
    send(&rig.peer, &with_header(&frame(MAC, 60)));
    settle(&mut rig, &mut receive).unwrap();
    assert_eq!(driver.take_used(), [(buffers[0].1.into(), 72)]);
    assert_eq!((rig.count(Counter::RxLinkDown), rig.count(Counter::RxFrames)), (1, 1));
}

#[test]
fn frames_that_the_filter_refuses_leave_nothing_in_guest_memory() {
    // The addresses are in the buffers, partly in them, or outside.
    for (count, len, features) in [(2, 1500, PLAIN), (2, 20, PLAIN), (2, 12, PLAIN), (8, 1500, MERGED)] {
        let (mut rig, mut driver) = rig(16);
        rig.state.change_filter(|filter| filter.set_mode(Mode::Promiscuous, false));
        provide(&mut driver, count, len);
        for len in [60, 1514, 9000] {
            send(&rig.peer, &with_header(&frame(OTHER, len)));
        }
        run(&mut rig, &driver, features).unwrap();
        assert!(untouched(&driver), "buffers of {len} bytes");
        assert_eq!((rig.count(Counter::RxFiltered), driver.take_used().len()), (3, 0), "buffers of {len} bytes");
    }
}

#[test]
fn flags_reach_only_a_driver_that_takes_unfinished_checksums() {
    for (features, expected) in [(MERGED, 0), (MERGED | 1 << VIRTIO_NET_F_GUEST_CSUM, 2)] {
        let (mut rig, mut driver) = rig(16);
        provide(&mut driver, 1, 1500);
        let mut data = with_header(&frame(MAC, 60));
        data[0] = 2;
        send(&rig.peer, &data);
        run(&mut rig, &driver, features).unwrap();
        assert_eq!(driver.bytes(BUFFERS, 1), [expected]);
    }
}

#[test]
fn a_backend_that_is_gone_is_not_polled() {
    let (mut rig, mut driver) = rig(16);
    provide(&mut driver, 1, 1500);
    rig.peer = sockets().0;
    assert_eq!(run(&mut rig, &driver, MERGED), Ok(Next::Doorbell));
    assert_eq!(rig.count(Counter::RxBackendErrors), 1);
}

#[test]
fn a_read_that_fails_costs_a_frame_and_not_the_next_one() {
    // A datagram to a closed port makes the next read fail, once, with ECONNREFUSED.
    let near = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    near.set_nonblocking(true).unwrap();
    peer.connect(near.local_addr().unwrap()).unwrap();
    let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    near.connect(nobody).unwrap();
    near.send(&[0]).unwrap();
    near.connect(peer.local_addr().unwrap()).unwrap();
    peer.send(&with_header(&frame(MAC, 60))).unwrap();

    let mut rig = Rig::over(near.into(), peer.into());
    let mut driver = DriverQueue::new(&rig.memory, 0, 16);
    let buffers = provide(&mut driver, 1, 1500);
    assert_eq!(run(&mut rig, &driver, MERGED), Ok(Next::Doorbell), "it has no more buffers");
    assert_eq!(driver.take_used(), [(buffers[0].1.into(), 72)]);
    assert_eq!((rig.count(Counter::RxBackendErrors), rig.count(Counter::RxFrames)), (1, 1));
}

#[test]
fn failing_backend_is_tried_one_batch_per_doorbell() {
    // A folder cannot be read (EISDIR).
    let folder = std::fs::File::open("/").unwrap();
    let mut rig = Rig::over(folder.into(), sockets().0);
    let mut driver = DriverQueue::new(&rig.memory, 0, 16);
    provide(&mut driver, 1, 1500);
    for batch in 1..=3 {
        assert_eq!(run(&mut rig, &driver, MERGED), Ok(Next::Doorbell));
        assert_eq!(rig.count(Counter::RxBackendErrors), batch * BATCH as u64);
        let no_doorbells = driver.read_u16(driver.used());
        assert_eq!(no_doorbells, 0, "the driver is asked for one");
    }
}

#[test]
fn ring_positions_survive_wrapping_with_a_worker_per_frame() {
    let (mut rig, mut driver) = rig(8);
    for i in 0..80 {
        let head = driver.add(&[(BUFFERS, 1500, WRITE)]);
        driver.add(&[(BUFFERS + 0x1000, 1500, WRITE)]);
        send(&rig.peer, &with_header(&frame(MAC, 60)));
        run(&mut rig, &driver, MERGED).unwrap();
        assert_eq!(driver.take_used(), [(head.into(), 72)], "{i}");
        send(&rig.peer, &with_header(&frame(MAC, 60)));
        run(&mut rig, &driver, MERGED).unwrap();
        assert_eq!(driver.take_used().len(), 1, "{i}");
    }
}
