//! For any accesses of a guest, the pages have the same values as exits.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use pci::testing::{OP_LEN, Op, Target};
use pci::{Access, ConfigTarget, DwordWrite, Topology};
use proptest::prelude::*;
use virtio_devices::testing::{FakeDevice, memory};
use virtio_devices::{DoorbellPage, FileMapping, NetSriov};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::kvm::MsiRoute;
use crate::pci_host::slot::{PciHost, Slot};
use crate::pci_host::wiring::Wiring;

/// A VM that records the pages it shows, or refuses to show any.
#[derive(Clone, Default)]
struct Vm {
    shown: Arc<Mutex<BTreeMap<u32, Shown>>>,
    changes: Arc<Mutex<usize>>,
    refuses: Arc<Mutex<bool>>,
}

impl Wiring for Vm {
    fn set_irq_routes(&self, _routes: &[MsiRoute]) -> io::Result<()> {
        Ok(())
    }

    fn attach_irqfd(&self, _eventfd: &EventFd, _gsi: u32) -> io::Result<()> {
        Ok(())
    }

    fn attach_pin(&self, _trigger: &EventFd, _resample: &EventFd, _gsi: u32) -> io::Result<()> {
        panic!("the device has no pin")
    }

    fn detach_irqfd(&self, _eventfd: &EventFd, _gsi: u32) -> io::Result<()> {
        Ok(())
    }

    fn attach_ioeventfd(&self, _eventfd: &EventFd, _address: u64) -> io::Result<()> {
        Ok(())
    }

    fn detach_ioeventfd(&self, _eventfd: &EventFd, _address: u64) -> io::Result<()> {
        Ok(())
    }

    fn show_doorbell(&self, _memory_slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()> {
        assert!(page.is_none(), "the device has no such page");
        Ok(())
    }

    fn show_memory(&self, _memory_slot: u32, memory: Option<(u64, &Arc<FileMapping>)>) -> io::Result<()> {
        assert!(memory.is_none(), "the device has no memory");
        Ok(())
    }

    fn show_config(&self, memory_slot: u32, pages: Option<&Shown>) -> io::Result<()> {
        // Hiding never fails.
        if *self.refuses.lock() && pages.is_some() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        *self.changes.lock() += 1;
        let mut shown = self.shown.lock();
        shown.remove(&memory_slot);
        shown.extend(pages.map(|pages| (memory_slot, pages.clone())));
        Ok(())
    }
}

struct Rig {
    slot: Arc<Slot>,
    placement: Placement,
    vm: Vm,
}

impl Rig {
    fn new(total_vfs: u16, vm: Vm) -> Self {
        let placement = Topology::<()>::new(127).place(Some(3), total_vfs).unwrap();
        let vfs = (0..total_vfs).map(|_| FakeDevice::new(&[64, 64, 64])).collect();
        let device = NetSriov::new(FakeDevice::new(&[64, 64, 64]), vfs, placement, &memory()).unwrap();
        let host = Arc::new(PciHost::default());
        host.set_wiring(Some(Box::new(vm.clone())));
        let slot = Slot::new(Box::new(device), placement, host).unwrap();
        slot.reconcile();
        Self { slot, placement, vm }
    }

    fn rid(&self, target: Target) -> Rid {
        match target {
            Target::Pf => self.placement.rid,
            Target::Vf(n) => self.placement.rid.wrapping_add(self.placement.vfs.unwrap().first_vf_offset + n),
        }
    }

    fn write(&self, target: Target, offset: u16, value: u32) {
        self.slot.config_write(self.rid(target), Dword::containing(offset), DwordWrite::full(value));
    }

    fn apply(&self, op: Op) {
        let mut data = [0; 16];
        match op {
            Op::ConfigWrite { target, offset, len, value } => {
                if let Some(access) = Access::decode(offset.into(), len.into()) {
                    let write = access.write(&value.to_le_bytes());
                    // The existing VFs, and the first that does not exist.
                    let target = if let Target::Vf(n) = target { Target::Vf(n % 5) } else { target };
                    self.slot.config_write(self.rid(target), access.dword(), write);
                }
            }
            Op::MmioWrite { window, offset, len, value } => {
                data.fill(value.to_le_bytes()[0]);
                self.slot.mmio_write(window, offset, &data[..usize::from(len).min(16)]);
            }
            Op::MmioRead { window, offset, len } => {
                self.slot.mmio_read(window, offset, &mut data[..usize::from(len).min(16)]);
            }
            Op::ConfigRead { .. } => {}
            Op::Reset => self.slot.reset(),
        }
    }

