//! Data in both directions, in order, within the credit of both sides.

use super::super::credit;
use super::super::packet::{HEADER, op};
use super::rig::*;
use crate::VsockCounter;

#[test]
fn a_client_of_the_host_reaches_a_port_of_the_guest() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    assert_eq!((ports.host, ports.guest), (1 << 30, 52));
    write(&client, b"hello");
    let packet = rig.packet();
    assert_eq!((packet.op(), packet.ports(), packet.data.as_slice()), (op::RW, ports, b"hello".as_slice()));
    assert_eq!((packet.header.src_cid.get(), packet.header.dst_cid.get()), (2, CID.into()));
    rig.send_data(ports, b"and back");
    assert_eq!(read(&client), b"and back");
    rig.assert_quiet();
    assert_eq!(rig.steps.count(VsockCounter::Connections), 1);
}

#[test]
fn data_after_the_connect_line_waits_for_the_guests_response() {
    let mut rig = Rig::ready();
    let client = rig.client("CONNECT 52\nearly");
    let request = rig.packet();
    rig.assert_quiet();
    rig.send(request.ports(), op::RESPONSE);
    assert_eq!(rig.packet().data, b"early");
    assert_eq!(read(&client), b"OK 1073741824\n");
}

#[test]
fn guest_program_reaches_a_host_program_by_its_port() {
    let mut rig = Rig::ready();
    let (program, ports) = rig.connected_guest(7, 1024);
    write(&program, b"hello");
    assert_eq!(rig.packet().data, b"hello");
    rig.send_data(ports, b"and back");
    assert_eq!(read(&program), b"and back");
}

#[test]
fn bulk_data_fills_buffers_in_order_within_the_guests_credit() {
    let mut rig = Rig::ready();
    rig.room = 100_000;
    let (client, ports) = rig.connected_client(52);
    let data = pattern(500_000);
    let (mut written, mut received) = (0, Vec::new());
    while received.len() < data.len() {
        written += write(&client, &data[written..]);
        let packets = rig.take_packets();
        let got: usize = packets.iter().map(|packet| packet.data.len()).sum();
        assert!(got <= 100_000, "{got}");
        received.extend(packets.into_iter().flat_map(|packet| packet.data));
        rig.update(ports);
    }
    assert!(received == data);
}

#[test]
fn guest_without_credit_gets_one_request_and_no_more_data() {
    let mut rig = Rig::ready();
    rig.room = 10;
    let (client, ports) = rig.connected_client(52);
    write(&client, &pattern(25));
    let packets = rig.packets();
    assert_eq!(packets.iter().map(Packet::op).collect::<Vec<_>>(), [op::RW, op::CREDIT_REQUEST]);
    assert_eq!(packets[0].data, pattern(25)[..10]);
    rig.assert_quiet();
    rig.taken.insert(ports, 8);
    rig.update(ports);
    assert_eq!(rig.packets()[0].data, pattern(25)[10..18]);
    rig.taken.insert(ports, 18);
    rig.update(ports);
    assert_eq!(rig.packet().data, pattern(25)[18..]);
}

#[test]
fn a_guest_that_tells_of_room_unasked_is_not_asked() {
    let mut rig = Rig::ready();
    rig.room = 10;
    let (client, ports) = rig.connected_client(52);
    rig.update(ports);
    write(&client, &pattern(25));
    let data = pattern(25);
    for part in [&data[..10], &data[10..20], &data[20..]] {
        assert_eq!(rig.packet().data, part);
        rig.assert_quiet();
        rig.update(ports);
    }
}

#[test]
fn guest_gets_credit_on_request_and_after_using_half() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    rig.send(ports, op::CREDIT_REQUEST);
    let update = rig.packet();
    assert_eq!((update.op(), update.header.fwd_cnt.get()), (op::CREDIT_UPDATE, 0));
    assert_eq!(update.header.buf_alloc.get(), credit::ROOM);
    let part = pattern(40_000);
    for sent in 1..=3 {
        rig.send_data(ports, &part);
        assert!(rig.take_packets().is_empty(), "after {sent} of {} bytes", part.len());
        assert_eq!(read(&client), part);
    }
    rig.send_data(ports, &part);
    let update = rig.packet();
    assert_eq!((update.op(), update.header.fwd_cnt.get()), (op::CREDIT_UPDATE, 160_000));
    assert_eq!(read(&client), part);
}

#[test]
fn a_client_that_takes_nothing_holds_up_its_own_connection_only() {
    let mut rig = Rig::ready();
    let (slow, slow_ports) = rig.connected_client(52);
    let (quick, quick_ports) = rig.connected_client(53);
    let part = pattern(16 << 10);
    let (mut sent, mut told) = (0u32, 0u32);
    while sent - told + part.len() as u32 <= credit::ROOM {
        rig.send_data(slow_ports, &part);
        sent += part.len() as u32;
        told = rig.take_packets().last().map_or(told, |update| update.header.fwd_cnt.get());
        assert!(sent < 64 << 20, "the socket takes all of it");
    }
    rig.send_data(quick_ports, b"quick");
    assert_eq!(read(&quick), b"quick");
    let mut received = 0;
    for _ in 0..100 {
        let data = read(&slow);
        assert!(data.iter().enumerate().all(|(i, byte)| *byte == part[(received + i) % part.len()]));
        received += data.len();
        rig.take_packets();
    }
    rig.send(slow_ports, op::CREDIT_REQUEST);
    assert_eq!((received, rig.packet().header.fwd_cnt.get()), (sent as usize, sent));
}

#[test]
fn a_packet_of_any_pieces_is_passed_on_whole() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    for pieces in [vec![], vec![1], vec![HEADER - 1, 2, 0, 5], vec![20, 24, 1, 1, 1, 1]] {
        let mut header = rig.header(ports, op::RW);
        header.len = 30.into();
        rig.offer(header, &pattern(30), &pieces);
        rig.transmit();
        assert_eq!(read(&client), pattern(30), "{pieces:?}");
    }
}

#[test]
fn a_packet_ends_where_its_header_says() {
    let mut rig = Rig::ready();
    let (client, ports) = rig.connected_client(52);
    let mut header = rig.header(ports, op::RW);
    header.len = 3.into();
    rig.send_raw(header, b"abcdef");
    assert_eq!(read(&client), b"abc");
    let update = rig.header(ports, op::CREDIT_UPDATE);
    rig.send_raw(update, b"no data");
    assert_eq!(read(&client), b"");
}

#[test]
fn connections_take_turns() {
    let mut rig = Rig::ready();
    let clients: Vec<_> = (0..3).map(|port| rig.connected_client(port)).collect();
    for (client, _) in &clients {
        write(client, &pattern(50_000));
    }
    let packets = rig.take_packets();
    for (_, ports) in &clients {
        let first = packets.iter().position(|packet| packet.ports() == *ports).unwrap();
        assert!(first < 8, "it waited for {first} packets of the others");
        let own = packets.iter().filter(|packet| packet.ports() == *ports);
        assert!(own.flat_map(|packet| packet.data.clone()).collect::<Vec<_>>() == pattern(50_000));
    }
}
