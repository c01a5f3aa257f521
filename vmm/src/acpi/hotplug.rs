//! The part of the DSDT for hot-plug of devices, and the power button.
//!
//! A new device is announced by a Bus Check (0), never by a Device Check (1): on the latter, Linux rescans every
//! described slot, and removes the VFs of a PF whose function 0 it does not find.

use acpi_tables::aml::{
    And, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Interrupt, Local,
    Method, MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path, ResourceTemplate, Scope, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::acpi::ged::{EJECT, EVENTS, PCI_EVENT, PLUGGED, PORTS, POWER_BUTTON_EVENT, UNPLUGGED, VCPU_EVENT};
use crate::acpi::processors;
use crate::arch::x86_64::layout::{EVENT_GSI, EVENT_PORT};

/// The slots of bus 0 that support hot-plug: all but the host bridge's.
const SLOTS: std::ops::RangeInclusive<u32> = 1..=31;
/// A device may have been added (`ACPI 6.5 §5.6.6`).
const BUS_CHECK: u8 = 0;
/// The device is to be removed.
const EJECT_REQUEST: u8 = 3;
/// The power button was pressed (`ACPI 6.5 §4.8.3.2.2`).
const BUTTON_PRESSED: u8 = 0x80;

/// The slots, the power button and the generic event device.
pub(crate) struct Hotplug;

impl Aml for Hotplug {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let slots: Vec<_> = SLOTS.map(SlotObject).collect();
        Scope::new(Path::new("\\_SB_.PCI0"), slots.iter().map(|slot| slot as &dyn Aml).collect()).to_aml_bytes(sink);
        Scope::new(Path::new("\\_SB_"), vec![&PowerButton, &Ged]).to_aml_bytes(sink);
    }
}

/// The ACPI device object of a slot of bus 0, from 1.
struct SlotObject(u32);

impl SlotObject {
    fn name(&self) -> String {
        format!("S{:03}", self.0)
    }

    fn bit(&self) -> u32 {
        1 << self.0
    }

    /// AML that notifies the slot with `value` if its bit is set in `slots`.
    fn notify(&self, slots: &Local, value: u8, sink: &mut dyn AmlSink) {
        let path = Path::new(&format!("\\_SB_.PCI0.{}", self.name()));
        If::new(&And::new(&ZERO, slots, &self.bit()), vec![&Notify::new(&path, &value)]).to_aml_bytes(sink);
    }
}

impl Aml for SlotObject {
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
struct Ged;

impl Aml for Ged {
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

/// The method that the guest runs on an interrupt of the generic event device.
struct Event;

impl Aml for Event {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (events, button) = (Local(0), Path::new("\\_SB_.PWRB"));
        Store::new(&events, &Path::new("EVTS")).to_aml_bytes(sink);
        If::new(&And::new(&ZERO, &events, &PCI_EVENT), vec![&Slots(Local(1))]).to_aml_bytes(sink);
        let scan = MethodCall::new(Path::new(processors::SCAN), Vec::new());
        If::new(&And::new(&ZERO, &events, &VCPU_EVENT), vec![&scan]).to_aml_bytes(sink);
        let pressed = Notify::new(&button, &BUTTON_PRESSED);
        If::new(&And::new(&ZERO, &events, &POWER_BUTTON_EVENT), vec![&pressed]).to_aml_bytes(sink);
    }
}

/// AML that notifies each slot of its events.
struct Slots(Local);

impl Aml for Slots {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        for (register, value) in [("PLUG", BUS_CHECK), ("UNPL", EJECT_REQUEST)] {
            Store::new(&self.0, &Path::new(register)).to_aml_bytes(sink);
            for slot in SLOTS.map(SlotObject) {
                slot.notify(&self.0, value, sink);
            }
        }
    }
}
