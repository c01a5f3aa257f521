//! The functions of an X550 on a switch, with their driver's side in this process.

mod interrupts;
mod moderation;
mod segments;
mod uplink_policy;

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use pci::{Device as _, Dword, DwordWrite, Placement, Rid, VfPlacement, WindowId};
use vm_memory::{Bytes as _, GuestAddress};
use x550::{Place, REGISTERS_BAR};

use super::rig::{frame, mac};
use crate::backend::Tap;
use crate::net::testing::sockets;
use crate::switch::worker::SwitchWorker;
use crate::switch::{PortSettings, Switch, SwitchMode, SwitchSpec, X550Ports};
use crate::{Counter, GuestMap, Lifecycle as _, Memory, X550Model, X550Spec, X550Sriov};

const PF: Rid = Rid::from_bits(8);
const SRIOV: u16 = 0x160;
/// VFs of the card.
const VFS: u16 = 4;
/// Descriptors of each ring.
const RING: u32 = 32;
/// The bytes of a receive buffer.
const BUFFER: u64 = 2048;
const STATUS_DONE: u32 = 1;
const STATUS_ENDS: u32 = 2;
const STATUS_VLAN: u32 = 8;

/// A card with its switch, whose worker the test runs.
struct Card {
    device: X550Sriov,
    ports: Arc<X550Ports>,
    switch: Switch,
    worker: SwitchWorker,
    memory: GuestMap,
    peer: OwnedFd,
    /// The tails of the receive and transmit rings, by queue.
    tails: [(u32, u32); 128],
}

/// The rings and buffers of a queue.
fn area(queue: u16) -> u64 {
    0x10_0000 * (1 + u64::from(queue))
}

