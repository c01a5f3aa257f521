//! The generic event device with the registers of slots, vCPUs and memory: a guest that accesses any ports, and a
//! machine that plugs, unplugs and resizes at the same time.
//!
//! The registers must read as in a model of plain sets; each event interrupts the guest and is reported once; and
//! everything that the guest releases is reported to the machine once, exists at that time, and is never vCPU 0.

use std::collections::BTreeSet;
use std::sync::Arc;

use machine::acpi::ged::{
    ALL_SLOT_PORTS, EJECT, GenericEventDevice, MEMORY_EVENT, PCI_EVENT, PLUGGED, POWER_BUTTON_EVENT, SLOT_PORTS,
    UNPLUGGED, VCPU_EVENT,
};
use machine::acpi::memory_hotplug::{self, BANK};
use machine::acpi::vcpu_hotplug::{self, Change, VcpuHotplug};
use machine::arch::x86_64::layout::MOST_SEGMENTS;
use pci::{Bdf, Rid};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::input::{Input, Seed};

/// The most vCPUs: more than a register of one byte can represent.
const MOST_VCPUS: u8 = 20;
/// The addresses of the first region of memory, and the distance of the next.
const MEMORY: u64 = 1 << 32;

// The kinds of operation.
const READ_EVENTS: u8 = 0;
const READ_SLOTS: u8 = 1;
const WRITE_SLOTS: u8 = 2;
const READ_VCPUS: u8 = 3;
const WRITE_VCPUS: u8 = 4;
const READ_MEMORY: u8 = 5;
const PLUG: u8 = 6;
const UNPLUG: u8 = 7;
const RESIZE: u8 = 8;
const ADD_MEMORY: u8 = 9;
const BUTTON: u8 = 10;
const TAKE: u8 = 11;
const RESET: u8 = 12;
const KINDS: u8 = 13;

/// The position of a root bus among the registers and a slot, or the number of a vCPU.
type Slots = BTreeSet<(u16, u8)>;
type Vcpus = BTreeSet<u8>;

/// Events that guest and machine have received, and pending events.
#[derive(Default)]
struct Model {
    events: u8,
    interrupt: bool,
    told: bool,
    plugged: Slots,
    unplugged: Slots,
    released: Slots,
    present: Vcpus,
    added: Vcpus,
    asked: Vcpus,
    leaving: Vcpus,
    ejected: Vcpus,
    regions: u64,
    new_regions: u8,
}

impl Model {
    fn new() -> Self {
        Self { present: [0, 1, 2].into(), ..Self::default() }
    }

    fn tell(&mut self, event: u8) {
        self.events |= event;
        self.interrupt = true;
    }

    fn read_slots(&mut self, port: u16) -> u8 {
        let (segment, offset) = (port / SLOT_PORTS, port % SLOT_PORTS);
        let (set, first) = match offset {
            PLUGGED..UNPLUGGED => (&mut self.plugged, PLUGGED),
            UNPLUGGED..EJECT => (&mut self.unplugged, UNPLUGGED),
            _ => return 0,
        };
        let base = 8 * (offset - first) as u8;
        (0..8).filter(|bit| set.remove(&(segment, base + bit))).fold(0, |byte, bit| byte | 1 << bit)
    }

    fn write_slots(&mut self, port: u16, value: u8) {
        let (segment, offset) = (port / SLOT_PORTS, port % SLOT_PORTS);
        if (EJECT..EJECT + 4).contains(&offset) && port < ALL_SLOT_PORTS {
            let base = 8 * (offset - EJECT) as u8;
            self.released.extend((0..8).filter(|bit| value >> bit & 1 == 1).map(|bit| (segment, base + bit)));
            self.told |= value != 0;
        }
    }

    fn read_vcpus(&mut self, offset: u16) -> u8 {
        let (register, n) = (offset / 32, (offset % 32) as u8);
        let ids = (0..8).filter_map(|bit| Some((bit, n.checked_mul(8)?.checked_add(bit)?)));
        let set = match register {
            0 => return ids.filter(|(_, id)| self.present.contains(id)).fold(0, |byte, (bit, _)| byte | 1 << bit),
            1 => &mut self.added,
            2 => &mut self.asked,
            _ => return 0,
        };
        ids.filter(|(_, id)| set.remove(id)).fold(0, |byte, (bit, _)| byte | 1 << bit)
    }

