//! Invalid packets and buffers.

use super::super::credit;
use super::super::packet::{Ports, op};
use super::rig::*;
use crate::VsockCounter;
use crate::net::steps::Step;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE};

const NOBODYS: Ports = Ports { host: 7, guest: 1024 };

#[test]
fn a_port_without_a_listener_refuses() {
    let mut rig = Rig::ready();
    for host in [1000, u32::MAX] {
        let ports = Ports { host, guest: 1024 };
        rig.send(ports, op::REQUEST);
        let packet = rig.packet();
        assert_eq!((packet.op(), packet.ports()), (op::RST, ports));
    }
    assert_eq!(rig.steps.count(VsockCounter::RefusedGuests), 2);
}

#[test]
fn a_packet_of_no_connection_is_reset() {
    let mut rig = Rig::ready();
    for op in [op::RESPONSE, op::RW, op::SHUTDOWN, op::CREDIT_UPDATE, op::CREDIT_REQUEST, 0, 8, u16::MAX] {
        rig.send(NOBODYS, op);
        assert_eq!((rig.packet().op(), rig.steps.census()), (op::RST, (0, 0)));
    }
    rig.send(NOBODYS, op::RST);
    rig.assert_quiet();
}

#[test]
fn another_type_of_socket_is_reset_as_that_type() {
    let mut rig = Rig::ready();
    let mut header = rig.header(NOBODYS, op::REQUEST);
    header.kind = 2.into();
    rig.send_raw(header, &[]);
    let packet = rig.packet();
    assert_eq!((packet.op(), packet.header.kind.get()), (op::RST, 2));
    header.op = op::RST.into();
    rig.send_raw(header, &[]);
    rig.assert_quiet();
}

#[test]
fn packets_of_or_to_somebody_else_are_dropped() {
    let mut rig = Rig::ready();
    for (src, dst) in [(4, 2), (2, 2), (3, 3), (3, 1), (3, u64::MAX), (3 | 1 << 32, 2)] {
        let mut header = rig.header(NOBODYS, op::REQUEST);
        (header.src_cid, header.dst_cid) = (src.into(), dst.into());
        rig.send_raw(header, &[]);
    }
    rig.assert_quiet();
    assert_eq!(rig.steps.count(VsockCounter::TxBadPackets), 6);
}

#[test]
fn a_guest_that_breaks_the_rules_loses_the_connection() {
    let broken: [fn(&mut Rig, Ports); 6] = [
        |rig, ports| rig.send(ports, op::REQUEST),
        |rig, ports| rig.send(ports, op::RESPONSE),
        |rig, ports| rig.send(ports, 9),
        |rig, ports| rig.send_data(ports, &pattern(credit::ROOM as usize + 1)),
        |rig, ports| {
            let mut header = rig.header(ports, op::RW);
            header.len = u32::MAX.into();
            rig.send_raw(header, b"short");
        },
        |rig, ports| {
            rig.shut_down(ports, 2);
            rig.send_data(ports, b"more");
        },
    ];
    for broken in broken {
        let mut rig = Rig::ready();
        let (client, ports) = rig.connected_client(52);
        broken(&mut rig, ports);
        let packet = rig.packet();
        assert_eq!((packet.op(), packet.ports()), (op::RST, ports));
        assert!(is_at_end(&client));
        assert_eq!((rig.steps.census(), rig.steps.count(VsockCounter::BrokenRules)), ((0, 0), 1));
    }
}

#[test]
fn chains_that_make_no_sense_are_given_back_and_counted() {
    let mut rig = Rig::new();
    for chain in [(BUFFERS, 8, WRITE), (MEMORY - 4, 8, 0), (u64::MAX, u32::MAX, 0)] {
        rig.transmit.add(&[chain]);
    }
    rig.transmit.add(&[(BUFFERS, 43, 0)]);
    assert_eq!(rig.transmit(), Step::Doorbell);
    assert_eq!(rig.transmit.take_used().iter().map(|(_, len)| *len).collect::<Vec<_>>(), [0; 4]);
    assert_eq!(rig.steps.count(VsockCounter::TxBadChains), 3);
    assert_eq!(rig.steps.count(VsockCounter::TxBadPackets), 1);
    for chain in [(BUFFERS, 100, 0), (BUFFERS, 44, WRITE), (MEMORY - 4, 100, WRITE)] {
        rig.receive.add(&[chain]);
    }
    rig.provide(1);
    rig.send(NOBODYS, op::RW);
    assert_eq!(rig.packets().len(), 1);
    assert_eq!(rig.steps.count(VsockCounter::RxBadChains), 3);
}

#[test]
fn a_bad_buffer_among_good_ones_loses_no_data_and_no_order() {
    let mut rig = Rig::new();
    rig.provide(1);
    let client = rig.client("CONNECT 52\n");
    let ports = rig.packets()[0].ports();
    rig.send(ports, op::RESPONSE);
    let data = pattern(40_000);
    write(&client, &data);
    let mut received = Vec::new();
    while received.len() < data.len() {
        rig.provide(3);
        rig.receive.add(&[(BUFFERS, 10, WRITE)]);
        rig.provide(2);
        received.extend(rig.packets().into_iter().flat_map(|packet| packet.data));
    }
    assert!(received == data);
}

#[test]
fn a_buffer_of_strange_pieces_is_filled() {
    let mut rig = Rig::new();
    let pieces = [(BUFFERS, 1), (BUFFERS + 1, 42), (BUFFERS + 43, 3), (BUFFERS + 46, 0), (BUFFERS + 46, 20)];
    rig.receive.add(&pieces.map(|(address, len)| (address, len, WRITE)));
    rig.send(NOBODYS, op::RW);
    rig.packets();
    assert_eq!(rig.receive.bytes(BUFFERS + 28, 4), [1, 0, op::RST as u8, 0]);
}
