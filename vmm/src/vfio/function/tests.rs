//! A function over a fake device.

use parking_lot::Mutex;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_NORESIZE, VFIO_PCI_INTX_IRQ_INDEX as INTX, VFIO_PCI_MSI_IRQ_INDEX as MSI,
    VFIO_PCI_MSIX_IRQ_INDEX as MSIX,
};

use super::*;
use crate::pci_host::recording_vm::{Record, RecordingVm, Refuse};
use crate::pci_host::slot::{PciHost, Slot};
use crate::vfio::fake::FakeDevice;
use crate::vfio::kernel::info::{IrqInfo, RegionInfo};
use crate::vfio::memory::fake_iommu::{FakeIommu, memory};
use crate::vfio::memory::guest_memory::GuestMemory;
use crate::vfio::memory::peer_bars::PeerBars;

const RID: Rid = Rid::from_bits(8);
const BAR: u64 = 0x8000;

/// MSI-X with 8 vectors, whose table is in page 2 of BAR 0, and MSI with 4; or one of them, or none.
fn device(has_msix: bool, has_msi: bool) -> (FakeDevice, DeviceInfo) {
    let mut config = vec![0; 0x100];
    let mut put = |offset: usize, bytes: &[u8]| config[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, &[0x86, 0x80, 0xca, 0x10]);
    put(
        0x34,
        &[match (has_msix, has_msi) {
            (true, _) => 0x40,
            (false, true) => 0x60,
            (false, false) => 0x70,
        }],
    );
    put(0x40, &[0x11, if has_msi { 0x60 } else { 0x70 }, 7, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
    put(0x60, &[5, 0x70, 4, 0]);
    put(0x70, &[0x10, 0x50, 2, 0]);
    put(0x50, &[1, 0, 3, 0]);
    let device = FakeDevice::default();
    {
        let mut state = device.0.lock();
        state.regions.insert(CONFIG, config);
        state.regions.insert(0, vec![0xab; usize::try_from(BAR).unwrap()]);
    }
    let mut info = DeviceInfo { resets: true, ..DeviceInfo::default() };
    info.regions[0] = RegionInfo { flags: 7, size: BAR, offset: 0, sparse: None, msix_mappable: true };
    info.regions[CONFIG] = RegionInfo { size: 0x100, ..RegionInfo::default() };
    info.irqs[MSIX as usize] = IrqInfo { flags: 1, count: 8 };
    info.irqs[MSI as usize] = IrqInfo { flags: 9, count: 4 };
    (device, info)
}

fn function(device: &FakeDevice, info: &DeviceInfo) -> VfioFunction {
    VfioFunction::new(RID, Box::new(device.clone()), info, &[], None).unwrap()
}

/// As [`device`], with an interrupt pin.
fn device_with_pin(has_msix: bool, has_msi: bool) -> (FakeDevice, DeviceInfo) {
    let (device, mut info) = device(has_msix, has_msi);
    info.irqs[INTX as usize] = IrqInfo { flags: 7, count: 1 };
    (device, info)
}

fn config(function: &mut VfioFunction, offset: u16, value: u32) {
    let _ = function.config_write(RID, Dword::containing(offset), DwordWrite::full(value));
}

fn at(offset: u64) -> (WindowId, u64) {
    (WindowId::Bar(BarIndex::ALL[0]), offset)
}

/// Sets a vector's message and its control word.
fn vector(function: &mut VfioFunction, number: u64, control: u32) {
    for (n, value) in (0..).zip([0xfee0_0000_u32, 0, 0x40, control]) {
        let (window, offset) = at(0x2000 + 16 * number + 4 * n);
        let _ = function.mmio_write(window, offset, &value.to_le_bytes());
    }
}

fn messages(function: &VfioFunction) -> Vec<Message> {
    let mut messages = Vec::new();
    function.messages(Reach::Device, &mut messages);
    messages
}

const ENABLE_MSIX: u32 = 0x8000_0000;
const BUS_MASTER: u32 = 6;

#[test]
fn vector_gets_an_eventfd_at_first_unmask_and_masking_is_local() {
    let (device, info) = device(true, true);
    let mut function = function(&device, &info);
    config(&mut function, 4, BUS_MASTER);
    config(&mut function, 0x40, ENABLE_MSIX);
    assert_eq!(device.take_calls(), [""; 0], "none is unmasked");
    vector(&mut function, 1, 0);
    assert_eq!(device.take_calls(), ["2: 1 of 0+2"]);
    vector(&mut function, 5, 0);
    vector(&mut function, 0, 0);
    assert_eq!(device.take_calls(), ["2: 1 of 5+1", "2: 1 of 0+1"]);
    let sent = messages(&function);
    assert_eq!((sent.len(), sent[0].address, sent[0].data, sent[0].requester), (3, 0xfee0_0000, 0x40, RID));
    vector(&mut function, 1, 1);
    vector(&mut function, 1, 0);
    assert_eq!((device.take_calls(), messages(&function).len()), (Vec::<String>::new(), 3));
    config(&mut function, 0x40, 0);
    assert_eq!((device.take_calls(), messages(&function).len()), (vec!["2: off".to_string()], 0));
}

#[test]
fn kernel_that_cannot_add_vectors_gets_all_of_them_again() {
    let (device, mut info) = device(true, false);
    info.irqs[MSIX as usize].flags |= VFIO_IRQ_INFO_NORESIZE;
    device.0.lock().fixed = true;
    let mut function = function(&device, &info);
    config(&mut function, 0x40, ENABLE_MSIX);
    for number in [2, 1, 6] {
        vector(&mut function, number, 0);
    }
    assert_eq!(device.take_calls(), ["2: 1 of 0+3", "2: 1 of 1+1", "2: off", "2: 3 of 0+7"]);
}

#[test]
fn a_masked_vectors_pending_bit_is_its_eventfd() {
    let (device, info) = device(true, false);
    let mut function = function(&device, &info);
    config(&mut function, 4, BUS_MASTER);
    config(&mut function, 0x40, ENABLE_MSIX);
    vector(&mut function, 3, 0);
    vector(&mut function, 3, 1);
    let mut pending = |device: &FakeDevice| {
        device.signal(MSIX, 3);
        let mut bits = [0; 4];
        let (window, offset) = at(0x3000);
        function.mmio_read(window, offset, &mut bits);
        bits[0]
    };
    assert_eq!(pending(&device), 1 << 3);
}

#[test]
fn msi_has_all_of_its_vectors_at_once() {
    let (device, info) = device(false, true);
    let mut function = function(&device, &info);
    config(&mut function, 4, BUS_MASTER);
    config(&mut function, 0x64, 0xfee0_0000);
    config(&mut function, 0x68, 0x50);
    config(&mut function, 0x60, 0x0021_0000);
    assert_eq!(device.take_calls(), ["1: 4 of 0+4"]);
    let data: Vec<_> = messages(&function).iter().map(|message| message.data).collect();
    assert_eq!(data, [0x50, 0x51, 0x52, 0x53]);
    config(&mut function, 0x60, 0x0011_0000);
    assert_eq!(device.take_calls(), ["1: off", "1: 2 of 0+2"]);
}

/// Requests to the host for a pin.
const PIN: [&str; 2] = ["0: 1 of 0+1", "0: unmask"];

#[test]
fn pin_only_device_signals_it_and_is_unmasked_at_resample() {
    let (device, info) = device_with_pin(false, false);
    let function = function(&device, &info);
    assert_eq!((device.take_calls(), messages(&function).len()), (PIN.map(String::from).to_vec(), 0));
    assert_eq!(function.config_read(RID, Dword::containing(0x3c)), 0x111, "slot 1 has GSI 17");
    let pin = function.pin().unwrap();
    device.signal(INTX, 0);
    assert_eq!(pin.trigger.read().unwrap(), 1);
    pin.resample.write(1).unwrap();
    assert_eq!(device.0.lock().unmasks[&INTX].read().unwrap(), 1);
}

#[test]
fn without_messages_a_missing_or_unmaskable_pin_is_refused() {
    for (flags, count) in [(7, 0), (1, 1), (3, 1), (6, 1)] {
        let (device, mut info) = device(false, false);
        info.irqs[INTX as usize] = IrqInfo { flags, count };
        let refused = VfioFunction::new(RID, Box::new(device.clone()), &info, &[], None).err().unwrap();
        assert_eq!(refused, ConfigError::NoInterrupts);
        assert!(device.take_calls().is_empty());
        let (device, mut info) = self::device(true, false);
        info.irqs[INTX as usize] = IrqInfo { flags, count };
        let function = function(&device, &info);
        assert_eq!((function.config_read(RID, Dword::containing(0x3c)), device.take_calls()), (0, Vec::new()));
        assert!(function.pin().is_none());
    }
}

/// The host supports one kind of interrupt at a time.
#[test]
fn pin_yields_to_messages_and_returns_when_they_are_disabled() {
    let (device, info) = device_with_pin(true, true);
    let mut function = function(&device, &info);
    config(&mut function, 4, BUS_MASTER);
    assert_eq!(device.take_calls(), PIN);
    let first = function.pin().unwrap();
    config(&mut function, 0x40, ENABLE_MSIX);
    assert_eq!((device.take_calls(), function.pin().is_none()), (vec!["0: off".to_string()], true));
    vector(&mut function, 0, 0);
    assert_eq!(device.take_calls(), ["2: 1 of 0+1"]);
    config(&mut function, 0x40, 0);
    assert_eq!(device.take_calls(), ["2: off", PIN[0], PIN[1]]);
    assert!(!Arc::ptr_eq(&function.pin().unwrap().trigger, &first.trigger), "no earlier signal");
    config(&mut function, 0x60, 0x0001_0000);
    assert_eq!(device.take_calls(), ["0: off", "1: 1 of 0+1"]);
    config(&mut function, 0x60, 0);
    assert_eq!(device.take_calls(), ["1: off", PIN[0], PIN[1]]);
}

#[test]
fn reset_replaces_the_pin_and_clears_interrupt_disable() {
    let (device, info) = device_with_pin(true, false);
    let mut function = function(&device, &info);
    for flr in [true, false] {
        config(&mut function, 4, BUS_MASTER | 0x400);
        let old = function.pin().unwrap();
        device.signal(INTX, 0);
        device.take_calls();
        device.take_writes();
        let outcome = if flr {
            function.config_write(RID, Dword::containing(0x78), DwordWrite::new(0x8000, 0b10))
        } else {
            function.reset(ResetKind::Conventional)
        };
        assert!(outcome.effects.messages);
        assert_eq!(device.take_calls(), ["0: off", PIN[0], PIN[1]]);
        assert!(device.take_writes().iter().all(|write| *write == (CONFIG, 4, vec![2, 0])));
        let new = function.pin().unwrap();
        assert!(!Arc::ptr_eq(&new.trigger, &old.trigger) && new.trigger.read().is_err());
        assert_eq!((Arc::strong_count(&old.trigger), Arc::strong_count(&old.resample)), (1, 1));
    }
}

#[test]
fn a_pin_that_the_host_refuses_is_counted_and_asked_for_again() {
    let (device, info) = device_with_pin(true, false);
    let mut function = function(&device, &info);
    let failures = |function: &VfioFunction| function.counters()()[3].1;
    for (n, unmask) in [(1, false), (2, true)] {
        config(&mut function, 0x40, ENABLE_MSIX);
        device.take_calls();
        {
            let mut state = device.0.lock();
            (state.fails, state.no_unmask) = (!unmask, unmask);
        }
        config(&mut function, 0x40, 0);
        assert_eq!((failures(&function), function.pin().is_none()), (n, true));
        // A pin that nothing unmasks is off.
        assert!(!device.has(INTX));
        let mut state = device.0.lock();
        (state.fails, state.no_unmask) = (false, false);
        drop(state);
        config(&mut function, 0x50, 0x0003_0001);
        config(&mut function, 0x54, 3);
        assert!(device.has(INTX) && function.pin().is_none(), "in D3hot it asserts nothing");
        config(&mut function, 0x54, 0);
        assert!(function.pin().is_some());
    }
}

#[test]
fn missing_host_interrupt_is_counted_and_requested_again() {
    let (device, info) = device(true, false);
    let mut function = function(&device, &info);
    config(&mut function, 4, BUS_MASTER);
    config(&mut function, 0x40, ENABLE_MSIX);
    device.0.lock().fails = true;
    vector(&mut function, 0, 0);
    let failures = |function: &VfioFunction| function.counters()()[3];
    assert_eq!(failures(&function), ("interrupt_failures", 1));
    device.0.lock().fails = false;
    vector(&mut function, 0, 1);
    vector(&mut function, 0, 0);
    assert_eq!((device.take_calls().len(), messages(&function).len()), (1, 1));
}

/// Everything except the pages of the table and of the pending bits is mapped.
#[test]
fn bars_are_mapped_except_for_registers_answered_here() {
    let (device, info) = device(true, false);
    let mut function = function(&device, &info);
    assert_eq!(device.0.lock().mapped, [(0, 0, 0x2000), (0, 0x4000, 0x4000)]);
    let mut areas = Vec::new();
    function.memory(&mut areas);
    let places: Vec<_> = areas.iter().map(|area| (area.offset, area.memory.len())).collect();
    assert_eq!(places, [(0, 0x2000), (0x4000, 0x4000)]);
    // The rest of these pages is reached on the device through exits.
    let mut data = [0; 4];
    let (window, offset) = at(0x2800);
    function.mmio_read(window, offset, &mut data);
    assert_eq!(data, [0xab; 4]);
    device.take_writes();
    let _ = function.mmio_write(window, offset, &[1, 2]);
    vector(&mut function, 0, 0);
    assert_eq!(device.take_writes(), [(0, 0x2800, vec![1, 2])], "the table is not the host's");
    assert_eq!(function.counters()()[0], ("exits", 6));
    let excluded = VfioFunction::new(RID, Box::new(device.clone()), &info, &[0], None).unwrap();
    areas.clear();
    excluded.memory(&mut areas);
    assert!(areas.is_empty());
}

#[test]
fn reset_leaves_a_device_without_interrupts_or_bus_mastering() {
    let (device, info) = device(true, false);
    let mut function = function(&device, &info);
    assert_eq!(device.0.lock().resets, 1, "before its first use");
    for (flr, reset) in [(true, 2), (false, 3)] {
        config(&mut function, 4, BUS_MASTER);
        config(&mut function, 0x40, ENABLE_MSIX);
        vector(&mut function, 0, 0);
        let eventfd = messages(&function).remove(0).eventfd;
        device.signal(MSIX, 0);
        device.take_calls();
        device.take_writes();
        let outcome = if flr {
            function.config_write(RID, Dword::containing(0x78), DwordWrite::new(0x8000, 0b10))
        } else {
            function.reset(ResetKind::Conventional)
        };
        assert!(outcome.effects.windows && outcome.effects.messages);
        assert_eq!((device.take_calls(), device.0.lock().resets), (vec!["2: off".to_string()], reset));
        let writes = device.take_writes();
        assert!(writes.iter().all(|write| *write == (CONFIG, 4, vec![2, 4])), "{writes:?}");
        assert!(messages(&function).is_empty());
        assert_eq!(Arc::strong_count(&eventfd), 1, "an earlier signal is dropped");
    }
    device.0.lock().fails = true;
    let _ = function.reset(ResetKind::Conventional);
    assert_eq!(function.counters()()[2], ("reset_failures", 1));
}

#[test]
fn a_device_that_is_lost_reads_all_ones() {
    let (device, info) = device(true, false);
    let mut function = function(&device, &info);
    device.0.lock().regions.clear();
    let mut data = [0; 8];
    let (window, offset) = at(0x5000);
    function.mmio_read(window, offset, &mut data);
    assert_eq!(data, [0xff; 8]);
    assert_eq!(function.config_read(RID, Dword::containing(4)), 0xf910_0000);
    assert_eq!(function.config_read(Rid::from_bits(9), Dword::containing(0)), ALL_ONES);
}

#[test]
fn the_state_of_a_device_of_the_host_is_not_saved() {
    let (device, info) = device(true, false);
    let error = function(&device, &info).save().unwrap_err().to_string();
    assert_eq!(error, "it is a device of the host, whose state cannot be read; remove it first");
}

/// In its slot: windows, memory and interrupts follow the registers, and nothing is left at the end.
#[test]
fn slot_maps_memory_and_wires_messages_and_leaves_nothing() {
    let (device, info) = device(true, false);
    let host = Arc::<PciHost>::default();
    let record = Arc::<Mutex<Record>>::default();
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&record)))));
    let placement = pci::Placement { segment: 0, rid: RID, vfs: None };
    let slot = Slot::new(Box::new(function(&device, &info)), placement, Arc::clone(&host)).unwrap();
    let write = |offset: u16, value: u32| {
        pci::ConfigTarget::config_write(&*slot, RID, Dword::containing(offset), DwordWrite::full(value));
    };
    write(0x10, 0xc000_0000);
    write(4, BUS_MASTER);
    write(0x40, ENABLE_MSIX);
    let table = |control: u32| {
        for (n, value) in (0..).zip([0xfee0_0000_u32, 0, 0x40, control]) {
            let (window, offset) = at(0x2000 + 4 * n);
            slot.mmio_write(window, offset, &value.to_le_bytes());
        }
    };
    table(0);
    let shown = |record: &Mutex<Record>| {
        let mut shown: Vec<_> = record.lock().memory.values().map(|(address, _)| *address).collect();
        shown.sort_unstable();
        shown
    };
    assert_eq!((shown(&record), record.lock().irqfds.len()), (vec![0xc000_0000, 0xc000_4000], 1));
    assert!(record.lock().pages.is_empty(), "registers of hardware change by themselves");
    table(1);
    assert_eq!((record.lock().irqfds.len(), device.0.lock().calls.len()), (0, 1));
    table(0);
    write(0x10, 0xc800_0000);
    assert_eq!((shown(&record), record.lock().irqfds.len()), (vec![0xc800_0000, 0xc800_4000], 1));
    // The second round gives the same result.
    for _ in 0..2 {
        write(4, 0);
        assert_eq!((shown(&record).len(), record.lock().irqfds.len()), (0, 0));
        write(4, BUS_MASTER);
        assert_eq!((shown(&record).len(), record.lock().irqfds.len()), (2, 1));
    }
    slot.retire();
    assert_eq!((shown(&record).len(), record.lock().irqfds.len()), (0, 0));
    assert_eq!(Arc::strong_count(&device.0), 1, "the device is closed");
}

