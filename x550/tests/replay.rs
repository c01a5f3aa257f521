//! The life of a NIC under the drivers of Linux, phase by phase: the registers that they touch in each phase, in an
//! order as theirs, and the values at which their polls end. Each poll must end at its first read.

mod common;

use common::{MAC, PF, effects, peek, read, write};
use x550::{Destination, Direction, Mac, Nic, Place};

const RST: u32 = 1 << 26;
const MAILBOX: u32 = 1 << 19;
const LSC: u32 = 1 << 20;
const ENABLE: u32 = 1 << 25;
const CTS: u32 = 0x2000_0000;
const ACK: u32 = 0x8000_0000;

fn each(first: u64, count: u64, stride: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |n| first + n * stride)
}

/// Polls a register once: the bits of `mask` have the value `expected`.
fn poll(nic: &mut Nic, place: Place, offset: u64, mask: u32, expected: u32) {
    assert_eq!(read(nic, place, offset) & mask, expected, "{place:?} {offset:#x}");
}

/// A command of MDIO: the address, then an operation with its data.
fn mdio(nic: &mut Nic, device: u32, register: u32, data: Option<u32>) -> u32 {
    write(nic, PF, 0x425c, 1 << 30 | device << 16 | register);
    poll(nic, PF, 0x425c, 1 << 30, 0);
    if let Some(data) = data {
        write(nic, PF, 0x4260, data);
    }
    let operation = if data.is_some() { 1 } else { 3 };
    write(nic, PF, 0x425c, 1 << 30 | operation << 26 | device << 16 | register);
    poll(nic, PF, 0x425c, 1 << 30, 0);
    read(nic, PF, 0x4260) >> 16
}

/// Takes both semaphores, runs `inside`, and releases them.
fn locked<T>(nic: &mut Nic, inside: impl FnOnce(&mut Nic) -> T) -> T {
    poll(nic, PF, 0x10140, 1, 0);
    let taken = read(nic, PF, 0x10160) | 1 << 1;
    write(nic, PF, 0x10160, taken);
    write(nic, PF, 0x10140, 0);
    let result = inside(nic);
    poll(nic, PF, 0x10140, 1, 0);
    write(nic, PF, 0x10160, taken & !(1 << 1));
    write(nic, PF, 0x10140, 0);
    result
}

/// A command of the management firmware with up to three dwords.
fn firmware(nic: &mut Nic, dwords: &[u32]) {
    poll(nic, PF, 0x15f00, 1, 1);
    for (offset, dword) in (0x15800..).step_by(4).zip(dwords) {
        write(nic, PF, offset, *dword);
    }
    write(nic, PF, 0x15f00, 1 | 2);
    poll(nic, PF, 0x15f00, 2 | 4, 4);
    poll(nic, PF, 0x15800, 0x00ff_0000, 0x0001_0000);
}

/// The driver's steps before a reset: queues stop, and the bus is quiet.
fn stop_and_reset(nic: &mut Nic) {
    write(nic, PF, 0x888, u32::MAX);
    let _ = read(nic, PF, 0x800);
    for queue in 0..128 {
        let (receive, transmit) = (block(queue) + 0x28, 0x6028 + 0x40 * queue);
        write(nic, PF, transmit, 1 << 26);
        poll(nic, PF, transmit, 1 << 26 | ENABLE, 0);
        let control = read(nic, PF, receive) & !ENABLE | 1 << 26;
        write(nic, PF, receive, control);
        poll(nic, PF, receive, ENABLE | 1 << 26, 0);
    }
    let control = read(nic, PF, 0);
    write(nic, PF, 0, control | 1 << 2);
    poll(nic, PF, 8, 1 << 19, 0);
    write(nic, PF, 0, control | RST);
    poll(nic, PF, 0, RST | 1 << 3, 0);
    poll(nic, PF, 8, 1 << 19, 1 << 19);
}

fn block(queue: u64) -> u64 {
    if queue < 64 { 0x1000 + 0x40 * queue } else { 0xd000 + 0x40 * (queue - 64) }
}

fn clear_statistics(nic: &mut Nic) {
    for offset in each(0x3fa0, 8, 4).chain([0x4000, 0x4074, 0x4080, 0x4088, 0x408c, 0x8780]) {
        let _ = read(nic, PF, offset);
        assert_eq!(peek(nic, PF, offset), 0, "{offset:#x}");
    }
}

