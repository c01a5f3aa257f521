//! Whatever a guest does to a PF with VFs, in whatever order: the invariants hold after each step.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use pci::testing::{Model, OP_LEN, Observed, Op, Target};
use pci::{Device, Dword, DwordWrite, Role};
use proptest::prelude::*;

mod bare;
use bare::{Bare, PF, space};

fn run(total_vfs: u16, bytes: &[u8]) -> Result<Observed<Bare>, TestCaseError> {
    let mut observed = Bare::new(total_vfs);
    for op in Op::decode(bytes) {
        let before = [4, 0x108, 0x10c, 0x110, 0x114, 0x120]
            .map(|offset| observed.device.config_read(PF, Dword::containing(offset)));
        let was_enabled = before[1] & 1 != 0;
        let effects = observed.apply(op);
        observed.check().map_err(|broken| TestCaseError::fail(format!("after {op:x?}: {broken}")))?;
        let read = |offset| observed.device.config_read(PF, Dword::containing(offset));
        if was_enabled && read(0x108) & 1 != 0 && effects.reset.is_none() {
            prop_assert_eq!((read(0x110), read(0x120)), (before[3], before[5]), "locked while VFs exist: {:x?}", op);
        }
        prop_assert_eq!(effects.vfs.is_some(), was_enabled != (read(0x108) & 1 != 0), "{:x?}", op);
    }
    Ok(observed)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// B2, B3: accesses of any width anywhere; what exists follows from registers after their masks.
    #[test]
    fn the_invariants_hold_after_any_sequence(
        total_vfs in prop_oneof![1u16..12, Just(255), Just(256), Just(300)],
        bytes in prop::collection::vec(any::<u8>(), 0..OP_LEN * 80),
    ) {
        run(total_vfs, &bytes)?;
    }

    #[test]
    fn device_and_model_agree_after_every_step(
        total_vfs in prop_oneof![1u16..12, Just(255), Just(300)],
        bytes in prop::collection::vec(any::<u8>(), 0..OP_LEN * 80),
    ) {
        let mut observed = Bare::new(total_vfs);
        let mut model = Model::new(&mut observed.device, PF);
        for op in Op::decode(&bytes) {
            let _ = observed.apply(op);
            model.apply(op);
            model.compare(&observed.device, PF).map_err(|what| TestCaseError::fail(format!("after {op:x?}: {what}")))?;
        }
    }

    #[test]
    fn a_reset_undoes_any_sequence(bytes in prop::collection::vec(any::<u8>(), 0..OP_LEN * 40)) {
        let mut observed = run(8, &bytes)?;
        let _ = observed.apply(Op::Reset);
        let fresh = Bare::new(8).device;
        prop_assert_eq!(&observed.device.pf, &fresh.pf);
        prop_assert_eq!(&observed.device.vfs, &fresh.vfs);
    }

    #[test]
    fn an_access_to_one_vf_leaves_the_others_alone(
        index in 0u16..8,
        bytes in prop::collection::vec(any::<u8>(), 0..OP_LEN * 40),
    ) {
        let mut observed = Bare::new(8);
        let _ = observed.enable_vfs(8);
        for op in Op::decode(&bytes) {
            if let Op::ConfigWrite { offset, len, value, .. } = op {
                let data = value.to_le_bytes();
                let _ = observed.config_write(Target::Vf(index), offset, &data[..usize::from(len).min(4)]);
            }
        }
        let fresh = space(Role::Vf);
        for (_, vf) in observed.device.vfs.iter().enumerate().filter(|(other, _)| *other != usize::from(index)) {
            prop_assert_eq!(vf, &fresh);
        }
        prop_assert_eq!(observed.device.pf.sriov().unwrap().num_visible(), 8);
    }

    #[test]
    fn a_dword_write_equals_its_byte_writes(offset in 0u16..0x400, value: u32) {
        // Control may be set by the first byte already; System Page Size holds one bit of the whole dword.
        prop_assume!(!matches!(offset, 0x42 | 0x48));
        let mut whole = space(Role::Plain);
        let mut bytes = whole.clone();
        let reg = Dword::containing(offset * 4);
        let _ = whole.write(reg, DwordWrite::full(value));
        for byte in [2, 0, 3, 1] {
            let _ = bytes.write(reg, DwordWrite::new(value, 1 << byte));
        }
        prop_assert_eq!(whole, bytes);
    }
}

/// G24: VFs that are enabled again.
#[test]
fn vfs_that_are_enabled_again_are_new() {
    let mut observed = Bare::new(8);
    let _ = observed.enable_vfs(4);
    let _ = observed.config_write(Target::Vf(2), 4, &[4, 0]);
    let _ = observed.disable_vfs();
    let _ = observed.enable_vfs(7);
    assert_eq!(observed.device.vfs, Bare::new(8).device.vfs);
    observed.check().unwrap();
}

/// G19: writes to VFs that do not exist.
#[test]
fn hidden_vfs_drop_writes() {
    let mut observed = Bare::new(8);
    let _ = observed.enable_vfs(4);
    assert!(observed.config_write(Target::Vf(4), 4, &[4, 0]).is_none());
    assert_eq!(observed.device.vfs, Bare::new(8).device.vfs);
}