    /// The functions with shown pages, after comparing the pages with reads through exits.
    fn compared(&self) -> Result<Vec<Rid>, String> {
        let mut functions = Vec::new();
        for shown in self.vm.shown.lock().values() {
            let pages = shown.memory.as_volatile_slice();
            for n in 0..u16::try_from(shown.len / PAGE).unwrap() {
                let rid = shown.first.wrapping_add(n);
                for reg in Dword::all() {
                    let place = shown.offset as usize + usize::from(n) * 4096 + usize::from(reg.offset());
                    let load: u32 = pages.load(place, Ordering::Relaxed).unwrap();
                    let exit = self.slot.config_read(rid, reg);
                    if load != exit {
                        return Err(format!("{rid} shows {load:#x} at {:#x}; an exit finds {exit:#x}", reg.offset()));
                    }
                }
                functions.push(rid);
            }
        }
        functions.sort_unstable();
        Ok(functions)
    }
}

const VFS: [u16; 2] = [0x110, 0x108];

#[test]
fn enabled_vfs_are_shown_and_disabled_ones_are_not() {
    let rig = Rig::new(300, Vm::default());
    assert_eq!(rig.compared().unwrap(), [rig.placement.rid]);
    for num_vfs in [300u16, 7, 1] {
        rig.write(Target::Pf, VFS[0], num_vfs.into());
        let changes = *rig.vm.changes.lock();
        rig.write(Target::Pf, VFS[1], 9);
        assert_eq!(*rig.vm.changes.lock(), changes + 1, "one change for all VFs");
        let expected: Vec<_> =
            [rig.placement.rid].into_iter().chain((0..num_vfs).map(|n| rig.rid(Target::Vf(n)))).collect();
        assert_eq!(rig.compared().unwrap(), expected);
        rig.write(Target::Pf, VFS[1], 0);
        assert_eq!(rig.compared().unwrap(), [rig.placement.rid]);
    }
}

impl Rig {
    /// Enables this many VFs.
    fn enable(&self, num_vfs: u16) {
        self.write(Target::Pf, VFS[0], num_vfs.into());
        self.write(Target::Pf, VFS[1], 9);
    }

    /// Makes the driver of VF `n` start or stop using the window into the BARs.
    fn arm(&self, n: u16, on: bool) {
        // The fifth virtio capability of a VF; its BAR, offset and length.
        let read = |offset| self.slot.config_read(self.rid(Target::Vf(n)), Dword::containing(offset));
        let capability = (0x40..0x100).step_by(4).find(|offset| read(*offset) >> 24 == 5).unwrap();
        for (offset, value) in [(4, 2), (8, 0), (12, 2 * u32::from(on))] {
            self.write(Target::Vf(n), capability + offset, value);
        }
    }

