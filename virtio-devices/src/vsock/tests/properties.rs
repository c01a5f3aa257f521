//! Any sequence of actions of guest and host: data arrives once and in order, and nothing exceeds its limit.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::Duration;

use proptest::prelude::*;

use super::super::credit;
use super::super::packet::{Ports, op};
use super::rig::*;

/// The data of all streams.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(2 << 20));
/// Number of connections at a time.
const STREAMS: usize = 4;

#[derive(Debug, Clone)]
enum Op {
    /// The host's program with this index sends this many bytes.
    HostSends(usize, usize),
    /// The host's program reads all available data.
    HostReads(usize),
    /// The host's program will send no more.
    HostEnds(usize),
    /// The guest's program sends this many bytes, if it has credit.
    GuestSends(usize, usize),
    /// The guest's program will send no more.
    GuestEnds(usize),
    /// The guest's program sends a credit update.
    GuestUpdates(usize),
    /// The driver takes packets, and provides this many new buffers.
    Driver(usize),
    /// Time passes.
    Wait(u64),
}

fn step() -> impl Strategy<Value = Op> {
    let stream = 0..STREAMS;
    prop_oneof![
        6 => (stream.clone(), 1..200_000usize).prop_map(|(stream, len)| Op::HostSends(stream, len)),
        4 => stream.clone().prop_map(Op::HostReads),
        1 => stream.clone().prop_map(Op::HostEnds),
        6 => (stream.clone(), 1..70_000usize).prop_map(|(stream, len)| Op::GuestSends(stream, len)),
        1 => stream.clone().prop_map(Op::GuestEnds),
        4 => stream.prop_map(Op::GuestUpdates),
        8 => (0..40usize).prop_map(Op::Driver),
        1 => (0..1000u64).prop_map(Op::Wait),
    ]
}

/// A connection, and the number of bytes of the pattern that each side has sent and received.
struct Stream {
    host: UnixStream,
    ports: Ports,
    host_sent: usize,
    guest_received: usize,
    guest_sent: usize,
    host_received: usize,
    /// The forwarded count last sent by the device.
    told: u32,
    host_ended: bool,
    guest_ended: bool,
    guest_heard_end: bool,
}

struct Model {
    rig: Rig,
    streams: Vec<Stream>,
    /// Receive buffers that the driver has provided.
    buffers: usize,
}

impl Model {
    fn new() -> Self {
        let mut rig = Rig::ready();
        rig.room = 64 << 10;
        let streams = (0..STREAMS as u32).map(|n| {
            let (host, ports) = if n % 2 == 0 { rig.connected_client(n) } else { rig.connected_guest(n, 1024) };
            Stream {
                host,
                ports,
                host_sent: 0,
                guest_received: 0,
                guest_sent: 0,
                host_received: 0,
                told: 0,
                host_ended: false,
                guest_ended: false,
                guest_heard_end: false,
            }
        });
        let streams = streams.collect();
        Self { rig, streams, buffers: 200 }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::HostSends(n, len) => {
                let stream = &mut self.streams[n];
                let end = (stream.host_sent + len).min(PATTERN.len());
                if !stream.host_ended {
                    stream.host_sent += write(&stream.host, &PATTERN[stream.host_sent..end]);
                }
            }
            Op::HostReads(n) => self.read(n),
            Op::HostEnds(n) => {
                self.streams[n].host_ended = true;
                self.streams[n].host.shutdown(Shutdown::Write).unwrap();
            }
            Op::GuestSends(n, len) => {
                let stream = &mut self.streams[n];
                let credit = credit::ROOM as usize - (stream.guest_sent - stream.told as usize);
                let len = len.min(credit).min(PATTERN.len() - stream.guest_sent);
                if !stream.guest_ended && len > 0 {
                    let data = &PATTERN[stream.guest_sent..stream.guest_sent + len];
                    self.rig.send_data(stream.ports, data);
                    stream.guest_sent += len;
                }
            }
            Op::GuestEnds(n) => {
                self.streams[n].guest_ended = true;
                self.rig.shut_down(self.streams[n].ports, 2);
            }
            Op::GuestUpdates(n) => self.rig.update(self.streams[n].ports),
            Op::Driver(buffers) => self.drive(buffers),
            Op::Wait(time) => self.rig.steps.wait(Duration::from_millis(time)),
        }
    }

    fn read(&mut self, n: usize) {
        let stream = &mut self.streams[n];
        let data = read(&stream.host);
        let end = stream.host_received + data.len();
        assert!(data == PATTERN[stream.host_received..end], "the host received something else");
        stream.host_received = end;
        assert!(end <= stream.guest_sent);
    }

    fn drive(&mut self, buffers: usize) {
        let packets = self.rig.packets();
        self.buffers -= packets.len();
        let mut got = HashMap::new();
        for packet in &packets {
            let stream = self.streams.iter_mut().find(|stream| stream.ports == packet.ports()).unwrap();
            stream.told = packet.header.fwd_cnt.get();
            assert!(stream.told as usize <= stream.guest_sent);
            match packet.op() {
                op::RW => {
                    let end = stream.guest_received + packet.data.len();
                    assert!(!stream.guest_heard_end && end <= stream.host_sent);
                    assert!(packet.data == PATTERN[stream.guest_received..end], "the guest received something else");
                    stream.guest_received = end;
                    *got.entry(packet.ports()).or_insert(0) += packet.data.len();
                    let taken = self.rig.taken.entry(packet.ports()).or_default();
                    *taken += packet.data.len() as u32;
                }
                op::SHUTDOWN => {
                    assert!(stream.host_ended && stream.guest_received == stream.host_sent);
                    stream.guest_heard_end = true;
                }
                op => assert!(matches!(op, op::CREDIT_UPDATE | op::CREDIT_REQUEST), "{op}"),
            }
        }
        assert!(got.values().all(|len| *len <= self.rig.room as usize), "more than the guest has room for");
        let buffers = buffers.min(250 - self.buffers);
        self.rig.provide(buffers);
        self.buffers += buffers;
    }

    /// All parties read everything available.
    fn finish(mut self) {
        for _ in 0..400 {
            for n in 0..STREAMS {
                self.read(n);
                self.rig.update(self.streams[n].ports);
            }
            self.drive(250);
            let is_done = |s: &Stream| s.guest_received == s.host_sent && s.host_received == s.guest_sent;
            if self.streams.iter().all(is_done) {
                break;
            }
        }
        for stream in &self.streams {
            assert_eq!((stream.guest_received, stream.host_received), (stream.host_sent, stream.guest_sent));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn data_arrives_once_and_in_order_whatever_the_order_of_events(ops in prop::collection::vec(step(), 0..150)) {
        let mut model = Model::new();
        for op in &ops {
            // A connection that both sides have ended is removed, which has its own tests.
            let ends = match op {
                Op::HostEnds(n) => model.streams[*n].guest_ended,
                Op::GuestEnds(n) => model.streams[*n].host_ended || model.streams[*n].guest_ended,
                _ => false,
            };
            if !ends {
                model.apply(op);
            }
        }
        model.finish();
    }
}
