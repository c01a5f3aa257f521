use crate::HostNic;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::*;

use super::super::counters::Counter;
use super::super::testing::*;
use super::super::{Net, NetError};
use crate::backend::Tap;
use crate::device::worker::spawn_all;
use crate::frames::net_protocol::MAX_FRAME;
use crate::{VirtioDevice, Worker};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const ONE_PAIR_CONTROL: u16 = 2;

/// The features that Linux negotiates with one pair.
fn features(guest: &Guest) -> u64 {
    guest.device.features() & !(1 << VIRTIO_NET_F_MQ)
}

/// Sends a frame each way and checks that it arrives.
fn check_traffic(guest: &mut Guest, len: usize) {
    let (received, sent) = (guest.count(Counter::RxFrames), guest.count(Counter::TxFrames));
    guest.provide(RECEIVE, 1, 2048);
    send(&guest.host[0], &with_header(&frame(MAC, len)));
    eventually("reception", || guest.count(Counter::RxFrames) == received + 1);
    let used = guest.queues[0].take_used();
    assert_eq!(used.iter().map(|(_, len)| *len as usize).collect::<Vec<_>>(), [len + 12]);

    guest.queues[1].send(BUFFERS + (1 << 20), &with_header(&frame(OTHER, len)), &[12]);
    guest.kick(TRANSMIT);
    eventually("transmission", || guest.count(Counter::TxFrames) == sent + 1);
    assert_eq!(receive(&guest.host[0]), Some(with_header(&frame(OTHER, len))));
    assert_eq!(guest.queues[1].take_used().len(), 1);
}

#[test]
fn an_impossible_nic_is_refused() {
    let tap = || Tap::over_sockets(vec![sockets().0]);
    let new = |spec| Net::new(spec, tap()).map(|_| ());
    assert_eq!(new(spec(1, 256)), Ok(()));
    for size in [0, 1, 3, 100, 257, 65_535] {
        assert_eq!(new(spec(1, size)), Err(NetError::QueueSize(size)));
    }
    for pairs in [0, 2] {
        assert_eq!(new(spec(pairs, 256)), Err(NetError::QueuePairs { pairs, queues: 1 }));
    }
    for mac in [[0; 6], [1, 0, 0, 0, 0, 1], [0xff; 6]] {
        let refused = new(crate::NetSpec { mac, ..spec(1, 256) });
        assert_eq!(refused, Err(NetError::Mac(mac)));
        assert!(refused.unwrap_err().to_string().starts_with(&format!("mac={:02x}:", mac[0])));
    }
}

#[test]
fn a_nic_has_its_type_and_features() {
    let guest = Guest::new(4, 256);
    let net = &guest.device;
    assert_eq!((net.device_type(), net.class()), (1, [2, 0, 0]));
    assert_eq!(net.queue_sizes(), [256, 256, 256, 256, 256, 256, 256, 256, 64]);
    let has = |bit: u32| net.features() & (1 << bit) != 0;
    assert!(has(VIRTIO_F_VERSION_1) && has(VIRTIO_NET_F_MQ) && has(VIRTIO_NET_F_MTU) && has(VIRTIO_NET_F_HOST_TSO4));
    assert!(has(VIRTIO_NET_F_GUEST_ANNOUNCE));
    // VIRTIO_F_SR_IOV is the transport's; a standby is not offered unless it is configured.
    assert!(![37, VIRTIO_NET_F_STANDBY].into_iter().any(has));
    let standby = Guest::with(crate::NetSpec { standby: true, ..spec(1, 256) });
    assert_eq!(standby.device.features() ^ Guest::new(1, 256).device.features(), 1 << VIRTIO_NET_F_STANDBY);
    assert!(Guest::new(1, 256).device.features() & (1 << VIRTIO_NET_F_MQ) == 0);
}

/// Linux would wait for a used buffer, and a segment for more buffers.
#[test]
fn receive_tso_is_offered_only_for_queues_that_hold_a_segment() {
    let takes = |queue_size| {
        let features = Guest::new(1, queue_size).device.features();
        [VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_HOST_TSO4].map(|bit| features & (1 << bit) != 0)
    };
    assert_eq!((takes(64), takes(128)), ([false, true, true], [true; 3]));
}

