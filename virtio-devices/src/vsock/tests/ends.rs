//! Ends of connections: in one direction, in both, at once, or for lack of a reply.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use super::super::connection::PATIENCE;
use super::super::credit;
use super::super::packet::{Ports, op};
use super::rig::*;
use crate::VsockCounter;

const RECEIVE: u32 = 1;
const SEND: u32 = 2;
const BOTH: u32 = 3;
const ALMOST: Duration = PATIENCE.saturating_sub(Duration::from_millis(1));

#[test]
fn a_client_that_sends_no_more_still_receives() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    write(&client, b"last");
    client.shutdown(Shutdown::Write).unwrap();
    let packets = rig.take_packets();
    assert_eq!(packets[0].data, b"last");
    assert_eq!((packets[1].op(), packets[1].header.flags.get()), (op::SHUTDOWN, SEND));
    assert_eq!(packets.len(), 2);
    rig.send_data(ports, b"answer");
    assert_eq!(read(&client), b"answer");
    rig.steps.wait(2 * PATIENCE);
    assert_eq!(rig.steps.census(), (1, 0));
    rig.shut_down(ports, BOTH);
    assert_eq!(rig.packet().op(), op::RST);
    assert!(is_at_end(&client));
}

#[test]
fn a_guest_that_sends_no_more_still_receives() {
    let mut rig = Rig::ready();
    let (program, ports) = rig.connected_guest(7, 1024);
    rig.send_data(ports, b"last");
    rig.shut_down(ports, SEND);
    assert_eq!(read(&program), b"last");
    assert!(is_at_end(&program));
    write(&program, b"answer");
    assert_eq!(rig.packet().data, b"answer");
    drop(program);
    let packet = rig.packet();
    assert_eq!((packet.op(), packet.header.flags.get()), (op::SHUTDOWN, BOTH));
    rig.send(ports, op::RST);
    rig.assert_quiet();
    assert_eq!(rig.steps.census(), (0, 0));
}

#[test]
fn a_guest_that_receives_no_more_has_its_client_told() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    rig.shut_down(ports, RECEIVE);
    assert_eq!((&client).write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    rig.send_data(ports, b"still");
    assert_eq!(read(&client), b"still");
    rig.assert_quiet();
}

#[test]
fn client_hangup_after_guest_shutdown_does_not_spin_the_worker() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    rig.shut_down(ports, SEND);
    drop(client);
    let packet = rig.packet();
    assert_eq!((packet.op(), packet.header.flags.get()), (op::SHUTDOWN, BOTH));
    rig.assert_quiet();
}

#[test]
fn all_that_a_client_sent_before_it_left_arrives() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    let data = pattern(100_000);
    assert_eq!(write(&client, &data), data.len());
    drop(client);
    let packets = rig.take_packets();
    let received: Vec<_> = packets.iter().flat_map(|packet| packet.data.clone()).collect();
    assert!(received == data);
    let last = packets.last().unwrap();
    assert_eq!((last.op(), last.header.flags.get()), (op::SHUTDOWN, BOTH));
    assert_eq!(packets.iter().filter(|packet| packet.op() == op::SHUTDOWN).count(), 1);
    // Data that the guest sends in the meantime is dropped.
    rig.send_data(ports, b"too late");
    rig.assert_quiet();
    rig.steps.wait(PATIENCE);
    assert_eq!(rig.packet().op(), op::RST);
    assert_eq!((rig.steps.census(), rig.steps.count(VsockCounter::TimedOut)), ((0, 0), 1));
}

#[test]
fn guest_that_sends_to_a_closed_client_gets_shutdown_at_once() {
    let mut rig = Rig::ready();
    rig.room = 10;
    let (client, ports) = rig.connected_client(52);
    write(&client, &pattern(30));
    assert_eq!(rig.take_packets()[0].data, pattern(30)[..10]);
    drop(client);
    rig.send_data(ports, b"x");
    let packets = rig.take_packets();
    assert_eq!((packets[0].op(), packets[0].header.flags.get()), (op::SHUTDOWN, RECEIVE));
    let mut rest = packets[1..].to_vec();
    for _ in 0..10 {
        rig.update(ports);
        rest.extend(rig.take_packets());
    }
    let data: Vec<_> = rest.iter().flat_map(|packet| packet.data.clone()).collect();
    assert_eq!(data, pattern(30)[10..]);
    assert_eq!(rest.last().map(|packet| (packet.op(), packet.header.flags.get())), Some((op::SHUTDOWN, BOTH)));
}