    fn write_vcpus(&mut self, offset: u16, value: u8) {
        let (register, n) = (offset / 32, (offset % 32) as u8);
        for id in (0..8).filter(|bit| value >> bit & 1 == 1).map(|bit| 8 * n + bit) {
            if register == 3 && id != 0 && self.present.remove(&id) {
                [&mut self.added, &mut self.asked, &mut self.leaving].into_iter().for_each(|set| _ = set.remove(&id));
                self.ejected.insert(id);
            } else if register == 4 {
                self.asked.remove(&id);
                self.leaving.remove(&id);
            }
        }
        self.told |= !self.ejected.is_empty();
    }

    /// The machine's change for this number of vCPUs.
    fn resize(&mut self, vcpus: u8) -> Change {
        if let Some(first) = self.leaving.first() {
            return Change::Unanswered(*first);
        }
        if let Some(surplus) = self.present.len().checked_sub(vcpus.into()) {
            self.leaving = self.present.iter().rev().take(surplus).copied().filter(|id| *id != 0).collect();
            self.asked = self.leaving.clone();
            return Change::Asked;
        }
        let free = (0..MOST_VCPUS).filter(|id| !self.present.contains(id));
        let new: Vec<u8> = free.take(usize::from(vcpus) - self.present.len()).collect();
        match new.iter().find(|id| self.ejected.contains(id)) {
            Some(id) => Change::Unanswered(*id),
            None => Change::Add(new),
        }
    }

    fn read_memory(&mut self, offset: u16) -> u8 {
        let Some(at) = offset.checked_sub(BANK) else {
            return if offset == 0 { std::mem::take(&mut self.new_regions) } else { 0 };
        };
        let (n, at) = (u64::from(at / BANK), usize::from(at % BANK));
        if n >= self.regions {
            return 0;
        }
        let words = [MEMORY * (n + 1), MEMORY * (n + 2) - 1, MEMORY, 1];
        words[at / 8].to_le_bytes()[at % 8]
    }
}