#[test]
fn frames_pass_both_ways_and_after_a_stop_without_a_reset() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    for round in 0..20 {
        guest.start_fresh(features);
        check_traffic(&mut guest, 60 + round);
        guest.stop();
    }
    assert_eq!(nonzero(&guest.device.counters()).iter().filter(|(c, _)| c.name().contains("bad")).count(), 0);
}

#[test]
fn spill_buffer_is_kept_when_the_driver_restarts() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    let mut run = || {
        guest.start_fresh(features);
        check_traffic(&mut guest, 60);
        guest.stop();
        guest.device.reset();
        let mut tap = guest.device.tap().unwrap().queues()[0].lock();
        let mut spill = tap.take_spill().unwrap();
        let place = (spill.bytes().as_ptr(), spill.bytes().len());
        tap.keep_spill(spill);
        place
    };
    let first = run();
    assert!(first.1 > MAX_FRAME);
    assert_eq!(run(), first);
}

fn queues(worker: &Worker) -> Vec<u16> {
    worker.doorbells.iter().map(|(queue, _)| *queue).collect()
}

#[test]
fn one_thread_per_pair_and_the_first_serves_the_control_queue() {
    for (pairs, features, expected) in [
        (1, 1 << VIRTIO_F_VERSION_1, vec![vec![0, 1, 2]]),
        (3, 1 << VIRTIO_F_VERSION_1, vec![vec![0, 1, 2]]),
        (3, 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_MQ, vec![vec![0, 1, 6], vec![2, 3], vec![4, 5]]),
    ] {
        let mut guest = Guest::new(pairs, 16);
        guest.start_fresh(features);
        assert_eq!(guest.workers.iter().map(queues).collect::<Vec<_>>(), expected);
        let names: Vec<_> = guest.workers.iter().map(|w| w.thread.name().to_owned()).collect();
        let expected: Vec<_> = (0..names.len()).map(|pair| format!("_net0_qp{pair}")).collect();
        assert_eq!(names, expected);
    }
}

#[test]
fn queues_that_the_driver_did_not_enable_are_left_alone() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    guest.queues.truncate(1);
    guest.start_fresh(features);
    assert_eq!(queues(&guest.workers[0]), [0]);
    guest.provide(RECEIVE, 1, 2048);
    send(&guest.host[0], &with_header(&frame(MAC, 60)));
    eventually("reception", || guest.count(Counter::RxFrames) == 1);
    guest.stop();
    guest.queues.clear();
    guest.start_fresh(features);
    assert!(guest.workers.is_empty());
}

#[test]
fn stale_frames_are_dropped_at_driver_start_but_not_at_resume() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    (0..5).for_each(|_| send(&guest.host[0], &with_header(&frame(MAC, 60))));
    guest.start_with(features);
    eventually("the stale frames' end", || guest.count(Counter::RxStale) == 5);
    check_traffic(&mut guest, 100);
    guest.stop();
    send(&guest.host[0], &with_header(&frame(MAC, 60)));
    guest.start_with(features);
    guest.provide(RECEIVE, 1, 2048);
    eventually("reception", || guest.count(Counter::RxFrames) == 2);
    guest.stop();
    guest.device.reset();
    send(&guest.host[0], &with_header(&frame(MAC, 60)));
    guest.start_with(features);
    eventually("the stale frame's end", || guest.count(Counter::RxStale) == 6);
}

#[test]
fn a_successor_waits_for_its_predecessor_and_takes_over() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    for _ in 0..50 {
        guest.start_fresh(features);
        let stopping: Vec<_> = guest.workers.drain(..).map(|worker| worker.stop()).collect();
        guest.start_fresh(features);
        stopping.into_iter().for_each(|thread| thread.join().unwrap());
        guest.stop();
    }
    guest.start_fresh(features);
    check_traffic(&mut guest, 60);
}

