//! The device with its thread and its sockets.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

use super::super::packet::{Header, Ports, STREAM, op};
use super::super::*;
use super::rig::{Packet, pattern};
use crate::ErrorKind;
use crate::testing::driver_queue::{BUFFERS, WRITE, eventually, memory};

const RECEIVE_BUFFERS: u64 = BUFFERS + (2 << 20);

/// A guest with the folder of its host's sockets.
type Guest = crate::testing::guest::Guest<Vsock, TempDir>;

impl Guest {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let vsock = Vsock::open(spec(&folder)).unwrap();
        let mut guest = Self::stopped(vsock, folder, &memory(), &[64; 3]);
        for n in 0..32u64 {
            guest.queues[0].add(&[(RECEIVE_BUFFERS + n * 4096, 4096, WRITE)]);
        }
        guest.start_without_events();
        guest
    }

    /// Starts the queues without event indexes: each doorbell and each interrupt is sent.
    fn start_without_events(&mut self) {
        self.start_with(FEATURES & !(1 << VIRTIO_RING_F_EVENT_IDX));
    }

    fn send_packet(&mut self, ports: Ports, op: u16, data: &[u8]) {
        let header = Header {
            src_cid: 3.into(),
            dst_cid: 2.into(),
            src_port: ports.guest.into(),
            dst_port: ports.host.into(),
            len: (data.len() as u32).into(),
            kind: STREAM.into(),
            op: op.into(),
            buf_alloc: (64 << 10).into(),
            ..Header::default()
        };
        self.queues[1].send(BUFFERS, &[header.as_bytes(), data].concat(), &[]);
        self.kick(1);
        self.await_used(1, 1);
    }

    /// The next packet that the driver receives.
    fn packet(&mut self) -> Packet {
        let mut used = None;
        eventually("a packet", || {
            used = self.queues[0].take_one_used();
            used.is_some()
        });
        let (head, len) = used.unwrap();
        let bytes = self.queues[0].bytes(RECEIVE_BUFFERS + u64::from(head) * 4096, len as usize);
        let (header, data) = Header::read_from_prefix(&bytes).unwrap();
        Packet { header, data: data.to_vec() }
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.host.path().join("v")).unwrap();
        client.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        client
    }

    fn connected_client(&mut self) -> (UnixStream, Ports) {
        let mut client = self.client();
        client.write_all(b"CONNECT 52\n").unwrap();
        let ports = self.packet().ports();
        self.send_packet(ports, op::RESPONSE, &[]);
        let mut line = [0; 14];
        client.read_exact(&mut line).unwrap();
        assert!(line.starts_with(b"OK ") && line.ends_with(b"\n"));
        (client, ports)
    }
}

fn spec(folder: &TempDir) -> VsockSpec {
    VsockSpec { id: "__vsock".into(), cid: 3, socket: folder.path().join("v") }
}

#[test]
fn programs_of_guest_and_host_reach_each_other_by_sockets() {
    let mut guest = Guest::new();
    assert_eq!(guest.workers[0].thread.name(), "__vsock_q0");
    let (mut client, ports) = guest.connected_client();
    client.write_all(b"hello").unwrap();
    assert_eq!(guest.packet().data, b"hello");
    guest.send_packet(ports, op::RW, b"and back\n");
    let mut line = String::new();
    BufReader::new(&client).read_line(&mut line).unwrap();
    assert_eq!(line, "and back\n");

    let listener = UnixListener::bind(guest.host.path().join("v_7")).unwrap();
    let ports = Ports { host: 7, guest: 1024 };
    guest.send_packet(ports, op::REQUEST, &[]);
    assert_eq!(guest.packet().op(), op::RESPONSE);
    let (mut program, _) = listener.accept().unwrap();
    guest.send_packet(ports, op::RW, &pattern(60_000));
    let mut data = vec![0; 60_000];
    program.read_exact(&mut data).unwrap();
    assert!(data == pattern(60_000));
    guest.send_packet(Ports { host: 8, guest: 1024 }, op::REQUEST, &[]);
    let mut next = guest.packet();
    if next.op() == op::CREDIT_UPDATE {
        next = guest.packet();
    }
    assert_eq!(next.op(), op::RST);
    guest.await_interrupt(0);
}