/// In its slot: the pin is wired to the slot's input while the device uses it, and each new wire makes the device
/// repeat its interrupt.
#[test]
fn slot_wires_a_pin_only_while_used_and_leaves_it_deasserted() {
    let (device, info) = device_with_pin(true, false);
    let host = Arc::<PciHost>::default();
    let record = Arc::<Mutex<Record>>::default();
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&record)))));
    let placement = pci::Placement { segment: 0, rid: RID, vfs: None };
    let slot = Slot::new(Box::new(function(&device, &info)), placement, Arc::clone(&host)).unwrap();
    let write = |offset: u16, value: u32| {
        pci::ConfigTarget::config_write(&*slot, RID, Dword::containing(offset), DwordWrite::full(value));
    };
    let asked = || device.0.lock().unmasks[&INTX].read().is_ok();
    let inputs = |record: &Mutex<Record>| record.lock().irqfds.iter().map(|(_, gsi)| *gsi).collect::<Vec<_>>();
    slot.reconcile();
    assert_eq!((inputs(&record), asked(), asked()), (vec![17], true, false));
    slot.reconcile();
    assert!(!asked(), "nothing has changed");
    write(0x54, 3);
    assert_eq!(inputs(&record), [0_u32; 0]);
    // An interrupt signalled in the meantime is repeated.
    device.signal(INTX, 0);
    write(0x54, 0);
    let waits = || slot.with(|device| device.pin().unwrap().trigger.read().is_ok());
    assert_eq!((inputs(&record), asked(), waits()), (vec![17], true, Some(false)));
    write(0x40, ENABLE_MSIX);
    assert_eq!(inputs(&record), [0_u32; 0]);
    write(0x40, 0);
    assert_eq!((inputs(&record), asked()), (vec![17], true));
    slot.reset();
    assert_eq!((inputs(&record), asked()), (vec![17], true));
    // The slot retries a wire that the VM refused.
    record.lock().refuse = Refuse::Irqfds;
    slot.reset();
    record.lock().refuse = Refuse::Nothing;
    slot.reconcile();
    assert_eq!((inputs(&record), asked()), (vec![17], true));
    // The VM is closed, and another one created.
    host.set_wiring(None);
    slot.forget_wiring();
    let other = Arc::<Mutex<Record>>::default();
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&other)))));
    slot.reconcile();
    assert_eq!((inputs(&other), asked()), (vec![17], true));
    slot.retire();
    assert_eq!((inputs(&other).len(), Arc::strong_count(&device.0)), (0, 1));
}

