//! Any sequence of a guest's operations on a PF with VFs: the invariants hold after each step.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use pci_sriov::testing::{Model, Observed, Op, Target};
use pci_sriov::{Device as _, Dword, DwordWrite, Rid, Role, Window};
use proptest::collection::vec;
use proptest::prelude::*;

mod bare;
#[path = "bare/ops.rs"]
mod ops;
use bare::{Bare, Device, space};
use ops::{op, total_vfs};

/// Attachment of the device.
#[derive(Debug, Clone, Copy)]
enum Kind {
    OnRootBus,
    BehindPort,
}

impl Kind {
    fn device(self, total_vfs: u16) -> Observed<Device> {
        match self {
            Self::OnRootBus => Bare::with_vfs(total_vfs),
            Self::BehindPort => Bare::endpoint(Rid::from_bits(0x100), total_vfs),
        }
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::OnRootBus), Just(Kind::BehindPort)]
}

fn windows(device: &Device) -> Vec<Window> {
    let mut out = Vec::new();
    device.windows(&mut out);
    out
}

fn run(kind: Kind, total_vfs: u16, ops: &[Op]) -> Result<Observed<Device>, TestCaseError> {
    let mut observed = kind.device(total_vfs);
    for op in ops {
        let pf = observed.device.rid();
        let read = |observed: &Observed<Device>, offset| observed.device.config_read(pf, Dword::containing(offset));
        let locked = |observed: &Observed<Device>| [0x110, 0x114, 0x120].map(|offset| read(observed, offset));
        let (before, windows_before) = (locked(&observed), windows(&observed.device));
        let was_enabled = read(&observed, 0x108) & 1 != 0;
        let effects = observed.apply(*op).effects;
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

/// The same device, created again from its saved state.
fn restored(kind: Kind, observed: &Observed<Device>) -> Result<Device, TestCaseError> {
    let refused = |error| TestCaseError::fail(format!("its own state is refused: {error}"));
    let old = &observed.device;
    let mut new = kind.device(u16::try_from(old.vfs().len()).unwrap()).device;
    for (new, old) in new.functions_mut().zip(old.functions()) {
        new.0.restore(&old.0.save()).map_err(refused)?;
    }
    Ok(new)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// B2, B3: accesses of any width anywhere; registers after their masks determine what exists.
    #[test]
    fn the_invariants_hold_after_any_sequence(kind in kind(), total_vfs in total_vfs(), ops in vec(op(), 0..80)) {
        run(kind, total_vfs, &ops)?;
    }

    #[test]
    fn device_and_model_agree_after_every_step(
        kind in kind(),
        total_vfs in total_vfs(),
        ops in vec((op(), prop::bool::weighted(0.1)), 0..40),
    ) {
        let mut observed = kind.device(total_vfs);
        let pf = observed.device.rid();
        let mut model = Model::new(&mut observed.device, pf);
        for (op, restores) in ops {
            let _ = observed.apply(op);
            if restores {
                observed.device = restored(kind, &observed)?;
            }
            model.apply(op);
            let agree = model.compare_after(op, &observed.device, pf);
            let agree = agree.and_then(|()| model.compare(&observed.device, pf));
            agree.map_err(|what| TestCaseError::fail(format!("after {op:x?}: {what}")))?;
        }
    }

    /// B22: enabled VFs are restored unchanged; all state is saved.
    #[test]
    fn a_restored_device_is_the_one_that_was_saved(kind in kind(), total_vfs in total_vfs(), ops in vec(op(), 0..60)) {
        let observed = run(kind, total_vfs, &ops)?;
        let new = restored(kind, &observed)?;
        prop_assert_eq!(new.pf(), observed.device.pf());
        prop_assert_eq!(new.vfs(), observed.device.vfs());
        prop_assert_eq!(windows(&new), windows(&observed.device));
    }

    #[test]
    fn a_reset_undoes_any_sequence(kind in kind(), ops in vec(op(), 0..60)) {
        let mut observed = run(kind, 8, &ops)?;
        let _ = observed.apply(Op::Reset);
        let fresh = kind.device(8).device;
        prop_assert_eq!(observed.device.pf(), fresh.pf());
        prop_assert_eq!(observed.device.vfs(), fresh.vfs());
    }

    #[test]
    fn an_access_to_one_vf_leaves_the_others_alone(index in 0u16..8, ops in vec(op(), 0..40)) {
        let mut observed = Bare::with_vfs(8);
        let _ = observed.enable_vfs(8);
        for op in ops {
            if let Op::ConfigWrite { offset, len, value, .. } = op {
                let _ = observed.apply(Op::ConfigWrite { target: Target::Vf(index), offset, len, value });
            }
        }
        let fresh = Bare::new(Role::Vf);
        for (_, vf) in observed.device.vfs().iter().enumerate().filter(|(other, _)| *other != usize::from(index)) {
            prop_assert_eq!(vf, &fresh);
        }
        prop_assert_eq!(observed.device.sriov().unwrap().num_visible(), 8);
    }

    #[test]
    fn a_dword_write_equals_its_byte_writes(offset in 0u16..0x400, value: u32) {
        // The first byte may set Control already; System Page Size needs one bit of the whole dword.
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
    let mut observed = Bare::with_vfs(8);
    let _ = observed.enable_vfs(4);
    let _ = observed.config_write(Target::Vf(2), 4, &[4, 0]);
    let _ = observed.disable_vfs();
    let _ = observed.enable_vfs(7);
    assert_eq!(observed.device.vfs(), Bare::with_vfs(8).device.vfs());
    observed.check().unwrap();
}

/// G19: writes to VFs that do not exist.
#[test]
fn hidden_vfs_drop_writes() {
    let mut observed = Bare::with_vfs(8);
    let _ = observed.enable_vfs(4);
    assert!(observed.config_write(Target::Vf(4), 4, &[4, 0]).is_none());
    assert_eq!(observed.device.vfs(), Bare::with_vfs(8).device.vfs());
}
