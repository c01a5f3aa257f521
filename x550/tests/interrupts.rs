//! Interrupts of the PF and its VFs.

mod common;

use common::{MAC, PF, nic, peek, read, sent, stored, write};
use x550::{Direction, Nic, Place};

const EICR: u64 = 0x800;
const EICS: u64 = 0x808;
const EIMS: u64 = 0x880;
const EIMC: u64 = 0x888;
const LSC: u32 = 1 << 20;
const MAILBOX: u32 = 1 << 19;

/// A NIC as Linux sets it up: other causes at vector 2, queue 0 at vector 0, queue 3's transmit at vector 40.
fn ready() -> Nic {
    let mut nic = nic();
    for (offset, value) in [
        (0x810, 0xffff),
        (0x898, 1 << 30),
        (0x900, 0x8080),
        (0x904, 0xa800_0000),
        (0xa00, 0x8200),
        (0xad0, u32::MAX),
        (0xad4, u32::MAX),
    ] {
        write(&mut nic, PF, offset, value);
    }
    let _ = nic.set_num_vfs(0);
    nic
}

/// X9: causes and masks.
#[test]
fn masks_are_set_and_cleared_bit_by_bit() {
    let mut nic = Nic::new(MAC);
    assert_eq!(stored(&mut nic, PF, EIMS, 0x0010_0003), 0x0010_0003);
    assert_eq!(stored(&mut nic, PF, EIMS, 0x0008_0004), 0x0018_0007);
    assert_eq!(peek(&nic, PF, 0xaa0), 7, "the same bits");
    write(&mut nic, PF, EIMC, 0x0010_0001);
    assert_eq!((peek(&nic, PF, EIMS), peek(&nic, PF, EIMC)), (0x0008_0006, 0));
    assert_eq!(stored(&mut nic, PF, 0xaa0, 0x8000_0000), 0x8000_0006);
    assert_eq!(peek(&nic, PF, EIMS), 0x0008_0006, "vectors 16 and up are not in it");
    assert_eq!(stored(&mut nic, PF, 0xaa4, 0x8000_0001), 0x8000_0001);
    write(&mut nic, PF, 0xab0, u32::MAX);
    write(&mut nic, PF, 0xab4, 1);
    assert_eq!((peek(&nic, PF, 0xaa0), peek(&nic, PF, 0xaa4), peek(&nic, PF, EIMS)), (0, 0x8000_0000, 0x0008_0000));
    assert_eq!(stored(&mut nic, PF, EIMS, u32::MAX), 0x7fff_ffff, "bit 31 is reserved");
}

#[test]
fn auto_registers_are_stored_in_both_of_their_places() {
    let mut nic = Nic::new(MAC);
    assert_eq!(stored(&mut nic, PF, 0x810, 0x4000_00ff), 0x4000_00ff, "EIAC");
    assert_eq!(stored(&mut nic, PF, 0x890, 0x1234), 0x1234, "EIAM");
    assert_eq!(peek(&nic, PF, 0xad0), 0x1234);
    assert_eq!(stored(&mut nic, PF, 0xad0, 0x8000_0001), 0x8000_0001);
    assert_eq!((peek(&nic, PF, 0x890), stored(&mut nic, PF, 0xad4, 7)), (1, 7));
    assert_eq!(peek(&nic, PF, 0xad0), 0x8000_0001);
}

/// X9: causes and masks.
#[test]
fn a_read_of_the_cause_clears_it_and_a_write_clears_its_bits() {
    let mut nic = Nic::new(MAC);
    write(&mut nic, PF, EICS, LSC | MAILBOX | 5);
    assert_eq!(read(&mut nic, PF, EICS), LSC | MAILBOX | 5, "a read of EICS clears nothing");
    write(&mut nic, PF, EICR, LSC | 1);
    assert_eq!(read(&mut nic, PF, EICR), MAILBOX | 4);
    assert_eq!(read(&mut nic, PF, EICR), 0);
}

