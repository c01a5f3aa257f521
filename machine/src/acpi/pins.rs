//! The part of the DSDT that routes the interrupt pins of devices on bus 0 (`ACPI 6.5 §6.2.13`).
//!
//! Only host devices have pins. They may be plugged into a running guest, so all slots are described. There are no
//! interrupt link devices: each pin is wired to one input of the IOAPIC, level-triggered and active-low like PCI pins,
//! and not to the PICs. A guest that does not use the IOAPIC gets no pin interrupts.

use acpi_tables::aml::{Method, Name, Package, Path, Return, ZERO};
use acpi_tables::{Aml, AmlSink};

use crate::arch::x86_64::layout;

/// The package, which all segments share.
const PINS: &str = "\\_SB_.PINS";

/// The package that says how each slot's interrupt pins are wired.
pub(crate) struct Pins;

impl Aml for Pins {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        // In segment 0, slot 0 is the host bridge, which has no pin.
        let slots: Vec<_> = (0..=31).map(Wired).collect();
        let slots = slots.iter().map(|slot| slot as &dyn Aml).collect();
        Name::new(Path::new(PINS), &Package::new(slots)).to_aml_bytes(sink);
    }
}

/// The pin INTA of a slot. A device has one function, so no other pin.
struct Wired(u8);

impl Aml for Wired {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let all_functions = u32::from(self.0) << 16 | 0xffff;
        Package::new(vec![&all_functions, &ZERO, &ZERO, &layout::pin_gsi(self.0)]).to_aml_bytes(sink);
    }
}

/// The routing table of a host bridge.
pub(crate) struct RoutingTable;

impl Aml for RoutingTable {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        Method::new(Path::new("_PRT"), 0, false, vec![&Return::new(&Path::new(PINS))]).to_aml_bytes(sink);
    }
}