fn clear_filters(nic: &mut Nic) {
    for (first, count, stride) in
        [(0x5200, 128, 4), (0xa000, 128, 4), (0xf100, 64, 4), (0xf200, 128, 4), (0xf400, 128, 4)]
    {
        each(first, count, stride).for_each(|offset| write(nic, PF, offset, 0));
    }
    for n in 1..128 {
        write(nic, PF, 0xa200 + 8 * n, 0);
        write(nic, PF, 0xa204 + 8 * n, 0);
        assert_eq!(peek(nic, PF, 0xa204 + 8 * n), 0);
    }
}

fn probe() -> Nic {
    let mut nic = Nic::new(MAC);
    let _ = nic.set_link(true);
    poll(&mut nic, PF, 8, 0xc, 0);
    poll(&mut nic, PF, 0x10010, 1 << 8 | 1 << 9, 1 << 8 | 1 << 9);
    poll(&mut nic, PF, 0x10148, 0x8000 | 1 << 5 | 0x3f << 19, 0x8000);
    poll(&mut nic, PF, 0x10150, u32::MAX, 0);
    assert_eq!((mdio(&mut nic, 1, 2, None), mdio(&mut nic, 1, 3, None)), (0x0154, 0x0221));
    stop_and_reset(&mut nic);
    let ctrl_ext = read(&mut nic, PF, 0x18);
    write(&mut nic, PF, 0x18, ctrl_ext | 1 << 28);
    clear_statistics(&mut nic);
    for queue in 0..128 {
        write(&mut nic, PF, 0x4904, queue);
        write(&mut nic, PF, 0x4984, 0);
    }
    clear_filters(&mut nic);
    assert_eq!((read(&mut nic, PF, 0x5400), read(&mut nic, PF, 0x5404)), (0x0100_5452, 0x8000_0302));
    for offset in [0x8804, 0x8d04] {
        poll(&mut nic, PF, offset, 3, 3);
    }
    let mut sum = 0u16;
    for word in 0..=0x41u32 {
        let value = locked(&mut nic, |nic| {
            firmware(nic, &[0x31, (word * 2).swap_bytes(), 0x0200]);
            read(nic, PF, 0x1580c) & 0xffff
        });
        sum = sum.wrapping_add(u16::try_from(value).unwrap_or(0));
    }
    assert_eq!(sum, 0xbaba);
    locked(&mut nic, |nic| firmware(nic, &[0xdd, 0]));
    nic
}

/// Interrupts, the queue pair `queue`, filters, and the link.
fn up(nic: &mut Nic, queue: u32) {
    for (offset, value) in [(0x810, 0xffff), (0x898, 0x4000_0011), (0xad0, u32::MAX), (0xad4, u32::MAX)] {
        write(nic, PF, offset, value);
    }
    let shift = 16 * (queue % 2);
    write(nic, PF, 0x900 + 4 * u64::from(queue / 2), 0x8080 << shift);
    write(nic, PF, 0xa00, 0x8100);
    each(0x820, 2, 4).for_each(|offset| write(nic, PF, offset, 0x1f8));
    write(nic, PF, 0x3000, 0);
    for (offset, value) in [(0x5088, 0x8100), (0x5080, 0x400), (0x5090, 4), (0x5818, 0xf3_0001), (0xee00, 0xa4_0611)] {
        write(nic, PF, offset, value);
    }
    poll(nic, PF, 0xee00, 1 << 3, 1 << 3);
    poll(nic, PF, 0x2f00, 1 << 3, 1 << 3);
    let (receive, transmit) = (block(queue.into()), 0x6000 + 0x40 * u64::from(queue));
    for block in [receive, transmit] {
        for (register, value) in [(0, 0x1_0000), (4, 0), (8, 0x2000), (0x10, 0), (0x18, 0), (0x28, ENABLE)] {
            write(nic, PF, block + register, value);
        }
        poll(nic, PF, block + 0x28, ENABLE, ENABLE);
    }
    write(nic, PF, 0x4a80, 1);
    write(nic, PF, 0x3000, 1);
    let bell = effects(nic, PF, receive + 0x18, 511).doorbell;
    assert!(bell.is_some_and(|bell| bell.direction == Direction::Receive && u32::from(bell.queue) == queue));
    for (register, data) in [(16, 0x1001), (32, 0x1000), (0xc400, 0x8000), (0, 0x3200)] {
        mdio(nic, 7, register, Some(data));
        assert_eq!(mdio(nic, 7, register, None), data);
    }
    poll(nic, PF, 0x42a4, 0x7000_0000, 0x7000_0000);
    poll(nic, PF, 0x42d0, u32::MAX, 0);
    let _ = read(nic, PF, 0x800);
    write(nic, PF, 0x880, MAILBOX | LSC);
    write(nic, PF, 0xaa0, 1);
}

