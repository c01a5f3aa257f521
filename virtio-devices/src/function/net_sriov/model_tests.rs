//! The device matches its model after every step, while it is saved and restored into another one in between.

use pci::testing::{Model, Observed, Op, Target};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value;

use super::state::{everything, save};
use super::*;

/// Step of a test.
#[derive(Debug, Clone)]
enum Step {
    /// Operations of a guest.
    Ops(Vec<Op>),
    /// The host pauses and saves the device, and continues with a restored one.
    Restore,
    /// The host pauses and resumes the device.
    Pause,
}

fn write(target: Target, offset: u16, len: u8, value: u32) -> Op {
    Op::ConfigWrite { target, offset, len, value }
}

fn target() -> impl Strategy<Value = Target> {
    prop_oneof![Just(Target::Pf), (0..TOTAL + 1).prop_map(Target::Vf)]
}

fn len() -> impl Strategy<Value = u8> {
    prop_oneof![1 => Just(1u8), 1 => Just(2), 4 => Just(4), 1 => 0u8..6]
}

fn value() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..16, (0u32..32).prop_map(|bit| 1 << bit), Just(u32::MAX), any::<u32>()]
}

/// Registers with an effect: SR-IOV, the BARs, Command, Device Control, power, MSI-X.
fn register() -> impl Strategy<Value = (Target, u16, u8, u32)> {
    let sriov = prop_oneof![
        (Just(0x108u16), Just(2u8), prop_oneof![3 => Just(9u32), 1 => 0u32..16]),
        (Just(0x110), Just(2), 0u32..u32::from(TOTAL) + 2),
        (Just(0x120), Just(4), (0u32..13).prop_map(|bit| 1 << bit)),
        ((9u16..15).prop_map(|n| 0x100 + 4 * n), Just(4), value()),
        ((4u16..10).prop_map(|n| 4 * n), Just(4), value()),
        (Just(0x8c), Just(2), 0u32..4),
    ];
    let any = prop_oneof![
        (Just(0x04u16), Just(2u8), 0u32..8),
        (Just(0x7e), Just(2), prop_oneof![Just(0x8000u32), Just(0xc000), Just(0)]),
        (Just(0x48), Just(2), prop_oneof![4 => Just(0x10u32), 1 => Just(0x8000)]),
    ];
    prop_oneof![
        3 => sriov.prop_map(|(offset, len, value)| (Target::Pf, offset, len, value)),
        2 => (target(), any).prop_map(|(target, (offset, len, value))| (target, offset, len, value)),
    ]
}

fn window() -> impl Strategy<Value = WindowId> {
    let bar = prop_oneof![Just(2), Just(4), 0usize..6].prop_map(|bar| BarIndex::ALL[bar]);
    (any::<bool>(), bar).prop_map(|(vf, bar)| if vf { WindowId::VfBar(bar) } else { WindowId::Bar(bar) })
}

/// The common configuration, ISR, device configuration, doorbells, the MSI-X table and its pending bits, of any
/// function.
fn memory_offset() -> impl Strategy<Value = u64> {
    let place = prop_oneof![
        4 => 0u64..0x40, 1 => Just(0x100), 1 => 0x200u64..0x208, 1 => 0x1000u64..0x1010, 1 => 0x800u64..0x808
    ];
    (0u64..u64::from(TOTAL) + 1, place, prop_oneof![Just(SLICE), Just(0x1000u64), Just(0x1_0000)])
        .prop_map(|(slice, offset, stride)| slice * stride + offset)
}