impl Card {
    /// A card with VFs enabled in pools of two queues, an address for each, and one pair of queues for each. `mac(n)`
    /// is the address of VF `n`; the PF's is `mac(9)`.
    fn new() -> Self {
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap();
        let (near, peer) = sockets();
        let uplink = Some(Tap::over_sockets(vec![near]));
        let spec = SwitchSpec {
            id: "nic".into(),
            mode: SwitchMode::Veb,
            ports: VFS + 1,
            workers: 1,
            uplink,
            uplink_rate: None,
        };
        let (switch, mut worker) = Switch::stepped(spec).unwrap();
        let ports = switch.x550(mac(9), VFS);
        let vfs = VfPlacement { total_vfs: VFS, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
        let placement = Placement { segment: 0, rid: PF, vfs: Some(vfs) };
        let spec = X550Spec { id: "nic".into(), model: X550Model::X550, mac: mac(9), total_vfs: VFS };
        let device = X550Sriov::new(spec, placement, &Memory::new(memory.clone()), ports.clone()).unwrap();
        worker.begin();
        let mut card = Self { device, ports, switch, worker, memory, peer, tails: [(0, 0); 128] };
        card.enable();
        card
    }

    fn config(&mut self, rid: Rid, offset: u16, value: u32) {
        let _ = self.device.config_write(rid, Dword::containing(offset), DwordWrite::full(value));
    }

    fn write(&mut self, offset: u32, value: u32) {
        // Dropping the outcome waits for what it stops.
        let _ = self.device.mmio_write(WindowId::Bar(REGISTERS_BAR), offset.into(), &value.to_le_bytes());
    }

    fn read(&mut self, offset: u32) -> u32 {
        let mut data = [0; 4];
        self.device.mmio_read(WindowId::Bar(REGISTERS_BAR), offset.into(), &mut data);
        u32::from_le_bytes(data)
    }

    fn enable(&mut self) {
        self.config(PF, 4, 6);
        self.config(PF, SRIOV + 0x10, VFS.into());
        self.config(PF, SRIOV + 8, 9);
        (0..VFS).for_each(|vf| self.config(Rid::from_bits(0x100 + vf), 4, 6));
        let default_pool = u32::from(VFS) << 7;
        for (offset, value) in [
            // 64 pools; virtualization, replication and the default pool; local switching.
            (0x11050, 3),
            (0x51b0, 1 | 1 << 30 | default_pool),
            (0x8220, 1),
            // All pools receive and send; broadcasts; receive and transmit units.
            (0x51e0, 0x1f),
            (0x8110, 0x1f),
            (0x5080, 1 << 10),
            (0x3000, 1),
            (0x4a80, 1),
        ] {
            self.write(offset, value);
        }
        for pool in 0..=u32::from(VFS) {
            let own = if pool == u32::from(VFS) { mac(9) } else { mac(pool as u16) };
            let [a, b, c, d, e, f] = own;
            self.write(0xa200 + 8 * pool, u32::from_le_bytes([a, b, c, d]));
            self.write(0xa204 + 8 * pool, u32::from_le_bytes([e, f, 0, 0x80]));
            self.write(0xa600 + 8 * pool, 1 << pool);
            self.write(0xa604 + 8 * pool, 0);
            // Untagged frames, and broadcasts.
            self.write(0xf000 + 4 * pool, 1 << 24 | 1 << 27);
            self.start(2 * pool as u16);
        }
        self.settle();
        self.run();
    }

    /// Enables a pair of queues, with buffers in the receive ring.
    fn start(&mut self, queue: u16) {
        let at = area(queue) as u32;
        let (receive, transmit) = (0x1000 + 0x40 * u32::from(queue), 0x6000 + 0x40 * u32::from(queue));
        for (block, base) in [(receive, at), (transmit, at + 0x1000)] {
            self.write(block, base);
            self.write(block + 4, 0);
            self.write(block + 8, 16 * RING);
        }
        self.write(receive + 0x14, (BUFFER / 1024) as u32);
        self.write(receive + 0x28, 1 << 25);
        self.write(transmit + 0x28, 1 << 25);
        for n in 0..RING {
            self.provide(queue, n);
        }
        self.set_receive_tail(queue, RING - 1);
    }

    fn provide(&self, queue: u16, n: u32) {
        let descriptor = area(queue) + u64::from(16 * n);
        self.memory.write_obj(area(queue) + 0x1_0000 + BUFFER * u64::from(n), GuestAddress(descriptor)).unwrap();
        self.memory.write_obj(0u64, GuestAddress(descriptor + 8)).unwrap();
    }

    fn set_receive_tail(&mut self, queue: u16, tail: u32) {
        self.tails[usize::from(queue)].0 = tail;
        self.write(0x1018 + 0x40 * u32::from(queue), tail);
    }

    /// Puts descriptors of two dwords of address and two of commands in the transmit ring.
    fn send_descriptors(&mut self, queue: u16, descriptors: &[[u32; 4]]) {
        let tail = &mut self.tails[usize::from(queue)].1;
        for dwords in descriptors {
            let bytes = dwords.map(u32::to_le_bytes).concat();
            let at = area(queue) + 0x1000 + u64::from(16 * *tail);
            self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
            *tail = (*tail + 1) % RING;
        }
        let tail = *tail;
        self.write(0x6018 + 0x40 * u32::from(queue), tail);
        self.run();
    }

    /// Writes a frame to memory. Returns its address.
    fn store(&self, queue: u16, frame: &[u8]) -> u32 {
        let at = area(queue) + 0x4_0000;
        self.memory.write_slice(frame, GuestAddress(at)).unwrap();
        at as u32
    }

    /// Sends a frame as one descriptor, which wants a report.
    fn send(&mut self, queue: u16, frame: &[u8]) {
        let at = self.store(queue, frame);
        self.send_descriptors(queue, &[[at, 0, data(frame.len() as u32), (frame.len() as u32) << 14]]);
    }

    /// Makes the switch follow the registers without the time that it takes between two tables.
    fn settle(&self) {
        self.switch.set_port(0, PortSettings::default()).wait().unwrap();
    }

    fn run(&mut self) {
        for _ in 0..4 {
            self.worker.step(Some(Duration::ZERO));
        }
        // Frames of a stream are gathered for a while.
        for _ in 0..64 {
            let soon = self.worker.timeout(None).filter(|time| *time <= Duration::from_micros(100));
            let Some(time) = soon else { return };
            self.worker.step(Some(time));
        }
    }

    /// The frames of a receive ring, with their status and tag. Provides the buffers again.
    fn received(&mut self, queue: u16) -> Vec<(Vec<u8>, u32, u16)> {
        let (mut frames, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let next = (self.tails[usize::from(queue)].0 + 1) % RING;
            let at = area(queue) + u64::from(16 * next);
            let status: u32 = self.memory.read_obj(GuestAddress(at + 8)).unwrap();
            if status & STATUS_DONE == 0 {
                return frames;
            }
            let (len, tag): (u16, u16) = (
                self.memory.read_obj(GuestAddress(at + 12)).unwrap(),
                self.memory.read_obj(GuestAddress(at + 14)).unwrap(),
            );
            let mut part = vec![0; usize::from(len)];
            let buffer = area(queue) + 0x1_0000 + BUFFER * u64::from(next);
            self.memory.read_slice(&mut part, GuestAddress(buffer)).unwrap();
            bytes.extend(part);
            if status & STATUS_ENDS != 0 {
                frames.push((std::mem::take(&mut bytes), status, tag));
            }
            self.provide(queue, next);
            self.set_receive_tail(queue, next);
        }
    }

    fn frames(&mut self, queue: u16) -> Vec<Vec<u8>> {
        self.received(queue).into_iter().map(|(frame, ..)| frame).collect()
    }

    /// The frames that reached the uplink, without their headers.
    fn sent(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; 70_000];
        while let Ok(len) = rustix::io::read(self.peer.as_fd(), &mut buffer) {
            frames.push(buffer[12..len].to_vec());
        }
        frames
    }