/// 4 VFs: the PF is pool 4, with queue 16.
fn enable_vfs(nic: &mut Nic) {
    let _ = nic.set_num_vfs(4);
    stop_and_reset(nic);
    poll(nic, PF, 8, 0xff << 10 | 1 << 18, 4 << 10 | 1 << 18);
    clear_filters(nic);
    write(nic, PF, 0xa600, 1 << 4);
    for (offset, value) in [(0x51b0, 1 | 4 << 7 | 1 << 30), (0x11050, 2), (0x51e0, 1 << 4), (0x8110, 1 << 4)] {
        write(nic, PF, offset, value);
    }
    for (offset, value) in [(0x8220, 1), (0x8120, 0xa), (0xf010, 0x0b00_0000), (0x8200, 0xf), (0x894, 0xf)] {
        write(nic, PF, offset, value);
    }
    up(nic, 16);
    for (offset, value) in [(0x5818, 0xa | 1 << 13), (0x3410, 0xf3_0001)] {
        write(nic, PF, offset, value);
    }
    let ctrl_ext = read(nic, PF, 0x18);
    write(nic, PF, 0x18, ctrl_ext | 1 << 14);
}

/// The driver of the PF serves one interrupt: which VFs were reset, and which sent or acknowledged.
fn serve(nic: &mut Nic) -> (u32, u32, u32) {
    let causes = read(nic, PF, 0x808);
    write(nic, PF, 0x800, causes);
    let (resets, events) = (read(nic, PF, 0x700), read(nic, PF, 0x710));
    write(nic, PF, 0x700, resets);
    write(nic, PF, 0x710, events);
    write(nic, PF, 0x880, MAILBOX | LSC);
    assert_eq!((peek(nic, PF, 0x700), peek(nic, PF, 0x710)), (0, 0));
    (causes, resets, events)
}

/// A message of a VF and the answer of the PF, as both drivers move them.
fn message(nic: &mut Nic, index: u16, words: &[u32], answer: &[u32]) {
    let (vf, number) = (Place::Vf(index), u64::from(index));
    write(nic, vf, 0x2fc, 4);
    poll(nic, vf, 0x2fc, 4, 4);
    for (offset, word) in (0x200..).step_by(4).zip(words) {
        write(nic, vf, offset, *word);
    }
    assert_eq!(effects(nic, vf, 0x2fc, 1).vectors, [(PF, 1 << 1)], "REQ, and the lock is free");
    assert_eq!(serve(nic), (MAILBOX, 0, 1 << index));
    write(nic, PF, 0x4b00 + 4 * number, 8);
    poll(nic, PF, 0x4b00 + 4 * number, 0xc, 8);
    for (offset, word) in (0x13000 + 64 * number..).step_by(4).zip(words) {
        assert_eq!(read(nic, PF, offset), *word);
    }
    write(nic, PF, 0x4b00 + 4 * number, 2);
    poll(nic, vf, 0x2fc, 0x20, 0x20);
    write(nic, PF, 0x4b00 + 4 * number, 8);
    for (offset, word) in (0x13000 + 64 * number..).step_by(4).zip(answer) {
        write(nic, PF, offset, *word);
    }
    write(nic, PF, 0x4b00 + 4 * number, 1);
    poll(nic, vf, 0x2fc, 0x10, 0x10);
    for (offset, word) in (0x200..).step_by(4).zip(answer) {
        assert_eq!(read(nic, vf, offset), *word);
    }
    assert_eq!(effects(nic, vf, 0x2fc, 2).vectors, [(PF, 1 << 1)], "ACK");
    assert_eq!(serve(nic), (MAILBOX, 0, 1 << (16 + index)));
}

/// The PF sets up a VF that was reset, with an address of its own.
fn serve_reset(nic: &mut Nic, index: u16, address: Mac) {
    let (pool, bit) = (u64::from(index), 1 << index);
    assert_eq!(serve(nic), (MAILBOX, bit, 0));
    for queue in 4 * pool..4 * pool + 4 {
        poll(nic, PF, block(queue) + 0x28, ENABLE, 0);
        let offset = 0x2f04;
        write(nic, PF, offset, 1 << 16 | u32::try_from(queue).unwrap_or(0) << 8 | 1);
    }
    let Mac([a, b, c, d, e, f]) = address;
    write(nic, PF, 0xa208 + 8 * pool, u32::from_le_bytes([a, b, c, d]));
    write(nic, PF, 0xa20c + 8 * pool, u32::from_le_bytes([e, f, 0, 0x80]));
    write(nic, PF, 0xa608 + 8 * pool, bit);
    write(nic, PF, 0xf000 + 4 * pool, 0x0900_0000);
    for offset in [0x51e0, 0x8110] {
        let set = read(nic, PF, offset);
        write(nic, PF, offset, set | bit);
    }
}