/// The address of a slot of the root bus at a position: each segment's bus 0, then further buses of segment 0.
fn address(root: u16, slot: u8) -> Bdf {
    let (segment, bus) = if root < MOST_SEGMENTS { (root, 0) } else { (0, root - MOST_SEGMENTS + 1) };
    Bdf { segment, rid: Rid::from_bus_devfn(u8::try_from(bus).expect("a bus"), slot << 3) }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of devices and vCPUs that the guest released, of vCPUs, and of interrupts.
fn run_to_end(input: &[u8]) -> (usize, usize, usize) {
    let mut input = Input::new(input);
    let machine = Arc::new(EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
    let device = GenericEventDevice::new(Arc::clone(&machine)).expect("an eventfd");
    let mut model = Model::new();
    device.with_vcpus(|vcpus| *vcpus = VcpuHotplug::new(3, MOST_VCPUS));
    let (mut released, mut interrupts) = (0, 0);
    while !input.is_empty() {
        match input.u8() % KINDS {
            READ_EVENTS => assert_eq!(device.take_events(), std::mem::take(&mut model.events)),
            READ_SLOTS => {
                let port = input.u16() % (ALL_SLOT_PORTS + 16);
                assert_eq!(device.read_slots(port), model.read_slots(port), "port {port}");
            }
            WRITE_SLOTS => {
                let (port, value) = (input.u16() % (ALL_SLOT_PORTS + 16), input.u8());
                device.write_slots(port, value);
                model.write_slots(port, value);
            }
            READ_VCPUS => {
                let offset = input.u8().into();
                assert_eq!(device.read_vcpus(offset), model.read_vcpus(offset), "offset {offset}");
            }
            WRITE_VCPUS => {
                let (offset, value) = (input.u8().into(), input.u8());
                device.write_vcpus(offset, value);
                if offset < vcpu_hotplug::PORTS {
                    model.write_vcpus(offset, value);
                } else {
                    model.told |= !model.ejected.is_empty();
                }
            }
            READ_MEMORY => {
                let offset = input.u16() % (memory_hotplug::PORTS + 16);
                assert_eq!(device.read_memory(offset), model.read_memory(offset), "offset {offset}");
            }
            kind @ (PLUG | UNPLUG) => {
                let (root, slot) = (u16::from(input.u8()), input.u8() % 32);
                let is_one = root < ALL_SLOT_PORTS / SLOT_PORTS;
                let set = if kind == PLUG { &mut model.plugged } else { &mut model.unplugged };
                set.extend(is_one.then_some((root, slot)));
                model.tell(PCI_EVENT);
                let address = address(root, slot);
                if kind == PLUG { device.plugged(address) } else { device.unplug(address) }
            }
            RESIZE => {
                let wanted = 1 + input.u8() % MOST_VCPUS;
                let change = model.resize(wanted);
                assert_eq!(device.with_vcpus(|vcpus| vcpus.resize(wanted)), change);
                if let Change::Add(new) = change {
                    device.with_vcpus(|vcpus| new.iter().for_each(|id| vcpus.add(*id)));
                    model.present.extend(&new);
                    model.added.extend(&new);
                }
                if !(model.added.is_empty() && model.asked.is_empty()) {
                    model.tell(VCPU_EVENT);
                }
            }
            ADD_MEMORY => {
                let first = MEMORY * (model.regions + 1);
                if device.with_memory(|memory| memory.has_room()) {
                    model.new_regions |= 1 << model.regions;
                    model.regions += 1;
                }
                device.with_memory(|memory| memory.add(first..first + MEMORY));
                if model.new_regions != 0 {
                    model.tell(MEMORY_EVENT);
                }
            }
            BUTTON => {
                device.press_power_button();
                model.tell(POWER_BUTTON_EVENT);
            }
            TAKE => {
                let taken = device.take_ejected();
                let expected = std::mem::take(&mut model.released).into_iter();
                assert!(taken.iter().copied().eq(expected.map(|(root, slot)| address(root, slot))), "{taken:?}");
                let vcpus: Vec<_> = device.with_vcpus(|vcpus| vcpus.take_ejected().collect());
                assert!(!vcpus.contains(&0) && vcpus.iter().eq(&std::mem::take(&mut model.ejected)), "{vcpus:?}");
                if !(model.added.is_empty() && model.asked.is_empty()) {
                    model.tell(VCPU_EVENT);
                }
                released += taken.len() + vcpus.len();
            }
            _ => {
                device.reset();
                device.with_vcpus(|vcpus| *vcpus = VcpuHotplug::new(3, MOST_VCPUS));
                model = Model { told: model.told, ..Model::new() };
            }
        }
        interrupts += usize::from(model.interrupt);
        assert_eq!(device.interrupt().read().is_ok(), std::mem::take(&mut model.interrupt), "no interrupt");
        assert_eq!(machine.read().is_ok(), std::mem::take(&mut model.told), "the machine is not woken");
        let present = device.with_vcpus(|vcpus| vcpus.present());
        // Inspecting the vCPUs repeats the interrupt for unread events.
        let repeated = device.interrupt().read().is_ok();
        assert_eq!(repeated, !(model.added.is_empty() && model.asked.is_empty()));
        model.events |= if repeated { VCPU_EVENT } else { 0 };
        assert!(present == model.present.len() && model.present.contains(&0));
    }
    (released, model.present.len(), interrupts)
}

/// Seeds: a device that is plugged and unplugged; vCPUs that are added, removed and kept; memory; the power button; a
/// reset; writes to unused ports.
pub fn seeds() -> Vec<Vec<u8>> {
    let port = |kind: u8, port: u16| [vec![kind], port.to_le_bytes().to_vec()].concat();
    let slots = 3 * SLOT_PORTS;
    let pci = Seed::new().with([PLUG, 3, 9, READ_EVENTS]).with(port(READ_SLOTS, slots + PLUGGED + 1));
    let pci = pci.with([UNPLUG, 3, 9, READ_EVENTS]).with(port(READ_SLOTS, slots + UNPLUGGED + 1));
    let pci = pci.with(port(WRITE_SLOTS, slots + EJECT + 1)).with([2, TAKE]);
    let grow = [RESIZE, 9, READ_EVENTS, READ_VCPUS, 0, READ_VCPUS, 32, READ_VCPUS, 33];
    let shrink = [RESIZE, 1, READ_EVENTS, READ_VCPUS, 64, READ_VCPUS, 65, WRITE_VCPUS, 96, 0xff, WRITE_VCPUS, 97, 0xff];
    let vcpus = Seed::new().with(grow).with(shrink).with([RESIZE, 3, TAKE, RESIZE, 3]);
    let kept = Seed::new().with([RESIZE, 0, WRITE_VCPUS, 128, 6, RESIZE, 19, RESET]);
    let memory = Seed::new().with([ADD_MEMORY, ADD_MEMORY, READ_EVENTS]).with(port(READ_MEMORY, 0));
    let memory = (64..90).fold(memory, |seed, at| seed.with(port(READ_MEMORY, at)));
    let nothing = Seed::new().with([BUTTON, READ_EVENTS]).with(port(WRITE_SLOTS, ALL_SLOT_PORTS + EJECT)).with([255]);
    let nothing = nothing.with([WRITE_VCPUS, 0, 255, WRITE_VCPUS, 200, 255, PLUG, 96, 1, UNPLUG, 223, 31]);
    [pci, vcpus, kept, memory, nothing].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_add_and_release() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(done, [(1, 3, 2), (9, 4, 3), (0, 3, 2), (0, 3, 2), (0, 3, 3)]);
    }
}
