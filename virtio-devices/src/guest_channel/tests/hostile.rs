//! Drivers and programs that ask for too much, or for what makes no sense.

use std::time::Duration;

use super::super::ports::MAX_CHAIN;
use super::*;

/// Keeps `chains` chains of `lines` in the ring, as the device takes them. Returns the number of lines that the host
/// got, each answered with `reply`.
fn flood(guest: &mut Guest, chains: usize, lines: &[u8], reply: Option<&[u8]>) -> u64 {
    let (mut sent, mut used, mut taken) = (0, 0, 0);
    eventually("the flood", || {
        while sent < chains && sent - used < 32 {
            guest.write(lines);
            sent += 1;
        }
        while let Some(line) = guest.host.take() {
            taken += 1;
            if let Some(reply) = reply {
                guest.host.answer(line.opening, reply.to_vec());
            }
        }
        guest.received(REPLIES);
        used += guest.queues[usize::from(REQUESTS)].take_used().len();
        used == chains
    });
    taken
}

#[test]
fn a_flood_of_requests_is_answered_one_by_one() {
    let mut guest = Guest::opened(None);
    let lines = b"{}\n".repeat(1000);
    let taken = flood(&mut guest, 100, &lines, Some(b"no\n"));
    let rest = std::iter::from_fn(|| guest.host.take()).count() as u64;
    assert_eq!(taken + rest, 100_000);
    assert_eq!(guest.count(ChannelCounter::Lines), 100_000);
}

#[test]
fn a_flood_waits_in_the_ring_for_its_rate() {
    // The bucket never fills again within a test.
    let rate = RateLimit { size: 100, one_time_burst: 0, refill: Duration::from_secs(1_000_000) };
    let mut guest = Guest::opened(Some(rate));
    let lines = b"{}\n".repeat(1000);
    (0..30).for_each(|_| guest.write(&lines));
    let mut taken = 0;
    eventually("all requests of the bucket", || {
        while let Some(line) = guest.host.take() {
            taken += 1;
            guest.host.answer(line.opening, b"no\n".to_vec());
        }
        guest.received(REPLIES);
        taken == 100 && guest.count(ChannelCounter::Limited) > 0
    });
    // The worker sleeps: it checks the queues for each doorbell and for nothing else.
    let limited = guest.count(ChannelCounter::Limited);
    std::thread::sleep(Duration::from_millis(50));
    assert!(guest.count(ChannelCounter::Limited) <= limited + 3, "it runs in circles");
    assert_eq!((guest.host.take(), guest.count(ChannelCounter::Lines)), (None, 100));
    assert!(guest.queues[usize::from(REQUESTS)].take_used().is_empty());
    // Nor does it delay a close, which ends the flood.
    guest.tell(0, PORT_OPEN, 0);
    guest.await_used(REQUESTS, 30);
}

#[test]
fn who_reads_no_replies_stops_only_himself() {
    let mut guest = Guest::opened(None);
    guest.queues[usize::from(REPLIES)].set_avail_index(0);
    guest.tell(0, PORT_OPEN, 0);
    guest.stop();
    guest.device.reset();
    // A driver without buffers for replies.
    let (channel, end) = channel(None);
    let mut guest = Guest::stopped(channel, end, &memory(), &[SIZE; 6]);
    guest.start();
    guest.tell(0, PORT_OPEN, 1);
    (0..20).for_each(|_| guest.write(b"a\nb\n"));
    let mut taken = 0;
    eventually("a full channel", || {
        while let Some(line) = guest.host.take() {
            taken += 1;
            guest.host.answer(line.opening, vec![b'x'; MAX_MESSAGE]);
        }
        taken == MAX_WAITING && guest.count(ChannelCounter::Full) > 0
    });
    let full = guest.count(ChannelCounter::Full);
    std::thread::sleep(Duration::from_millis(50));
    assert!(guest.count(ChannelCounter::Full) <= full + MAX_WAITING as u64, "it runs in circles");
    assert_eq!(guest.host.take(), None);
    // Notices still pass.
    guest.provide(NOTICES, 1, PAGE as u32);
    guest.tell(1, PORT_OPEN, 1);
    guest.host.announce(b"notice\n".to_vec());
    assert_eq!(guest.lines(NOTICES, 1), ["notice"]);
}

#[test]
fn chains_longer_than_a_driver_writes_are_cut() {
    let mut guest = Guest::opened(None);
    let garbage = vec![0xa5; 1 << 15];
    // The same buffer 32 times in a chain, of which the device reads a part.
    for _ in 0..64 {
        let queue = &mut guest.queues[usize::from(REQUESTS)];
        queue.memory_write(BUFFERS, &garbage);
        queue.add(&[(BUFFERS, 1 << 15, 0); 32]);
        guest.kick(REQUESTS);
        guest.await_used(REQUESTS, 1);
    }
    assert_eq!((guest.taken().bytes, guest.host.take()), (None, None));
    assert_eq!(guest.count(ChannelCounter::TxTooLong), 64);
}