/// X9: causes and masks.
#[test]
fn with_ocd_a_read_of_the_cause_keeps_those_of_queues() {
    let mut nic = Nic::new(MAC);
    write(&mut nic, PF, 0x898, 1 << 5);
    write(&mut nic, PF, EICS, LSC | 5);
    assert_eq!([LSC | 5, 5], [0; 2].map(|_| read(&mut nic, PF, EICR)));
}

/// X11: IVAR.
#[test]
fn other_causes_have_the_vector_of_ivar_misc() {
    let mut nic = ready();
    assert_eq!(sent(&mut nic, PF, EICS, LSC), [], "masked");
    assert_eq!(sent(&mut nic, PF, EIMS, LSC | MAILBOX), [(PF, 1 << 2)], "a pending cause is sent");
    assert_eq!(sent(&mut nic, PF, EICS, LSC), [], "still set");
    assert_eq!(sent(&mut nic, PF, EICS, MAILBOX), [(PF, 1 << 2)], "another cause");
    write(&mut nic, PF, EICR, LSC);
    assert_eq!(sent(&mut nic, PF, EICS, LSC), [(PF, 1 << 2)]);
    assert_eq!(peek(&nic, PF, EIMS), LSC | MAILBOX, "EIAM has none of them");
    assert_eq!(sent(&mut nic, PF, EIMS, LSC), [(PF, 1 << 2)], "and again at each enable");
    write(&mut nic, PF, 0xa00, 0x0200);
    write(&mut nic, PF, EICR, LSC);
    assert_eq!(sent(&mut nic, PF, EICS, LSC), [], "without a vector");
    assert_eq!(peek(&nic, PF, EICR) & LSC, LSC);
}

/// X10: EIAM, EIAC, GPIE.
#[test]
fn other_causes_mask_and_clear_themselves_if_told_to() {
    let mut nic = ready();
    write(&mut nic, PF, 0x890, LSC);
    write(&mut nic, PF, 0x810, LSC);
    write(&mut nic, PF, EIMS, LSC | MAILBOX);
    assert_eq!(sent(&mut nic, PF, EICS, LSC), [(PF, 4)]);
    assert_eq!((peek(&nic, PF, EICR), peek(&nic, PF, EIMS)), (0, MAILBOX));
}

/// X11: IVAR.
#[test]
fn a_queue_has_the_vector_of_its_byte_of_ivar() {
    let mut nic = Nic::new(MAC);
    write(&mut nic, PF, 0xaa0, u32::MAX);
    write(&mut nic, PF, 0xaa4, u32::MAX);
    write(&mut nic, PF, 0x900, 0x8382_8180);
    write(&mut nic, PF, 0x9fc, 0xbf00_003f);
    for (direction, queue, expected) in [
        (Direction::Receive, 0, 1),
        (Direction::Transmit, 0, 2),
        (Direction::Receive, 1, 4),
        (Direction::Transmit, 1, 8),
        (Direction::Receive, 126, 0),
        (Direction::Transmit, 127, 1 << 63),
        (Direction::Receive, 128, 0),
        (Direction::Receive, u16::MAX, 0),
    ] {
        let vectors = nic.queue_event(direction, queue).vectors;
        let expected = if expected == 0 { vec![] } else { vec![(PF, expected)] };
        assert_eq!(vectors, expected, "{direction:?} {queue}");
    }
}

/// X10: EIAM, EIAC, GPIE.
#[test]
fn a_vector_masks_itself_and_waits_for_its_enable() {
    let mut nic = ready();
    for (queue, direction, enable, bit) in [(0, Direction::Receive, 0xaa0, 0), (3, Direction::Transmit, 0xaa4, 8)] {
        let vector = if enable == 0xaa0 { bit } else { bit + 32 };
        assert_eq!(nic.queue_event(direction, queue).vectors, []);
        assert_eq!(sent(&mut nic, PF, enable, 1 << bit), [(PF, 1 << vector)]);
        assert_eq!(peek(&nic, PF, enable), 0, "masked");
        assert_eq!(nic.queue_event(direction, queue).vectors, []);
        assert_eq!(nic.queue_event(direction, queue).vectors, []);
        assert_eq!(sent(&mut nic, PF, enable, 1 << bit), [(PF, 1 << vector)], "once for both");
        assert_eq!(sent(&mut nic, PF, enable, 1 << bit), []);
        assert_eq!(nic.queue_event(direction, queue).vectors, [(PF, 1 << vector)]);
    }
}

