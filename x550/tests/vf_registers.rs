//! Registers of a VF: its own, those of its pool, the mailbox, and resets.

mod common;

use common::{MAC, PF, effects, nic, peek, read, sent, stored, write};
use x550::{Direction, Doorbell, Nic, Place};

const VFMAILBOX: u64 = 0x2fc;
const MAILBOX: u32 = 1 << 19;
const RST: u32 = 1 << 26;

/// VF 0 to 3 with 4 queues each: offset of the VF, and that of the PF for VF 3.
#[test]
fn a_vf_sees_the_registers_of_its_pool() {
    for (vf, pf, value) in [
        (0x1000, 0x1000 + 0x40 * 12, 0x80),
        (0x1004, 0x1004 + 0x40 * 12, 1),
        (0x1008, 0x1008 + 0x40 * 12, 0x80),
        (0x100c, 0x100c + 0x40 * 12, 1),
        (0x1010, 0x1010 + 0x40 * 12, 1),
        (0x1014, 0x1014 + 0x40 * 12, 1),
        (0x1018, 0x1018 + 0x40 * 12, 1),
        (0x1028, 0x1028 + 0x40 * 12, 1 << 25),
        (0x102c, 0x102c + 0x40 * 12, 1),
        (0x10c0, 0x1000 + 0x40 * 15, 0x80),
        (0x2000, 0x6000 + 0x40 * 12, 0x80),
        (0x2010, 0x6010 + 0x40 * 12, 1),
        (0x2018, 0x6018 + 0x40 * 12, 1),
        (0x2028, 0x6028 + 0x40 * 12, 1 << 25),
        (0x2038, 0x6038 + 0x40 * 12, 5),
        (0x203c, 0x603c + 0x40 * 12, 1),
        (0x20e8, 0x6028 + 0x40 * 15, 1 << 25),
        (0x300, 0xea0c, 1),
        (0x3000, 0x340c, 1),
        (0x3100, 0x180c0, 1),
        (0x3124, 0x180e4, 1),
        (0x3200, 0x190c0, 1),
        (0x323c, 0x190fc, 1),
    ] {
        let mut nic = nic();
        assert_eq!(stored(&mut nic, Place::Vf(3), vf, value), value, "{vf:#x}");
        assert_eq!(peek(&nic, PF, pf), value, "{vf:#x} is {pf:#x}");
        write(&mut nic, PF, pf, 0);
        assert_eq!(peek(&nic, Place::Vf(3), vf), 0);
    }
}

/// X15: queues of a pool.
#[test]
fn a_vf_has_the_queues_of_its_pool_alone() {
    for (mode, per_pool) in [(0u32, 0u16), (1, 8), (2, 4), (3, 2)] {
        for index in [0u16, 1, 15, 31, 62] {
            for queue in 0..8u16 {
                let mut nic = nic();
                let _ = nic.set_num_vfs(63);
                write(&mut nic, PF, 0x11050, mode);
                let all = index * per_pool + queue;
                let has = queue < per_pool && all < 128;
                for (first, direction) in [(0x1000, Direction::Receive), (0x2000, Direction::Transmit)] {
                    let block = first + 0x40 * u64::from(queue);
                    let doorbell = has.then_some(Doorbell { direction, queue: all });
                    let rung = effects(&mut nic, Place::Vf(index), block + 0x18, 7).doorbell;
                    assert_eq!(rung, doorbell, "mode {mode}, VF {index}, queue {queue}");
                    assert_eq!(read(&mut nic, Place::Vf(index), block + 0x18), if has { 7 } else { 0 });
                }
                if has {
                    assert_eq!((nic.receive_queue(all).tail, nic.transmit_queue(all).tail), (7, 7));
                    assert_eq!(nic.owner(all), (Place::Vf(index), queue));
                }
            }
        }
    }
}

#[test]
fn queues_without_a_vf_are_the_pfs() {
    let nic = nic();
    assert_eq!([15, 16, 127].map(|queue| nic.owner(queue)), [(Place::Vf(3), 3), (PF, 16), (PF, 127)]);
}

#[test]
fn constant_and_absent_registers_of_a_vf_read_zero() {
    let mut nic = nic();
    for offset in [0x0, 0x8, 0x48, 0x4, 0x144, 0x240, 0x1030, 0x101c, 0x1200, 0x2200, 0x3128, 0x3240, 0x3ffc] {
        assert_eq!(stored(&mut nic, Place::Vf(0), offset, !RST), 0, "{offset:#x}");
    }
    assert_eq!(read(&mut nic, Place::Vf(0), 0x4000), u32::MAX, "beyond the BAR");
    for index in [63, u16::MAX] {
        assert_eq!(stored(&mut nic, Place::Vf(index), 0, RST), u32::MAX, "no such VF");
    }
}

