//! The part of the DSDT for hot-plug of devices, and the power button.
//!
//! A new device is announced with a Bus Check (0), never with a Device Check (1): on the latter, Linux rescans every
//! described slot, and removes the VFs of a PF if it does not find function 0.

use acpi_tables::aml::{
    And, Arg, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Interrupt,
    Local, Method, MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path, ResourceTemplate, Scope, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::acpi::bridge::Root;
use crate::acpi::ged::{
    EJECT, MEMORY_EVENT, PCI_EVENT, PLUGGED, POWER_BUTTON_EVENT, SLOT_PORTS, UNPLUGGED, VCPU_EVENT, slot_ports,
};
use crate::acpi::{memory_devices, processors};
use crate::arch::x86_64::layout::{EVENT_GSI, EVENT_PORT, SLOTS_PORT};

/// The slots of a root bus that support hot-plug: all except that of the host bridge, which only bus 0 of segment 0
/// has.
const fn slots(root: Root) -> std::ops::RangeInclusive<u32> {
    if root.segment == 0 && root.bus == 0 { 1..=31 } else { 0..=31 }
}

/// A device may have been added (`ACPI 6.5 §5.6.6`).
const BUS_CHECK: u8 = 0;
/// The device should be removed.
const EJECT_REQUEST: u8 = 3;
/// The power button was pressed (`ACPI 6.5 §4.8.3.2.2`).
const BUTTON_PRESSED: u8 = 0x80;

/// The slots of all root buses, the power button and the generic event device.
pub(crate) struct Hotplug<'a> {
    /// The root buses.
    pub roots: &'a [Root],
    /// True if there are slots for memory.
    pub memory: bool,
}

impl Aml for Hotplug<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        self.roots.iter().for_each(|root| RootSlots(*root).to_aml_bytes(sink));
        let event = Event { roots: self.roots, memory: self.memory };
        Scope::new(Path::new("\\_SB_"), vec![&PowerButton, &Ged(event)]).to_aml_bytes(sink);
    }
}

/// The slots of one root bus, their registers, and the method that notifies those with news.
struct RootSlots(Root);

impl RootSlots {
    fn path(&self) -> String {
        format!("\\_SB_.{}", self.0.name())
    }

    /// The path of the method.
    fn scan(&self) -> Path {
        Path::new(&format!("{}.SCAN", self.path()))
    }
}

impl Aml for RootSlots {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let registers = || Path::new("REGS");
        let reserved = |from: u16, to: u16| FieldEntry::Reserved(usize::from(to - from) * 8);
        let field = Field::new(
            registers(),
            FieldAccessType::DWord,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            vec![
                reserved(0, PLUGGED),
                FieldEntry::Named(*b"PLUG", 32),
                reserved(PLUGGED + 4, UNPLUGGED),
                FieldEntry::Named(*b"UNPL", 32),
                reserved(UNPLUGGED + 4, EJECT),
                FieldEntry::Named(*b"EJCT", 32),
            ],
        );
        let port = SLOTS_PORT + slot_ports(self.0.segment, self.0.bus);
        let region = OpRegion::new(registers(), OpRegionSpace::SystemIO, &port, &SLOT_PORTS);
        let slots: Vec<_> = slots(self.0).map(SlotObject).collect();
        // Notifies the slots in the first argument with the event in the second.
        let notify: Vec<_> = self::slots(self.0).map(NotifySlot).collect();
        let notify = notify.iter().map(|slot| slot as &dyn Aml).collect();
        let notify = Method::new(Path::new("TELL"), 2, true, notify);
        let scan = Method::new(
            Path::new("SCAN"),
            0,
            true,
            vec![&Tell { register: "PLUG", value: BUS_CHECK }, &Tell { register: "UNPL", value: EJECT_REQUEST }],
        );
        let mut children: Vec<&dyn Aml> = vec![&region, &field];
        children.extend(slots.iter().map(|slot| slot as &dyn Aml));
        children.extend([&notify as &dyn Aml, &scan]);
        Scope::new(Path::new(&self.path()), children).to_aml_bytes(sink);
    }
}

/// AML that notifies the slots in a register.
struct Tell {
    register: &'static str,
    value: u8,
}