/// Sends until the client's socket accepts no more, and some of the data is kept. Returns all data sent.
fn stuff(rig: &mut Rig, ports: Ports) -> Vec<u8> {
    let mut sent = Vec::new();
    let mut told = 0;
    while sent.len() - told as usize + 4096 <= credit::ROOM as usize {
        rig.send_data(ports, &pattern(4096));
        sent.extend(pattern(4096));
        told = rig.take_packets().last().map_or(told, |update| update.header.fwd_cnt.get());
    }
    sent
}

#[test]
fn data_sent_before_guest_close_reaches_a_slow_client() {
    for closes_at_once in [false, true] {
        let mut rig = Rig::ready();
        let (client, ports) = rig.connected_client(52);
        let sent = stuff(&mut rig, ports);
        rig.shut_down(ports, BOTH);
        if closes_at_once {
            rig.send(ports, op::RST);
        }
        rig.assert_quiet();
        rig.steps.wait(ALMOST);
        let mut received = vec![0; 30_000];
        (&client).read_exact(&mut received).unwrap();
        rig.assert_quiet();
        // The client has read some, which restarts the timeout.
        rig.steps.wait(ALMOST);
        let mut packets = Vec::new();
        for _ in 0..20 {
            received.extend(read(&client));
            packets.extend(rig.take_packets().iter().map(Packet::op));
        }
        assert!(received == sent);
        assert!(is_at_end(&client));
        assert_eq!(packets, if closes_at_once { vec![] } else { vec![op::RST] });
        assert_eq!(rig.steps.census(), (0, 0));
    }
}

#[test]
fn client_that_reads_nothing_after_guest_close_is_dropped() {
    for closes_at_once in [false, true] {
        let mut rig = Rig::ready();
        let (_client, ports) = rig.connected_client(52);
        stuff(&mut rig, ports);
        rig.shut_down(ports, BOTH);
        if closes_at_once {
            rig.send(ports, op::RST);
            // The guest has dropped the connection, and may not use it.
            rig.send(ports, op::REQUEST);
            assert_eq!(rig.packet().op(), op::RST);
        }
        rig.steps.wait(PATIENCE);
        let packets: Vec<_> = rig.take_packets().iter().map(Packet::op).collect();
        assert_eq!(packets, if closes_at_once { vec![] } else { vec![op::RST] });
        assert_eq!((rig.steps.census(), rig.steps.count(VsockCounter::TimedOut)), ((0, 0), 1));
    }
}

#[test]
fn a_guest_that_does_not_answer_a_client_loses_it() {
    let mut rig = Rig::ready();
    let client = rig.client("CONNECT 52\n");
    let ports = rig.packet().ports();
    rig.steps.wait(ALMOST);
    assert_eq!(rig.steps.census(), (1, 0));
    rig.steps.wait(Duration::from_millis(1));
    let packet = rig.packet();
    assert_eq!((packet.op(), packet.ports()), (op::RST, ports));
    assert!(is_at_end(&client));
    // Too late.
    rig.send(ports, op::RESPONSE);
    assert_eq!(rig.packet().op(), op::RST);
}

#[test]
fn a_guest_without_buffers_never_sees_a_client_that_gave_up() {
    let mut rig = Rig::new();
    let client = rig.client("CONNECT 52\n");
    rig.assert_quiet();
    rig.steps.wait(PATIENCE);
    assert!(is_at_end(&client));
    rig.provide(10);
    rig.assert_quiet();
}

#[test]
fn a_guest_that_refuses_a_client_closes_it() {
    let mut rig = Rig::ready();
    let client = rig.client("CONNECT 52\n");
    let ports = rig.packet().ports();
    rig.send(ports, op::RST);
    assert!(is_at_end(&client));
    rig.assert_quiet();
}

#[test]
fn a_client_that_left_before_the_guest_answered_is_reset() {
    let mut rig = Rig::ready();
    drop(rig.client("CONNECT 52\n"));
    let ports = rig.packet().ports();
    rig.assert_quiet();
    rig.send(ports, op::RESPONSE);
    assert_eq!(rig.packet().op(), op::RST);
    assert_eq!(rig.steps.census(), (0, 0));
}

#[test]
fn clients_that_leave_at_any_byte_of_their_line_do_no_harm() {
    let line = "CONNECT 52\n";
    let mut rig = Rig::ready();
    for len in 0..line.len() {
        drop(rig.client(&line[..len]));
        rig.assert_quiet();
        assert_eq!(rig.steps.census(), (0, 0));
    }
    rig.connected_client(52);
}
