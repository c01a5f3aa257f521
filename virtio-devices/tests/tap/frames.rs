//! Frames between a driver and the host.

use std::sync::Arc;
use std::time::Duration;

use virtio_bindings::virtio_net::*;
use virtio_devices::{Counter, Interrupts, Memory, Net, NetSpec, Start, Tap, TapSpec, VirtioDevice, Worker};

use crate::driver::*;
use crate::host::*;
use crate::sample::*;

const SIZE: u16 = 128;

/// A NIC on the tap `tap0`, its driver, and the host's end.
pub(crate) struct Machine {
    pub net: Net,
    pub queues: Vec<DriverQueue>,
    pub workers: Vec<Worker>,
    pub interrupts: Arc<Interrupts>,
    memory: Memory,
    wire: Wire,
}

impl Machine {
    pub(crate) fn new(pairs: u16) -> Self {
        new_namespace();
        let tap = Tap::open(&TapSpec { name: Some("tap0".into()), ..spec("", pairs) }).unwrap();
        Self::over(tap, pairs)
    }

    /// A NIC on `tap`.
    pub(crate) fn over(tap: Tap, pairs: u16) -> Self {
        let name = tap.name().to_owned();
        Self::of(Net::new(nic(pairs), tap).unwrap(), &name)
    }

    /// A NIC whose frames leave by the interface `name`.
    pub(crate) fn of(net: Net, name: &str) -> Self {
        let map = memory();
        let pairs = net.queue_sizes().len() as u16 / 2;
        let sizes = net.queue_sizes().iter().enumerate();
        let interrupts = Arc::new(Interrupts::new(2 * pairs + 1, 2 * pairs + 2));
        interrupts.set_config_vector(2 * pairs + 1);
        Self {
            queues: sizes.map(|(index, size)| DriverQueue::new(&map, index as u16, *size)).collect(),
            net,
            workers: Vec::new(),
            interrupts,
            memory: Memory::new(map),
            wire: Wire::new(name),
        }
    }

    pub(crate) fn start(&mut self, features: u64) {
        let queues = self.queues.iter().enumerate().map(|(i, q)| (i as u16, Arc::clone(&q.queue))).collect();
        let interrupts = Arc::clone(&self.interrupts);
        self.workers = self
            .net
            .start(Start { memory: self.memory.clone().into(), features, queues, interrupts, log: None })
            .unwrap();
        // What is answered has been started: frames are no longer from before that. And the host's own multicast stays
        // away.
        let control = self.workers[0].doorbells.last().unwrap().0;
        assert_eq!(self.command(control, &[0, 0, 0]), 0);
    }

    pub(crate) fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    /// Has the driver set up its queues again, after a reset.
    pub(crate) fn renew(&mut self) {
        let memory = self.queues[0].memory.clone();
        self.queues[0].memory_write(0, &vec![0; BUFFERS as usize]);
        let sizes = self.net.queue_sizes().iter().enumerate();
        self.queues = sizes.map(|(index, size)| DriverQueue::new(&memory, index as u16, *size)).collect();
    }

    pub(crate) fn kick(&self, queue: u16) {
        let mut doorbells = self.workers.iter().flat_map(|worker| &worker.doorbells);
        doorbells.find(|(index, _)| *index == queue).unwrap().1.write(1).unwrap();
    }

    /// True if the driver was notified of a change of the configuration since the last call.
    pub(crate) fn heard(&self) -> bool {
        let pairs = self.queues.len() as u16 / 2;
        self.interrupts.eventfd(2 * pairs + 1).is_some_and(|config| config.read().is_ok())
    }

    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.net.counters().get(counter)
    }

    pub(crate) fn provide(&mut self, queue: u16, count: u64, len: u32) {
        let base = BUFFERS + u64::from(queue) * 0x4_0000;
        for i in 0..count {
            self.queues[usize::from(queue)].add(&[(base + i * u64::from(len), len, WRITE)]);
        }
        self.kick(queue);
    }

    pub(crate) fn command(&mut self, queue: u16, command: &[u8]) -> u8 {
        let at = MEMORY - 0x1000;
        let driver = &mut self.queues[usize::from(queue)];
        driver.memory_write(at - 1, &[0xee]);
        driver.memory_write(at, command);
        driver.add(&[(at, command.len() as u32, 0), (at - 1, 1, WRITE)]);
        self.kick(queue);
        let driver = &mut self.queues[usize::from(queue)];
        eventually("an answer", || !driver.take_used().is_empty());
        driver.bytes(at - 1, 1)[0]
    }

    /// Has the driver send `data`, and waits until the device is done with it.
    pub(crate) fn transmit(&mut self, data: &[u8]) {
        self.queues[1].send(BUFFERS + 0x20_0000, data, &[]);
        self.kick(1);
        let driver = &mut self.queues[1];
        eventually("the end of a transmission", || !driver.take_used().is_empty());
    }

    /// The driver's next frame in `queue`, with its header, from buffers that `provide` made of this length.
    fn received(&mut self, queue: u16) -> Vec<(u32, u32)> {
        let driver = &mut self.queues[usize::from(queue)];
        let mut used = Vec::new();
        eventually("a reception", || {
            used.extend(driver.take_used());
            !used.is_empty()
        });
        used
    }
}