/// X10: EIAM, EIAC, GPIE.
#[test]
fn without_eiame_a_vector_stays_enabled() {
    let mut nic = ready();
    write(&mut nic, PF, 0x898, 0);
    write(&mut nic, PF, 0xaa0, 1);
    for _ in 0..2 {
        assert_eq!(nic.queue_event(Direction::Receive, 0).vectors, [(PF, 1)]);
    }
}

#[test]
fn software_raises_vectors_by_cause_set() {
    let mut nic = ready();
    write(&mut nic, PF, 0xaa0, 3);
    write(&mut nic, PF, 0xaa4, 1);
    assert_eq!(sent(&mut nic, PF, EICS, 1), [(PF, 1)]);
    assert_eq!(sent(&mut nic, PF, 0xa90, 2), [(PF, 2)]);
    assert_eq!(sent(&mut nic, PF, 0xa94, 1), [(PF, 1 << 32)]);
}

#[test]
fn intervals_are_in_microseconds() {
    let mut nic = nic();
    for (place, offset, vector) in [
        (PF, 0x820, 0),
        (PF, 0x87c, 23),
        (PF, 0x12300, 24),
        (PF, 0x1249c, 127),
        (Place::Vf(3), 0x820, 0),
        (Place::Vf(3), 0x828, 2),
    ] {
        assert_eq!(stored(&mut nic, place, offset, 0x8000_0000 | 500), 496, "{offset:#x}");
        assert_eq!(nic.interval(place, vector), 124);
    }
    assert_eq!((nic.interval(PF, 128), nic.interval(Place::Vf(3), 3), nic.interval(Place::Vf(99), 0)), (0, 0, 0));
}

/// X12: vectors of a VF.
#[test]
fn a_vf_has_three_vectors_of_its_own() {
    let (mut nic, vf) = (nic(), Place::Vf(1));
    write(&mut nic, PF, 0x898, 1 << 30);
    for (offset, value, expected) in [
        (0x110, u32::MAX, 7),
        (0x114, u32::MAX, 7),
        (0x108, 3, 3),
        (0x120, u32::MAX, 0x8383_8383),
        (0x12c, u32::MAX, 0x8383_8383),
        (0x140, u32::MAX, 0x83),
    ] {
        assert_eq!(stored(&mut nic, vf, offset, value), expected, "{offset:#x}");
        assert_eq!(peek(&nic, Place::Vf(2), offset), 0, "not those of another VF");
    }
    write(&mut nic, vf, 0x120, 0x8180_8180);
    assert_eq!(nic.owner(4), (vf, 0));
    assert_eq!(nic.queue_event(Direction::Transmit, 4).vectors, [(vf, 2)]);
    assert_eq!(nic.queue_event(Direction::Transmit, 5).vectors, [], "it masked itself");
    assert_eq!(sent(&mut nic, vf, 0x108, 2), [(vf, 2)]);
    assert_eq!(sent(&mut nic, vf, 0x104, u32::MAX), [(vf, 1)]);
    assert_eq!(read(&mut nic, vf, 0x100), 6);
    assert_eq!(read(&mut nic, vf, 0x100), 0);
    write(&mut nic, vf, 0x104, 6);
    write(&mut nic, vf, 0x100, 2);
    assert_eq!(peek(&nic, vf, 0x104), 4);
    write(&mut nic, vf, 0x10c, 7);
    assert_eq!((peek(&nic, vf, 0x108), peek(&nic, vf, 0x10c)), (0, 0));
}

/// X12: vectors of a VF.
#[test]
fn a_vector_beyond_the_third_of_a_vf_is_never_sent() {
    let (mut nic, vf) = (nic(), Place::Vf(0));
    write(&mut nic, vf, 0x108, 7);
    write(&mut nic, vf, 0x120, 0x83);
    assert_eq!(nic.queue_event(Direction::Receive, 0).vectors, []);
}
