use virtio_bindings::virtio_net::{VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4};

use super::super::counters::Counter;
use super::super::pass::{BATCH, Next};
use super::super::testing::*;
use super::super::transmit::Transmit;
use crate::memory::effort::counted::Effort;
use crate::queue::ring::BrokenRing;

const NO_FEATURES: u64 = 0;

/// A rig and the driver's side of its transmit queue.
fn rig(size: u16) -> (Rig, DriverQueue) {
    let rig = Rig::new();
    let driver = DriverQueue::new(&rig.memory, 1, size);
    (rig, driver)
}

/// Lets the device send what is available.
fn run(rig: &mut Rig, driver: &DriverQueue, features: u64) -> Result<Next, BrokenRing> {
    let queue = driver.queue.clone();
    let mut transmit = Transmit::new(rig.ring(&queue, 1, false), features);
    rig.pass(|pass| transmit.run(pass))
}

#[test]
fn frames_leave_whole_and_in_order_however_they_are_cut() {
    let (mut rig, mut driver) = rig(64);
    let cuts: [&[usize]; 5] = [&[], &[12], &[0, 5, 7, 0, 14], &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], &[40]];
    let mut heads = Vec::new();
    for (i, cut) in cuts.iter().enumerate() {
        heads.push(driver.send(BUFFERS + 0x1000 * i as u64, &with_header(&frame(OTHER, 60 + i)), cut));
    }
    assert_eq!(run(&mut rig, &driver, NO_FEATURES), Ok(Next::Doorbell));
    for i in 0..cuts.len() {
        assert_eq!(receive(&rig.peer), Some(with_header(&frame(OTHER, 60 + i))), "{i}");
    }
    let used: Vec<_> = heads.into_iter().map(|head| (u32::from(head), 0)).collect();
    assert_eq!(driver.take_used(), used);
    assert_eq!((rig.count(Counter::TxFrames), rig.count(Counter::TxBytes)), (5, 310));
    assert!(rig.interrupted(1));
}

#[test]
fn the_backend_sees_the_header_that_was_checked() {
    let (mut rig, mut driver) = rig(16);
    let mut data = with_header(&frame(OTHER, 1514));
    data[..12].copy_from_slice(&[0b111, 1, 54, 0, 100, 0, 34, 0, 16, 0, 9, 9]);
    driver.send(BUFFERS, &data, &[12]);
    run(&mut rig, &driver, 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_TSO4).unwrap();
    assert_eq!(receive(&rig.peer).unwrap()[..12], [1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0]);
}

#[test]
fn a_chain_in_an_indirect_table_is_sent() {
    let (mut rig, mut driver) = rig(16);
    let (data, table) = (with_header(&frame(OTHER, 300)), BUFFERS + 0x8000);
    driver.memory_write(BUFFERS, &data);
    driver.set_descriptor(table, 0, (BUFFERS, 100, NEXT, 1));
    driver.set_descriptor(table, 1, (BUFFERS + 100, 212, 0, 0));
    driver.add(&[(table, 32, INDIRECT)]);
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert_eq!(receive(&rig.peer), Some(data));
}

