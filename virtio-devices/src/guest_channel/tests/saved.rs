//! A channel that is saved, and restored with another device.

use super::*;
use crate::state::hex_bytes::HexBytes;
use crate::state::{ChannelState, OutboxState};

/// The negotiated features of a driver that knows ports.
const PORTED: Option<u64> = Some(1 << F_MULTIPORT);

fn state(guest: &Guest) -> ChannelState {
    match guest.device.save() {
        DeviceSpecific::Channel(state) => *state,
        state => panic!("{state:?}"),
    }
}

/// A guest with the memory and the queues of `old`, on another device that was restored to its state.
fn moved(old: &mut Guest) -> Guest {
    old.stop();
    let saved = serde_json::to_string(&old.device.save()).unwrap();
    let (mut channel, end) = channel(None);
    channel.restore(&serde_json::from_str(&saved).unwrap(), PORTED).unwrap();
    assert_eq!(serde_json::to_string(&channel.save()).unwrap(), saved);
    let map = old.queues[0].memory.clone();
    let mut guest = Guest::stopped(channel, end, &map, &[SIZE; 6]);
    guest.queues = std::mem::take(&mut old.queues);
    guest.start();
    guest
}

#[test]
fn half_a_line_and_all_that_waits_move_with_the_guest() {
    let mut old = Guest::opened(None);
    old.write(b"answered\ntaken\nwaiting\n");
    let (opening, line) = old.text();
    assert_eq!(line, "answered");
    old.text();
    // Without buffers, the reply waits as well.
    old.await_used(REQUESTS, 1);
    old.write(&[vec![b'x'; MAX_LINE], b"hal".to_vec()].concat());
    old.await_used(REQUESTS, 1);
    old.write(b"\nhal");
    old.await_used(REQUESTS, 1);
    old.stop();
    old.host.answer(opening, b"reply\n".to_vec());
    let mut new = moved(&mut old);
    assert_eq!(new.lines(REPLIES, 1), ["reply"]);
    assert_eq!(new.text().1, "waiting");
    assert_eq!(new.taken().bytes, None);
    new.write(b"f\n");
    let (opening, line) = new.text();
    assert_eq!(line, "half");
    new.host.answer(opening, b"answered there\n".to_vec());
    assert_eq!(new.lines(REPLIES, 1), ["answered there"]);
}

#[test]
fn a_chain_that_waits_continues_where_it_was_left() {
    let mut old = Guest::opened(None);
    let lines: Vec<_> = (0..20).map(|n| n.to_string()).collect();
    old.write((lines.join("\n") + "\n").as_bytes());
    eventually("a full channel", || old.count(ChannelCounter::Full) > 0);
    old.stop();
    assert!(state(&old).taken > 0);
    let mut new = moved(&mut old);
    let mut taken = Vec::new();
    eventually("all lines", || {
        while let Some(line) = new.host.take() {
            taken.push(String::from_utf8(line.bytes.unwrap()).unwrap());
            new.host.answer(line.opening, b"\n".to_vec());
        }
        new.received(REPLIES);
        taken.len() == lines.len()
    });
    assert_eq!(taken, lines);
}

#[test]
fn a_close_ends_a_half_read_chain_of_a_broken_ring() {
    let mut guest = Guest::opened(None);
    guest.write(&b"line\n".repeat(20));
    eventually("a full channel", || guest.count(ChannelCounter::Full) > 0);
    guest.break_ring(REQUESTS);
    guest.tell(0, PORT_OPEN, 0);
    guest.stop();
    channel(None).0.restore(&guest.device.save(), PORTED).unwrap();
}

