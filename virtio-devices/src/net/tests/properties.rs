//! A driver that writes anything anywhere: nothing panics, and no frame is lost without being counted.

use proptest::prelude::*;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_queue::QueueT;

use super::super::control::Control;
use super::super::counters::Counter;
use super::super::filter::Mode;
use super::super::pass::Next;
use super::super::receive::Receive;
use super::super::testing::*;
use super::super::transmit::Transmit;

/// A descriptor that is usually invalid, with a fair chance of being valid.
fn descriptor() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let address = prop_oneof![4 => BUFFERS..BUFFERS + 0x8000, 1 => 0..MEMORY + 0x1000, 1 => any::<u64>()];
    let len = prop_oneof![4 => 0..3000u32, 1 => (0..8u32).prop_map(|n| n * 16), 1 => any::<u32>()];
    let flags = prop_oneof![4 => 0..4u16, 1 => 0..8u16, 1 => any::<u16>()];
    (address, len, flags, prop_oneof![4 => 0..8u16, 1 => any::<u16>()])
}

#[derive(Debug, Clone)]
enum Op {
    Descriptor(u16, (u64, u32, u16, u16)),
    Offer(u16),
    AvailIndex(u16),
    UsedEvent(u16),
    Frame(usize),
    Link(bool),
    Filter(bool),
    Run,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..8u16, descriptor()).prop_map(|(index, descriptor)| Op::Descriptor(index, descriptor)),
        8 => prop_oneof![8 => 0..8u16, 1 => any::<u16>()].prop_map(Op::Offer),
        1 => prop_oneof![0..16u16, any::<u16>()].prop_map(Op::AvailIndex),
        1 => any::<u16>().prop_map(Op::UsedEvent),
        4 => prop_oneof![14..100usize, 14..20_000usize].prop_map(Op::Frame),
        1 => any::<bool>().prop_map(Op::Link),
        1 => any::<bool>().prop_map(Op::Filter),
        6 => Just(Op::Run),
    ]
}

/// Applies an operation of the driver or the host. Returns false for any other operation.
fn apply(op: &Op, rig: &Rig, driver: &mut DriverQueue) -> bool {
    match *op {
        Op::Descriptor(index, descriptor) => driver.set_raw(index, descriptor),
        Op::Offer(head) => driver.offer(head),
        Op::AvailIndex(index) => driver.set_avail_index(index),
        Op::UsedEvent(event) => driver.set_used_event(event),
        Op::Link(up) => _ = rig.state.set_link_up(up),
        Op::Filter(on) => rig.state.change_filter(|filter| filter.set_mode(Mode::Promiscuous, !on)),
        Op::Frame(_) | Op::Run => return false,
    }
    true
}

const RX_DROPS: [Counter; 5] =
    [Counter::RxTooLong, Counter::RxTooShort, Counter::RxFiltered, Counter::RxLinkDown, Counter::RxStopped];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_received_frame_is_delivered_counted_or_still_waiting(
        ops in prop::collection::vec(op(), 1..80), merged: bool, event_idx: bool,
    ) {
        let mut rig = Rig::new();
        let mut driver = DriverQueue::new(&rig.memory, 0, 8);
        let queue = driver.queue.clone();
        let features = u64::from(merged) << VIRTIO_NET_F_MRG_RXBUF;
        let mut receive = Receive::new(rig.ring(&queue, 0, event_idx), features, spill());
        let mut frames = 0;
        'ops: for op in &ops {
            match op {
                Op::Frame(len) => {
                    // The buffer of the substitute is finite.
                    frames += u64::from(rustix::io::write(&rig.peer, &with_header(&frame(OTHER, *len))).is_ok());
                }
                Op::Run => loop {
                    match rig.pass(|pass| receive.run(pass)) {
                        Ok(Next::More) => {}
                        Ok(_) => break,
                        // The driver must reset the device.
                        Err(_) => break 'ops,
                    }
                },
                other => prop_assert!(apply(other, &rig, &mut driver)),
            }
        }
        let seen = rig.count(Counter::RxFrames)
            + RX_DROPS.iter().map(|counter| rig.count(*counter)).sum::<u64>()
            + u64::from(receive.has_waiting());
        let left = rig.pass(|pass| pass.backend.discard_stale());
        prop_assert_eq!(frames, seen + left, "{:?}", rig.counts());
    }

    #[test]
    fn every_chain_to_transmit_is_sent_or_counted_and_given_back(
        ops in prop::collection::vec(op(), 1..80), event_idx: bool, features: u64,
    ) {
        let mut rig = Rig::new();
        let mut driver = DriverQueue::new(&rig.memory, 1, 8);
        let queue = driver.queue.clone();
        let mut transmit = Transmit::new(rig.ring(&queue, 1, event_idx), features);
        for op in &ops {
            match op {
                Op::Frame(len) => _ = driver.send(BUFFERS, &with_header(&frame(OTHER, *len)), &[]),
                Op::Run => loop {
                    match rig.pass(|pass| transmit.run(pass)) {
                        Ok(Next::More) => {}
                        Ok(_) => break,
                        Err(_) => return Ok(()),
                    }
                },
                other => prop_assert!(apply(other, &rig, &mut driver)),
            }
            while receive(&rig.peer).is_some() {}
        }
        drop(transmit);
        let consumed = queue.lock().next_avail();
        let seen: u64 = Counter::ALL
            .iter()
            .filter(|counter| counter.name().starts_with("tx_") && **counter != Counter::TxBytes)
            .map(|counter| rig.count(*counter))
            .sum();
        prop_assert_eq!(u64::from(consumed), seen, "{:?}", rig.counts());
        prop_assert!(queue.lock().next_used() <= consumed);
    }

    #[test]
    fn commands_of_any_bytes_in_any_chains_are_answered_or_refused(
        ops in prop::collection::vec(op(), 1..60), bytes in prop::collection::vec(0..6u8, 64), features: u64,
    ) {
        let mut rig = Rig::new();
        let mut driver = DriverQueue::new(&rig.memory, 2, 8);
        driver.memory_write(BUFFERS, &bytes);
        let queue = driver.queue.clone();
        let mut control = Control::new(rig.ring(&queue, 2, false), features, 4, Vec::new());
        for op in &ops {
            match op {
                Op::Frame(len) => _ = driver.add(&[(BUFFERS, *len as u32, 0), (BUFFERS + 0x8000, 1, WRITE)]),
                Op::Run => loop {
                    match rig.pass(|pass| control.run(pass)) {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(_) => return Ok(()),
                    }
                },
                other => prop_assert!(apply(other, &rig, &mut driver)),
            }
        }
        drop(control);
        let consumed = queue.lock().next_avail();
        let seen = rig.count(Counter::ControlCommands) + rig.count(Counter::ControlRefused);
        prop_assert_eq!(u64::from(consumed), seen);
        prop_assert!((1..=4).contains(&rig.state.active_pairs()));
        let [first, ..] = rig.state.mac();
        prop_assert!(first & 1 == 0);
    }
}
