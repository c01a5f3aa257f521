//! Two PFs with VFs and a plain NIC in a machine without KVM: a guest moves their BARs arbitrarily, and a fake VM
//! records its calls.
//!
//! After each operation, the decoded addresses must match the registers, read through the ECAM as a guest does; each
//! page of configuration space that the VM maps must hold the value of a read; and the VM must have the doorbells in
//! the windows and the messages that may be sent, each with its own route. A reset must leave nothing of this.

mod seeds;
mod shared;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, LazyLock};

use machine::arch::x86_64::layout;
use parking_lot::Mutex;
use pci::{BarIndex, HostBridge, Placement, Rid, Topology, WindowId, ecam_read, ecam_write};
use virtio_devices::testing::{FakeDevice, memory};
use virtio_devices::{DeviceState, Lifecycle, Memory, NetSriov, VirtioFunction, VirtioPci};
use vm_memory::Bytes;
use vmm::testing::{Apertures, PAGE, PciHost, Record, RecordingVm, Refuse, Shown, Slot, place_bars};

use crate::input::Input;
pub use seeds::seeds;
use shared::{DOORBELLS_AT, DOORBELLS_STEP, Shared};

/// For each device, the queue sizes of its functions and the number of its VFs.
const QUEUES: [&[u16]; 3] = [&[256, 256, 64], &[64, 64, 64, 64, 64], &[16]];
const VFS: [u16; 3] = [5, 2, 0];
const MEM64: Range<u64> = 0x1_4000_0000..0xff_0000_0000;

// The kinds of operation.
const CONFIG: u8 = 0;
const MMIO_WRITE: u8 = 1;
const MMIO_READ: u8 = 2;
const RESET: u8 = 3;
const REBOOT: u8 = 4;
const REFUSE: u8 = 5;
const KINDS: u8 = 6;

// Registers.
const COMMAND: u16 = 0x04;
const BAR0: u16 = 0x10;
const SRIOV: u16 = 0x100;

/// The registers that determine the decoded addresses. An operation uses their index here.
const REGISTERS: [u16; 24] = [
    COMMAND,
    BAR0,
    0x14,
    0x18,
    0x1c,
    0x20,
    0x24,
    0x48,
    0x7c,
    0x7e,
    0x8c,
    SRIOV + 0x08,
    SRIOV + 0x10,
    SRIOV + 0x20,
    SRIOV + 0x24,
    SRIOV + 0x28,
    SRIOV + 0x2c,
    SRIOV + 0x30,
    SRIOV + 0x34,
    SRIOV + 0x38,
    0xd4,
    0xd8,
    0xdc,
    0xe0,
];

static MEMORY: LazyLock<Memory> = LazyLock::new(memory);

thread_local! {
    /// The devices with their BARs placed, in slot order. They are placed once, because that takes longer than running
    /// an input.
    static PLACED: RefCell<Vec<DeviceState>> = const { RefCell::new(Vec::new()) };
}

/// A window according to the registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Decoded {
    base: u64,
    len: u64,
    device: usize,
    id: WindowId,
}

struct Guest {
    host: Arc<PciHost>,
    topology: Topology<Arc<Slot>>,
    slots: Vec<(Placement, Arc<Slot>)>,
    /// The devices with queues, in slot order.
    devices: Vec<Shared>,
    record: Arc<Mutex<Record>>,
    /// True if BARs get addresses before the guest runs.
    firmware: bool,
}

impl Guest {
    fn new(firmware: bool) -> Self {
        let host = Arc::new(PciHost::default());
        let mut topology = Topology::new(layout::LAST_BUS);
        let (mut slots, mut devices) = (Vec::new(), Vec::new());
        let mut plug = |slot, total_vfs, device: &mut dyn FnMut(Placement) -> Box<dyn VirtioPci>| {
            let placement = topology.place(slot, total_vfs).expect("there is room");
            let slot = Slot::new(device(placement), placement, Arc::clone(&host)).expect("addresses for its pages");
            topology.plug(placement, Arc::clone(&slot)).expect("there is room");
            slots.push((placement, slot));
        };
        for (queues, total_vfs) in QUEUES.into_iter().zip(VFS) {
            plug(None, total_vfs, &mut |placement| {
                let vfs = (0..total_vfs).map(|_| FakeDevice::new(queues)).collect();
                let pf = FakeDevice::new(queues);
                let device: Box<dyn VirtioPci> = match total_vfs {
                    0 => Box::new(VirtioFunction::plain(pf, placement.rid, MEMORY.clone()).expect("a NIC")),
                    _ => Box::new(NetSriov::new(pf, vfs, placement, &MEMORY).expect("a PF")),
                };
                let mut device = Shared::new(devices.len(), placement, device);
                if let Some(placed) =
                    PLACED.with_borrow(|placed| placed.get(devices.len()).cloned().filter(|_| firmware))
                {
                    device.restore(&placed).expect("a state of this device");
                    let _ = device.resume();
                }
                devices.push(device.clone());
                Box::new(device)
            });
        }
        plug(Some(0), 0, &mut |_| Box::new(HostBridge::new(1, 2)));
        let guest = Self { host, topology, slots, devices, record: Arc::default(), firmware };
        guest.wire();
        if firmware && PLACED.with_borrow(Vec::is_empty) {
            guest.place();
            let save = |device: &Shared| {
                let mut device = device.clone();
                let _ = device.pause();
                let state = device.save().expect("it is paused").expect("a device with registers");
                let _ = device.resume();
                state
            };
            PLACED.set(guest.devices.iter().map(save).collect());
        }
        guest
    }