    fn counter(&self, place: Place, counter: Counter) -> u64 {
        let number = if let Place::Vf(index) = place { usize::from(index) + 1 } else { 0 };
        self.ports.counters()[number].get(counter)
    }
}

/// The command of a descriptor of `len` bytes that ends a frame and wants a report.
const fn data(len: u32) -> u32 {
    len | 3 << 20 | 1 << 24 | 1 << 27 | 1 << 29
}

#[test]
fn frames_pass_between_vfs_the_pf_and_the_uplink() {
    let mut card = Card::new();
    let to_vf = frame(mac(0), mac(1), 100);
    card.send(0, &to_vf);
    assert_eq!((card.frames(2), card.frames(4), card.sent()), (vec![to_vf], vec![], vec![]));
    let to_pf = frame(mac(1), mac(9), 1514);
    card.send(2, &to_pf);
    assert_eq!((card.frames(8), card.frames(0)), (vec![to_pf], vec![]));
    let away = frame(mac(1), mac(77), 60);
    card.send(2, &away);
    assert_eq!(card.sent(), [away]);
    let to_all = frame(mac(9), [0xff; 6], 64);
    card.send(8, &to_all);
    assert_eq!(card.sent(), std::slice::from_ref(&to_all));
    assert_eq!([0, 2, 4, 6, 8].map(|queue| card.frames(queue).len()), [1, 1, 1, 1, 0]);
    assert_eq!(card.counter(Place::Vf(1), Counter::TxFrames), 2);
    assert_eq!(card.read(0x101c + 0x40), 2, "PVFGPRC of VF 1");
    // DPDK adds these up: 6 frames were received in all rings, and 4 sent. Bytes are without the checksum.
    assert_eq!([0x1030, 0x1034, 0x1038].map(|at| card.read(at)), [6, 100 + 1514 + 4 * 64, 0], "QPRC and QBRC");
    assert_eq!([0x8680, 0x8700, 0x8704].map(|at| card.read(at)), [4, 100 + 1514 + 60 + 64, 0], "QPTC and QBTC");
}

/// X29: loopback.
#[test]
fn a_nic_in_loopback_receives_what_it_sends_alone() {
    let mut card = Card::new();
    // Without virtualization, the NIC is one port, whose queues begin with 0. HLREG0.LPBK; broadcasts, all groups.
    (0..VFS + 1).for_each(|pool| card.write(0x6028 + 0x80 * u32::from(pool), 0));
    for (at, value) in [(0x11050, 0), (0x51b0, 0), (0x5080, 1 << 8 | 1 << 10), (0x4240, 1 << 15)] {
        card.write(at, value);
    }
    card.write(0x6028, 1 << 25);
    card.settle();
    // Of the driver's own test: all stations, from all stations.
    let odd = frame([0xff; 6], [0xff; 6], 1024);
    card.send(0, &odd);
    rustix::io::write(card.peer.as_fd(), &[&[0u8; 12][..], &frame(mac(77), [0xff; 6], 64)].concat()).unwrap();
    card.run();
    assert_eq!((card.frames(0), card.sent()), (vec![odd], vec![]));
    card.write(0x4240, 0);
    card.settle();
    card.send(0, &frame(mac(9), mac(77), 64));
    assert_eq!((card.frames(0).len(), card.sent().len()), (0, 1));
}