#[test]
fn bad_tx_chains_are_dropped_and_counted_and_the_next_is_sent() {
    type Build = fn(&mut DriverQueue);
    let cases: [(&str, Counter, Build); 14] = [
        ("no header", Counter::TxTooShort, |q| _ = q.send(BUFFERS, &[0; 11], &[])),
        ("a header only", Counter::TxTooShort, |q| _ = q.send(BUFFERS, &[0; 12], &[])),
        ("half an Ethernet header", Counter::TxTooShort, |q| _ = q.send(BUFFERS, &[0; 25], &[12])),
        ("empty", Counter::TxTooShort, |q| _ = q.add(&[(BUFFERS, 0, 0)])),
        ("too long", Counter::TxTooLong, |q| _ = q.add(&[(BUFFERS, 12, 0), (BUFFERS, 65_559, 0)])),
        ("all of memory", Counter::TxTooLong, |q| _ = q.add(&[(0, MEMORY as u32, 0)])),
        ("a header that asks for a checksum", Counter::TxBadHeaders, |q| _ = q.send(BUFFERS, &[1; 80], &[])),
        ("writable", Counter::TxBadChains, |q| _ = q.add(&[(BUFFERS, 12, 0), (BUFFERS, 60, WRITE)])),
        ("outside memory", Counter::TxBadChains, |q| _ = q.add(&[(BUFFERS, 12, 0), (MEMORY - 30, 60, 0)])),
        ("at the end of all addresses", Counter::TxBadChains, |q| _ = q.add(&[(u64::MAX - 30, 60, 0)])),
        ("a loop", Counter::TxBadChains, |q| {
            q.set_raw(0, (BUFFERS, 60, NEXT, 0));
            q.offer(0);
        }),
        ("a descriptor beyond the table", Counter::TxBadChains, |q| {
            q.set_raw(0, (BUFFERS, 60, NEXT, 16));
            q.offer(0);
        }),
        ("a table within a table", Counter::TxBadChains, |q| {
            q.set_descriptor(BUFFERS, 0, (BUFFERS, 16, INDIRECT, 0));
            q.set_raw(0, (BUFFERS, 16, INDIRECT, 0));
            q.offer(0);
        }),
        ("a table of no size", Counter::TxBadChains, |q| {
            q.set_raw(0, (BUFFERS, 0, INDIRECT, 0));
            q.offer(0);
        }),
    ];
    for (what, counter, build) in cases {
        let (mut rig, mut driver) = rig(16);
        driver.build(&[(0, 0, 0)]);
        build(&mut driver);
        let good = driver.send(BUFFERS + 0x1_0000, &with_header(&frame(OTHER, 60)), &[]);
        assert_eq!(run(&mut rig, &driver, NO_FEATURES), Ok(Next::Doorbell), "{what}");
        assert_eq!(rig.count(counter), 1, "{what}: {:?}", rig.counts());
        assert_eq!(receive(&rig.peer), Some(with_header(&frame(OTHER, 60))), "{what}");
        assert_eq!(receive(&rig.peer), None, "{what}");
        let used = driver.take_used();
        assert_eq!((used.len(), used.last()), (2, Some(&(good.into(), 0))), "{what}: the driver gets both back");
    }
}

#[test]
fn a_chain_of_more_segments_than_one_call_takes_is_dropped() {
    let (mut rig, mut driver) = rig(16);
    let table = BUFFERS + 0x8000;
    for i in 0..1023 {
        driver.set_descriptor(table, i, (BUFFERS, 1, NEXT, i + 1));
    }
    driver.set_descriptor(table, 1022, (BUFFERS, 1, 0, 0));
    driver.add(&[(table, 1023 * 16, INDIRECT)]);
    driver.set_descriptor(table + 0x8000, 0, (BUFFERS, 60, NEXT, 0));
    driver.add(&[(table + 0x8000, 16 * 0xffff, INDIRECT)]);
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert_eq!((rig.count(Counter::TxBadChains), rig.count(Counter::TxFrames)), (2, 0));
    // A chain with one descriptor less is sent.
    driver.set_descriptor(table, 1021, (BUFFERS, 1, 0, 0));
    driver.add(&[(table, 1022 * 16, INDIRECT)]);
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert_eq!(receive(&rig.peer).map(|data| data.len()), Some(1022));
}

#[test]
fn chains_of_empty_descriptors_end_a_batch_early() {
    let (mut rig, mut driver) = rig(256);
    let table = BUFFERS + 0x8000;
    for index in 0..1021 {
        driver.set_descriptor(table, index, (BUFFERS, 0, NEXT, index + 1));
    }
    driver.memory_write(BUFFERS, &with_header(&frame(OTHER, 60)));
    driver.set_descriptor(table, 1021, (BUFFERS, 72, 0, 0));
    (0..BATCH).for_each(|_| _ = driver.add(&[(table, 1022 * 16, INDIRECT)]));
    let before = Effort::so_far();
    assert_eq!(run(&mut rig, &driver, NO_FEATURES), Ok(Next::More));
    let read = Effort::so_far().since(before).descriptors;
    assert!((1022..13_000).contains(&read), "{read} of {}", BATCH * 1022);
    // The others are sent in the next turns.
    while run(&mut rig, &driver, NO_FEATURES) == Ok(Next::More) {}
    assert_eq!(rig.count(Counter::TxFrames), BATCH as u64);
}

