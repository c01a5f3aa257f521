//! The part of the DSDT by which devices come and go, and the power button.
//!
//! A new device is told by a Bus Check (0), never by a Device Check (1): at that, Linux checks every slot that is described, and
//! takes the VFs of one whose function 0 it does not find.

use acpi_tables::aml::{
    And, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Interrupt, Local,
    Method, MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path, ResourceTemplate, Scope, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::acpi_processors;
use crate::arch::x86_64::layout::{EVENT_GSI, EVENT_PORT};
use crate::event_device::{EJECT, EVENTS, PCI_EVENT, PLUGGED, PORTS, POWER_BUTTON_EVENT, PROCESSOR_EVENT, UNPLUGGED};

/// The slots of bus 0 whose devices can come and go: all but the host bridge's.
const SLOTS: std::ops::RangeInclusive<u32> = 1..=31;
/// Something may have come (`ACPI 6.5 §5.6.6`).
const BUS_CHECK: u8 = 0;
/// The device should go.
const EJECT_REQUEST: u8 = 3;
/// The power button was pressed (`ACPI 6.5 §4.8.3.2.2`).
const BUTTON_PRESSED: u8 = 0x80;

/// The slots, the power button and the generic event device.
pub struct Hotplug;

impl Aml for Hotplug {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let slots: Vec<_> = SLOTS.map(Slot).collect();
        Scope::new(Path::new("\\_SB_.PCI0"), slots.iter().map(|slot| slot as &dyn Aml).collect()).to_aml_bytes(sink);
        Scope::new(Path::new("\\_SB_"), vec![&PowerButton, &EventDevice]).to_aml_bytes(sink);
    }
}

/// A slot of bus 0, from 1.
struct Slot(u32);

impl Slot {
    fn name(&self) -> String {
        format!("S{:03}", self.0)
    }

    fn bit(&self) -> u32 {
        1 << self.0
    }

    /// Notifies the slot of `value` if its bit is set in `slots`.
    fn notify(&self, slots: &Local, value: u8, sink: &mut dyn AmlSink) {
        let path = Path::new(&format!("\\_SB_.PCI0.{}", self.name()));
        If::new(&And::new(&ZERO, slots, &self.bit()), vec![&Notify::new(&path, &value)]).to_aml_bytes(sink);
    }
}

impl Aml for Slot {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let eject = Path::new("\\_SB_.GED_.EJCT");
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

/// A power button that is a device, as a machine without fixed hardware has it (`ACPI 6.5 §4.8.2.2.1.2`).
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

/// The generic event device, whose interrupt makes the guest look at its registers.
struct EventDevice;

impl Aml for EventDevice {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let registers = || Path::new("REGS");
        let field = |access, fields| {
            Field::new(registers(), access, FieldLockRule::NoLock, FieldUpdateRule::WriteAsZeroes, fields)
        };
        let reserved = |from: u16, to: u16| FieldEntry::Reserved(usize::from(to - from) * 8);
        let slots = vec![
            reserved(0, PLUGGED),
            FieldEntry::Named(*b"PLUG", 32),
            reserved(PLUGGED + 4, UNPLUGGED),
            FieldEntry::Named(*b"UNPL", 32),
            reserved(UNPLUGGED + 4, EJECT),
            FieldEntry::Named(*b"EJCT", 32),
        ];
        Device::new(
            Path::new("GED_"),
            vec![
                &Name::new(Path::new("_HID"), &"ACPI0013"),
                &Name::new(Path::new("_UID"), &0u8),
                &Name::new(
                    Path::new("_CRS"),
                    &ResourceTemplate::new(vec![&Interrupt::new(true, true, false, false, EVENT_GSI)]),
                ),
                &OpRegion::new(registers(), OpRegionSpace::SystemIO, &EVENT_PORT, &PORTS),
                &field(FieldAccessType::Byte, vec![reserved(0, EVENTS), FieldEntry::Named(*b"EVTS", 8)]),
                &field(FieldAccessType::DWord, slots),
                &Method::new(Path::new("_EVT"), 1, true, vec![&Event]),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// What the guest does at an interrupt of the event device.
struct Event;

impl Aml for Event {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (events, button) = (Local(0), Path::new("\\_SB_.PWRB"));
        Store::new(&events, &Path::new("EVTS")).to_aml_bytes(sink);
        If::new(&And::new(&ZERO, &events, &PCI_EVENT), vec![&Slots(Local(1))]).to_aml_bytes(sink);
        let scan = MethodCall::new(Path::new(acpi_processors::SCAN), Vec::new());
        If::new(&And::new(&ZERO, &events, &PROCESSOR_EVENT), vec![&scan]).to_aml_bytes(sink);
        let pressed = Notify::new(&button, &BUTTON_PRESSED);
        If::new(&And::new(&ZERO, &events, &POWER_BUTTON_EVENT), vec![&pressed]).to_aml_bytes(sink);
    }
}

/// Tells each slot what is new with it.
struct Slots(Local);

impl Aml for Slots {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        for (register, value) in [("PLUG", BUS_CHECK), ("UNPL", EJECT_REQUEST)] {
            Store::new(&self.0, &Path::new(register)).to_aml_bytes(sink);
            for slot in SLOTS.map(Slot) {
                slot.notify(&self.0, value, sink);
            }
        }
    }
}