/// X25: transmit descriptors.
#[test]
fn a_descriptor_that_wants_a_report_is_written_back() {
    let mut card = Card::new();
    for n in 0..RING + 5 {
        card.send(0, &frame(mac(0), mac(1), 60));
        let at = area(0) + 0x1000 + u64::from(16 * (n % RING)) + 12;
        let status: u32 = card.memory.read_obj(GuestAddress(at)).unwrap();
        assert_eq!((status & STATUS_DONE, card.read(0x6010)), (1, (n + 1) % RING));
        assert_eq!(card.frames(2).len(), 1);
    }
}

/// X26: receive descriptors.
#[test]
fn a_long_frame_takes_several_buffers() {
    let mut card = Card::new();
    let long = frame(mac(0), mac(1), 9014);
    card.send(0, &long);
    let received = card.received(2);
    assert_eq!((received.len(), &received[0].0), (1, &long));
}

#[test]
fn a_frame_of_several_descriptors_waits_for_its_last() {
    let mut card = Card::new();
    let whole = frame(mac(0), mac(1), 200);
    let at = card.store(0, &whole);
    let part = data(120) & !(1 << 24 | 1 << 27);
    card.send_descriptors(0, &[[at, 0, part, 200 << 14]]);
    assert_eq!((card.frames(2).len(), card.read(0x6010)), (0, 0));
    card.send_descriptors(0, &[[at + 120, 0, data(80), 0]]);
    assert_eq!((card.frames(2), card.read(0x6010)), (vec![whole], 2));
}

/// X18: VMVIR and QDE.
#[test]
fn a_port_vlan_separates_and_is_not_shown() {
    let mut card = Card::new();
    // VFs 0 and 1 in VLAN 7, with priority 3: their tag, their membership, and no untagged frames.
    for pool in [0, 1] {
        card.write(0x8000 + 4 * pool, 1 << 30 | 3 << 13 | 7);
    }
    card.write(0xf100, 1 << 31 | 7);
    card.write(0xf200, 3);
    card.settle();
    let inside = frame(mac(0), mac(1), 100);
    card.send(0, &inside);
    assert_eq!(card.frames(2), std::slice::from_ref(&inside));
    card.send(0, &frame(mac(0), mac(2), 100));
    assert_eq!(card.frames(4), Vec::<Vec<u8>>::new());
    card.send(0, &frame(mac(0), mac(77), 100));
    let sent = card.sent();
    assert_eq!((sent[0].len(), &sent[0][12..16]), (104, &[0x81, 0, 0x60, 7][..]));
}

/// X26: receive descriptors.
#[test]
fn a_vlan_tag_moves_to_and_from_descriptors() {
    let mut card = Card::new();
    // VLAN 5 has VFs 0 and 1; VF 1 strips tags.
    card.write(0xf100, 1 << 31 | 5);
    card.write(0xf200, 3);
    card.write(0x1028 + 0x80, 1 << 25 | 1 << 30);
    card.settle();
    let plain = frame(mac(0), mac(1), 100);
    let at = card.store(0, &plain);
    let context = [5 << 16 | 14 << 9, 0, 2 << 20 | 1 << 29, 0];
    card.send_descriptors(0, &[context, [at, 0, data(100) | 1 << 30, 100 << 14]]);
    let received = card.received(2);
    assert_eq!((received.len(), &received[0].0, received[0].2), (1, &plain, 5));
    assert_ne!(received[0].1 & STATUS_VLAN, 0);
}

/// X17: spoof checks.
#[test]
fn a_pool_receives_the_groups_whose_hash_is_set() {
    let mut card = Card::new();
    // ROMPE for VFs 1 and 2; MCSTCTRL.MFE with hashes of bits 47:36; MTA for 01:00:5e:00:00:05.
    for pool in [1, 2] {
        card.write(0xf000 + 4 * pool, 1 << 24 | 1 << 25 | 1 << 27);
    }
    card.write(0x5090, 1 << 2);
    card.write(0x5200 + 4 * (0x50 >> 5), 1 << (0x50 & 31));
    card.settle();
    card.send(0, &frame(mac(0), [1, 0, 0x5e, 0, 0, 5], 64));
    assert_eq!([2, 4, 6].map(|queue| card.frames(queue).len()), [1, 1, 0]);
    card.send(0, &frame(mac(0), [1, 0, 0x5e, 0, 0, 6], 64));
    assert_eq!([2, 4, 6].map(|queue| card.frames(queue).len()), [0, 0, 0]);
    assert_eq!(card.counter(Place::Vf(1), Counter::RxFiltered), 1);
}

