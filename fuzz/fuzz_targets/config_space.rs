//! Arbitrary accesses to a PF with VFs: to configuration space in every width and alignment, to the windows of its BARs, and
//! resets. After each of them the invariants of SR-IOV hold, the device is what the model says, and what it decodes can be asked for.
//!
//! The first byte of the input chooses the number of VFs; operations follow as `pci::testing::Op` decodes them. There are no
//! threads, sockets or timers: the device behind the functions is one without a backend.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pci::Topology;
use pci::testing::{Model, Observed, Op};
use virtio_devices::testing::{FakeDevice, memory};
use virtio_devices::{NetSriov, VirtioPci};

/// Small numbers of VFs, and one that takes two buses.
const TOTAL_VFS: [u16; 8] = [1, 2, 3, 4, 7, 8, 9, 300];

fuzz_target!(|input: &[u8]| {
    let Some((choice, ops)) = input.split_first() else { return };
    let total_vfs = TOTAL_VFS[usize::from(choice % 8)];
    let placement = Topology::<()>::new(127).place(None, total_vfs).expect("an empty segment has room");
    let vfs = (0..total_vfs).map(|_| FakeDevice::new(&[256, 256, 64])).collect();
    let mut device = NetSriov::new(FakeDevice::new(&[256, 256, 64]), vfs, placement, &memory()).expect("a PF with VFs");
    let mut model = Model::new(&mut device, placement.rid);
    let mut observed = Observed::new(device, placement.rid);
    let (mut doorbells, mut messages) = (Vec::new(), Vec::new());
    for op in Op::decode(ops) {
        let _ = observed.apply(op);
        model.apply(op);
        if let Err(broken) = observed.check().and_then(|()| model.compare(&observed.device, placement.rid)) {
            panic!("after {op:x?}: {broken}");
        }
        doorbells.clear();
        messages.clear();
        observed.device.doorbells(&mut doorbells);
        observed.device.messages(&mut messages);
        assert!(observed.device.take_stopping().is_empty(), "a device without a backend has no worker");
    }
});
