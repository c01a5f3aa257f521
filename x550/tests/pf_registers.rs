//! Registers of the PF, one row for each rule.

mod common;

use common::{MAC, PF, effects, nic, peek, read, stored, write};
use x550::{Nic, Place};

/// X1: their values after a reset.
/// Offset, a value after power-on.
#[test]
fn registers_have_their_values_after_a_reset() {
    let mut nic = Nic::new(MAC);
    for (offset, value, name) in [
        (0x0, 0, "CTRL"),
        (0x8, 1 << 19, "STATUS: LAN 0, master enabled"),
        (0x18, 0, "CTRL_EXT"),
        (0x10010, 0x0400_4b00, "EEC: present, read, 32 K words, flushed"),
        (0x10148, 0x8000, "FWSM: valid, no recovery, no error, not pass-through"),
        (0x10150, 0, "FACTPS"),
        (0x42d0, 0, "MMNGC"),
        (0x15f00, 1, "HICR"),
        (0x15f0c, 0, "FWSTS"),
        (0x5400, 0x0100_5452, "RAL 0"),
        (0x5404, 0x8000_0302, "RAH 0"),
        (0xa200, 0x0100_5452, "RAL 0 at its other place"),
        (0xa204, 0x8000_0302, "RAH 0 at its other place"),
        (0x540c, 0, "RAH 1"),
        (0x42a4, 0, "LINKS"),
        (0x8804, 3, "SECTXSTAT"),
        (0x8d04, 3, "SECRXSTAT"),
        (0x2f00, 8, "RDRXCTL.DMAIDONE"),
        (0xee00, 8, "FDIRCTRL.INIT_DONE"),
        (0x5088, 0x8100, "VLNCTRL"),
        (0x3c00, 0x6_0000, "RXPBSIZE 0"),
        (0x10160, 0, "SW_FW_SYNC"),
        (0x4, 0, "no register"),
        (0x1fffc, 0, "no register"),
        (0x20000, 0, "no register"),
        (0x7fffc, 0, "no register"),
        (0x80000, u32::MAX, "beyond the BAR"),
        (u64::MAX - 3, u32::MAX, "beyond the BAR"),
    ] {
        assert_eq!(read(&mut nic, PF, offset), value, "{name}");
    }
}

/// Offset, written, read back.
#[test]
fn writes_have_their_effect_at_once() {
    for (offset, written, value, name) in [
        (0x0, 1 << 2, 1 << 2, "CTRL.GIO_DIS"),
        (0x0, 1 << 26, 0, "CTRL.RST clears"),
        (0x0, 1 << 3, 0, "CTRL.LRST clears"),
        (0x8, 0, 1 << 19, "STATUS is read-only"),
        (0x18, 1 << 28 | 1 << 14, 1 << 28 | 1 << 14, "CTRL_EXT"),
        (0x10010, 1 << 23, 0x0400_4b00, "EEC.FLUP clears"),
        (0x10148, 0, 0x8000, "FWSM is read-only"),
        (0x10160, 0x8000_0006, 0x8000_0006, "SW_FW_SYNC with REGSMP"),
        (0x1028, 1 << 25, 1 << 25, "RXDCTL.ENABLE"),
        (0xd028, 1 << 25, 1 << 25, "RXDCTL.ENABLE of queue 64"),
        (0x6028, 1 << 26 | 1 << 25, 1 << 25, "TXDCTL.SWFLSH clears"),
        (0x2f00, 0, 8, "RDRXCTL.DMAIDONE stays"),
        (0xee00, 0, 8, "FDIRCTRL.INIT_DONE stays"),
        (0xee2c, 0x1_0003, 0x1_0000, "FDIRCMD ends"),
        (0x42a4, u32::MAX, 0, "LINKS is read-only"),
        (0x8804, 0, 3, "SECTXSTAT is read-only"),
        (0x8d04, 0, 3, "SECRXSTAT is read-only"),
        (0x4074, 5, 0, "statistics are read-only"),
        (0x425c, 1 << 30, 0, "MSCA.MDI_COMMAND clears"),
    ] {
        assert_eq!(stored(&mut Nic::new(MAC), PF, offset, written), value, "{name}");
    }
}

