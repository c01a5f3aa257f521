//! An X540, where it differs from an X550.

mod common;

use common::{MAC, PF, peek, read, stored, write};
use x550::{Model, Nic, NicState, RestoreError};

fn x540() -> Nic {
    Nic::with_model(Model::X540, MAC)
}

#[test]
fn a_new_nic_is_an_x550_unless_told_otherwise() {
    assert_eq!((Nic::new(MAC).model(), x540().model()), (Model::X550, Model::X540));
    assert_eq!(Nic::new(MAC), Nic::with_model(Model::X550, MAC));
    let mut nic = x540();
    let _ = nic.reset();
    assert_eq!(nic, x540());
    write(&mut nic, PF, 0, 1 << 26);
    assert_eq!(nic.model(), Model::X540);
}

/// X6: flash. Drivers keep the number of words in 16 bits, and refuse to read beyond it.
#[test]
fn drivers_can_count_the_words_of_the_flash() {
    for (mut nic, words) in [(Nic::new(MAC), 0x8000), (x540(), 0x4000)] {
        let size = read(&mut nic, PF, 0x10010) >> 11 & 0xf;
        assert_eq!(1u32 << (size + 6), words);
        assert!(words <= u16::MAX.into());
    }
}

/// X6: flash.
#[test]
fn the_driver_of_an_x540_reads_a_valid_checksum() {
    let mut nic = x540();
    let mut sum = 0u16;
    for word in (0..0x3f).chain([0x3f]) {
        let register = stored(&mut nic, PF, 0x10014, word << 2 | 1);
        assert_eq!(register & 0xffff, word << 2 | 2, "done");
        sum = sum.wrapping_add(u16::try_from(register >> 16).unwrap());
    }
    assert_eq!(sum, 0xbaba);
    assert_eq!(stored(&mut nic, PF, 0x10014, 0x15 << 2), 0x15 << 2, "no start");
    assert_eq!(stored(&mut nic, PF, 0x10014, 0xffff_ffff) >> 16, 0xffff, "the last word");
    assert_eq!(stored(&mut nic, PF, 0x10018, 0x1234_0055), 0x1234_0056, "a write ends at once");
    assert_eq!(stored(&mut nic, PF, 0x10014, 0x15 << 2 | 1) >> 16, 0xfafa, "and has no effect");
}

#[test]
fn an_x550_has_no_register_of_an_x540_alone() {
    for offset in [0x10014, 0x10018] {
        assert_eq!(stored(&mut Nic::new(MAC), PF, offset, 0x55), 0);
    }
}

/// X22: RSS of pools.
/// Offset, read back after all-ones: X550, X540.
#[test]
fn registers_of_rss_per_pool_are_those_of_an_x550() {
    for (offset, x550) in [(0x3400, u32::MAX), (0xee80, u32::MAX), (0x18000, u32::MAX), (0x19ffc, u32::MAX)] {
        assert_eq!(stored(&mut Nic::new(MAC), PF, offset, u32::MAX), x550, "{offset:#x}");
        assert_eq!(stored(&mut x540(), PF, offset, u32::MAX), 0, "{offset:#x}");
    }
    for offset in [0x5818, 0x5c00, 0x5c80, 0xee44] {
        assert_eq!(stored(&mut x540(), PF, offset, u32::MAX), u32::MAX, "{offset:#x}");
    }
}

/// X7: PHY.
#[test]
fn the_phy_of_each_model_has_its_identifier() {
    for (model, id) in [(Model::X550, 0x0221), (Model::X540, 0x0200)] {
        let mut nic = Nic::with_model(model, MAC);
        write(&mut nic, PF, 0x425c, 1 << 30 | 1 << 16 | 3);
        write(&mut nic, PF, 0x425c, 1 << 30 | 3 << 26 | 1 << 16);
        assert_eq!(read(&mut nic, PF, 0x4260) >> 16, id, "{model}");
    }
}

#[test]
fn the_state_of_the_other_model_is_refused() {
    let mut nic = x540();
    let state = Nic::new(MAC).save();
    let error = nic.restore(&state).unwrap_err();
    assert_eq!(error, RestoreError::Model(Model::X550, Model::X540));
    assert_eq!(error.to_string(), "saved state of an X550; this NIC is an X540");
    write(&mut nic, PF, 0x10014, 0x15 << 2 | 1);
    let saved = nic.save();
    let mut other = x540();
    other.restore(&saved).unwrap();
    assert_eq!((&other, peek(&other, PF, 0x10014)), (&nic, 0xfafa_0056));
    let foreign = NicState { registers: vec![(0x3400, 1)], ..x540().save() };
    assert_eq!(other.restore(&foreign), Err(RestoreError::Value("offsets of registers")));
}