/// The NIC of a [`Machine`].
pub(crate) fn nic(pairs: u16) -> NetSpec {
    NetSpec { queue_pairs: pairs, queue_size: SIZE, ..NetSpec::new("_net0", MAC) }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A TCP segment over IPv4 of `payload` bytes with a checksum that is left to the receiver.
fn tcp(to: [u8; 6], payload: usize) -> Vec<u8> {
    let mut data = frame(to, 54 + payload);
    data[14..34].copy_from_slice(&[0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    data[16..18].copy_from_slice(&(40 + payload as u16).to_be_bytes());
    let sum: u32 = data[14..34].chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    data[24..26].copy_from_slice(&sum.to_be_bytes());
    data[34..54].copy_from_slice(&[0, 1, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    data
}

pub(crate) fn one_pair(net: &Net) -> u64 {
    net.features() & !(1 << VIRTIO_NET_F_MQ)
}

#[test]
fn frames_pass_between_driver_and_host_across_resets() {
    let mut machine = Machine::new(1);
    for round in 0..3 {
        machine.start(one_pair(&machine.net));
        machine.provide(0, 4, 2048);
        let before = machine.count(Counter::RxFrames);
        machine.wire.send(&frame(MAC, 1000 + round));
        eventually("reception", || machine.count(Counter::RxFrames) > before);
        machine.transmit(&with_header(&frame(OTHER, 500 + round)));
        assert_eq!(machine.wire.receive(), Some(frame(OTHER, 500 + round)));
        machine.stop();
        machine.net.reset();
        machine.renew();
    }
}

/// TCP over IPv4 to be cut into pieces of 1,460 bytes, with a checksum to fill in.
const SEGMENT: [u8; 10] = [1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0];

#[test]
fn the_host_sees_a_segment_of_the_guest_in_one_piece() {
    let mut machine = Machine::new(1);
    machine.start(one_pair(&machine.net));
    let segment = tcp(OTHER, 20_000);
    let mut data = with_header(&segment);
    data[..10].copy_from_slice(&SEGMENT);
    machine.transmit(&data);
    assert_eq!(machine.wire.receive().map(|seen| seen.len()), Some(segment.len()));
    assert_eq!((machine.count(Counter::TxFrames), machine.count(Counter::TxBytes)), (1, segment.len() as u64));
}

#[test]
fn guest_gets_whole_tap_segments_only_if_negotiated() {
    for (without, expected) in [(0, vec![2048; 9]), (1 << VIRTIO_NET_F_GUEST_TSO4, vec![1526; 13])] {
        let mut machine = Machine::new(1);
        machine.start(one_pair(&machine.net) & !without);
        machine.provide(0, 32, 2048);
        Wire::offloading("tap0").send_segment(SEGMENT, &tcp(MAC, 20_000));
        let mut used = machine.received(0);
        eventually("the whole segment", || {
            used.extend(machine.queues[0].take_used());
            used.len() > expected.len()
        });
        let lens: Vec<_> = used.iter().map(|(_, len)| *len).collect();
        assert_eq!(lens[..expected.len()], expected, "and the rest");
        let header = machine.queues[0].bytes(BUFFERS, 12);
        let buffers = if without == 0 { 10 } else { 1 };
        assert_eq!((header[1], header[10]), (u8::from(without == 0), buffers), "{header:?}");
    }
}

#[test]
fn a_frame_that_the_kernel_refuses_is_dropped_and_counted() {
    let mut machine = Machine::new(1);
    machine.start(one_pair(&machine.net));
    // A segment of TCP whose headers are not there passes our check and not the kernel's.
    let mut data = with_header(&frame(OTHER, 30));
    data[..10].copy_from_slice(&[1, 1, 54, 0, 0xb4, 5, 20, 0, 6, 0]);
    machine.transmit(&data);
    machine.transmit(&with_header(&frame(OTHER, 60)));
    assert_eq!(machine.wire.receive(), Some(frame(OTHER, 60)));
    assert_eq!((machine.count(Counter::TxBackendRefused), machine.count(Counter::TxFrames)), (1, 1));
    ip("link set tap0 down");
    machine.transmit(&with_header(&frame(OTHER, 60)));
    assert_eq!(machine.count(Counter::TxBackendErrors), 1);
    ip("link set tap0 up");
    machine.transmit(&with_header(&frame(OTHER, 61)));
    assert_eq!(machine.count(Counter::TxFrames), 2);
}

#[test]
fn only_the_pairs_that_the_driver_uses_have_a_queue_of_the_tap() {
    let mut machine = Machine::new(4);
    machine.start(machine.net.features());
    let used = |machine: &Machine| machine.net.counters().get(Counter::RxFrames);
    (0..4).for_each(|pair| machine.provide(2 * pair, 32, 2048));
    (0..16).for_each(|flow| machine.wire.send(&flow_frame(flow)));
    eventually("reception", || used(&machine) >= 16);
    assert!(machine.received(0).len() >= 16, "all in the first pair");
    assert_eq!(machine.command(8, &[4, 0, 4, 0]), 0);
    machine.provide(0, 32, 2048);
    // The other workers attach their queues when they are notified.
    eventually("frames of several flows in several pairs", || {
        (0..16).for_each(|flow| machine.wire.send(&flow_frame(flow)));
        (1..4).any(|pair| !machine.queues[2 * pair].take_used().is_empty())
    });
    assert_eq!(machine.command(8, &[4, 0, 1, 0]), 0);
    std::thread::sleep(Duration::from_secs(1));
    machine.provide(0, 32, 2048);
    (2..8).step_by(2).for_each(|queue| drop(machine.queues[queue].take_used()));
    (0..16).for_each(|flow| machine.wire.send(&flow_frame(flow)));
    machine.received(0);
    std::thread::sleep(Duration::from_millis(50));
    assert!((2..8).step_by(2).all(|queue| machine.queues[queue].take_used().is_empty()));
}

/// A UDP datagram of one of many flows.
pub(crate) fn flow_frame(flow: u8) -> Vec<u8> {
    let mut data = frame(MAC, 60);
    data[14..42].copy_from_slice(&[
        0x45, 0, 0, 46, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, flow, 4, flow, 4, 1, 0, 26, 0, 0,
    ]);
    data
}

#[test]
fn the_driver_switches_offloads_off_and_on() {
    let mut machine = Machine::new(1);
    let features = one_pair(&machine.net);
    machine.start(features);
    let set = |offloads: u64| [&[5, 0], &offloads.to_le_bytes()[..]].concat();
    let on = 1 << VIRTIO_NET_F_GUEST_CSUM | 1 << VIRTIO_NET_F_GUEST_TSO4;
    for offloads in [0, on, 0] {
        assert_eq!(machine.command(2, &set(offloads)), 0, "{offloads:#x}");
    }
    machine.stop();
    machine.net.reset();
    machine.renew();
    machine.start(features & !(1 << VIRTIO_NET_F_GUEST_TSO4));
    assert_eq!(machine.command(2, &set(on)), 1);
}

/// The lengths of the driver's first frames of a segment of 20,000 bytes that the host sends.
fn lens_of_a_segment(machine: &mut Machine) -> Vec<u32> {
    machine.provide(0, 32, 2048);
    Wire::offloading("tap0").send_segment(SEGMENT, &tcp(MAC, 20_000));
    let mut used = Vec::new();
    eventually("the segment", || {
        used.extend(machine.queues[0].take_used());
        used.len() > 9
    });
    used[..9].iter().map(|(_, len)| *len).collect()
}

#[test]
fn the_drivers_offloads_outlive_a_stop_and_not_a_reset() {
    let mut machine = Machine::new(4);
    let features = machine.net.features();
    machine.start(features);
    assert_eq!(machine.command(8, &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0);
    machine.stop();
    machine.start(features);
    assert_eq!(lens_of_a_segment(&mut machine), [1526; 9]);
    machine.stop();
    machine.net.reset();
    machine.renew();
    machine.start(features);
    assert_eq!(lens_of_a_segment(&mut machine), [2048; 9]);
}

#[test]
fn offloads_refused_by_the_tap_leave_none_of_the_last_driver() {
    let mut machine = Machine::new(1);
    let features = one_pair(&machine.net);
    machine.start(features);
    assert_eq!(lens_of_a_segment(&mut machine), [2048; 9]);
    machine.stop();
    machine.net.reset();
    machine.renew();
    // The kernel knows UDP segmentation for both versions of IP or for none.
    machine.start(features & !(1 << VIRTIO_NET_F_GUEST_USO6));
    assert_eq!(lens_of_a_segment(&mut machine), [1526; 9]);
}