/// X2: bits that software can write.
/// Patterns of `ethtool -t`: offset of the first register, registers, bytes between them, writable bits, read bits.
#[test]
fn storage_has_true_masks() {
    for (first, count, stride, writable, name) in [
        (0x3220, 1, 4, 0x8007_fff0, "FCRTL"),
        (0x3260, 1, 4, 0x8007_fff0, "FCRTH"),
        (0x3008, 1, 4, u32::MAX, "PFCTOP"),
        (0x1000, 4, 0x40, 0xffff_ff80, "RDBAL"),
        (0x1004, 4, 0x40, u32::MAX, "RDBAH"),
        (0x1008, 4, 0x40, 0x000f_ff80, "RDLEN"),
        (0x1018, 4, 0x40, 0x0000_ffff, "RDT"),
        (0x3200, 1, 4, u32::MAX, "FCTTV"),
        (0x6000, 4, 0x40, 0xffff_ff80, "TDBAL"),
        (0x6004, 4, 0x40, u32::MAX, "TDBAH"),
        (0x6008, 4, 0x40, 0x000f_ff80, "TDLEN"),
        (0x3000, 1, 4, 1, "RXCTRL"),
        (0x5400, 16, 8, u32::MAX, "RAL"),
        (0x5404, 16, 8, 0x8000_ffff, "RAH"),
        (0x5200, 128, 4, u32::MAX, "MTA"),
        (0xa000, 128, 4, u32::MAX, "VFTA"),
    ] {
        for offset in (0..count).map(|n| first + n * stride) {
            for pattern in [0x5a5a_5a5a, 0xa5a5_a5a5, 0, u32::MAX] {
                assert_eq!(stored(&mut Nic::new(MAC), PF, offset, pattern), pattern & writable, "{name} {offset:#x}");
            }
        }
    }
}

#[test]
fn disabling_the_master_is_seen_in_status() {
    let mut nic = Nic::new(MAC);
    write(&mut nic, PF, 0, 1 << 2);
    assert_eq!(read(&mut nic, PF, 8), 0);
    let _ = nic.set_num_vfs(5);
    assert_eq!(read(&mut nic, PF, 8), 5 << 10 | 1 << 18);
}

/// X5: semaphores.
#[test]
fn the_semaphore_is_set_by_a_read_and_cleared_by_a_write() {
    let mut nic = Nic::new(MAC);
    assert_eq!([0, 1, 1], [0; 3].map(|_| read(&mut nic, PF, 0x10140)));
    write(&mut nic, PF, 0x10140, 0);
    assert_eq!(peek(&nic, PF, 0x10140), 0);
    assert_eq!(stored(&mut nic, PF, 0x10140, 2), 2, "SWESMBI is stored");
    assert_eq!(stored(&mut nic, PF, 0x10140, 3), 3, "a write keeps what it has");
    write(&mut nic, PF, 0x10140, 0);
    write(&mut nic, PF, 0x10140, 1);
    assert_eq!(peek(&nic, PF, 0x10140), 0, "a write does not take it");
}

/// X8: link.
#[test]
fn the_link_interrupts_and_survives_every_reset() {
    let mut nic = Nic::new(MAC);
    let _ = nic.set_link(true);
    assert_eq!((read(&mut nic, PF, 0x42a4), read(&mut nic, Place::Vf(0), 0x10)), (0x7000_0000, 0x7000_0000));
    assert_eq!(read(&mut nic, PF, 0x800), 1 << 20, "LSC");
    assert!(nic.set_link(true).is_none());
    assert_eq!(read(&mut nic, PF, 0x800), 0, "nothing changed");
    write(&mut nic, PF, 0, 1 << 26);
    let _ = nic.reset();
    assert!(nic.link_is_up());
    let _ = nic.set_link(false);
    assert_eq!((peek(&nic, PF, 0x42a4), peek(&nic, PF, 0x800)), (0, 1 << 20));
}

/// X4: what a reset keeps.
#[test]
fn a_device_reset_keeps_phy_semaphores_and_firmware() {
    let mut nic = nic();
    for (offset, value) in [(0x10160, 6), (0x15800, 0xdd), (0x4260, 7), (0x5200, 9), (0x800, 0), (0x880, 0xff)] {
        write(&mut nic, PF, offset, value);
    }
    let _ = read(&mut nic, PF, 0x10140);
    let after = effects(&mut nic, PF, 0, 1 << 26);
    assert!(after.queues && after.pools && after.moderation && after.vectors.is_empty());
    let kept = [0x10160, 0x15800, 0x4260, 0x10140].map(|offset| peek(&nic, PF, offset));
    assert_eq!(kept, [6, 0xdd, 7, 1]);
    assert_eq!([0x5200, 0x880, 0x11050].map(|offset| peek(&nic, PF, offset)), [0; 3]);
    assert_eq!(peek(&nic, PF, 0x5404), 0x8000_0302);
}