#[test]
fn a_message_that_was_read_in_part_continues() {
    let mut old = Guest::opened(None);
    old.tell(1, PORT_OPEN, 1);
    old.stop();
    // One buffer of 16 takes a part.
    old.host.announce([vec![b'x'; MAX_MESSAGE - 1], vec![b'\n']].concat());
    old.host.announce(b"dropped\n".to_vec());
    (0..MAX_WAITING_NOTICES - 1).for_each(|n| old.host.announce(format!("{n}\n").into_bytes()));
    let saved = state(&old);
    // The first was dropped, of which the driver had nothing.
    assert_eq!((saved.notices.messages.len(), saved.notices.sent), (MAX_WAITING_NOTICES, 0));
    let mut sent = saved.clone();
    sent.notices.sent = 3;
    let (mut channel, end) = channel(None);
    channel.restore(&DeviceSpecific::Channel(Box::new(sent)), PORTED).unwrap();
    end.announce(b"last\n".to_vec());
    let mut guest = Guest::stopped(channel, end, &memory(), &[SIZE; 6]);
    guest.start();
    guest.provide(NOTICES, 16, PAGE as u32);
    let lines = guest.lines(NOTICES, MAX_WAITING_NOTICES);
    assert_eq!((lines[0].as_str(), lines[1].as_str(), lines[63].as_str()), ("pped", "1", "last"));
}

#[test]
fn an_owed_message_is_sent_by_the_next_device() {
    let (channel, end) = channel(None);
    let mut old = Guest::stopped(channel, end, &memory(), &[SIZE; 6]);
    old.start();
    old.tell(NO_PORT, DEVICE_READY, 1);
    old.tell(0, PORT_READY, 1);
    let mut new = moved(&mut old);
    new.provide(TO_DRIVER, 8, 64);
    assert_eq!(new.used(TO_DRIVER, 4), [8, 8, 8 + 13, 8]);
}

#[test]
fn no_state_is_restored_that_a_driver_could_not_have() {
    let open = ChannelState { open: [true, true], ..ChannelState::default() };
    let messages = |count: usize, len: usize| OutboxState { messages: vec![HexBytes(vec![b'x'; len]); count], sent: 0 };
    let restored = |state: ChannelState, features: Option<u64>| {
        let (mut channel, _) = channel(None);
        let result = channel.restore(&DeviceSpecific::Channel(Box::new(state)), features);
        assert!(result.is_ok() || channel.save() == DeviceSpecific::PowerOn);
        result.is_ok()
    };
    let full = ChannelState {
        owed: 63,
        taken: (64 << 10) - 1,
        half: HexBytes(vec![b'x'; MAX_LINE - 1]),
        lines: vec![None, Some(HexBytes(Vec::new()))],
        replies: OutboxState { sent: 4, ..messages(6, 5) },
        notices: messages(MAX_WAITING_NOTICES, MAX_MESSAGE),
        ..open.clone()
    };
    assert!(restored(full.clone(), PORTED));
    assert!(!restored(full.clone(), None) && !restored(full.clone(), Some(0)));
    type Change = fn(&mut ChannelState);
    let wrong: [Change; 14] = [
        |state| state.owed = 64,
        |state| state.taken = 64 << 10,
        |state| state.half.0.push(b'x'),
        |state| state.half.0[7] = b'\n',
        |state| state.skips = true,
        |state| state.lines.push(None),
        |state| state.lines[1] = Some(HexBytes(vec![b'x'; MAX_LINE])),
        |state| state.lines[1] = Some(HexBytes(b"a\nb".to_vec())),
        |state| state.replies.sent = 5,
        |state| state.replies.messages[1].0.clear(),
        |state| state.notices.messages.push(HexBytes(vec![b'x'])),
        |state| state.notices.messages[0].0.push(b'x'),
        |state| state.open[0] = false,
        |state| state.open[1] = false,
    ];
    for (n, change) in wrong.into_iter().enumerate() {
        let mut state = full.clone();
        change(&mut state);
        assert!(!restored(state, PORTED), "change {n}");
    }
    let other = channel(None).0.restore(&DeviceSpecific::Config(Vec::new()), PORTED).unwrap_err();
    assert_eq!(other.to_string(), "saved state of a device with different kinds of device");
}
