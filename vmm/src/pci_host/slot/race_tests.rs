//! vCPUs that change one device at the same time, while the host pauses it: when all are done, the wiring is what the
//! device wants.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::os::fd::AsRawFd;
use std::thread;

use pci::{Device, Topology};
use proptest::collection::vec;
use proptest::prelude::*;
use virtio_devices::testing::{Driver, FakeDevice, memory};
use virtio_devices::{Doorbell, DoorbellPage, FileMapping, Message, NetSriov};
use vm_memory::{Bytes, VolatileMemory};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::kvm::MsiRoute;
use crate::pci_host::config_pages::{PAGE, Shown};

const TOTAL: u16 = 6;
const QUEUES: [u16; 3] = [64; 3];
/// The SR-IOV capability in the PF's configuration space.
const SRIOV: u64 = 0x100;
/// Bytes of a VF's slice of each VF BAR.
const SLICES: [(u8, u64); 2] = [(2, 0x2000), (4, 0x1000)];
/// BARs 2 and 4 in a header, and in the SR-IOV capability.
const BARS: [u64; 2] = [0x18, 0x20];
const VF_BARS: [u64; 2] = [SRIOV + 0x2c, SRIOV + 0x34];

/// Requests to a VM that were not undone.
#[derive(Default)]
struct Record {
    routes: BTreeMap<u32, MsiRoute>,
    irqfds: BTreeMap<i32, u32>,
    ioeventfds: BTreeSet<(i32, u64)>,
    shown: BTreeMap<u32, Shown>,
}

#[derive(Clone, Default)]
struct Vm(Arc<Mutex<Record>>);

impl Wiring for Vm {
    fn set_irq_routes(&self, routes: &[MsiRoute]) -> io::Result<()> {
        self.0.lock().routes = routes.iter().map(|route| (route.gsi, *route)).collect();
        Ok(())
    }

    fn attach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        let mut record = self.0.lock();
        assert!(record.routes.contains_key(&gsi), "attached to a GSI without a route");
        assert_eq!(record.irqfds.insert(eventfd.as_raw_fd(), gsi), None, "attached twice");
        Ok(())
    }

    fn attach_pin(&self, _trigger: &EventFd, _resample: &EventFd, _gsi: u32) -> io::Result<()> {
        panic!("the device has no pin")
    }

    fn detach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        assert_eq!(self.0.lock().irqfds.remove(&eventfd.as_raw_fd()), Some(gsi), "never attached");
        Ok(())
    }

    fn attach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()> {
        assert!(self.0.lock().ioeventfds.insert((eventfd.as_raw_fd(), address)), "attached twice");
        Ok(())
    }

    fn detach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()> {
        assert!(self.0.lock().ioeventfds.remove(&(eventfd.as_raw_fd(), address)), "never attached");
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
        let mut record = self.0.lock();
        record.shown.remove(&memory_slot);
        record.shown.extend(pages.map(|pages| (memory_slot, pages.clone())));
        Ok(())
    }
}

/// Wiring that a device wants, in the form that a VM records.
struct Wanted {
    ioeventfds: BTreeSet<(i32, u64)>,
    /// Address, data and requester of the message that each eventfd sends.
    messages: BTreeMap<i32, (u64, u32, Rid)>,
    windows: Vec<Window>,
}

/// The device as seen by a vCPU that drives one of its functions: an offset in a window of VFs is an offset in the
/// slice of that VF.
struct Vcpu<'s> {
    slot: &'s Slot,
    vf: u16,
    /// Number of writes to a BAR.
    writes: u64,
}

impl Vcpu<'_> {
    fn offset(&self, window: WindowId, offset: u64) -> u64 {
        let slice = SLICES.iter().find(|(bar, _)| WindowId::VfBar(pci::BarIndex::new(*bar).unwrap()) == window);
        slice.map_or(offset, |(_, len)| u64::from(self.vf) * len + offset)
    }
}

