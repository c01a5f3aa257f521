//! Operations of a guest: sequences that enable, use, reset and move VFs, which random bytes seldom produce.

use pci_sriov::testing::{OP_LEN, Op, Target};
use pci_sriov::{BarIndex, WindowId};
use proptest::prelude::*;

fn write(target: Target, offset: u16, len: u8, value: u32) -> Op {
    Op::ConfigWrite { target, offset, len, value }
}

fn pf(offset: u16, len: u8, value: u32) -> Op {
    write(Target::Pf, offset, len, value)
}

/// A VF among the first ones, at the end of the first bus, or any.
fn vf() -> impl Strategy<Value = Target> {
    prop_oneof![8 => 0u16..12, 1 => 253u16..258, 1 => any::<u16>()].prop_map(Target::Vf)
}

fn address() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), Just(u32::MAX), 0u32..0x100, any::<u32>(), (0u32..0x1000).prop_map(|page| page << 20)]
}

/// Writes of meaningful values to registers of the PF.
fn pf_register() -> impl Strategy<Value = Op> {
    let control = prop_oneof![
        4 => Just(9u32), 2 => Just(0), 1 => Just(1), 1 => Just(8), 2 => Just(0x10), 2 => Just(0x19), 1 => any::<u32>()
    ];
    let width = || prop_oneof![1 => Just(1u8), 4 => Just(2), 1 => Just(4)];
    let num_vfs = prop_oneof![6 => 0u32..12, 1 => 250u32..310, 1 => any::<u32>()];
    let page_size = prop_oneof![4 => (0u32..13).prop_map(|bit| 1 << bit), 1 => any::<u32>()];
    let register = |first: u16| (0u16..6).prop_map(move |n| first + 4 * n);
    prop_oneof![
        6 => (control, width()).prop_map(|(value, len)| pf(0x108, len, value)),
        4 => (num_vfs, width()).prop_map(|(value, len)| pf(0x110, len, value)),
        2 => page_size.prop_map(|value| pf(0x120, 4, value)),
        4 => (register(0x124), address()).prop_map(|(offset, value)| pf(offset, 4, value)),
        2 => (register(0x10), address()).prop_map(|(offset, value)| pf(offset, 4, value)),
        2 => any::<u32>().prop_map(|value| pf(0x04, 2, value)),
        1 => any::<u32>().prop_map(|value| pf(0x0c, 4, value)),
        1 => prop_oneof![Just(0x8000u32), any::<u32>()].prop_map(|value| pf(0x48, 2, value)),
        2 => (0u32..4).prop_map(|state| pf(0x8c, 1, state)),
        1 => (prop_oneof![Just(0x50u16), Just(0x68), Just(0x70)], any::<u32>())
            .prop_map(|(reg, value)| pf(reg, 2, value)),
        1 => any::<u32>().prop_map(|value| pf(0x7c, 4, value)),
    ]
}

/// Writes of meaningful values to registers of VFs.
fn vf_register() -> impl Strategy<Value = Op> {
    let place = prop_oneof![3 => Just((0x04, 2)), 1 => Just((0x48, 2)), 2 => Just((0x7e, 2)), 1 => Just((0x00, 4))];
    (vf(), place, any::<u32>()).prop_map(|(target, (offset, len), value)| write(target, offset, len, value))
}

/// Accesses to the MSI-X tables.
fn memory() -> impl Strategy<Value = Op> {
    let bar = BarIndex::new(4).unwrap();
    let window = prop_oneof![1 => Just(WindowId::Bar(bar)), 3 => Just(WindowId::VfBar(bar))];
    let len = prop_oneof![4 => Just(4u8), 1 => Just(8), 1 => 0u8..17];
    (window, 0u64..12, 0u64..0x40, len, any::<u32>()).prop_map(|(window, slice, offset, len, value)| Op::MmioWrite {
        window,
        offset: slice << 12 | offset,
        len,
        value,
    })
}

/// A single operation.
pub(crate) fn op() -> impl Strategy<Value = Op> {
    let any_access = (prop_oneof![Just(Target::Pf), vf()], 0u16..0x160, 0u8..6, any::<u32>());
    prop_oneof![
        8 => pf_register(),
        4 => vf_register(),
        2 => memory(),
        2 => any_access.prop_map(|(target, offset, len, value)| write(target, offset, len, value)),
        2 => any::<[u8; OP_LEN]>().prop_map(|bytes| Op::decode(&bytes).next().unwrap()),
        1 => Just(Op::Reset),
    ]
}

/// Number of VFs of a PF.
pub(crate) fn total_vfs() -> impl Strategy<Value = u16> {
    prop_oneof![6 => 1u16..12, 1 => Just(255), 1 => Just(256), 1 => Just(300)]
}