fn access() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => register().prop_map(|(target, offset, len, value)| write(target, offset, len, value)),
        2 => (target(), 0u16..0x140, len(), value())
            .prop_map(|(target, offset, len, value)| write(target, offset, len, value)),
        1 => (target(), any::<u16>(), len()).prop_map(|(target, offset, len)| Op::ConfigRead { target, offset, len }),
        3 => (window(), memory_offset(), 0u8..17, value())
            .prop_map(|(window, offset, len, value)| Op::MmioWrite { window, offset, len, value }),
        1 => (window(), memory_offset(), 0u8..17)
            .prop_map(|(window, offset, len)| Op::MmioRead { window, offset, len }),
        1 => prop_oneof![9 => Just(write(Target::Pf, 0x110, 2, TOTAL.into())), 1 => Just(Op::Reset)],
    ]
}

/// Operations of a driver that start its function, which chance would rarely produce: Bus Master, MSI-X, features, two
/// queues.
fn drive(target: Target) -> Vec<Op> {
    let window = |bar: usize| match target {
        Target::Pf => (WindowId::Bar(BarIndex::ALL[bar]), 0),
        Target::Vf(index) => (WindowId::VfBar(BarIndex::ALL[bar]), index.into()),
    };
    let memory = |bar, slice: u64, offset, len, value| {
        let (window, index) = window(bar);
        Op::MmioWrite { window, offset: slice * index + offset, len, value }
    };
    let mut ops = vec![write(target, 4, 2, 6), write(target, 0x7e, 2, 0x8000)];
    for (offset, value) in [(0, 0xfee0_0000), (8, 0x41), (12, 0), (16, 0xfee0_0000), (24, 0x42)] {
        ops.push(memory(4, 0x1000, offset, 4, value));
    }
    let registers =
        [(0x14, 1, 0), (0x14, 1, 1), (0x14, 1, 3), (0x08, 4, 1), (0x0c, 4, 1), (0x14, 1, 11), (0x10, 2, 0)].into_iter();
    let queue = |n: u32| {
        let base = 0x1_0000 * n;
        [(0x16, 2, n), (0x1a, 2, 1), (0x20, 4, base), (0x28, 4, base + 0x8000), (0x30, 4, base + 0xc000), (0x1c, 2, 1)]
    };
    let registers = registers.chain(queue(0)).chain(queue(2)).chain([(0x14, 1, 15)]);
    ops.extend(registers.map(|(offset, len, value)| memory(2, SLICE, offset, len, value)));
    ops
}

/// All VFs with their memory, as Linux enables them.
fn enable_all() -> Vec<Op> {
    let pf =
        [(0x120, 4, 1), (0x12c, 4, 0x4000_0000), (0x134, 4, 0x5000_0000), (0x110, 2, u32::from(TOTAL)), (0x108, 2, 9)];
    pf.into_iter().map(|(offset, len, value)| write(Target::Pf, offset, len, value)).collect()
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => access().prop_map(|op| Step::Ops(vec![op])),
        1 => Just(Step::Ops(enable_all())),
        2 => target().prop_map(|target| Step::Ops(drive(target))),
        2 => Just(Step::Restore),
        1 => Just(Step::Pause),
    ]
}

fn fail(error: impl std::fmt::Display) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

/// Restores the state of `old` in a new device, which looks the same to a guest.
fn restored(old: &mut Nic) -> Result<Nic, TestCaseError> {
    let ran = (running(old), old.pf().is_running());
    let state = save(old);
    let mut new = idle();
    new.restore(&state).map_err(fail)?;
    prop_assert_eq!(&save(&mut new), &state);
    prop_assert_eq!(everything(&mut new), everything(old));
    new.resume();
    prop_assert_eq!((running(&new), new.pf().is_running()), ran);
    Ok(new)
}

fn agree(model: &Model, observed: &mut Observed<Nic>, what: &str) -> Result<(), TestCaseError> {
    let agreed = model.compare(&observed.device, PF).and_then(|()| observed.check());
    agreed.map_err(|broken| fail(format!("after {what}: {broken}")))?;
    properties::check(&mut observed.device)
}

