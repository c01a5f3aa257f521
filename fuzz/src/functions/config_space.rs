//! A PF with VFs: configuration space in every width and alignment, the windows of its BARs, and resets.
//!
//! After each operation, the invariants of SR-IOV hold, the written register matches the model, and every change of
//! decoded windows or allowed messages was reported by an effect. Every few operations and at the end, all functions
//! are compared with the model. Occasionally, a device restored from the saved state replaces the device.
//!
//! The first byte of the input chooses the number of VFs. Operations follow, as `pci::testing::Op` decodes them,
//! except that some resets are restores. The device behind the functions has no backend.

use std::sync::LazyLock;

use pci::testing::{Model, OP_LEN, Observed, Op, Target};
use pci::{BarIndex, Device, Placement, Reach, Topology, WindowId};
use virtio_devices::testing::{FakeDevice, memory};
use virtio_devices::{Lifecycle, Memory, Message, NetSriov, Signals};

use crate::input::Seed;

const QUEUES: [u16; 3] = [256, 256, 64];

/// All functions are compared after this many operations and at the end, because that takes the most time.
const WHOLE: usize = 32;

static MEMORY: LazyLock<Memory> = LazyLock::new(memory);

/// Mostly small numbers of VFs, since every input creates a PF.
fn total_vfs(choice: u8) -> u16 {
    match choice {
        0xff => 257,
        choice => 1 + u16::from(choice % 9),
    }
}

/// The messages that the device may send, without their eventfds.
fn messages(device: &NetSriov<FakeDevice>) -> Vec<(pci::Rid, u64, u32)> {
    let mut messages = Vec::new();
    device.messages(Reach::Device, &mut messages);
    let plain = |Message { requester, address, data, .. }: &Message| (*requester, *address, *data);
    messages.iter().map(plain).collect()
}

fn windows(device: &impl Device) -> Vec<pci::Window> {
    let mut windows = Vec::new();
    device.windows(&mut windows);
    windows
}

fn device(placement: Placement) -> NetSriov<FakeDevice> {
    let total_vfs = placement.vfs.map_or(0, |vfs| vfs.total_vfs);
    let vfs = (0..total_vfs).map(|_| FakeDevice::new(&QUEUES)).collect();
    NetSriov::new(FakeDevice::new(&QUEUES), vfs, placement, &MEMORY).expect("a PF with VFs")
}