/// X13: mailbox.
#[test]
fn both_functions_have_the_same_buffer() {
    let mut nic = nic();
    for (n, word) in (0..16).zip(100..) {
        write(&mut nic, Place::Vf(2), 0x200 + 4 * n, word);
        assert_eq!(read(&mut nic, PF, 0x13080 + 4 * n), word);
        assert_eq!(stored(&mut nic, PF, 0x13080 + 4 * n, !word), !word);
        assert_eq!(read(&mut nic, Place::Vf(2), 0x200 + 4 * n), !word);
    }
    assert_eq!((peek(&nic, PF, 0x1307c), peek(&nic, PF, 0x130c0)), (0, 0), "other VFs");
    assert_eq!(stored(&mut nic, PF, 0x13000 + 64 * 63, 1), 0, "there is no VF 63");
}

/// X13: mailbox.
#[test]
fn the_lock_is_visible_in_the_next_read() {
    let mut nic = nic();
    let _ = read(&mut nic, Place::Vf(1), VFMAILBOX);
    assert_eq!(stored(&mut nic, Place::Vf(1), VFMAILBOX, 4), 4);
    assert_eq!(stored(&mut nic, PF, 0x4b04, 8), 4, "the VF has it");
    assert_eq!(stored(&mut nic, Place::Vf(1), VFMAILBOX, 0), 0);
    assert_eq!(stored(&mut nic, PF, 0x4b04, 8), 8);
    assert_eq!(stored(&mut nic, Place::Vf(1), VFMAILBOX, 4), 8, "the PF has it");
    assert_eq!(stored(&mut nic, PF, 0x4b04, 0), 0);
    write(&mut nic, Place::Vf(1), VFMAILBOX, 4);
    assert_eq!(stored(&mut nic, PF, 0x4b04, 0x10), 0, "RVFU");
    assert_eq!(stored(&mut nic, PF, 0x4b00 + 4 * 63, 8), 0, "there is no VF 63");
}

/// X13: mailbox.
#[test]
fn a_message_of_a_vf_reaches_the_pf() {
    for (index, register, bit) in [(0, 0x710, 0), (15, 0x710, 15), (16, 0x714, 0), (62, 0x71c, 14)] {
        let mut nic = nic();
        write(&mut nic, PF, 0xa00, 0x8700);
        write(&mut nic, PF, 0x880, MAILBOX);
        assert_eq!(sent(&mut nic, Place::Vf(index), VFMAILBOX, 4), []);
        assert_eq!(sent(&mut nic, Place::Vf(index), VFMAILBOX, 4 | 1), [(PF, 1 << 7)], "REQ");
        assert_eq!(read(&mut nic, PF, register), 1 << bit);
        assert_eq!(read(&mut nic, PF, 0x800), MAILBOX);
        assert_eq!(sent(&mut nic, Place::Vf(index), VFMAILBOX, 2), [(PF, 1 << 7)], "ACK");
        assert_eq!(read(&mut nic, PF, register), 0x1_0001 << bit);
        assert_eq!(stored(&mut nic, PF, register, 1 << bit), 0x1_0000 << bit, "a write clears its bits");
        assert_eq!(stored(&mut nic, PF, register, u32::MAX), 0);
    }
}

/// X13: mailbox.
#[test]
fn a_message_of_the_pf_reaches_its_vf() {
    let (mut nic, vf) = (nic(), Place::Vf(3));
    let _ = read(&mut nic, vf, VFMAILBOX);
    write(&mut nic, vf, 0x110, 7);
    write(&mut nic, vf, 0x108, 4);
    assert_eq!(sent(&mut nic, PF, 0x4b0c, 1), [], "no vector yet");
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0x10, "PFSTS");
    write(&mut nic, vf, 0x140, 0x82);
    assert_eq!(sent(&mut nic, PF, 0x4b0c, 1 | 8), [(vf, 4)]);
    assert_eq!(sent(&mut nic, PF, 0x4b0c, 2), [(vf, 4)]);
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0x30, "PFSTS and PFACK");
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0, "cleared by the read");
    assert_eq!(peek(&nic, PF, 0x4b0c), 0, "write-only bits");
    let both = nic.write(PF, 0x4b08, &[1, 0, 0, 0, 1, 0, 0, 0]).vectors;
    assert_eq!(both, [(vf, 4)], "VF 2 has no vector");
    assert_eq!(read(&mut nic, Place::Vf(2), VFMAILBOX) & 0x10, 0x10);
}