/// Applies `steps` to a device and to its model, and compares them after each.
fn run(steps: &[Step]) -> Result<Observed<Nic>, TestCaseError> {
    let mut device = idle();
    let mut model = Model::new(&mut device, PF);
    let mut observed = Observed::new(device, PF);
    for step in steps {
        match step {
            Step::Ops(ops) => {
                for op in ops {
                    let _ = observed.apply(*op);
                    model.apply(*op);
                    agree(&model, &mut observed, &format!("{op:x?}"))?;
                }
            }
            Step::Restore => {
                observed.device = restored(&mut observed.device)?;
                agree(&model, &mut observed, "a restore")?;
            }
            Step::Pause => {
                observed.device.pause();
                agree_paused(&model, &observed)?;
                observed.device.resume();
                agree(&model, &mut observed, "a pause")?;
            }
        }
    }
    Ok(observed)
}

fn agree_paused(model: &Model, observed: &Observed<Nic>) -> Result<(), TestCaseError> {
    model.compare(&observed.device, PF).and_then(|()| observed.check()).map_err(fail)?;
    prop_assert!(running(&observed.device).is_empty() && !observed.device.pf().is_running());
    Ok(())
}

/// A change to one place of a document: the place, the kind of change, and a number.
type Mutation = (u32, u8, u64);

/// The number of values in `value`, including itself.
fn count(value: &Value) -> u32 {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum::<u32>(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Calls `change` with the `n`-th value.
fn at(value: &mut Value, n: &mut u32, change: &mut impl FnMut(&mut Value)) {
    if *n == 0 {
        change(value);
        *n = u32::MAX;
        return;
    }
    *n -= 1;
    let inner: Vec<_> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(fields) => fields.values_mut().collect(),
        _ => Vec::new(),
    };
    for value in inner {
        if *n != u32::MAX {
            at(value, n, change);
        }
    }
}

fn mutate(document: &mut Value, (place, kind, number): Mutation) {
    let mut place = place % count(document);
    at(document, &mut place, &mut |value| match (value, kind % 4) {
        (Value::Bool(on), _) => *on = !*on,
        (Value::Array(items), 0) => drop(items.pop()),
        (Value::Array(items), 1) if !items.is_empty() => items.push(items[0].clone()),
        (Value::Array(items), 2) => items.reverse(),
        (Value::Object(fields), _) => drop(fields.remove("sriov").or_else(|| fields.remove("vfs"))),
        (value @ Value::Null, _) => *value = Value::Array(Vec::new()),
        (value @ Value::Number(_), 0) => *value = (number % 17).into(),
        (value @ Value::Number(_), 1) => *value = (1u64 << (number % 64)).into(),
        (value @ Value::Number(_), 2) => *value = (number & 0xffff).into(),
        (value, _) => *value = number.into(),
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// G64: configuration space, windows and messages before and after; B22: the saved state determines everything.
    #[test]
    fn device_and_model_agree_after_every_step(steps in vec(step(), 1..40)) {
        let mut observed = run(&steps)?;
        restored(&mut observed.device)?;
    }

    #[test]
    fn mutated_state_is_refused_or_reachable_by_a_guest(
        steps in vec(step(), 1..12),
        mutations in vec(any::<Mutation>(), 1..4),
    ) {
        let mut document = serde_json::to_value(save(&mut run(&steps)?.device)).unwrap();
        for mutation in mutations {
            mutate(&mut document, mutation);
        }
        let Ok(state) = serde_json::from_value::<DeviceState>(document) else { return Ok(()) };
        let mut observed = Observed::new(idle(), PF);
        if observed.device.restore(&state).is_err() {
            prop_assert_eq!(everything(&mut observed.device), everything(&mut idle()));
            prop_assert_eq!(save(&mut observed.device), save(&mut idle()));
            return Ok(());
        }
        observed.check().map_err(fail)?;
        observed.device.resume();
        properties::check(&mut observed.device)?;
        restored(&mut observed.device)?;
        let _ = observed.device.reset(ResetKind::Conventional);
        prop_assert_eq!(everything(&mut observed.device), everything(&mut idle()));
    }
}