/// X4: what a reset keeps.
#[test]
fn power_on_and_function_level_reset_reset_everything() {
    let mut nic = nic();
    for offset in (0..0x20000).step_by(4) {
        write(&mut nic, PF, offset, 0x5a5a_5a5a & !(1 << 26 | 1 << 3));
    }
    let _ = nic.reset();
    let mut new = Nic::new(MAC);
    let _ = new.set_num_vfs(4);
    assert_eq!(nic, new);
}

/// X6: flash.
#[test]
fn the_driver_reads_a_valid_checksum() {
    let mut nic = Nic::new(MAC);
    let mut sum = 0u16;
    for word in 0..=0x41u32 {
        for (offset, value) in [(0x15800, 0x31), (0x15804, (word * 2).swap_bytes()), (0x15808, 0x0200), (0x15f00, 3)] {
            write(&mut nic, PF, offset, value);
        }
        assert_eq!(peek(&nic, PF, 0x15f00), 5, "done, with a status");
        sum = sum.wrapping_add(u16::try_from(peek(&nic, PF, 0x1580c) & 0xffff).unwrap());
    }
    assert_eq!(sum, 0xbaba);
}

#[test]
fn the_firmware_disables_the_receiver() {
    let mut nic = Nic::new(MAC);
    write(&mut nic, PF, 0x3000, 1);
    write(&mut nic, PF, 0x15800, 0xde);
    assert!(effects(&mut nic, PF, 0x15f00, 3).queues);
    assert_eq!(peek(&nic, PF, 0x3000), 0);
}

#[test]
fn indirect_registers_have_one_value_per_queue() {
    let mut nic = Nic::new(MAC);
    for queue in [0, 1, 127] {
        write(&mut nic, PF, 0x4904, queue);
        assert_eq!(stored(&mut nic, PF, 0x4984, 0x8005_0000 + queue), 0x8005_0000 + queue);
    }
    write(&mut nic, PF, 0x4904, 1);
    assert_eq!(peek(&nic, PF, 0x4984), 0x8005_0001);
    assert_eq!(stored(&mut nic, PF, 0x4984, u32::MAX), 0x80ff_ffff);
}

#[test]
fn effects_name_what_a_write_may_change() {
    for (offset, value, queues, pools, moderation) in [
        (0x1028, 1 << 25, true, false, false),
        (0xd028, 1 << 25, true, false, false),
        (0x6028, 1 << 25, true, false, false),
        (0x3000, 1, true, false, false),
        (0x4a80, 1, true, false, false),
        (0x51e0, 1, true, true, false),
        (0x8110, 1, true, true, false),
        (0x11050, 1, true, true, false),
        (0x5080, 1 << 9, false, true, false),
        (0x5088, 1 << 30, false, true, false),
        (0x5090, 4, false, true, false),
        (0x51b0, 3 << 29, false, true, false),
        (0x5200, 1, false, true, false),
        (0x5408, 1, false, true, false),
        (0x8000, 1, false, true, false),
        (0x8200, 1, false, true, false),
        (0x8220, 1, false, true, false),
        (0xa000, 1, false, true, false),
        (0xa600, 1, false, true, false),
        (0xf000, 1 << 24, false, true, false),
        (0xf100, 1, false, true, false),
        (0xf200, 1, false, true, false),
        (0xf400, 1, false, true, false),
        (0xf600, 1, false, true, false),
        (0x4984, 1, false, true, false),
        (0x2f04, 1 << 16, false, true, false),
        (0x820, 0x40, false, false, false),
        (0x12300, 0x40, false, false, false),
        (0x4240, 1 << 15, false, true, false),
        (0x4294, 1, false, false, false),
    ] {
        let seen = effects(&mut Nic::new(MAC), PF, offset, value);
        assert_eq!((seen.queues, seen.pools, seen.moderation), (queues, pools, moderation), "{offset:#x}");
    }
}

/// X3: dwords.
#[test]
fn narrow_and_misaligned_writes_are_dropped() {
    let mut nic = Nic::new(MAC);
    for (offset, len) in [(0x5200, 1), (0x5200, 2), (0x5201, 1), (0x5202, 2), (0x5201, 4), (0x5203, 4)] {
        assert!(nic.write(PF, offset, &vec![0xff; len]).is_none());
        assert_eq!((peek(&nic, PF, 0x5200), peek(&nic, PF, 0x5204)), (0, 0), "{len} at {offset:#x}");
    }
    let _ = nic.write(PF, 0x5200, &0x2_0000_0001u64.to_le_bytes());
    assert_eq!((peek(&nic, PF, 0x5200), peek(&nic, PF, 0x5204)), (1, 2));
    let mut byte = [0];
    nic.read(PF, 0x5204, &mut byte);
    assert_eq!(byte, [2]);
}
