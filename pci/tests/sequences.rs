//! Whatever a guest does to a PF with VFs, in whatever order: the invariants hold after each step.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use pci::testing::{Model, Observed, Op, Target};
use pci::{Device, Dword, DwordWrite, Role, Window};
use proptest::collection::vec;
use proptest::prelude::*;

mod bare;
#[path = "bare/ops.rs"]
mod ops;
use bare::{Bare, PF, space};
use ops::{op, total_vfs};

fn windows(device: &Bare) -> Vec<Window> {
    let mut out = Vec::new();
    device.windows(&mut out);
    out
}

fn run(total_vfs: u16, ops: &[Op]) -> Result<Observed<Bare>, TestCaseError> {
    let mut observed = Bare::new(total_vfs);
    for op in ops {
        let read = |observed: &Observed<Bare>, offset| observed.device.config_read(PF, Dword::containing(offset));
        let locked = |observed: &Observed<Bare>| (read(observed, 0x110), read(observed, 0x120));
        let (before, windows_before) = (locked(&observed), windows(&observed.device));
        let was_enabled = read(&observed, 0x108) & 1 != 0;
        let effects = observed.apply(*op);
        observed.check().map_err(|broken| TestCaseError::fail(format!("after {op:x?}: {broken}")))?;
        let is_enabled = read(&observed, 0x108) & 1 != 0;
        if was_enabled && is_enabled && effects.reset.is_none() {
            prop_assert_eq!(locked(&observed), before, "locked while VFs exist: {:x?}", op);
        }
        prop_assert_eq!(effects.vfs.is_some(), was_enabled != is_enabled, "{:x?}", op);
        prop_assert!(effects.windows || windows(&observed.device) == windows_before, "moved in silence: {:x?}", op);
    }
    Ok(observed)
}

/// The same device, made anew from what it saves.
fn restored(observed: &Observed<Bare>) -> Result<Bare, TestCaseError> {
    let refused = |error| TestCaseError::fail(format!("its own state is refused: {error}"));
    let Bare { pf, vfs } = &observed.device;
    let mut new = Bare::new(u16::try_from(vfs.len()).unwrap()).device;
    new.pf.restore(&pf.save()).map_err(refused)?;
    for (new, vf) in new.vfs.iter_mut().zip(vfs) {
        new.restore(&vf.save()).map_err(refused)?;
    }
    Ok(new)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// B2, B3: accesses of any width anywhere; what exists follows from registers after their masks.
    #[test]
    fn the_invariants_hold_after_any_sequence(total_vfs in total_vfs(), ops in vec(op(), 0..80)) {
        run(total_vfs, &ops)?;
    }

    #[test]
    fn device_and_model_agree_after_every_step(
        total_vfs in total_vfs(),
        ops in vec((op(), prop::bool::weighted(0.1)), 0..40),
    ) {
        let mut observed = Bare::new(total_vfs);
        let mut model = Model::new(&mut observed.device, PF);
        for (op, restores) in ops {
            let _ = observed.apply(op);
            if restores {
                observed.device = restored(&observed)?;
            }
            model.apply(op);
            let agree = model.compare_after(op, &observed.device, PF).and_then(|()| model.compare(&observed.device, PF));
            agree.map_err(|what| TestCaseError::fail(format!("after {op:x?}: {what}")))?;
        }
    }

    /// B22: VFs that are enabled come back as they were; there is no state beside what is saved.
    #[test]
    fn a_restored_device_is_the_one_that_was_saved(total_vfs in total_vfs(), ops in vec(op(), 0..60)) {
        let observed = run(total_vfs, &ops)?;
        let new = restored(&observed)?;
        prop_assert_eq!(&new.pf, &observed.device.pf);
        prop_assert_eq!(&new.vfs, &observed.device.vfs);
        prop_assert_eq!(windows(&new), windows(&observed.device));
    }

    #[test]
    fn a_reset_undoes_any_sequence(ops in vec(op(), 0..60)) {
        let mut observed = run(8, &ops)?;
        let _ = observed.apply(Op::Reset);
        let fresh = Bare::new(8).device;
        prop_assert_eq!(&observed.device.pf, &fresh.pf);
        prop_assert_eq!(&observed.device.vfs, &fresh.vfs);
    }

    #[test]
    fn an_access_to_one_vf_leaves_the_others_alone(index in 0u16..8, ops in vec(op(), 0..40)) {
        let mut observed = Bare::new(8);
        let _ = observed.enable_vfs(8);
        for op in ops {
            if let Op::ConfigWrite { offset, len, value, .. } = op {
                let _ = observed.apply(Op::ConfigWrite { target: Target::Vf(index), offset, len, value });
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