/// The operation for a restore: a reset with an odd length, which a reset ignores.
const RESTORE: [u8; OP_LEN] = [0xf, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn is_restore(op: &[u8]) -> bool {
    matches!(op, [kind, len, ..] if kind & RESTORE[0] == RESTORE[0] && len & RESTORE[1] == RESTORE[1])
}

/// A device restored from the saved state of `old`.
fn restored(old: &mut NetSriov<FakeDevice>, placement: Placement) -> NetSriov<FakeDevice> {
    let _ = old.pause();
    let state = old.save().expect("the device is paused").expect("a device with registers");
    let mut new = device(placement);
    new.restore(&state).expect("the state was saved by this device");
    assert_eq!(new.save().expect("a restored device is paused"), Some(state));
    let _ = new.resume();
    new
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the final numbers of VFs and of messages that may be sent.
fn run_to_end(input: &[u8]) -> (u16, usize) {
    let Some((choice, ops)) = input.split_first() else { return (0, 0) };
    let total_vfs = total_vfs(*choice);
    let placement = Topology::<()>::new(127).place(None, total_vfs).expect("an empty segment has room");
    let mut device = device(placement);
    let mut model = Model::new(&mut device, placement.rid);
    let mut observed = Observed::new(device, placement.rid);
    let mut before = (windows(&observed.device), messages(&observed.device));
    for (n, bytes) in ops.chunks_exact(OP_LEN).enumerate() {
        if is_restore(bytes) {
            observed.device = restored(&mut observed.device, placement);
            let after = (windows(&observed.device), messages(&observed.device));
            assert_eq!(after, before, "a restore changes windows or messages");
            continue;
        }
        let Some(op) = Op::decode(bytes).next() else { continue };
        let pci::Outcome { effects, stopping, .. } = observed.apply(op);
        model.apply(op);
        let compared = if n % WHOLE == WHOLE - 1 {
            model.compare(&observed.device, placement.rid)
        } else {
            model.compare_after(op, &observed.device, placement.rid)
        };
        if let Err(broken) = compared.and_then(|()| observed.check()) {
            panic!("after {op:x?}: {broken}");
        }
        let after = (windows(&observed.device), messages(&observed.device));
        assert!(effects.windows || before.0 == after.0, "{op:x?} changes windows without an effect: {after:x?}");
        assert!(effects.messages || before.1 == after.1, "{op:x?} changes messages without an effect: {after:x?}");
        before = after;
        assert!(stopping.is_empty(), "a device without a backend has no worker");
    }
    if let Err(broken) = model.compare(&observed.device, placement.rid) {
        panic!("at the end: {broken}");
    }
    (model.num_visible(), before.1.len())
}

fn config(target: Target, offset: u16, len: u8, value: u32) -> Op {
    Op::ConfigWrite { target, offset, len, value }
}

/// Operations by which Linux enables VFs: System Page Size, the VF BARs' sizes and addresses, NumVFs, VF Enable and VF
/// MSE.
fn enable(num_vfs: u16) -> Vec<Op> {
    let write = |offset, len, value| config(Target::Pf, offset, len, value);
    let mut ops = vec![write(4, 2, 6), write(0x120, 4, 1)];
    for (offset, address) in
        [(0x124, 0), (0x128, 0), (0x12c, 0x4000_0000), (0x130, 1), (0x134, 0x5000_0000), (0x138, 1)]
    {
        ops.extend([write(offset, 4, u32::MAX), write(offset, 4, address)]);
    }
    ops.extend([write(0x110, 2, num_vfs.into()), write(0x108, 2, 9)]);
    ops
}

/// Operations by which a driver starts a VF: Bus Master, MSI-X with a vector, features, a queue, DRIVER_OK. `vf` counts
/// from 0.
fn drive(vf: u16) -> Vec<Op> {
    let registers = |offset: u64, len, value| Op::MmioWrite {
        window: WindowId::VfBar(BarIndex::ALL[2]),
        offset: 0x2000 * u64::from(vf) + offset,
        len,
        value,
    };
    let table = |offset: u64, value| Op::MmioWrite {
        window: WindowId::VfBar(BarIndex::ALL[4]),
        offset: 0x1000 * u64::from(vf) + offset,
        len: 4,
        value,
    };
    // Features: only VERSION_1, which is bit 0 of word 1. Then queue 0, enabled at address 0, with vector 1.
    let features = [(0x14, 1, 1), (0x14, 1, 3), (0x08, 4, 1), (0x0c, 4, 1), (0x14, 1, 11)];
    let queue = [(0x16, 2, 0), (0x1a, 2, 1), (0x20, 4, 0x1000), (0x28, 4, 0x2000), (0x30, 4, 0x3000), (0x1c, 2, 1)];
    let mut ops = vec![config(Target::Vf(vf), 4, 2, 4)];
    ops.extend(features.into_iter().chain(queue).map(|(offset, len, value)| registers(offset, len, value)));
    ops.extend([table(16, 0xfee0_0000), table(24, 0x41), table(28, 0), config(Target::Vf(vf), 0x7e, 2, 0x8000)]);
    ops.push(registers(0x14, 1, 15));
    ops
}

/// Seeds: VFs enabled as by Linux, used by a driver, reset in each way, restored, and disabled.
pub fn seeds() -> Vec<Vec<u8>> {
    let seed = |choice: u8, ops: &[Vec<Op>]| {
        ops.concat().into_iter().fold(Seed::new().with([choice]), |seed, op| seed.with(op.encode())).done()
    };
    let pf = |offset, len, value| vec![config(Target::Pf, offset, len, value)];
    let flr = vec![config(Target::Vf(1), 0x48, 2, 0x8000)];
    let d3 = [pf(0x8c, 2, 3), pf(0x8c, 2, 0)].concat();
    vec![
        seed(7, &[enable(7)]),
        seed(7, &[enable(8), drive(0), drive(7)]),
        seed(7, &[enable(8), (1..7).flat_map(drive).collect()]),
        seed(7, &[enable(4), drive(1), flr, d3]),
        seed(2, &[enable(3), drive(2), pf(0x108, 2, 0), enable(2)]),
        seed(2, &[enable(3), drive(1), vec![Op::Reset]]),
        seed(3, &[enable(4), pf(0x48, 2, 0x8000)]),
        seed(3, &[enable(5)]),
        seed(0xff, &[enable(257), drive(256)]),
        [seed(7, &[enable(8), drive(0), drive(7)]), RESTORE.to_vec(), seed(0, &[pf(0x110, 2, 3)])[1..].to_vec()]
            .concat(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_enable_vfs_and_bring_up_their_drivers() {
        let reached: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(reached, [(7, 0), (8, 2), (8, 6), (4, 0), (2, 0), (0, 0), (0, 0), (0, 0), (257, 1), (8, 2)]);
    }
}