impl Aml for Tell {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let slots = Local(0);
        Store::new(&slots, &Path::new(self.register)).to_aml_bytes(sink);
        If::new(&slots, vec![&MethodCall::new(Path::new("TELL"), vec![&slots, &self.value])]).to_aml_bytes(sink);
    }
}

/// The ACPI device object of a slot of a root bus.
struct SlotObject(u32);

impl SlotObject {
    fn name(&self) -> String {
        format!("S{:03}", self.0)
    }

    fn bit(&self) -> u32 {
        1 << self.0
    }
}

impl Aml for SlotObject {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        // A name without a path is searched for in the enclosing scopes; the host bridge's scope has it.
        let eject = Path::new("EJCT");
        Device::new(
            Path::new(&self.name()),
            vec![
                &Name::new(Path::new("_ADR"), &(self.0 << 16)),
                &Name::new(Path::new("_SUN"), &self.0),
                &Method::new(Path::new("_EJ0"), 1, true, vec![&Store::new(&eject, &self.bit())]),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// AML that notifies slot `n` with the second argument, if the slot's bit is set in the first.
struct NotifySlot(u32);

impl Aml for NotifySlot {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (slot, slots, event) = (SlotObject(self.0), Arg(0), Arg(1));
        let name = Path::new(&slot.name());
        If::new(&And::new(&ZERO, &slots, &slot.bit()), vec![&Notify::new(&name, &event)]).to_aml_bytes(sink);
    }
}

/// The control-method power button of a hardware-reduced machine (`ACPI 6.5 §4.8.2.2.1.2`).
struct PowerButton;

impl Aml for PowerButton {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        Device::new(
            Path::new("PWRB"),
            vec![&Name::new(Path::new("_HID"), &EISAName::new("PNP0C0C")), &Name::new(Path::new("_UID"), &0u8)],
        )
        .to_aml_bytes(sink);
    }
}

/// The generic event device. On its interrupt, the guest reads its registers.
struct Ged<'a>(Event<'a>);

impl Aml for Ged<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let registers = || Path::new("REGS");
        let events = Field::new(
            registers(),
            FieldAccessType::Byte,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            vec![FieldEntry::Named(*b"EVTS", 8)],
        );
        Device::new(
            Path::new("GED_"),
            vec![
                &Name::new(Path::new("_HID"), &"ACPI0013"),
                &Name::new(Path::new("_UID"), &0u8),
                &Name::new(
                    Path::new("_CRS"),
                    &ResourceTemplate::new(vec![&Interrupt::new(true, true, false, false, EVENT_GSI)]),
                ),
                &OpRegion::new(registers(), OpRegionSpace::SystemIO, &EVENT_PORT, &1u8),
                &events,
                &Method::new(Path::new("_EVT"), 1, true, vec![&self.0]),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// The method that the guest runs on an interrupt of the generic event device.
struct Event<'a> {
    roots: &'a [Root],
    /// True if there are slots for memory.
    memory: bool,
}

impl Aml for Event<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (events, button) = (Local(0), Path::new("\\_SB_.PWRB"));
        Store::new(&events, &Path::new("EVTS")).to_aml_bytes(sink);
        let scans = self.roots.iter().map(|root| MethodCall::new(RootSlots(*root).scan(), Vec::new()));
        let scans: Vec<_> = scans.collect();
        let scans = scans.iter().map(|scan| scan as &dyn Aml).collect();
        If::new(&And::new(&ZERO, &events, &PCI_EVENT), scans).to_aml_bytes(sink);
        let scan = MethodCall::new(Path::new(processors::SCAN), Vec::new());
        If::new(&And::new(&ZERO, &events, &VCPU_EVENT), vec![&scan]).to_aml_bytes(sink);
        if self.memory {
            let scan = MethodCall::new(Path::new(memory_devices::SCAN), Vec::new());
            If::new(&And::new(&ZERO, &events, &MEMORY_EVENT), vec![&scan]).to_aml_bytes(sink);
        }
        let pressed = Notify::new(&button, &BUTTON_PRESSED);
        If::new(&And::new(&ZERO, &events, &POWER_BUTTON_EVENT), vec![&pressed]).to_aml_bytes(sink);
    }
}