fn address(index: u16) -> Mac {
    let [low, _] = index.to_le_bytes();
    Mac([2, 0, 0, 0, 1, low])
}

fn probe_vf(nic: &mut Nic, index: u16) {
    let vf = Place::Vf(index);
    assert_eq!(effects(nic, vf, 0, RST).vectors, [(PF, 1 << 1)]);
    poll(nic, vf, 0x2fc, 0x40, 0);
    write(nic, vf, 0x10c, 7);
    let _ = read(nic, vf, 0x100);
    serve_reset(nic, index, address(index));
    message(nic, index, &[1], &[1 | CTS | ACK, 0, 0, 0]);
    message(nic, index, &[8, 4], &[8 | CTS | ACK, 4]);
    message(nic, index, &[9, 0, 0, 0, 0], &[9 | CTS | ACK, 1, 1, 0, 0]);
}

fn up_vf(nic: &mut Nic, index: u16) {
    let vf = Place::Vf(index);
    for (offset, value) in [(0x120, 0x8080), (0x140, 0x81), (0x820, 0x1f8), (0x824, 0x1f8), (0x300, 1 << 29)] {
        write(nic, vf, offset, value);
    }
    for first in [0x1000, 0x2000] {
        for (register, value) in [(0, 0x1_0000), (4, 0), (8, 0x2000), (0x10, 0), (0x18, 0), (0x28, ENABLE)] {
            write(nic, vf, first + register, value);
        }
        poll(nic, vf, first + 0x28, ENABLE, ENABLE);
    }
    each(0x3100, 10, 4).for_each(|offset| write(nic, vf, offset, 0x5a));
    each(0x3200, 16, 4).for_each(|offset| write(nic, vf, offset, 0x0100_0100));
    write(nic, vf, 0x3000, 0x33_0001);
    assert!(effects(nic, vf, 0x1018, 511).doorbell.is_some_and(|bell| bell.queue == 4 * index));
    poll(nic, vf, 0x10, 0x7000_0000, 0x7000_0000);
    for (offset, value) in [(0x110, 7), (0x114, 7), (0x108, 7)] {
        write(nic, vf, offset, value);
    }
    let multicast = [3 | 1 << 16, 0x123];
    message(nic, index, &multicast, &[3 | CTS | ACK]);
    write(nic, PF, 0x5200 + 4 * (0x123 >> 5), 1 << (0x123 & 31));
    message(nic, index, &[5, 1518], &[5 | CTS | ACK]);
}

#[test]
fn each_poll_of_a_whole_life_ends_at_its_first_read() {
    let mut nic = probe();
    up(&mut nic, 0);
    assert!(nic.receive_queue(0).enabled && nic.transmit_queue(0).enabled);
    assert_eq!((nic.receive_queue(0).available(), nic.switching().pools), (511, 1));
    assert_eq!(nic.queue_event(Direction::Receive, 0).vectors, [(PF, 1)]);

    enable_vfs(&mut nic);
    let switching = nic.switching();
    assert!(switching.is_veb && switching.replicates && switching.default_pool == Some(4));
    assert!(nic.pool(4).addresses == [MAC] && nic.pool(4).receives && !nic.pool(0).receives);
    assert!(nic.receive_queue(16).enabled && nic.rss(4).is_enabled());

    for index in 0..4 {
        probe_vf(&mut nic, index);
        assert_eq!(nic.pool(index).addresses, [address(index)]);
        up_vf(&mut nic, index);
        let first = 4 * index;
        assert!(nic.receive_queue(first).enabled && nic.transmit_queue(first).enabled && nic.rss(index).is_enabled());
        assert_eq!(nic.queue_event(Direction::Receive, first).vectors, [(Place::Vf(index), 1)]);
        assert_eq!(nic.queue_event(Direction::Receive, first).vectors, [], "masked until its driver enables it");
        // After the interval of VTEITR.
        nic.set_time(1000 * u64::from(index + 1));
        assert_eq!(effects(&mut nic, Place::Vf(index), 0x108, 1).vectors, [(Place::Vf(index), 1)]);
    }
    policies(&mut nic);
    function_level_reset(&mut nic);
    down_and_up(&mut nic);
    off(&mut nic);
}

