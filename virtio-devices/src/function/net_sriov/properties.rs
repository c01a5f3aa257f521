//! Properties that hold after any sequence of accesses (the numbers are those of the invariants in the tests' plan).

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Operation of a guest, or of the machine, on the device.
#[derive(Debug, Clone)]
enum Op {
    ConfigRead(Rid, u64, usize),
    ConfigWrite(Rid, u64, usize, u32),
    MemoryRead(WindowId, u64, usize),
    MemoryWrite(WindowId, u64, Vec<u8>),
    /// Operations that chance would rarely produce.
    Enable(u16),
    Init(Option<u16>),
    Refuse(Option<u16>, bool),
    Reset,
}

fn rid() -> impl Strategy<Value = Rid> {
    prop_oneof![3 => Just(PF), 5 => (0..TOTAL + 1).prop_map(vf_rid), 1 => any::<u16>().prop_map(Rid::from_bits)]
}

fn config_offset() -> impl Strategy<Value = u64> {
    prop_oneof![Just(4), Just(0x110), Just(0x108), Just(0x120), 0x40u64..0x100, 0x100u64..0x140, 0u64..0x1000]
}

fn window() -> impl Strategy<Value = WindowId> {
    let bar = prop_oneof![Just(2), Just(4), 0usize..6].prop_map(|bar| BarIndex::ALL[bar]);
    (any::<bool>(), bar).prop_map(|(vf, bar)| if vf { WindowId::VfBar(bar) } else { WindowId::Bar(bar) })
}

fn memory_offset() -> impl Strategy<Value = u64> {
    let place = prop_oneof![0u64..0x40, 0u64..0x40, Just(0x100), 0x200u64..0x208, 0xffcu64..0x1010, 0u64..0x2010];
    prop_oneof![
        9 => (0u64..u64::from(TOTAL) + 1, place).prop_map(|(slice, offset)| slice * SLICE + offset),
        1 => any::<u64>(),
    ]
}

fn len() -> impl Strategy<Value = usize> {
    prop_oneof![5 => Just(1), 5 => Just(2), 8 => Just(4), 1 => Just(8), 1 => 0usize..20]
}

fn value() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..0x20, Just(0x8000), Just(u32::MAX), any::<u32>()]
}

fn op() -> impl Strategy<Value = Op> {
    let function = || prop_oneof![Just(None), (0..TOTAL).prop_map(Some)];
    let data = len().prop_flat_map(|len| vec(prop_oneof![0u8..16, any::<u8>()], len));
    prop_oneof![
        4 => (rid(), config_offset(), len()).prop_map(|(rid, offset, len)| Op::ConfigRead(rid, offset, len)),
        8 => (rid(), config_offset(), len(), value())
            .prop_map(|(rid, at, len, value)| Op::ConfigWrite(rid, at, len, value)),
        4 => (window(), memory_offset(), len()).prop_map(|(window, offset, len)| Op::MemoryRead(window, offset, len)),
        8 => (window(), memory_offset(), data).prop_map(|(window, offset, data)| Op::MemoryWrite(window, offset, data)),
        2 => (0..TOTAL + 2).prop_map(Op::Enable),
        3 => function().prop_map(Op::Init),
        1 => (function(), any::<bool>()).prop_map(|(function, refuse)| Op::Refuse(function, refuse)),
        1 => Just(Op::Reset),
    ]
}

fn apply(device: &mut Nic, op: &Op) -> Effects {
    match op {
        Op::ConfigRead(rid, offset, len) => {
            Driver::new(device, *rid).config_read(*offset, *len);
            Effects::NONE
        }
        Op::ConfigWrite(rid, offset, len, value) => Driver::new(device, *rid).config_write(*offset, *len, *value),
        Op::MemoryRead(window, offset, len) => {
            device.mmio_read(*window, *offset, &mut vec![0; *len]);
            Effects::NONE
        }
        Op::MemoryWrite(window, offset, data) => device.mmio_write(*window, *offset, data).effects,
        Op::Enable(num_vfs) => enable(device, *num_vfs),
        Op::Init(None) => {
            pf(device).init();
            Effects::NONE
        }
        Op::Init(Some(index)) => {
            vf(device, *index).init();
            Effects::NONE
        }
        Op::Refuse(None, refuse) => {
            device.pf_mut().device_mut().refuse = *refuse;
            Effects::NONE
        }
        Op::Refuse(Some(index), refuse) => {
            device.vf_mut(VfIndex(*index)).unwrap().device_mut().refuse = *refuse;
            Effects::NONE
        }
        Op::Reset => device.reset(ResetKind::Conventional).effects,
    }
}

