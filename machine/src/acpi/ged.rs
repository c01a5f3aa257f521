//! The generic event device (`ACPI 6.5 §5.6.9`): notifies the guest that a device or vCPU was added or should be
//! removed, that memory was added, or that the power button was pressed; and receives the guest's releases of devices
//! and vCPUs.
//!
//! The registers are I/O ports, used only by the AML of `acpi/hotplug.rs`:
//!
//! | port | read | written |
//! |---|---|---|
//! | 0 | the events, which the read clears | nothing |
//!
//! The slots of each root bus have registers of their own, [`SLOT_PORTS`] apart: first those of each segment's bus 0,
//! then those of further root buses of segment 0.
//!
//! | offset | read | written |
//! |---|---|---|
//! | 0 | slots with a new device, one bit each, which the read clears | nothing |
//! | 4 | slots whose device should be removed, which the read clears | nothing |
//! | 8 | 0 | slots whose device the guest has released |
//! | 12 | 0 | nothing |
//!
//! Accesses are single bytes: byte `n` is bits `8 * n` to `8 * n + 7` of the register. vCPUs and memory have ports of
//! their own (`acpi/vcpu_hotplug.rs`, `acpi/memory_hotplug.rs`).

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use pci::{Bdf, Rid};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::acpi::event_state::{EventDeviceState, SlotsState};
use crate::acpi::memory_hotplug::MemoryHotplug;
use crate::acpi::vcpu_hotplug::VcpuHotplug;
use crate::arch::x86_64::layout::{LAST_BUS, MOST_SEGMENTS};

/// Number of ports of the slots of one root bus.
pub const SLOT_PORTS: u16 = 16;
/// Number of root buses that there may be: one of each segment, and each further bus of segment 0.
pub const ROOT_BUSES: u16 = MOST_SEGMENTS + LAST_BUS as u16;
/// Number of ports of the slots of all root buses.
pub const ALL_SLOT_PORTS: u16 = SLOT_PORTS * ROOT_BUSES;
/// Offset of the register of slots with a new device.
pub const PLUGGED: u16 = 0;
/// Offset of the register of slots whose device should be removed.
pub const UNPLUGGED: u16 = 4;
/// Offset of the register with which the guest releases devices.
pub const EJECT: u16 = 8;
/// Offset after that register.
const END: u16 = 12;
/// Event: devices were added or should be removed.
pub const PCI_EVENT: u8 = 1 << 0;
/// Event: the power button was pressed.
pub const POWER_BUTTON_EVENT: u8 = 1 << 1;
/// Event: vCPUs were added or should be removed.
pub const VCPU_EVENT: u8 = 1 << 2;
/// Event: memory was added.
pub const MEMORY_EVENT: u8 = 1 << 3;
const ALL_EVENTS: u8 = PCI_EVENT | POWER_BUTTON_EVENT | VCPU_EVENT | MEMORY_EVENT;

/// The position of a root bus among all that there may be: [`ROOT_BUSES`] or more if it cannot exist.
const fn position(segment: u16, bus: u8) -> u16 {
    match (segment, bus) {
        (0..MOST_SEGMENTS, 0) => segment,
        (0, 1..=LAST_BUS) => MOST_SEGMENTS - 1 + bus as u16,
        _ => ROOT_BUSES,
    }
}

/// The segment and the number of the root bus at a position below [`ROOT_BUSES`].
fn root_at(position: u16) -> (u16, u8) {
    match position.checked_sub(MOST_SEGMENTS) {
        None => (position, 0),
        Some(further) => (0, u8::try_from(further + 1).unwrap_or(u8::MAX)),
    }
}

/// The first port of the slots of a root bus.
pub(crate) const fn slot_ports(segment: u16, bus: u8) -> u16 {
    SLOT_PORTS * position(segment, bus)
}

/// Events that the guest has not read yet, and releases that the VMM has not handled yet.
#[derive(Debug)]
struct Pending {
    events: u8,
    /// By the position of the root bus.
    slots: [Slots; ROOT_BUSES as usize],
}