#[test]
fn a_start_that_fails_leaves_no_worker_and_has_touched_nothing() {
    let mut guest = Guest::new(4, 16);
    let features = guest.device.features();
    send(&guest.host[0], &with_header(&frame(MAC, 60)));
    guest.queues[0].add(&[(BUFFERS, 2048, WRITE)]);
    guest.queues[1].send(BUFFERS + (1 << 19), &with_header(&frame(OTHER, 60)), &[]);
    let used: Vec<_> = guest.queues.iter().map(|queue| queue.bytes(queue.used(), 0x100)).collect();

    let start = guest.to_start(features);
    let shared = guest.device.starting(&start).shared();
    let refused = spawn_all(
        guest.device.starting(&start).pairs_to_run(guest.device.tap().unwrap()).unwrap(),
        &shared.complete,
        |pair| {
            if pair.index < 3 {
                return guest.device.starting(&start).spawn(pair, &shared);
            }
            // The other threads get time to do harm.
            thread::sleep(Duration::from_millis(100));
            Err(io::ErrorKind::WouldBlock.into())
        },
    );
    assert_eq!(refused.map(|_| ()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    assert_eq!(Arc::strong_count(&shared), 1, "no thread is left that could have another");
    assert!(receive(&guest.host[0]).is_none() && !guest.is_drained(0));
    assert_eq!(guest.queues.iter().map(|queue| queue.bytes(queue.used(), 0x100)).collect::<Vec<_>>(), used);
    assert_eq!(nonzero(&guest.device.counters()), []);

    guest.start_with(features);
    assert_eq!(guest.command(8, &[0, 0, 0]), 0);
}

#[test]
fn a_worker_stops_soon_however_busy_it_is() {
    let mut guest = Guest::new(1, 256);
    let features = features(&guest);
    guest.start_fresh(features);
    (0..256).for_each(|_| _ = guest.queues[1].send(BUFFERS, &with_header(&frame(OTHER, 60_000)), &[]));
    guest.kick(TRANSMIT);
    let start = Instant::now();
    guest.stop();
    assert!(start.elapsed().as_secs() < 30);
}

#[test]
fn a_broken_queue_ends_and_the_others_continue() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    guest.start_fresh(features);
    let avail = guest.queues[1].avail();
    guest.queues[1].write(avail + 2, 0x7777u16.to_le_bytes());
    guest.kick(TRANSMIT);
    eventually("the end of the queue", || guest.count(Counter::BrokenRings) == 1);
    assert!(guest.interrupts.needs_reset());
    assert_eq!(guest.interrupts.eventfd(3).unwrap().read().unwrap(), 1, "the driver is notified, once");
    guest.provide(RECEIVE, 1, 2048);
    send(&guest.host[0], &with_header(&frame(MAC, 60)));
    eventually("reception", || guest.count(Counter::RxFrames) == 1);
    assert_eq!(guest.command(ONE_PAIR_CONTROL, &[0, 0, 0]), 0);
}

#[test]
fn queues_outside_memory_are_given_up_at_the_start() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    for queue in &guest.queues[..2] {
        use virtio_queue::QueueT;
        queue.queue.lock().set_used_ring_address(None, Some(1));
    }
    guest.start_with(features);
    eventually("the end of the queues", || guest.count(Counter::BrokenRings) == 2);
    assert!(guest.interrupts.needs_reset());
    assert_eq!(guest.command(ONE_PAIR_CONTROL, &[0, 0, 0]), 0);
}

#[test]
fn the_control_queue_follows_the_pairs_that_the_driver_knows_of() {
    let mut guest = Guest::new(2, 16);
    let features = guest.device.features();
    guest.start_fresh(features);
    assert_eq!(guest.command(4, &[4, 0, 2, 0]), 0);
    let mut guest = Guest::new(2, 16);
    guest.start_fresh(features & !(1 << VIRTIO_NET_F_MQ));
    assert_eq!(guest.command(2, &[0, 0, 0]), 0);
    assert_eq!(guest.command(2, &[4, 0, 2, 0]), 1, "MQ was not negotiated");
}

#[test]
fn a_reset_returns_to_power_on_and_changes_the_generation() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    let config = |guest: &Guest| {
        let mut data = [0; 8];
        guest.device.config_read(0, &mut data);
        (data, guest.device.config_generation())
    };
    let (power_on, generation) = config(&guest);
    guest.start_fresh(features);
    let mut seen = HashSet::from([generation]);
    assert_eq!(guest.command(ONE_PAIR_CONTROL, &[&[1, 1], &OTHER[..]].concat()), 0);
    assert_eq!(guest.command(ONE_PAIR_CONTROL, &[0, 0, 0]), 0);
    assert_eq!(guest.device.mac(), OTHER);
    let (changed, next) = config(&guest);
    assert_eq!(changed[..6], OTHER);
    assert!(seen.insert(next));
    guest.stop();
    guest.device.reset();
    let (reset, generation) = config(&guest);
    assert_eq!(reset, power_on);
    assert!(seen.insert(generation));
    assert!(guest.device.state.filter().wants_all());
    // Writes of the driver change nothing.
    guest.device.config_write(0, &OTHER);
    assert_eq!(guest.device.mac(), MAC);
}