#[test]
fn clients_that_came_before_the_driver_wait_for_it() {
    let mut guest = Guest::new();
    guest.stop();
    let mut client = guest.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    guest.start_without_events();
    assert_eq!(guest.packet().op(), op::REQUEST);
}

#[test]
fn a_pause_keeps_connections_and_a_reset_ends_them() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.stop();
    assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    client.write_all(b"in between").unwrap();
    guest.start_without_events();
    assert_eq!(guest.packet().data, b"in between");
    guest.send_packet(ports, op::RW, b"x");
    client.read_exact(&mut [0]).unwrap();
    guest.stop();
    guest.device.reset();
    guest.start_without_events();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    guest.send_packet(ports, op::RW, b"x");
    assert_eq!(guest.packet().op(), op::RST);
}

#[test]
fn a_restored_driver_is_told_that_its_connections_are_gone() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.stop();
    guest.device.restore(&DeviceSpecific::PowerOn, Some(FEATURES)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    guest.start_without_events();
    // There is no buffer for the event yet, then one that is too short; another start does not lose the event.
    guest.queues[2].add(&[(BUFFERS + (1 << 20), 2, WRITE)]);
    guest.kick(2);
    let queue = &mut guest.queues[2];
    eventually("the buffer that is too short", || queue.take_used() == [(0, 0)]);
    guest.stop();
    guest.start_without_events();
    guest.queues[2].memory_write(BUFFERS + (1 << 20), &[0xee; 8]);
    guest.queues[2].add(&[(BUFFERS + (1 << 20), 8, WRITE)]);
    guest.kick(2);
    let queue = &mut guest.queues[2];
    eventually("the event", || queue.take_used() == [(1, 4)]);
    assert_eq!(queue.bytes(BUFFERS + (1 << 20), 8), [0, 0, 0, 0, 0xee, 0xee, 0xee, 0xee]);
    let (_client, new) = guest.connected_client();
    assert_ne!(new, ports);
    let no = guest.device.restore(&DeviceSpecific::Config(Vec::new()), None).unwrap_err();
    assert!(matches!(no, StateError::Shape("kinds of device")));
}

#[test]
fn broken_vsock_ring_is_abandoned_and_sets_device_needs_reset() {
    let mut guest = Guest::new();
    guest.break_ring(1);
    guest.stop();
    assert_eq!(guest.device.counters().get(VsockCounter::BrokenRings), 1);
}

#[test]
fn the_configuration_is_the_context_id() {
    let guest = Guest::new();
    let mut data = [0xee; 10];
    guest.device.config_read(0, &mut data);
    assert_eq!(data, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    guest.device.config_read(u64::MAX, &mut data);
    assert_eq!(data, [0; 10]);
}

#[test]
fn a_socket_is_taken_over_from_the_dead_and_not_from_the_living() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("v");
    let open = || Vsock::open(spec(&folder)).map(|_| ());
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let vsock = Vsock::open(spec(&folder)).unwrap();
    let error = open().unwrap_err();
    assert_eq!((error.kind(), error.to_string().contains("another program")), (ErrorKind::Busy, true));
    drop(vsock);
    assert!(!path.exists());
    std::fs::write(&path, "").unwrap();
    assert_eq!(open().unwrap_err().kind(), ErrorKind::Unsuitable);
    let spec = VsockSpec { socket: folder.path().join("none/v"), ..spec(&folder) };
    assert_eq!(Vsock::open(spec).map(|_| ()).unwrap_err().kind(), ErrorKind::Missing);
    let spec = VsockSpec { id: String::new(), cid: 3, socket: folder.path().join("v".repeat(200)) };
    assert_eq!(Vsock::open(spec).map(|_| ()).unwrap_err().kind(), ErrorKind::Invalid);
}