/// The slots of one root bus, one bit each.
#[derive(Debug, Clone, Copy, Default)]
struct Slots {
    plugged: u32,
    unplugged: u32,
    ejected: u32,
}

impl Default for Pending {
    fn default() -> Self {
        Self { events: 0, slots: [Slots::default(); ROOT_BUSES as usize] }
    }
}

impl Pending {
    /// The slots of a root bus, if it can exist.
    fn of(&mut self, segment: u16, bus: u8) -> Option<&mut Slots> {
        self.slots.get_mut(usize::from(position(segment, bus)))
    }

    /// The slots, and the register's offset, of a port.
    fn at(&mut self, port: u16) -> Option<(&mut Slots, u16)> {
        Some((self.slots.get_mut(usize::from(port / SLOT_PORTS))?, port % SLOT_PORTS))
    }
}

/// The generic event device.
#[derive(Debug)]
pub struct GenericEventDevice {
    pending: Mutex<Pending>,
    vcpus: Mutex<VcpuHotplug>,
    memory: Mutex<MemoryHotplug>,
    interrupt: EventFd,
    /// Signalled when [`Self::take_ejected`] or [`VcpuHotplug::take_ejected`] has releases to return.
    machine: Arc<EventFd>,
}

impl GenericEventDevice {
    /// A device with nothing pending, without vCPUs and without added memory. `machine` is signalled when the guest has
    /// released a device or vCPU.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is left.
    pub fn new(machine: Arc<EventFd>) -> io::Result<Self> {
        let interrupt = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let (pending, vcpus, memory) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Self { pending, vcpus, memory, interrupt, machine })
    }

    /// The device's interrupt, which is edge-triggered.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Notifies the guest of a new device at `address`, in a slot of a root bus.
    pub fn plugged(&self, address: Bdf) {
        self.tell_slots(address, |slots, slot| slots.plugged |= slot);
    }

    /// Asks the guest to release the device at `address`, in a slot of a root bus.
    pub fn unplug(&self, address: Bdf) {
        self.tell_slots(address, |slots, slot| slots.unplugged |= slot);
    }

    /// Notifies the guest after `change` of the registers that have the slot at `address`, with the slot's bit.
    fn tell_slots(&self, address: Bdf, change: impl FnOnce(&mut Slots, u32)) {
        let Bdf { segment, rid } = address;
        self.tell(PCI_EVENT, |pending| {
            if let Some(slots) = pending.of(segment, rid.bus()) {
                change(slots, 1 << rid.device());
            }
        });
    }

    /// Notifies the guest that the power button was pressed.
    pub fn press_power_button(&self) {
        self.tell(POWER_BUTTON_EVENT, |_| {});
    }

    /// Reads or changes the vCPUs, and notifies the guest of news.
    pub fn with_vcpus<R>(&self, change: impl FnOnce(&mut VcpuHotplug) -> R) -> R {
        let (result, has_news) = {
            let mut vcpus = self.vcpus.lock();
            (change(&mut vcpus), vcpus.has_news())
        };
        if has_news {
            self.tell(VCPU_EVENT, |_| {});
        }
        result
    }

    /// Reads or changes the memory slots, and notifies the guest of news.
    pub fn with_memory<R>(&self, change: impl FnOnce(&mut MemoryHotplug) -> R) -> R {
        let (result, has_news) = {
            let mut memory = self.memory.lock();
            (change(&mut memory), memory.has_news())
        };
        if has_news {
            self.tell(MEMORY_EVENT, |_| {});
        }
        result
    }

    fn tell(&self, event: u8, change: impl FnOnce(&mut Pending)) {
        {
            let mut pending = self.pending.lock();
            pending.events |= event;
            change(&mut pending);
        }
        // If the counter is full, an interrupt is already pending.
        let _ = self.interrupt.write(1);
    }

    /// Interrupts again if there are unread events, and returns true if so. The interrupt is an edge, which is lost if
    /// it comes before the guest's driver is up; the guest would then read the event only at the next one.
    pub fn remind(&self) -> bool {
        let unread = self.pending.lock().events != 0;
        if unread {
            let _ = self.interrupt.write(1);
        }
        unread
    }

    /// The addresses of the devices that the guest has released since the last call.
    pub fn take_ejected(&self) -> Vec<Bdf> {
        let mut pending = self.pending.lock();
        let ejected = pending.slots.iter_mut().map(|slots| std::mem::take(&mut slots.ejected));
        let slots = |(position, ejected): (u16, u32)| {
            let (segment, bus) = root_at(position);
            let address = move |slot: u8| Bdf { segment, rid: Rid::from_bus_devfn(bus, slot << 3) };
            (0..32).filter(move |slot| ejected >> slot & 1 == 1).map(address)
        };
        (0..).zip(ejected).flat_map(slots).collect()
    }

    /// Clears all pending events and releases, all vCPUs and all memory slots.
    pub fn reset(&self) {
        *self.pending.lock() = Pending::default();
        *self.vcpus.lock() = VcpuHotplug::default();
        *self.memory.lock() = MemoryHotplug::default();
        let _ = self.interrupt.read();
    }

    /// State to save.
    pub fn save(&self) -> EventDeviceState {
        let pending = self.pending.lock();
        let slots = (0..).zip(pending.slots).map(|(position, slots)| {
            let Slots { plugged, unplugged, ejected } = slots;
            let (segment, bus) = root_at(position);
            SlotsState { segment, bus, plugged, unplugged, ejected }
        });
        let has_news = |slots: &SlotsState| slots.plugged | slots.unplugged | slots.ejected != 0;
        let (vcpus, memory) = (self.vcpus.lock().save(), self.memory.lock().save());
        EventDeviceState { events: pending.events, slots: slots.filter(has_news).collect(), vcpus, memory }
    }

    /// Restores `state` in a machine with at most `max_vcpus` vCPUs, and signals the machine about pending releases.
    /// The guest is interrupted by [`Self::remind`]. Returns false, and changes nothing, if no guest can have caused
    /// this state.
    #[must_use]
    pub fn restore(&self, state: &EventDeviceState, max_vcpus: u8) -> bool {
        let vcpus = VcpuHotplug::restored(&state.vcpus, max_vcpus);
        let (Some(vcpus), Some(memory)) = (vcpus, MemoryHotplug::restored(&state.memory)) else { return false };
        let mut new = Pending { events: state.events, ..Pending::default() };
        let mut has_released = !state.vcpus.ejected.is_empty();
        for SlotsState { segment, bus, plugged, unplugged, ejected } in &state.slots {
            let Some(slots) = new.of(*segment, *bus) else { return false };
            *slots = Slots { plugged: *plugged, unplugged: *unplugged, ejected: *ejected };
            has_released |= *ejected != 0;
        }
        if state.events & !ALL_EVENTS != 0 {
            return false;
        }
        *self.pending.lock() = new;
        *self.vcpus.lock() = vcpus;
        *self.memory.lock() = memory;
        if has_released {
            let _ = self.machine.write(1);
        }
        true
    }

    /// The vCPUs that the machine must run, by ascending numbers.
    pub fn running_vcpus(&self) -> Vec<u8> {
        self.vcpus.lock().running().collect()
    }

    /// Reads the event register.
    pub fn take_events(&self) -> u8 {
        std::mem::take(&mut self.pending.lock().events)
    }

    /// Reads one of the slots' ports, which is below [`ALL_SLOT_PORTS`].
    pub fn read_slots(&self, port: u16) -> u8 {
        match self.pending.lock().at(port) {
            Some((slots, offset @ PLUGGED..UNPLUGGED)) => take_byte(&mut slots.plugged, offset - PLUGGED),
            Some((slots, offset @ UNPLUGGED..EJECT)) => take_byte(&mut slots.unplugged, offset - UNPLUGGED),
            _ => 0,
        }
    }

    /// Writes one of the slots' ports, which is below [`ALL_SLOT_PORTS`].
    pub fn write_slots(&self, port: u16, value: u8) {
        if let Some((slots, offset @ EJECT..END)) = self.pending.lock().at(port)
            && value != 0
        {
            slots.ejected |= u32::from(value) << (8 * (offset - EJECT));
            let _ = self.machine.write(1);
        }
    }

    /// Reads the vCPU hot-plug port at `offset`.
    pub fn read_vcpus(&self, offset: u16) -> u8 {
        self.vcpus.lock().read(offset)
    }

    /// Reads the memory hot-plug port at `offset`. These ports are read-only.
    pub fn read_memory(&self, offset: u16) -> u8 {
        self.memory.lock().read(offset)
    }

    /// Writes the vCPU hot-plug port at `offset`.
    pub fn write_vcpus(&self, offset: u16, value: u8) {
        if self.vcpus.lock().write(offset, value) {
            let _ = self.machine.write(1);
        }
    }
}