#[test]
fn a_pool_with_many_addresses_receives_only_theirs() {
    let mut card = Card::new();
    let more = |n: u32| [0x52, 0x55, 0, 0, 1, n as u8];
    for n in 8..88 {
        let [a, b, c, d, e, f] = more(n);
        card.write(0xa200 + 8 * n, u32::from_le_bytes([a, b, c, d]));
        card.write(0xa204 + 8 * n, u32::from_le_bytes([e, f, 0, 0x80]));
        card.write(0xa600 + 8 * n, 1 << 1);
        card.write(0xa604 + 8 * n, 0);
    }
    card.settle();
    for (to, is_own) in [(mac(1), true), (more(8), true), (more(87), true), (more(88), false), (mac(77), false)] {
        card.send(0, &frame(mac(0), to, 60));
        let received = (card.frames(2).len(), card.frames(4).len(), card.sent().len());
        assert_eq!(received, (usize::from(is_own), 0, usize::from(!is_own)), "{to:x?}");
    }
}

#[test]
fn a_spoofed_address_is_dropped_and_counted() {
    let mut card = Card::new();
    // It counts for the next frame, before the switch has a new table.
    card.write(0x8200, 1);
    card.send(0, &frame(mac(3), mac(1), 100));
    assert_eq!((card.frames(2).len(), card.counter(Place::Vf(0), Counter::TxSpoofedMac)), (0, 1));
    card.send(0, &frame(mac(0), mac(1), 100));
    assert_eq!(card.frames(2).len(), 1);
}

impl Card {
    /// Adds a rule for TCP from 10.0.0.1 to 10.0.0.2 with an action, the bits of FDIRCMD.
    fn add_rule(&mut self, action: u32) {
        // Perfect filters by the addresses and the protocol.
        let masks = [(0xee70, 0x37), (0xee40, 0), (0xee3c, 0), (0xee44, u32::MAX), (0xee48, u32::MAX)];
        let rule = [(0xee18, 0x0100_000a), (0xee1c, 0x0200_000a), (0xee20, 0), (0xee24, 0), (0xee28, 1 << 16 | 1)];
        self.write(0xee00, 1 | 1 << 4 | 127 << 8 | 6 << 16 | 10 << 24 | 4 << 28);
        masks.into_iter().chain(rule).for_each(|(offset, value)| self.write(offset, value));
        self.write(0xee2c, 1 | 1 << 3 | 2 << 5 | 1 << 11 | 1 << 15 | action);
        self.settle();
    }
}

/// X23: flow director.
#[test]
fn a_frame_that_a_rule_drops_is_counted() {
    let mut card = Card::new();
    card.add_rule(1 << 9 | 127 << 16);
    let matching = uncut(100);
    let mut other = matching.clone();
    other[33] = 3;
    card.send(0, &matching);
    card.send(0, &other);
    assert_eq!((card.frames(2), card.counter(Place::Vf(0), Counter::FlowDropped)), (vec![other], 1));
}

/// X23: flow director.
#[test]
fn a_rule_moves_a_frame_to_a_vf_that_has_not_its_address() {
    let mut card = Card::new();
    card.add_rule(4 << 16);
    card.send(0, &uncut(100));
    assert_eq!((card.frames(2).len(), card.frames(4)), (0, vec![uncut(100)]));
}

#[test]
fn a_pool_that_does_not_send_has_no_link() {
    let mut card = Card::new();
    card.write(0x51e0, 0x1d);
    card.write(0x8110, 0x1d);
    card.settle();
    card.send(2, &frame(mac(1), mac(0), 100));
    card.send(0, &frame(mac(0), mac(1), 100));
    assert_eq!((card.frames(0).len(), card.frames(2).len()), (0, 0));
    assert_eq!(card.counter(Place::Vf(1), Counter::TxLinkDown), 1);
}