/// Writes `total` bytes of garbage, in chains as long as the device reads: no text, half lines, lines that are too
/// long. The host answers what is a line. During that time the channel keeps no more than its limits, and notices pass.
fn garbage(total: u64) {
    const BLOCK: u64 = MAX_CHAIN as u64;
    let mut guest = Guest::opened(None);
    guest.tell(1, PORT_OPEN, 1);
    // The end of a line that is too long, a short one, and the beginning of another that is too long.
    let mut block = vec![0xa5; MAX_CHAIN];
    (block[MAX_CHAIN / 2], block[MAX_CHAIN / 2 + 9]) = (b'\n', b'\n');
    let address = Guest::buffer(REQUESTS, 0);
    let descriptors = [(address, 1 << 15, 0), (address + (1 << 15), 1 << 15, 0)];
    guest.queues[usize::from(REQUESTS)].memory_write(address, &block);
    let blocks = total / BLOCK;
    let (mut sent, mut used, mut lines, mut refused, mut notices) = (0, 0, 0, 0, 0);
    while used < blocks {
        while sent < blocks && sent - used < 16 {
            guest.queues[usize::from(REQUESTS)].add(&descriptors);
            sent += 1;
        }
        guest.kick(REQUESTS);
        while let Some(line) = guest.host.take() {
            (lines, refused) = (lines + 1, refused + u64::from(line.bytes.is_none()));
            guest.host.answer(line.opening, b"no\n".to_vec());
        }
        let kept = guest.host.save();
        assert!(kept.half.0.len() < MAX_LINE && kept.lines.len() + kept.replies.messages.len() <= MAX_WAITING);
        guest.received(REPLIES);
        // A notice for each part of the garbage.
        if notices <= used * 16 / blocks {
            guest.host.announce(b"notice\n".to_vec());
            assert_eq!(guest.lines(NOTICES, 1), ["notice"]);
            notices += 1;
        }
        used += guest.queues[usize::from(REQUESTS)].take_used().len() as u64;
        std::thread::yield_now();
    }
    let rest = std::iter::from_fn(|| guest.host.take()).map(|line| u64::from(line.bytes.is_none()));
    let rest: Vec<_> = rest.collect();
    // The first block has the beginning of its first line, too.
    assert_eq!((lines + rest.len() as u64, refused + rest.iter().sum::<u64>()), (2 * blocks + 1, blocks + 1));
    assert_eq!(guest.count(ChannelCounter::TxBytes), blocks * BLOCK);
    assert!(notices >= 16, "{notices} notices");
}

#[test]
fn garbage_is_answered_within_the_channels_limits() {
    garbage(64 << 20);
}

#[test]
#[ignore = "takes 12 s, alone in its process: cargo test -p virtio-devices --lib a_gigabyte -- --ignored"]
fn a_gigabyte_of_garbage_leaves_the_programs_memory_as_it_was() {
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    garbage(64 << 20);
    let before = resident();
    let start = Instant::now();
    garbage(1 << 30);
    let after = resident();
    println!("{:?}; {before} KiB before, {after} KiB after", start.elapsed());
    assert!(after < before + 4096, "{before} KiB before, {after} KiB after");
}

#[test]
fn messages_and_chains_that_make_no_sense_are_counted() {
    let mut guest = Guest::opened(None);
    guest.lines(TO_DRIVER, 0);
    for (port, event, value) in [(2, PORT_OPEN, 1), (0, PORT_OPEN, 2), (0, 99, 1), (NO_PORT, PORT_READY, 1)] {
        guest.tell(port, event, value);
    }
    guest.tell(NO_PORT, DEVICE_READY, 0);
    guest.offer(OF_DRIVER, b"short");
    guest.await_used(OF_DRIVER, 1);
    for queue in [REQUESTS, OF_DRIVER, NOTICES + 1] {
        for chain in [(BUFFERS, 8, WRITE), (MEMORY - 4, 8, 0), (u64::MAX, u32::MAX, 0)] {
            guest.queues[usize::from(queue)].add(&[chain]);
        }
        guest.kick(queue);
        guest.await_used(queue, 3);
    }
    eventually("counts", || {
        (guest.count(ChannelCounter::BadMessages), guest.count(ChannelCounter::TxBadChains)) == (4, 10)
    });
    guest.write(b"still here\n");
    assert_eq!(guest.text().1, "still here");
}

#[test]
fn a_buffer_too_small_for_a_name_does_not_lose_it() {
    let (channel, end) = channel(None);
    let mut guest = Guest::stopped(channel, end, &memory(), &[SIZE; 6]);
    guest.start();
    guest.tell(0, PORT_READY, 1);
    guest.provide(TO_DRIVER, 3, 12);
    assert_eq!(guest.used(TO_DRIVER, 3), [0, 0, 0]);
    guest.provide(TO_DRIVER, 1, 64);
    guest.await_used(TO_DRIVER, 1);
    eventually("a count", || guest.count(ChannelCounter::RxBadChains) == 3);
}

#[test]
fn a_broken_ring_of_requests_does_not_hold_up_a_close() {
    let mut guest = Guest::opened(None);
    guest.break_ring(REQUESTS);
    guest.tell(0, PORT_OPEN, 0);
    guest.tell(1, PORT_OPEN, 1);
    guest.host.announce(b"notice\n".to_vec());
    assert_eq!(guest.lines(NOTICES, 1), ["notice"]);
}

#[test]
fn a_stop_while_a_port_closes_loses_no_message() {
    for _ in 0..20 {
        let mut guest = Guest::opened(None);
        (0..20).for_each(|_| guest.write(b"a\nb\n"));
        let message = [0, 0, 0, 0, 6, 0, 0, 0];
        guest.offer(OF_DRIVER, &message);
        guest.stop();
        guest.start();
        guest.await_used(OF_DRIVER, 1);
        guest.await_used(REQUESTS, 20);
        assert_eq!(guest.host.take(), None);
    }
}