    /// Wires the devices to a new VM, and assigns their BARs if `firmware` is set.
    fn boot(&self) {
        self.wire();
        if self.firmware {
            self.place();
        }
    }

    fn wire(&self) {
        *self.record.lock() = Record::default();
        self.host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&self.record)))));
    }

    /// Assigns the devices' BARs.
    fn place(&self) {
        place_bars(&self.topology, Apertures { mem32: layout::MMIO32, mem64: MEM64 }).expect("there is room");
        let mut placed: Vec<_> = self.slots.iter().flat_map(|(placement, _)| self.placed(*placement)).collect();
        placed.sort_by_key(|range| range.start);
        assert!(placed.is_sorted_by(|a, b| a.end <= b.start), "BARs overlap: {placed:x?}");
        for range in placed {
            let inside = |aperture: &Range<u64>| aperture.start <= range.start && range.end <= aperture.end;
            assert!(inside(&layout::MMIO32) || inside(&MEM64), "{range:x?} is outside the apertures");
        }
    }

    /// The addresses of a device's BARs with all VFs enabled.
    fn placed(&self, placement: Placement) -> Vec<Range<u64>> {
        let total_vfs = placement.vfs.map_or(0, |vfs| vfs.total_vfs);
        let page = u64::from(self.read(placement.rid, SRIOV + 0x20)) << 12;
        let own = self.bars(placement.rid, BAR0).into_iter().map(|(bar, base)| (base, self.size(placement.rid, bar)));
        let vfs = self.bars(placement.rid, SRIOV + 0x24).into_iter().filter(|_| total_vfs > 0);
        let vfs = vfs.map(|(bar, base)| (base, self.size(placement.rid, bar).max(page) * u64::from(total_vfs)));
        own.chain(vfs).map(|(base, len)| base..base + len).collect()
    }

    /// The size of a BAR. All functions have the same layout: doorbells in BAR 2, MSI-X in BAR 4.
    fn size(&self, _function: Rid, bar: BarIndex) -> u64 {
        if bar.get() == 2 { 0x2000 } else { 0x1000 }
    }

    /// The BARs from register `first` on, with their addresses.
    fn bars(&self, rid: Rid, first: u16) -> Vec<(BarIndex, u64)> {
        let bar = |n: u8| {
            let low = self.read(rid, first + 4 * u16::from(n));
            let high = self.read(rid, first + 4 * u16::from(n) + 4);
            (low & 0xf == 0xc).then(|| (BarIndex::ALL[usize::from(n)], u64::from(high) << 32 | u64::from(low & !0xf)))
        };
        // All BARs here are 64-bit, and none starts at an odd index.
        [0, 2, 4].into_iter().filter_map(bar).collect()
    }

    fn read(&self, rid: Rid, offset: u16) -> u32 {
        let mut data = [0; 4];
        ecam_read(&self.topology, u64::from(rid.to_bits()) << 12 | u64::from(offset), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, rid: Rid, offset: u16, data: &[u8]) {
        ecam_write(&self.topology, u64::from(rid.to_bits()) << 12 | u64::from(offset), data);
    }

    /// The windows that are decoded according to the registers.
    fn decoded(&self) -> Vec<Decoded> {
        let mut decoded = Vec::new();
        for (device, (placement, _)) in self.slots.iter().enumerate() {
            let rid = placement.rid;
            // The PowerState field. These devices have their PMCSR at 8Ch.
            let is_d0 = self.read(rid, 0x8c) & 3 == 0;
            if is_d0 && self.read(rid, COMMAND) & 2 != 0 {
                let own = self.bars(rid, BAR0).into_iter();
                decoded.extend(
                    own.map(|(bar, base)| (WindowId::Bar(bar), base, self.size(rid, bar)))
                        .map(|(id, base, len)| Decoded { base, len, device, id }),
                );
            }
            let control = self.read(rid, SRIOV + 8);
            if placement.vfs.is_some() && is_d0 && control & 9 == 9 {
                let num_vfs = u64::from(self.read(rid, SRIOV + 0x10) & 0xffff);
                let page = u64::from(self.read(rid, SRIOV + 0x20)) << 12;
                let vfs = self.bars(rid, SRIOV + 0x24).into_iter();
                decoded.extend(vfs.map(|(bar, base)| Decoded {
                    base,
                    len: self.size(rid, bar).max(page) * num_vfs,
                    device,
                    id: WindowId::VfBar(bar),
                }));
            }
        }
        // A window that would wrap around the address space is not decoded.
        decoded.retain(|window| window.len > 0 && window.base.checked_add(window.len).is_some());
        decoded.sort_unstable();
        decoded
    }

    /// Checks everything that is decoded, wired and mapped. Of the configuration pages, checks only one function of
    /// each device.
    fn check(&self, somewhere: u64) {
        let decoded = self.decoded();
        assert_eq!(self.host.mmio.window_count(), decoded.len(), "{decoded:x?}");
        for window in &decoded {
            let Decoded { base, len, .. } = *window;
            for address in [base.wrapping_sub(1), base, base + len / 2, base + len - 1, base + len] {
                self.check_address(&decoded, address);
            }
        }
        self.check_address(&decoded, somewhere);
        if self.record.lock().refuse == Refuse::Nothing {
            self.check_messages();
            self.check_doorbells(&decoded);
            self.check_shown(somewhere);
        }
    }

    /// An address belongs to the window that contains it; of several, to one with the highest base.
    fn check_address(&self, decoded: &[Decoded], address: u64) {
        let around = |window: &&Decoded| window.base <= address && address - window.base < window.len;
        let highest = decoded.iter().filter(around).map(|window| window.base).max();
        match (self.host.mmio.find(address), highest) {
            (None, None) => {}
            (Some((slot, id, offset)), Some(base)) => {
                let owner = |window: &Decoded| Arc::ptr_eq(&self.slots[window.device].1, &slot) && window.id == id;
                let found = decoded.iter().filter(around).any(|window| window.base == base && owner(window));
                assert!(found && offset == address - base, "{address:#x} is {id:?} + {offset:#x}, {decoded:x?}");
            }
            (found, highest) => {
                let found = found.map(|(_, id, offset)| (id, offset));
                panic!("{address:#x} is {found:x?}, expected a window at {highest:x?}");
            }
        }
    }

    /// True if a function may send messages: MSI-X enabled and not masked, Bus Master set, and its PF in D0.
    fn sends(&self, pf: Rid, rid: Rid) -> bool {
        let control = self.read(rid, 0x7c) >> 16;
        self.read(rid, COMMAND) & 4 != 0 && control & 0xc000 == 0x8000 && self.read(pf, 0x8c) & 3 == 0
    }

    /// Checks that exactly the messages that may be sent have an eventfd and their own route.
    fn check_messages(&self) {
        let record = self.record.lock();
        let gsis: BTreeSet<_> = record.irqfds.iter().map(|(_, gsi)| *gsi).collect();
        assert_eq!(gsis.len(), record.irqfds.len(), "two eventfds raise one interrupt");
        let wired: BTreeSet<_> = record
            .irqfds
            .iter()
            .map(|(eventfd, gsi)| {
                let route = record.routes.get(gsi).expect("an interrupt has a message");
                (*eventfd, route.requester, route.address, route.data)
            })
            .collect();
        let mut wanted = BTreeSet::new();
        for (device, (placement, _)) in self.devices.iter().zip(&self.slots) {
            for message in device.sent() {
                assert!(self.sends(placement.rid, message.requester), "{} must not send", message.requester);
                wanted.insert((message.eventfd.as_raw_fd(), message.requester, message.address, message.data));
            }
        }
        assert_eq!(wired, wanted);
    }

    /// Checks that exactly the doorbells of the decoded windows are at their addresses. If two functions of a device
    /// claim an address, the device chooses one.
    fn check_doorbells(&self, decoded: &[Decoded]) {
        let mut wanted = BTreeMap::new();
        for window in decoded {
            let device = &self.devices[window.device];
            let functions = match window.id {
                WindowId::Bar(bar) if bar.get() == 2 => 0..=0,
                WindowId::VfBar(bar) if bar.get() == 2 => 1..=self.read(device.rid(0), SRIOV + 0x10) as u16,
                _ => continue,
            };
            let first = *functions.start();
            for function in functions {
                let address = window.base + u64::from(function - first) * DOORBELLS_STEP + DOORBELLS_AT;
                wanted.insert((device.doorbell(function).as_raw_fd(), address), window.device);
            }
        }
        let record = self.record.lock();
        let owner = |doorbell| wanted.get(doorbell).unwrap_or_else(|| panic!("{doorbell:x?} is not wanted"));
        let wired: BTreeSet<_> = record.ioeventfds.iter().map(|doorbell| (doorbell.1, owner(doorbell))).collect();
        let wanted: BTreeSet<_> = wanted.iter().map(|((_, address), device)| (*address, device)).collect();
        assert_eq!(wired, wanted);
    }

    fn check_shown(&self, somewhere: u64) {
        for pages in self.record.lock().pages.values() {
            self.check_page(pages, (somewhere % (pages.len / PAGE)) as u16);
        }
    }

    /// Checks that the n-th page holds the values of reads.
    fn check_page(&self, pages: &Shown, n: u16) {
        let rid = pages.first.wrapping_add(n);
        let mut page = [0; 0x180];
        let memory = vm_memory::VolatileMemory::as_volatile_slice(&*pages.memory);
        memory
            .read_slice(&mut page, pages.offset as usize + usize::from(n) * PAGE as usize)
            .expect("a page for each function");
        for (offset, bytes) in (0..).step_by(4).zip(page.chunks_exact(4)) {
            let shown = u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            assert_eq!(shown, self.read(rid, offset), "{rid} at {offset:#x}");
        }
    }

    /// Checks all mapped pages.
    fn check_pages(&self) {
        let record = self.record.lock();
        for pages in record.pages.values().filter(|_| record.refuse == Refuse::Nothing) {
            (0..pages.len / PAGE).for_each(|n| self.check_page(pages, n as u16));
        }
    }

    fn apply(&self, input: &mut Input<'_>) {
        let kind = input.u8() % KINDS;
        let n = usize::from(input.u8()) % self.slots.len();
        let (placement, slot) = &self.slots[n];
        match kind {
            CONFIG => {
                let function = u16::from(input.u8()) % (placement.vfs.map_or(0, |vfs| vfs.total_vfs) + 1);
                let (register, len) = (input.u8(), [1, 2, 4][usize::from(input.u8() % 3)]);
                let value: [u8; 4] = input.array();
                // By index, or any byte of the header and the first capabilities.
                let offset = REGISTERS.get(usize::from(register)).copied().unwrap_or(register.into());
                let rid = self.devices.get(n).map_or(placement.rid, |device| device.rid(function));
                self.write(rid, offset, &value[..len]);
            }
            MMIO_WRITE | MMIO_READ => {
                let (choice, offset, len) = (input.u8(), u64::from(input.u16()), usize::from(input.u8() % 9));
                let mut data: [u8; 8] = input.array();
                let decoded = self.decoded();
                let Some(n) = usize::from(choice).checked_rem(decoded.len()) else { return };
                let Some((slot, window, offset)) = self.host.mmio.find(decoded[n].base.saturating_add(offset)) else {
                    return;
                };
                match kind {
                    MMIO_WRITE => slot.mmio_write(window, offset, &data[..len]),
                    _ => slot.mmio_read(window, offset, &mut data[..len]),
                }
            }
            RESET => slot.reset(),
            REBOOT => {
                self.part();
                self.boot();
            }
            REFUSE => {
                let refuse = if input.u8() & 1 == 1 { Refuse::All } else { Refuse::Nothing };
                self.record.lock().refuse = refuse;
                // Retries everything that the VM refused.
                self.slots.iter().for_each(|(_, slot)| slot.reconcile());
            }
            _ => {}
        }
    }

    /// Unplugs the devices from their VM, which must then have nothing of them.
    fn part(&self) {
        let refused = std::mem::take(&mut self.record.lock().refuse);
        self.slots.iter().for_each(|(_, slot)| slot.reset());
        assert_eq!(self.host.mmio.window_count(), 0, "a reset leaves nothing decoded");
        if refused == Refuse::Nothing {
            let record = self.record.lock();
            assert!(record.irqfds.is_empty() && record.ioeventfds.is_empty(), "a reset leaves nothing wired");
        }
        self.host.set_wiring(None);
        self.slots.iter().for_each(|(_, slot)| slot.forget_wiring());
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the final numbers of windows, interrupts and mapped pages.
fn run_to_end(input: &[u8]) -> (usize, usize, u64) {
    let mut input = Input::new(input);
    let guest = Guest::new(input.u8() & 1 == 1);
    guest.check(0);
    while !input.is_empty() {
        let somewhere = input.clone().u64();
        guest.apply(&mut input);
        guest.check(somewhere);
    }
    guest.check_pages();
    let ends = {
        let record = guest.record.lock();
        let pages = record.pages.values().map(|pages| pages.len / PAGE).sum();
        (guest.host.mmio.window_count(), record.irqfds.len(), pages)
    };
    guest.part();
    ends
}