#[test]
fn command_finished_after_a_reset_changes_nothing() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    guest.start_fresh(features);
    let old = Arc::clone(&guest.device.state);
    guest.device.reset();
    old.set_mac(OTHER);
    old.change_filter(|filter| filter.mac = OTHER);
    assert_eq!((guest.device.mac(), guest.device.state.filter().mac), (MAC, MAC));
}

#[test]
fn a_change_of_the_link_is_told_once_and_outlives_a_reset() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    let status = |guest: &Guest| {
        let mut data = [0; 2];
        guest.device.config_read(6, &mut data);
        u16::from_le_bytes(data)
    };
    guest.start_fresh(features);
    let told = guest.interrupts.eventfd(3).unwrap();
    assert_eq!((status(&guest), guest.device.link_up()), (1, true));
    let generation = guest.device.config_generation();
    guest.device.set_link(false).wait().unwrap();
    guest.device.set_link(false).wait().unwrap();
    assert_eq!((status(&guest), told.read().unwrap()), (0, 1));
    assert_ne!(guest.device.config_generation(), generation);
    guest.stop();
    guest.device.reset();
    assert_eq!(status(&guest), 0);
    guest.device.set_link(true).wait().unwrap();
    assert!(told.read().is_err(), "no driver to notify");
}

#[test]
fn frames_sent_while_the_link_was_down_are_never_delivered() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    guest.start_fresh(features);
    // Without buffers frames wait in the tap, and only the host wakes the worker.
    guest.device.set_link(false).wait().unwrap();
    (0..3).for_each(|_| send(&guest.host[0], &with_header(&frame(MAC, 60))));
    eventually("the drop", || guest.count(Counter::RxLinkDown) == 3);
    // The same applies when the VM was paused all the time.
    guest.stop();
    (0..3).for_each(|_| send(&guest.host[0], &with_header(&frame(MAC, 60))));
    guest.device.set_link(true).wait().unwrap();
    guest.start_with(features);
    guest.provide(0, 4, 1500);
    eventually("the drop", || guest.count(Counter::RxLinkDown) == 6);
    send(&guest.host[0], &with_header(&frame(MAC, 61)));
    eventually("a frame", || guest.count(Counter::RxFrames) == 1);
    let used = guest.queues[0].take_used();
    assert_eq!(used.iter().map(|(_, len)| *len).collect::<Vec<_>>(), [73]);
}

#[test]
fn new_losses_are_logged_at_reset_and_at_device_end() {
    record_log();
    let mut guest = Guest::with(crate::NetSpec { id: "lossy".into(), ..spec(1, 16) });
    let features = features(&guest);
    let lose = |guest: &mut Guest, frames| {
        let before = guest.count(Counter::TxTooShort);
        (0..frames).for_each(|_| _ = guest.queues[1].send(BUFFERS, &[0; 20], &[]));
        guest.kick(TRANSMIT);
        eventually("the loss", || guest.count(Counter::TxTooShort) == before + frames);
    };
    guest.start_fresh(features);
    guest.device.reset();
    assert!(logged("lossy").is_empty());
    lose(&mut guest, 2);
    guest.device.reset();
    guest.device.reset();
    assert_eq!(logged("lossy"), ["lossy: lost or refused so far: tx_too_short=2"]);
    lose(&mut guest, 1);
    guest.device.reset();
    assert_eq!(logged("lossy").len(), 1);
    drop(guest);
    assert_eq!(logged("lossy")[1..], ["lossy: lost or refused so far: tx_too_short=3"]);
}

#[test]
fn frame_waiting_for_buffers_when_the_queue_stops_is_counted() {
    let mut guest = Guest::new(1, 16);
    let features = features(&guest);
    guest.start_fresh(features);
    guest.provide(RECEIVE, 2, 1500);
    send(&guest.host[0], &with_header(&frame(MAC, 9000)));
    eventually("the frame's reading", || guest.is_drained(0));
    guest.stop();
    assert_eq!(guest.count(Counter::RxStopped), 1);
    assert_eq!(guest.queues[0].take_used(), []);
}