#[test]
fn a_head_beyond_the_ring_is_skipped() {
    let (mut rig, mut driver) = rig(16);
    driver.offer(16);
    driver.offer(u16::MAX);
    let good = driver.send(BUFFERS, &with_header(&frame(OTHER, 60)), &[]);
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert_eq!(driver.take_used(), [(good.into(), 0)]);
    assert_eq!((rig.count(Counter::TxBadChains), rig.count(Counter::TxFrames)), (2, 1));
}

#[test]
fn a_ring_whose_index_jumps_by_more_than_its_size_is_broken() {
    let (mut rig, driver) = rig(16);
    driver.set_avail_index(17);
    assert_eq!(run(&mut rig, &driver, NO_FEATURES), Err(BrokenRing));
}

#[test]
fn a_backend_that_is_full_or_gone_costs_frames_and_nothing_else() {
    let (mut rig, mut driver) = rig(256);
    let data = with_header(&frame(OTHER, 60_000));
    (0..200).for_each(|_| _ = driver.send(BUFFERS, &data, &[]));
    while run(&mut rig, &driver, NO_FEATURES) == Ok(Next::More) {}
    let sent = rig.count(Counter::TxFrames);
    assert!(sent > 0 && sent + rig.count(Counter::TxBackendFull) == 200, "{:?}", rig.counts());
    rig.peer = sockets().0;
    driver.send(BUFFERS, &data, &[]);
    assert_eq!(run(&mut rig, &driver, NO_FEATURES), Ok(Next::Doorbell));
    assert_eq!(rig.count(Counter::TxBackendErrors), 1);
    assert_eq!(driver.take_used().len(), 201);
}

#[test]
fn with_the_link_down_frames_are_dropped() {
    let (mut rig, mut driver) = rig(16);
    rig.state.set_link_up(false);
    driver.send(BUFFERS, &with_header(&frame(OTHER, 60)), &[]);
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert_eq!((receive(&rig.peer), rig.count(Counter::TxLinkDown)), (None, 1));
}

#[test]
fn a_batch_is_bounded_and_reports_that_more_is_left() {
    let (mut rig, mut driver) = rig(128);
    (0..100).for_each(|_| _ = driver.send(BUFFERS, &with_header(&frame(OTHER, 60)), &[]));
    assert_eq!(run(&mut rig, &driver, NO_FEATURES), Ok(Next::More));
    assert_eq!(rig.count(Counter::TxFrames), 64);
    assert_eq!(run(&mut rig, &driver, NO_FEATURES), Ok(Next::Doorbell));
    assert_eq!(rig.count(Counter::TxFrames), 100);
}

#[test]
fn without_event_idx_flags_suppress_interrupts_and_doorbells() {
    let (mut rig, mut driver) = rig(16);
    driver.write(driver.avail(), [1, 0]);
    driver.send(BUFFERS, &with_header(&frame(OTHER, 60)), &[]);
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert!(!rig.interrupted(1), "VIRTQ_AVAIL_F_NO_INTERRUPT");
    driver.write(driver.avail(), [0, 0]);
    assert_eq!(driver.read_u16(driver.used()), 0, "a doorbell is wanted while the device waits");
    run(&mut rig, &driver, NO_FEATURES).unwrap();
    assert!(!rig.interrupted(1), "nothing was used");
}

#[test]
fn with_event_idx_the_driver_is_interrupted_at_its_used_event() {
    let (mut rig, mut driver) = rig(16);
    let queue = driver.queue.clone();
    let mut transmit = Transmit::new(rig.ring(&queue, 1, true), NO_FEATURES);
    driver.set_used_event(2);
    for (number, expected) in [(0, false), (1, false), (2, true), (3, false)] {
        driver.send(BUFFERS, &with_header(&frame(OTHER, 60)), &[]);
        rig.pass(|pass| transmit.run(pass)).unwrap();
        assert_eq!(rig.interrupted(1), expected, "{number}");
        assert_eq!(driver.avail_event(), number + 1, "the doorbell that the device waits for");
    }
    // Several frames at once pass the requested index.
    driver.set_used_event(5);
    (0..4).for_each(|_| _ = driver.send(BUFFERS, &with_header(&frame(OTHER, 60)), &[]));
    rig.pass(|pass| transmit.run(pass)).unwrap();
    assert!(rig.interrupted(1));
    assert_eq!(rig.count(Counter::Interrupts), 2);
}
