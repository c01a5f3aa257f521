//! The host bridges in the DSDT.

use acpi_tables::aml::{AddressSpace, AddressSpaceCacheable, Device, EISAName, Name, Path, ResourceTemplate, Scope};
use acpi_tables::{Aml, AmlSink};

use crate::acpi::pins::RoutingTable;
use crate::pci_layout::Apertures;

/// The root bus of a host bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Root {
    /// The segment.
    pub segment: u16,
    /// The number of the bus: 0, or another one on segment 0.
    pub bus: u8,
}

impl Root {
    /// The ACPI name of the host bridge.
    pub(crate) fn name(self) -> String {
        match self {
            Self { segment: 0, bus: 0 } => "PCI0".to_string(),
            Self { segment, bus: 0 } => format!("PC{segment:02X}"),
            Self { bus, .. } => format!("PB{bus:02X}"),
        }
    }

    /// A number that no other host bridge has.
    fn uid(self) -> u16 {
        match self.bus {
            0 => self.segment,
            bus => 0x100 | u16::from(bus),
        }
    }
}

/// The PCI Express host bridge of a root bus (`PCI Firmware 3.3 §4.6`).
///
/// It has no I/O port window, because no device has I/O BARs, and no _OSC, because the platform controls hot-plug, and
/// there is no other feature to negotiate. The windows are not marked prefetchable: Linux would place only prefetchable
/// BARs there, but places both kinds in unmarked windows.
pub(crate) struct Bridge {
    /// The root bus.
    pub root: Root,
    /// The last bus behind it.
    pub last_bus: u8,
    /// Apertures for its devices.
    pub apertures: Apertures,
    /// NUMA node, if it has one.
    pub node: Option<u32>,
}

impl Aml for Bridge {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let Apertures { mem32, mem64 } = &self.apertures;
        let space = AddressSpaceCacheable::NotCacheable;
        let buses = AddressSpace::new_bus_number(self.root.bus.into(), u16::from(self.last_bus));
        let (low, high);
        let mut resources: Vec<&dyn Aml> = vec![&buses];
        // A segment with a tiny weight may have no window; nor may its further root buses.
        if !mem32.is_empty() {
            low = AddressSpace::new_memory(space, true, mem32.start as u32, (mem32.end - 1) as u32, None);
            resources.push(&low);
        }
        if !mem64.is_empty() {
            high = AddressSpace::new_memory(space, true, mem64.start, mem64.end - 1, None);
            resources.push(&high);
        }
        let node = self.node.map(|node| Name::new(Path::new("_PXM"), &node));
        let objects = [
            Name::new(Path::new("_HID"), &EISAName::new("PNP0A08")),
            Name::new(Path::new("_CID"), &EISAName::new("PNP0A03")),
            Name::new(Path::new("_SEG"), &self.root.segment),
            Name::new(Path::new("_BBN"), &self.root.bus),
            Name::new(Path::new("_UID"), &self.root.uid()),
            // DMA is coherent.
            Name::new(Path::new("_CCA"), &1u8),
            Name::new(Path::new("_CRS"), &ResourceTemplate::new(resources)),
        ];
        let objects =
            objects.iter().chain(&node).map(|object| object as &dyn Aml).chain([&RoutingTable as _]).collect();
        let device = Device::new(Path::new(&self.root.name()), objects);
        Scope::new(Path::new("\\_SB_"), vec![&device]).to_aml_bytes(sink);
    }
}