    /// The VFs with shown pages; the PF's page always is shown.
    fn vfs(&self) -> Vec<u16> {
        let shown = self.compared().unwrap();
        assert_eq!(shown.first(), Some(&self.placement.rid));
        let index = |rid: &Rid| rid.to_bits() - self.rid(Target::Vf(0)).to_bits();
        shown.iter().skip(1).map(index).collect()
    }
}

#[test]
fn config_window_access_costs_only_its_own_function_its_page() {
    let rig = Rig::new(6, Vm::default());
    rig.enable(6);
    for (armed, shown) in
        [(2, &[0, 1, 3, 4, 5][..]), (0, &[1, 3, 4, 5]), (5, &[1, 3, 4]), (4, &[1, 3]), (3, &[1]), (1, &[])]
    {
        rig.arm(armed, true);
        assert_eq!(rig.vfs(), shown, "after {armed}");
        rig.arm(armed, false);
        rig.write(Target::Pf, 4, 6);
        assert_eq!(rig.vfs(), shown, "after {armed}");
    }
    // VFs that are enabled again have their pages again, in one memory slot.
    rig.write(Target::Pf, VFS[1], 0);
    rig.enable(6);
    assert_eq!((rig.vfs(), rig.vm.shown.lock().len()), (vec![0, 1, 2, 3, 4, 5], 2));
    rig.arm(3, true);
    rig.slot.reset();
    assert_eq!((rig.vfs(), rig.vm.shown.lock().len()), (vec![], 1));
}

/// Each change of the shown pages stops all vCPUs for a moment.
#[test]
fn repeated_window_use_changes_the_shown_pages_once() {
    let rig = Rig::new(4, Vm::default());
    rig.enable(4);
    rig.arm(1, true);
    let changes = *rig.vm.changes.lock();
    for _ in 0..100 {
        rig.arm(1, false);
        rig.arm(1, true);
    }
    assert_eq!(*rig.vm.changes.lock(), changes);
}

#[test]
fn config_page_rows_that_a_guest_can_create_are_limited() {
    let rig = Rig::new(300, Vm::default());
    rig.enable(300);
    (0..300).step_by(2).for_each(|n| rig.arm(n, true));
    assert!(rig.vm.shown.lock().len() <= 1 + MAX_ROWS);
    let odd: Vec<_> = (0..300).filter(|n| n % 2 == 1).take(MAX_ROWS - 1).collect();
    assert_eq!(rig.vfs(), odd, "from the first on");
    rig.slot.retire();
    assert!(rig.vm.shown.lock().is_empty());
}

#[test]
fn a_write_of_the_pfs_power_renders_its_page_alone() {
    let rig = Rig::new(4, Vm::default());
    rig.write(Target::Pf, VFS[0], 4);
    rig.write(Target::Pf, VFS[1], 9);
    let read = |offset| rig.slot.config_read(rig.placement.rid, Dword::containing(offset));
    let power = (0x40..0x100).step_by(4).find(|offset| read(*offset) & 0xff == 1).unwrap();
    // A value that no rendered page has in its first byte.
    const STALE: u8 = 0x55;
    for state in [3, 0] {
        let shown: Vec<_> = rig.vm.shown.lock().values().cloned().collect();
        let firsts = || shown.iter().flat_map(|shown| (0..shown.len / PAGE).map(move |n| (shown, n * PAGE)));
        let first = |shown: &Shown, at: u64| shown.memory.as_volatile_slice().read_obj::<u8>(at as usize).unwrap();
        firsts().for_each(|(shown, at)| {
            shown.memory.as_volatile_slice().write_obj(STALE, at as usize).unwrap();
        });
        rig.write(Target::Pf, power + 4, state);
        let stale: Vec<_> = firsts().map(|(shown, at)| first(shown, at) == STALE).collect();
        assert_eq!(stale, [false, true, true, true, true], "D{state}");
    }
}

#[test]
fn a_vm_that_cannot_show_pages_is_served_by_exits() {
    let vm = Vm::default();
    *vm.refuses.lock() = true;
    let rig = Rig::new(4, vm);
    rig.write(Target::Pf, VFS[0], 4);
    rig.write(Target::Pf, VFS[1], 9);
    assert!(rig.vm.shown.lock().is_empty());
    assert_eq!(rig.slot.config_read(rig.rid(Target::Vf(3)), Dword::containing(8)), 0x0200_0001);
}

#[test]
fn a_vm_that_can_no_longer_show_pages_shows_none() {
    let rig = Rig::new(4, Vm::default());
    assert_eq!(rig.compared().unwrap().len(), 1);
    *rig.vm.refuses.lock() = true;
    rig.write(Target::Pf, VFS[0], 4);
    rig.write(Target::Pf, VFS[1], 9);
    assert!(rig.vm.shown.lock().is_empty());
    *rig.vm.refuses.lock() = false;
    rig.write(Target::Pf, VFS[1], 0);
    assert!(rig.vm.shown.lock().is_empty(), "it stays so until there is a new VM");
}

proptest! {
    #[test]
    fn a_page_shows_the_bytes_that_an_exit_would_answer(bytes in prop::collection::vec(any::<u8>(), 0..OP_LEN * 60)) {
        let rig = Rig::new(4, Vm::default());
        for op in Op::decode(&bytes) {
            rig.apply(op);
            rig.compared().map_err(|what| TestCaseError::fail(format!("after {op:x?}: {what}")))?;
        }
    }
}