/// In its slot: the parts of its BAR that other host devices reach; its MSI-X table is not mapped.
#[test]
fn peers_reach_a_bar_at_its_guest_address_until_it_is_removed() {
    const RAM: (u64, u64) = (0, 0x1000);
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let space = Arc::new(GuestMemory::new(Arc::clone(&fake) as _, &memory(&[(0, 0x1000)])).unwrap());
    let bars = Arc::<PeerBars>::default();
    bars.join(&space);
    for peers in [Some(bars as Arc<dyn MemoryPeers>), None] {
        let (device, info) = device(true, false);
        let function = VfioFunction::new(RID, Box::new(device.clone()), &info, &[], peers.as_ref()).unwrap();
        let host = Arc::<PciHost>::default();
        let record = Arc::<Mutex<Record>>::default();
        host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&record)))));
        let placement = pci::Placement { segment: 0, rid: RID, vfs: None };
        let slot = Slot::new(Box::new(function), placement, Arc::clone(&host)).unwrap();
        let write = |offset: u16, value: u32| {
            pci::ConfigTarget::config_write(&*slot, RID, Dword::containing(offset), DwordWrite::full(value));
        };
        let reached = |base: u64| {
            let areas = [(base, 0x2000), (base + 0x4000, 0x4000)].into_iter().filter(|_| peers.is_some());
            std::iter::once(RAM).chain(areas).collect::<Vec<_>>()
        };
        write(0x10, 0xc000_0000);
        assert_eq!(fake.sorted(), [RAM], "it is not decoded");
        write(4, BUS_MASTER);
        assert_eq!(fake.sorted(), reached(0xc000_0000));
        write(0x10, 0xc000_8000);
        assert_eq!(fake.sorted(), reached(0xc000_8000));
        write(4, 0);
        assert_eq!(fake.sorted(), [RAM]);
        write(4, BUS_MASTER);
        assert_eq!(fake.sorted(), reached(0xc000_8000));
        // The VM is closed without notifying the device, and another one created.
        host.set_wiring(None);
        slot.forget_wiring();
        assert_eq!(fake.sorted(), [RAM]);
        host.set_wiring(Some(Box::new(RecordingVm(Arc::default()))));
        slot.reconcile();
        assert_eq!(fake.sorted(), reached(0xc000_8000));
        slot.reset();
        assert_eq!(fake.sorted(), [RAM]);
        write(0x10, 0xc000_0000);
        write(4, BUS_MASTER);
        assert_eq!(fake.sorted(), reached(0xc000_0000));
        // The fake IOMMU checks that memory still exists when it is unmapped.
        slot.retire();
        assert_eq!((fake.sorted(), Arc::strong_count(&device.0)), (vec![RAM], 1));
    }
}