impl Device for Vcpu<'_> {
    type Stopping = Infallible;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.slot.config_read(rid, reg)
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> pci::Outcome<Infallible> {
        self.slot.config_write(rid, reg, write);
        pci::Outcome::none()
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.slot.mmio_read(window, self.offset(window, offset), data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> pci::Outcome<Infallible> {
        self.writes += 1;
        self.slot.mmio_write(window, self.offset(window, offset), data);
        pci::Outcome::none()
    }

    fn may_send(&self, _rid: Rid) -> bool {
        false
    }

    fn windows(&self, _out: &mut Vec<Window>) {}

    fn reset(&mut self, _kind: ResetKind) -> pci::Outcome<Infallible> {
        self.slot.reset();
        pci::Outcome::none()
    }
}

/// Operation of a vCPU on the PF.
#[derive(Debug, Clone, Copy)]
enum PfOp {
    Enable(u16),
    Disable,
    VfMemory(bool),
    Memory(bool),
    Power(bool),
    Move(u8),
    MoveVfs(u8),
    Init,
    Flr,
    Reset,
}

/// Operation of a vCPU on a VF.
#[derive(Debug, Clone, Copy)]
enum VfOp {
    Init,
    Msix(bool),
    Mask(u16, bool),
    Message(u16, u32),
    BusMaster(bool),
    Status(u32),
    Notify(u16),
    Flr,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Pf(PfOp),
    Vf(u16, VfOp),
    /// The host pauses the queues and resumes them.
    StorageLock,
}

fn op() -> impl Strategy<Value = Op> {
    let pf = prop_oneof![
        4 => (1..=TOTAL).prop_map(PfOp::Enable),
        2 => Just(PfOp::Disable),
        1 => any::<bool>().prop_map(PfOp::VfMemory),
        1 => any::<bool>().prop_map(PfOp::Memory),
        1 => any::<bool>().prop_map(PfOp::Power),
        1 => (0..4_u8).prop_map(PfOp::Move),
        1 => (0..4_u8).prop_map(PfOp::MoveVfs),
        2 => Just(PfOp::Init),
        1 => Just(PfOp::Flr),
        1 => Just(PfOp::Reset),
    ];
    let vector = || 0..4_u16;
    let vf = prop_oneof![
        6 => Just(VfOp::Init),
        1 => any::<bool>().prop_map(VfOp::Msix),
        3 => (vector(), any::<bool>()).prop_map(|(vector, masked)| VfOp::Mask(vector, masked)),
        3 => (vector(), 0x50..0x60_u32).prop_map(|(vector, data)| VfOp::Message(vector, data)),
        1 => any::<bool>().prop_map(VfOp::BusMaster),
        1 => prop_oneof![Just(0), Just(0x80)].prop_map(VfOp::Status),
        1 => (0..3_u16).prop_map(VfOp::Notify),
        2 => Just(VfOp::Flr),
    ];
    prop_oneof![
        4 => pf.prop_map(Op::Pf),
        16 => (0..TOTAL, vf).prop_map(|(vf, op)| Op::Vf(vf, op)),
        1 => Just(Op::StorageLock),
    ]
}

struct Rig {
    slot: Arc<Slot>,
    host: Arc<PciHost>,
    placement: Placement,
    vm: Vm,
}

impl Rig {
    fn new() -> Self {
        let placement = Topology::<()>::new(127).place(Some(3), TOTAL).unwrap();
        let function = || FakeDevice::with_worker(&QUEUES);
        let vfs = (0..TOTAL).map(|_| function()).collect();
        let device = NetSriov::new(function(), vfs, placement, &memory()).unwrap();
        let (host, vm) = (Arc::new(PciHost::default()), Vm::default());
        host.set_wiring(Some(Box::new(vm.clone())));
        let slot = Slot::new(Box::new(device), placement, Arc::clone(&host)).unwrap();
        slot.reconcile();
        let rig = Self { slot, host, placement, vm };
        for op in [PfOp::Move(0), PfOp::MoveVfs(0), PfOp::Memory(true), PfOp::Init, PfOp::Enable(TOTAL)] {
            rig.apply(Op::Pf(op));
        }
        rig
    }

    fn vf_rid(&self, index: u16) -> Rid {
        self.placement.rid.wrapping_add(self.placement.vfs.unwrap().first_vf_offset + index)
    }

    fn apply(&self, op: Op) {
        match op {
            Op::Pf(op) => {
                apply_to_pf(&mut Driver::new(&mut Vcpu { slot: &self.slot, vf: 0, writes: 0 }, self.placement.rid), op)
            }
            Op::Vf(vf, op) => {
                let mut vcpu = Vcpu { slot: &self.slot, vf, writes: 0 };
                apply_to_vf(&mut Driver::of_vf(&mut vcpu, self.vf_rid(vf), 0), op);
            }
            Op::StorageLock => {
                self.slot.pause();
                self.slot.resume().unwrap();
            }
        }
    }

    fn wanted(&self) -> Wanted {
        let (mut windows, mut doorbells, mut messages) = (Vec::new(), Vec::new(), Vec::new());
        self.slot.with(|device| {
            device.windows(&mut windows);
            device.doorbells(Reach::Device, &mut doorbells);
            device.messages(Reach::Device, &mut messages);
        });
        let at = |doorbell: &Doorbell| {
            let window = windows.iter().find(|window| window.id == doorbell.window)?;
            Some((doorbell.eventfd.as_raw_fd(), window.base + doorbell.offset))
        };
        let ioeventfds = doorbells.iter().filter_map(at).collect();
        let message = |m: &Message| (m.eventfd.as_raw_fd(), (m.address, m.data, m.requester));
        Wanted { ioeventfds, messages: messages.iter().map(message).collect(), windows }
    }

    /// Compares the VM with the device, while no vCPU is active.
    fn check(&self) {
        let Wanted { ioeventfds, messages, windows } = self.wanted();
        let record = self.vm.0.lock();
        assert_eq!(record.ioeventfds, ioeventfds);
        let sent = |(eventfd, gsi): (&i32, &u32)| {
            let route = record.routes[gsi];
            (*eventfd, (route.address, route.data, route.requester))
        };
        assert_eq!(record.irqfds.iter().map(sent).collect::<BTreeMap<_, _>>(), messages);
        assert_eq!(self.host.mmio.window_count(), windows.len());
        assert_eq!(self.slot.wired.lock().windows, windows);
        self.check_pages(&record);
    }

    /// Checks that all existing functions have their page, with the same content as reads.
    fn check_pages(&self, record: &Record) {
        let status = self.slot.with(|device| device.sriov_status()).flatten();
        let visible = status.unwrap().num_visible();
        let functions = std::iter::once(self.placement.rid).chain((0..visible).map(|index| self.vf_rid(index)));
        let pages = record.shown.values().flat_map(|shown| {
            (0..visible.max(1)).take_while(|n| u64::from(*n) * PAGE < shown.len).map(move |n| (shown, n))
        });
        let mut shown = Vec::new();
        for (Shown { first, memory, offset, .. }, n) in pages {
            let rid = first.wrapping_add(n);
            shown.push(rid);
            for reg in Dword::all() {
                let at = *offset as usize + usize::from(n) * PAGE as usize + usize::from(reg.offset());
                let value: u32 = memory.as_volatile_slice().load(at, Ordering::Relaxed).unwrap();
                assert_eq!(value, self.slot.config_read(rid, reg), "{rid} {reg:?}");
            }
        }
        assert_eq!(shown, functions.collect::<Vec<_>>());
    }

    /// Unplugs the device, and checks that no wiring is left.
    fn retire(&self) {
        self.slot.retire();
        let record = self.vm.0.lock();
        assert_eq!((record.irqfds.len(), record.ioeventfds.len(), record.shown.len()), (0, 0, 0));
        assert_eq!((self.host.routes.len(), self.host.mmio.window_count()), (0, 0));
    }
}

/// Moves BARs 2 and 4 to one of some places above `base`.
fn write_bars(pf: &mut Driver<'_, Vcpu<'_>>, bars: [u64; 2], base: u32, place: u8) {
    let base = base + u32::from(place) * 0x100_0000;
    for (bar, base) in bars.into_iter().zip([base, base + 0x10_0000]) {
        let _ = pf.config_write(bar, 4, base);
    }
}

fn apply_to_pf(pf: &mut Driver<'_, Vcpu<'_>>, op: PfOp) {
    match op {
        PfOp::Move(place) => write_bars(pf, BARS, 0x1000_0000, place),
        PfOp::MoveVfs(place) => write_bars(pf, VF_BARS, 0x2000_0000, place),
        PfOp::Enable(count) => {
            let _ = pf.config_write(SRIOV + 0x10, 2, count.into());
            let _ = pf.config_write(SRIOV + 8, 2, 9);
        }
        PfOp::Disable => drop(pf.config_write(SRIOV + 8, 2, 0)),
        PfOp::VfMemory(on) => {
            let control = pf.config_read(SRIOV + 8, 2);
            let _ = pf.config_write(SRIOV + 8, 2, if on { control | 8 } else { control & !8 });
        }
        PfOp::Memory(on) => drop(pf.config_write(4, 2, if on { 6 } else { 4 })),
        PfOp::Power(on) => {
            let power = pf.capability(0x01, |_| true).unwrap();
            let _ = pf.config_write(power + 4, 2, if on { 0 } else { 3 });
        }
        PfOp::Init => {
            pf.init();
            pf.enable_msix(4);
        }
        PfOp::Flr => drop(pf.flr()),
        PfOp::Reset => pf.device.slot.reset(),
    }
}

fn apply_to_vf(vf: &mut Driver<'_, Vcpu<'_>>, op: VfOp) {
    match op {
        VfOp::Init => {
            vf.init();
            vf.enable_msix(4);
        }
        VfOp::Msix(on) => {
            if let Some(msix) = vf.capability(0x11, |_| true) {
                let _ = vf.config_write(msix + 2, 2, if on { 0x8000 } else { 0xc000 });
            }
        }
        VfOp::Mask(vector, masked) => drop(vf.bar_write(4, u64::from(vector) * 16 + 12, 4, masked.into())),
        VfOp::Message(vector, data) => drop(vf.bar_write(4, u64::from(vector) * 16 + 8, 4, data)),
        VfOp::BusMaster(on) => drop(vf.set_bus_master(on)),
        VfOp::Status(status) => drop(vf.set_status(status)),
        VfOp::Notify(queue) => drop(vf.notify(queue)),
        VfOp::Flr => drop(vf.flr()),
    }
}

#[test]
fn a_driver_sets_up_no_queue_of_a_vf_whose_memory_is_off() {
    let rig = Rig::new();
    rig.apply(Op::Pf(PfOp::VfMemory(false)));
    let mut vcpu = Vcpu { slot: &rig.slot, vf: 0, writes: 0 };
    assert_eq!(Driver::of_vf(&mut vcpu, rig.vf_rid(0), 0).init(), 0xff);
    // A driver that reads all-ones as the number of queues writes 600,000 times.
    assert!(vcpu.writes < 100, "{} writes", vcpu.writes);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(8) })]

    /// For any interleaving of the vCPUs' accesses.
    #[test]
    fn concurrent_changes_of_vcpus_are_all_wired_in_the_end(rounds in vec(vec(vec(op(), 12), 4), 2)) {
        let rig = Rig::new();
        rig.check();
        for vcpus in rounds {
            thread::scope(|scope| {
                for ops in &vcpus {
                    scope.spawn(|| ops.iter().for_each(|op| rig.apply(*op)));
                }
            });
            rig.check();
        }
        rig.retire();
    }
}
