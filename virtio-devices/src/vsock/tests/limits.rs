//! Limits of a guest and of many clients.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::super::credit::{FEW, LITTLE_ROOM, ROOM};
use super::super::muxer::{MAX_CALLERS, MAX_CONNECTIONS, MAX_RESETS};
use super::super::packet::{Ports, op};
use super::rig::*;
use crate::VsockCounter;
use crate::net::steps::Step;

#[test]
fn at_most_1023_connections_and_the_first_64_have_more_credit() {
    // Two descriptors each.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let mut rig = Rig::ready();
    for guest in 0..MAX_CONNECTIONS as u32 {
        rig.send(Ports { host: 7, guest }, op::REQUEST);
        let response = rig.packet();
        let room = if guest < FEW as u32 { ROOM } else { LITTLE_ROOM };
        assert_eq!((response.op(), response.header.buf_alloc.get()), (op::RESPONSE, room));
    }
    rig.send(Ports { host: 7, guest: 5 }, op::CREDIT_REQUEST);
    assert_eq!(rig.take_packets().last().map(Packet::op), Some(op::CREDIT_UPDATE));
    assert_eq!(rig.steps.census(), (MAX_CONNECTIONS, 0));
    rig.send(Ports { host: 7, guest: 5000 }, op::REQUEST);
    assert_eq!(rig.packet().op(), op::RST);
    let client = rig.client("CONNECT 52\n");
    assert!(is_at_end(&client));
    rig.assert_quiet();
    rig.send(Ports { host: 7, guest: 5 }, op::RST);
    rig.connected_client(52);
    assert_eq!(rig.steps.census(), (MAX_CONNECTIONS, 0));
    assert_eq!(rig.steps.count(VsockCounter::RefusedClients), 1);
    assert_eq!(rig.steps.count(VsockCounter::RefusedGuests), 1);
}

#[test]
fn clients_that_say_nothing_do_not_keep_others_out() {
    let mut rig = Rig::ready();
    let silent: Vec<_> = (0..MAX_CALLERS + 10).map(|_| rig.client("CONN")).collect();
    assert_eq!(rig.steps.census(), (0, MAX_CALLERS));
    assert!(is_at_end(&silent[0]) && is_at_end(&silent[9]) && !is_at_end(&silent[10]));
    rig.connected_client(52);
}

#[test]
fn guest_that_takes_no_resets_is_not_served_until_it_does() {
    let mut rig = Rig::new();
    let mut sent = 0;
    let stuck = (0..64).any(|_| {
        for _ in 0..8 {
            let header = rig.header(Ports { host: 7, guest: sent }, op::RW);
            rig.offer(header, &[], &[]);
            sent += 1;
        }
        rig.transmit() == Step::Frame
    });
    assert!(stuck);
    assert_eq!(rig.steps.resets(), MAX_RESETS);
    let mut resets = 0;
    for _ in 0..sent {
        rig.provide(4);
        resets += rig.packets().len() as u32;
        rig.transmit();
    }
    assert_eq!((resets, rig.steps.resets()), (sent, 0));
}

#[test]
fn short_connections_leave_nothing_behind_for_a_stalled_guest() {
    let mut rig = Rig::new();
    for guest in 0..2000 {
        let ports = Ports { host: 7, guest: guest % 3 };
        rig.send(ports, op::REQUEST);
        rig.send(ports, op::RST);
        rig.listeners.lock().clear();
    }
    assert_eq!((rig.steps.census(), rig.steps.resets()), ((0, 0), 0));
    rig.provide(10);
    rig.assert_quiet();
}

#[test]
fn a_port_of_the_host_is_given_to_one_client() {
    let mut rig = Rig::ready();
    let clients: Vec<_> = (0..50).map(|_| rig.connected_client(52)).collect();
    let mut hosts: Vec<_> = clients.iter().map(|(_, ports)| ports.host).collect();
    hosts.dedup();
    assert_eq!(hosts.len(), 50);
}