fn take_byte(register: &mut u32, n: u16) -> u8 {
    let shift = 8 * u32::from(n);
    let byte = (*register >> shift) as u8;
    *register &= !(0xff << shift);
    byte
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acpi::memory_hotplug;
    use crate::acpi::vcpu_hotplug::{self, ADDED, PRESENT};

    fn device() -> (GenericEventDevice, Arc<EventFd>) {
        let machine = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        (GenericEventDevice::new(Arc::clone(&machine)).unwrap(), machine)
    }

    fn at(segment: u16, bus: u8, slot: u8) -> Bdf {
        Bdf { segment, rid: Rid::new(bus, slot, 0).unwrap() }
    }

    /// Reads a register of the slots of segment 3.
    fn read(device: &GenericEventDevice, offset: u16) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|n| device.read_slots(3 * SLOT_PORTS + offset + n)))
    }

    #[test]
    fn unread_events_interrupt_again() {
        let (device, _) = device();
        assert!(!device.remind() && device.interrupt().read().is_err());
        device.press_power_button();
        device.interrupt().read().unwrap();
        assert!(device.remind() && device.interrupt().read().is_ok());
        assert_eq!(device.take_events(), POWER_BUTTON_EVENT);
        assert!(!device.remind() && device.interrupt().read().is_err());
    }

    #[test]
    fn each_event_is_reported_once_and_interrupts() {
        let (device, _) = device();
        assert_eq!(device.take_events(), 0);
        device.plugged(at(3, 0, 31));
        device.plugged(at(3, 0, 9));
        device.unplug(at(3, 0, 3));
        assert_eq!(device.interrupt().read().unwrap(), 3);
        assert_eq!(device.take_events(), PCI_EVENT);
        assert!((0..3 * SLOT_PORTS).all(|port| device.read_slots(port) == 0), "other segments have no news");
        assert_eq!((read(&device, PLUGGED), read(&device, UNPLUGGED)), (1 << 31 | 1 << 9, 1 << 3));
        assert_eq!((device.take_events(), read(&device, PLUGGED), read(&device, UNPLUGGED)), (0, 0, 0));
        device.press_power_button();
        assert_eq!(device.take_events(), POWER_BUTTON_EVENT);
    }

    #[test]
    fn memory_that_the_guest_releases_reaches_the_machine_once() {
        let (device, machine) = device();
        device.write_slots(EJECT, 0);
        assert!(machine.read().is_err());
        device.write_slots(EJECT, 1 << 4);
        device.write_slots(95 * SLOT_PORTS + EJECT + 3, 1 << 7);
        assert!(machine.read().is_ok());
        assert_eq!(device.take_ejected(), [at(0, 0, 4), at(95, 0, 31)]);
        assert_eq!(device.take_ejected(), []);
    }

    #[test]
    fn a_further_root_bus_has_registers_of_its_own() {
        let (device, machine) = device();
        device.with_vcpus(|vcpus| *vcpus = VcpuHotplug::new(1, 1));
        for bus in [1, 64, 127] {
            let first = slot_ports(0, bus);
            device.plugged(at(0, bus, 1));
            device.unplug(at(0, bus, 9));
            let state = device.save();
            assert_eq!((state.slots.len(), state.slots[0].bus, state.slots[0].segment), (1, bus, 0));
            assert!(device.restore(&state, 1) && device.save() == state, "bus {bus}");
            assert_eq!((device.read_slots(first + PLUGGED), device.read_slots(first + UNPLUGGED + 1)), (2, 2));
            device.write_slots(first + EJECT + 1, 2);
            assert!(machine.read().is_ok());
            assert_eq!(device.take_ejected(), [at(0, bus, 9)]);
            assert!((0..ALL_SLOT_PORTS).all(|port| device.read_slots(port) == 0));
        }
        let ports: std::collections::BTreeSet<_> = (0..MOST_SEGMENTS).map(|segment| slot_ports(segment, 0)).collect();
        assert!((1..=LAST_BUS).all(|bus| !ports.contains(&slot_ports(0, bus))));
        assert_eq!(slot_ports(0, LAST_BUS) + SLOT_PORTS, ALL_SLOT_PORTS);
    }

    #[test]
    fn nothing_else_can_be_written() {
        let (device, machine) = device();
        for port in
            (0..=u16::MAX).filter(|port| *port >= ALL_SLOT_PORTS || !(EJECT..END).contains(&(port % SLOT_PORTS)))
        {
            device.write_slots(port, 0xff);
        }
        assert!(machine.read().is_err() && (0..=u16::MAX).all(|port| device.read_slots(port) == 0));
    }

    #[test]
    fn a_reset_drops_unread_events() {
        let (device, _) = device();
        device.plugged(at(0, 0, 1));
        device.press_power_button();
        device.write_slots(EJECT, 1);
        device.reset();
        assert!(device.take_events() == 0 && (0..ALL_SLOT_PORTS).all(|port| device.read_slots(port) == 0));
        assert!(device.take_ejected().is_empty() && device.interrupt().read().is_err());
    }

    #[test]
    fn ged_notifies_guest_of_added_and_machine_of_ejected_vcpus() {
        let (device, machine) = device();
        device.with_vcpus(|vcpus| *vcpus = VcpuHotplug::new(1, 2));
        assert!(device.interrupt().read().is_err(), "those of the start are no news");
        device.with_vcpus(|vcpus| vcpus.add(1));
        assert!(device.interrupt().read().is_ok());
        assert_eq!(device.take_events(), VCPU_EVENT);
        assert_eq!([PRESENT, ADDED, ADDED].map(|register| device.read_vcpus(register)), [3, 2, 0]);
        device.write_vcpus(vcpu_hotplug::EJECT, 1);
        assert!(machine.read().is_err(), "the first one stays");
        device.write_vcpus(vcpu_hotplug::EJECT, 2);
        assert!(machine.read().is_ok());
        assert_eq!(device.with_vcpus(|vcpus| vcpus.take_ejected().collect::<Vec<_>>()), [1]);
        device.reset();
        assert_eq!(device.read_vcpus(PRESENT), 0);
    }

    #[test]
    fn the_guest_is_notified_of_memory() {
        let (device, _) = device();
        assert!(device.with_memory(|memory| memory.has_room()) && device.interrupt().read().is_err());
        device.with_memory(|memory| memory.add(1 << 32..2 << 32));
        assert!(device.interrupt().read().is_ok());
        assert_eq!(device.take_events(), MEMORY_EVENT);
        assert_eq!([0, 0].map(|register| device.read_memory(register)), [1, 0]);
        device.reset();
        assert_eq!(device.read_memory(memory_hotplug::BANK + memory_hotplug::STATUS), 0);
    }

    #[test]
    fn a_slot_that_cannot_be_is_no_slot() {
        let (device, _) = device();
        device.plugged(at(96, 0, 1));
        device.plugged(at(1, 1, 1));
        device.plugged(at(0, 128, 1));
        assert!((0..ALL_SLOT_PORTS).all(|port| device.read_slots(port) == 0));
    }
}