/// X14: resets.
#[test]
fn the_reset_of_the_pf_is_seen_until_it_is_done() {
    let mut nic = Nic::new(MAC);
    let vf = Place::Vf(0);
    assert_eq!([read(&mut nic, vf, VFMAILBOX), read(&mut nic, vf, VFMAILBOX)], [0x40; 2], "RSTI");
    write(&mut nic, PF, 0x18, 1 << 28);
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0x40);
    write(&mut nic, PF, 0x18, 1 << 14);
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0x80, "RSTD");
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0, "cleared by the read");
    write(&mut nic, PF, 0x18, 1 << 14);
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0, "no reset ended");
    write(&mut nic, PF, 0, RST);
    assert_eq!(read(&mut nic, vf, VFMAILBOX), 0x40);
}

/// X14: resets.
/// VFCTRL.RST and a function level reset do the same.
#[test]
fn a_reset_of_a_vf_clears_its_part_and_tells_the_pf() {
    for index in [0u16, 3] {
        let vf = Place::Vf(index);
        let mut before = nic();
        write(&mut before, PF, 0xa00, 0x8700);
        write(&mut before, PF, 0x880, MAILBOX);
        for (offset, value) in [(0x1000, 0x80), (0x1028, 1 << 25), (0x2028, 1 << 25), (0x300, 1), (0x3000, 1)] {
            for other in [index, 1] {
                write(&mut before, Place::Vf(other), offset, value);
            }
        }
        for (offset, value) in [(0x108, 7), (0x110, 7), (0x120, 0x8080), (0x140, 0x82), (0x820, 8), (VFMAILBOX, 4)] {
            write(&mut before, vf, offset, value);
        }
        let pool = 4 * u64::from(index);
        let admin = [(0xf000 + pool, 1 << 24), (0x8000 + pool, 0x4000_0007), (0x51e0, 0xf), (0x8110, 0xf)];
        for (offset, value) in admin {
            write(&mut before, PF, offset, value);
        }
        let mut nic = before.clone();
        let effects = effects(&mut nic, vf, 0, RST);
        assert!(effects.queues && effects.vectors == [(PF, 1 << 7)]);
        assert_eq!(before.reset_vf(index), effects);
        assert_eq!(nic, before);
        for offset in [0x0, 0x1000, 0x1028, 0x2028, 0x300, 0x3000, 0x108, 0x110, 0x120, 0x140, 0x820] {
            assert_eq!(read(&mut nic, vf, offset), 0, "{offset:#x}");
        }
        assert_eq!(read(&mut nic, vf, VFMAILBOX) & 4, 0, "the lock");
        assert_eq!(read(&mut nic, Place::Vf(1), 0x1028), 1 << 25, "another VF");
        for (offset, value) in admin {
            assert_eq!(peek(&nic, PF, offset), value, "the PF's own registers");
        }
        assert_eq!((read(&mut nic, PF, 0x700), read(&mut nic, PF, 0x600)), (1 << index, 1 << index));
        assert_eq!(stored(&mut nic, PF, 0x700, 1 << index), 0, "a write clears it");
    }
}

/// X14: resets.
#[test]
fn the_upper_vfs_have_registers_of_their_own_for_resets() {
    let mut nic = nic();
    let _ = nic.reset_vf(32);
    let _ = nic.reset_vf(62);
    assert!(nic.reset_vf(63).is_none());
    let bits = 1 | 1 << 30;
    assert_eq!([0x700, 0x704, 0x600, 0x1c0].map(|offset| peek(&nic, PF, offset)), [0, bits, 0, bits]);
    assert_eq!(stored(&mut nic, PF, 0x704, 1), 1 << 30);
    write(&mut nic, PF, 0x1c0, u32::MAX);
    assert_eq!(peek(&nic, PF, 0x704), 1 << 30, "VFLRE is read-only");
}

#[test]
fn a_reset_of_the_pf_resets_the_queues_of_all_vfs() {
    let (mut nic, vf) = (nic(), Place::Vf(2));
    for (offset, value) in [(0x1028, 1 << 25), (0x2000, 0x80), (0x108, 7), (0x140, 0x82), (0x200, 5)] {
        write(&mut nic, vf, offset, value);
    }
    write(&mut nic, vf, VFMAILBOX, 1);
    write(&mut nic, PF, 0x4b08, 8);
    write(&mut nic, PF, 0, RST);
    assert_eq!([0x1068 + 7 * 0x40, 0x6000 + 8 * 0x40].map(|offset| peek(&nic, PF, offset)), [0, 0]);
    assert_eq!([0x710, 0x4b08].map(|offset| peek(&nic, PF, offset)), [0, 0], "events and the PF's lock");
    assert_eq!([0x108, 0x140, 0x200].map(|offset| peek(&nic, vf, offset)), [7, 0x82, 5], "the VF is reached later");
}