/// The VF whose own registers `op` accesses, if it accesses those of one VF.
fn vf_of(device: &Nic, op: &Op) -> Option<u16> {
    let index = match op {
        Op::ConfigRead(rid, ..) | Op::ConfigWrite(rid, ..) => {
            (0..device.functions.num_visible()).find(|index| vf_rid(*index) == *rid)?
        }
        Op::MemoryRead(WindowId::VfBar(bar), offset, _) | Op::MemoryWrite(WindowId::VfBar(bar), offset, _) => {
            device.functions.locate(*bar, *offset)?.0.0
        }
        _ => return None,
    };
    Some(index)
}

/// The state of each VF as its driver sees it, enabled or not.
fn states(device: &Nic) -> Vec<(Vec<u32>, Status, bool, [u8; 8])> {
    let vfs = (0..TOTAL).map(|index| device.vf(VfIndex(index)).unwrap());
    vfs.map(|vf| {
        let config = (0..0x100).step_by(4).map(|offset| vf.config().read(Dword::containing(offset))).collect();
        (config, vf.status(), vf.is_running(), vf.device().config)
    })
    .collect()
}

pub(super) fn check(device: &mut Nic) -> Result<(), TestCaseError> {
    let control = pf(device).config_read(SRIOV + 8, 2);
    let num_vfs = u16::try_from(pf(device).config_read(SRIOV + 0x10, 2)).unwrap();
    let visible = if control & 1 == 1 { num_vfs } else { 0 };
    // 4: exactly the VFs 0..NumVFs exist if VF Enable is set, and none otherwise.
    prop_assert_eq!(device.functions.num_visible(), visible);
    prop_assert!(visible <= TOTAL);
    let fresh = states(&idle());
    for index in 0..TOTAL {
        let hidden = index >= visible;
        let reads = device.config_read(vf_rid(index), Dword::containing(8));
        prop_assert_eq!(reads == ALL_ONES, hidden);
        if hidden {
            // A hidden VF is in its reset state: enabling needs no work.
            prop_assert_eq!(&states(device)[usize::from(index)], &fresh[usize::from(index)]);
        }
    }
    // 5: the windows of VFs exist iff they decode, and have a slice for each.
    let vf_windows: Vec<_> = windows(device).into_iter().filter(|(id, _)| matches!(id, WindowId::VfBar(_))).collect();
    if control & 9 != 9 || visible == 0 || !device.functions.is_powered() {
        prop_assert!(vf_windows.is_empty());
    }
    for (id, len) in vf_windows {
        let WindowId::VfBar(bar) = id else { continue };
        prop_assert_eq!(len, device.sriov().unwrap().aperture(bar) * u64::from(visible));
    }
    // Queues run iff the driver and the registers allow it.
    let powered = device.functions.is_powered();
    for (function, powered) in
        std::iter::once((device.pf(), true)).chain(device.functions.vfs().iter().map(|vf| (vf, powered)))
    {
        let status = function.status();
        let wanted = status.contains(Status::DRIVER_OK)
            && !status.intersects(Status::DEVICE_NEEDS_RESET | Status::FAILED)
            && function.config().bus_master()
            && powered;
        prop_assert_eq!(function.is_running(), wanted);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn any_accesses_keep_the_invariants(ops in vec(op(), 1..80)) {
        let mut device = idle();
        for op in &ops {
            let before = states(&device);
            let own = vf_of(&device, op);
            let windows_before = windows(&device);
            let effects = apply(&mut device, op);
            check(&mut device)?;
            // 11: an access to one VF changes no other.
            if let Some(own) = own {
                let after = states(&device);
                for index in (0..TOTAL).filter(|index| *index != own) {
                    prop_assert_eq!(&before[usize::from(index)], &after[usize::from(index)]);
                }
            }
            // 12: a window changes only with an effect that reports it.
            if !matches!(op, Op::Enable(_) | Op::Init(_)) {
                prop_assert!(effects.windows || windows(&device) == windows_before, "{:?}", op);
            }
            prop_assert_eq!(effects.reset, None);
        }
        // 10: a device after a reset equals a new one.
        let _ = device.reset(ResetKind::Conventional);
        prop_assert_eq!(states(&device), states(&idle()));
        prop_assert!(device.pf().config() == idle().pf().config());
    }
}