/// The PF notifies a VF whose driver has served its last interrupt, which masked itself.
fn ping(nic: &mut Nic, index: u16) {
    let vf = Place::Vf(index);
    write(nic, vf, 0x100, 7);
    write(nic, vf, 0x108, 7);
    assert_eq!(effects(nic, PF, 0x4b00 + 4 * u64::from(index), 1).vectors, [(vf, 2)]);
    poll(nic, vf, 0x2fc, 0x10, 0x10);
}

/// Address, VLAN, rate and checks of VF 1, as `ip link set` sets them.
fn policies(nic: &mut Nic) {
    write(nic, PF, 0xa210, u32::from_le_bytes([2, 0, 0, 9]));
    write(nic, PF, 0xa214, u32::from_le_bytes([9, 9, 0, 0x80]));
    ping(nic, 1);
    write(nic, PF, 0x8004, 1 << 30 | 5 << 13 | 7);
    write(nic, PF, 0xf100 + 4, 1 << 31 | 7);
    write(nic, PF, 0xf200 + 8, 1 << 1);
    write(nic, PF, 0xa000, 1 << 7);
    for queue in 4..8 {
        write(nic, PF, 0x4904, queue);
        write(nic, PF, 0x4984, 0x8005_0000);
        write(nic, PF, 0x2f04, 1 << 16 | queue << 8 | 3);
    }
    write(nic, PF, 0x8200, 0x0102_0203 & 0x00ff_ffff);
    let pool = nic.pool(1);
    assert_eq!((pool.addresses.as_slice(), pool.rate), ([Mac([2, 0, 0, 9, 9, 9])].as_slice(), Some(500)));
    assert!(pool.port_vlan.is_some_and(|tag| tag.vlan == 7 && tag.priority == 5) && pool.hides_vlan);
    assert!(pool.has_vlan(7) && !pool.has_vlan(8) && pool.checks_mac && pool.checks_vlan && pool.checks_type);
    assert!(pool.accepts(Destination::Own, Some(7)) && pool.accepts(Destination::Broadcast, Some(7)));
}

/// The VF's queues end, and the PF sets it up again. Policies of its registers stay.
fn function_level_reset(nic: &mut Nic) {
    assert_eq!(nic.reset_vf(1).vectors, [(PF, 1 << 1)]);
    assert!(!nic.receive_queue(4).enabled && !nic.rss(1).is_enabled() && nic.receive_queue(0).enabled);
    serve_reset(nic, 1, address(1));
    assert!(nic.pool(1).port_vlan.is_some() && nic.pool(1).rate == Some(500));
    message(nic, 1, &[1], &[1 | CTS | ACK, 0, 0, 0]);
    up_vf(nic, 1);
}

/// The PF is reset, as by a new MTU: all VFs see it, and wait.
fn down_and_up(nic: &mut Nic) {
    stop_and_reset(nic);
    for index in 0..4 {
        poll(nic, Place::Vf(index), 0x2fc, 0xc0, 0x40);
        assert!(!nic.receive_queue(4 * index).enabled && (index == 0 || !nic.pool(index).receives));
    }
    enable_vfs(nic);
    for index in 0..4 {
        poll(nic, Place::Vf(index), 0x2fc, 0xc0, 0x80);
        ping(nic, index);
        probe_vf(nic, index);
        up_vf(nic, index);
    }
}

/// No VFs again, and the end.
fn off(nic: &mut Nic) {
    let _ = nic.set_num_vfs(0);
    stop_and_reset(nic);
    write(nic, PF, 0x51b0, 0);
    write(nic, PF, 0x11050, 0);
    up(nic, 0);
    assert!(nic.receive_queue(0).enabled && nic.switching().pools == 1);
    assert_eq!(nic.queue_event(Direction::Receive, 0).vectors, [(PF, 1)]);
    locked(nic, |nic| firmware(nic, &[0xde, 0]));
    poll(nic, PF, 0x3000, 1, 0);
    stop_and_reset(nic);
    let ctrl_ext = read(nic, PF, 0x18);
    write(nic, PF, 0x18, ctrl_ext & !(1 << 28));
    assert!(!nic.receive_queue(0).enabled && nic.link_is_up());
}