/// A TCP segment of `payload` bytes over IPv4, as a driver leaves it for the NIC to cut.
fn uncut(payload: usize) -> Vec<u8> {
    let mut frame = frame(mac(0), mac(1), 54 + payload);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame[34..54].copy_from_slice(&[0x12, 0x34, 0, 80, 0, 0, 0, 9, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame
}

#[test]
fn a_disabled_queue_and_a_vf_without_bus_master_move_nothing() {
    let mut card = Card::new();
    card.write(0x6028, 0);
    card.send(0, &frame(mac(0), mac(1), 100));
    assert_eq!((card.frames(2).len(), card.read(0x6010)), (0, 0));
    card.config(Rid::from_bits(0x101), 4, 2);
    card.send(2, &frame(mac(1), mac(2), 100));
    assert_eq!(card.frames(4).len(), 0);
    card.config(Rid::from_bits(0x101), 4, 6);
    card.run();
    assert_eq!(card.frames(4).len(), 1, "the frame that waited");
}

#[test]
fn a_queue_that_is_enabled_before_its_stop_has_ended_runs() {
    let mut card = Card::new();
    let write = |card: &mut Card, value: u32| {
        card.device.mmio_write(WindowId::Bar(REGISTERS_BAR), 0x6028, &value.to_le_bytes())
    };
    // Two vCPUs: the first has not waited for what it stops when the second writes.
    let (stopping, starting) = (write(&mut card, 0), write(&mut card, 1 << 25));
    drop(stopping);
    drop(starting);
    card.run();
    card.send(0, &frame(mac(0), mac(1), 100));
    assert_eq!(card.frames(2).len(), 1);
}

#[test]
fn a_ring_without_descriptors_costs_nothing() {
    let mut card = Card::new();
    card.write(0x6008, 0);
    card.write(0x6018, 5);
    card.run();
    assert_eq!(card.counter(Place::Vf(0), Counter::TxBadChains), 0);
}

#[test]
fn a_saved_card_continues_where_it_stopped() {
    let mut card = Card::new();
    card.send(0, &frame(mac(0), mac(1), 100));
    drop(card.device.pause());
    let state = card.device.save().unwrap().unwrap();
    let mut other = Card::new();
    (other.tails, other.memory) = (card.tails, other.memory);
    let mut all = vec![0; 16 << 20];
    card.memory.read_slice(&mut all, GuestAddress(0)).unwrap();
    other.memory.write_slice(&all, GuestAddress(0)).unwrap();
    drop(other.device.pause());
    other.device.restore(&state).unwrap();
    drop(other.device.resume());
    other.run();
    assert_eq!(other.frames(2).len(), 1);
    other.send(0, &frame(mac(0), mac(1), 200));
    assert_eq!(other.frames(2), [frame(mac(0), mac(1), 200)]);
}

#[test]
fn hostile_rings_stop_at_most_their_own_queue() {
    let mut card = Card::new();
    // Frames without an end, without memory, without length, and with contradictory contexts.
    let endless = [0x10_0000, 0, data(60) & !(1 << 24), 60 << 14];
    card.send_descriptors(0, &[endless; RING as usize - 1]);
    assert_eq!(card.counter(Place::Vf(0), Counter::TxBadChains), 1);
    card.send_descriptors(2, &[[0, 0xffff, data(60), 60 << 14], [0, 0, data(0), 0]]);
    for segments in [0, 1 << 31] {
        for lens in [0, 127 << 9 | 511, 14 << 9 | 20] {
            let context = [lens, 0, 2 << 20 | 1 << 29 | 1 << 10, 0];
            let at = card.store(2, &frame(mac(1), mac(2), 60));
            card.send_descriptors(2, &[context, [at, 0, data(60) | segments, 3 << 8 | 1 << 7]]);
        }
    }
    card.write(0x6008 + 0x80, 0);
    card.write(0x6018 + 0x80, 0xffff);
    card.run();
    // A ring that is not in memory.
    card.write(0x1000 + 0x40 * 4 + 4, 0xffff);
    card.send(6, &frame(mac(3), mac(2), 60));
    card.send(6, &frame(mac(3), mac(9), 60));
    assert_eq!(card.frames(8).len(), 1);
}
