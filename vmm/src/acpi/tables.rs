//! The ACPI tables: the hardware that the guest cannot enumerate.
//!
//! The machine is hardware-reduced (`ACPI 6.5 §4.1`): it has sleep and reset registers, but no other fixed hardware.
//! Devices that the guest can enumerate are not described. The slots of bus 0 are, for hot-plug; no device is ever
//! described on a VF bus, so that ACPI hot-plug cannot affect VFs.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path,
    ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};

use crate::acpi::hotplug::Hotplug;
use crate::acpi::processors::Processors;
use crate::arch::x86_64::layout::{
    self, ECAM, LAST_BUS, Layout, MMIO32, RESET_PORT, RESET_VALUE, S5_SLEEP_TYPE, SERIAL_GSI, SERIAL_PORT,
    SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT,
};

const OEM_ID: [u8; 6] = *b"SRIOV ";
const OEM_TABLE: [u8; 8] = *b"SRIOVVMM";
const OEM_REVISION: u32 = 1;

/// The revision of the MADT of ACPI 6.3 and later.
const MADT_REVISION: u8 = 5;
/// The DSDT revision that makes AML integers 64 bits wide.
const DSDT_REVISION: u8 = 2;
/// Bit 2: no VGA. Bit 5: no CMOS RTC. The other bits would announce hardware (`ACPI 6.5 §5.2.9.3`).
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 5;

/// The hardware that the tables describe.
#[derive(Debug, Clone, Copy)]
pub struct Hardware<'a> {
    /// The addresses.
    pub layout: &'a Layout,
    /// vCPUs at boot, with local APIC IDs from 0.
    pub vcpus: u8,
    /// The maximum number of vCPUs, 1 to 254; the additional ones have the next local APIC IDs.
    pub max_vcpus: u8,
    /// Whether there is a serial port.
    pub serial: bool,
}

/// All tables in sequence, the RSDP first, to be loaded at guest address `base`.
pub fn tables(hardware: &Hardware, base: u64) -> Vec<u8> {
    let mut tables = vec![0; Rsdp::len().next_multiple_of(16)];
    let mut place = |table: &dyn Aml| {
        tables.resize(tables.len().next_multiple_of(16), 0);
        let address = base + tables.len() as u64;
        table.to_aml_bytes(&mut tables);
        address
    };
    let dsdt = place(&dsdt(hardware));
    let entries = [place(&fadt(dsdt)), place(&madt(hardware)), place(&mcfg())];
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE, OEM_REVISION);
    for entry in entries {
        xsdt.add_entry(entry);
    }
    let xsdt = place(&xsdt);
    let rsdp = bytes(&Rsdp::new(OEM_ID, xsdt));
    tables[..rsdp.len()].copy_from_slice(&rsdp);
    tables
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> impl Aml {
    let port = |port: u16| GAS::new(GasSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::Wbinvd)
        // No power and sleep buttons in fixed hardware.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(SLEEP_STATUS_PORT);
    fadt.finalize()
}

/// The interrupt controllers. A flag marks vCPUs that can be added later (`ACPI 6.5 §5.2.12.2`).
fn madt(hardware: &Hardware) -> impl Aml {
    let mut madt = Sdt::new(*b"APIC", 36, MADT_REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    madt.append_slice(&layout::LOCAL_APIC.to_le_bytes());
    // No flags: there are no 8259 interrupt controllers for Linux to disable.
    madt.append_slice(&0u32.to_le_bytes());
    for id in 0..hardware.max_vcpus {
        let status = if id < hardware.vcpus { EnabledStatus::Enabled } else { EnabledStatus::DisabledOnlineCapable };
        madt.append_slice(&bytes(&ProcessorLocalApic::new(id, id, status)));
    }
    madt.append_slice(&bytes(&IoApic::new(0, layout::IOAPIC, 0)));
    madt
}

fn mcfg() -> impl Aml {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(ECAM.start, 0, 0, LAST_BUS);
    mcfg
}

fn dsdt(hardware: &Hardware) -> impl Aml {
    let mut dsdt = Sdt::new(*b"DSDT", 36, DSDT_REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    dsdt.append_slice(&bytes(&Pci0(hardware.layout)));
    dsdt.append_slice(&bytes(&Motherboard));
    dsdt.append_slice(&bytes(&Processors(hardware.max_vcpus)));
    dsdt.append_slice(&bytes(&Hotplug));
    if hardware.serial {
        dsdt.append_slice(&bytes(&Com1));
    }
    dsdt.append_slice(&bytes(&SoftOff));
    dsdt
}

fn path(name: &str) -> Path {
    Path::new(name)
}

/// The PCI Express host bridge of segment 0 (`PCI Firmware 3.3 §4.6`).
///
/// It has no I/O port window, because no device has I/O BARs, and no _OSC, because the platform controls hot-plug, and
/// there is no other feature to negotiate. The windows are not marked prefetchable: Linux would place only prefetchable
/// BARs there, but places both kinds in unmarked windows.
struct Pci0<'a>(&'a Layout);

impl Aml for Pci0<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let Layout { mmio64, .. } = self.0;
        let space = AddressSpaceCacheable::NotCacheable;
        Scope::new(
            path("\\_SB_"),
            vec![&Device::new(
                path("PCI0"),
                vec![
                    &Name::new(path("_HID"), &EISAName::new("PNP0A08")),
                    &Name::new(path("_CID"), &EISAName::new("PNP0A03")),
                    &Name::new(path("_SEG"), &0u8),
                    &Name::new(path("_BBN"), &0u8),
                    &Name::new(path("_UID"), &0u8),
                    // DMA is coherent.
                    &Name::new(path("_CCA"), &1u8),
                    &Name::new(
                        path("_CRS"),
                        &ResourceTemplate::new(vec![
                            &AddressSpace::new_bus_number(0, u16::from(LAST_BUS)),
                            &AddressSpace::new_memory(space, true, MMIO32.start as u32, (MMIO32.end - 1) as u32, None),
                            &AddressSpace::new_memory(space, true, mmio64.start, mmio64.end - 1, None),
                        ]),
                    ),
                ],
            )],
        )
        .to_aml_bytes(sink);
    }
}

/// Reserves the ECAM (`PCI Firmware 3.3 §4.1.2`).
struct Motherboard;

impl Aml for Motherboard {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let len = ECAM.end - ECAM.start;
        Scope::new(
            path("\\_SB_"),
            vec![&Device::new(
                path("MBRD"),
                vec![
                    &Name::new(path("_HID"), &EISAName::new("PNP0C02")),
                    &Name::new(path("_UID"), &0u8),
                    &Name::new(
                        path("_CRS"),
                        &ResourceTemplate::new(vec![&Memory32Fixed::new(true, ECAM.start as u32, len as u32)]),
                    ),
                ],
            )],
        )
        .to_aml_bytes(sink);
    }
}

/// A 16550A-compatible serial port.
struct Com1;

impl Aml for Com1 {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        Scope::new(
            path("\\_SB_"),
            vec![&Device::new(
                path("COM1"),
                vec![
                    &Name::new(path("_HID"), &EISAName::new("PNP0501")),
                    &Name::new(path("_UID"), &0u8),
                    &Name::new(
                        path("_CRS"),
                        &ResourceTemplate::new(vec![
                            &Interrupt::new(true, true, false, false, SERIAL_GSI),
                            &IO::new(SERIAL_PORT, SERIAL_PORT, 0, 8),
                        ]),
                    ),
                ],
            )],
        )
        .to_aml_bytes(sink);
    }
}

/// S5, the only sleep state.
struct SoftOff;

impl Aml for SoftOff {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        Name::new(path("\\_S5_"), &Package::new(vec![&S5_SLEEP_TYPE])).to_aml_bytes(sink);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = layout::ACPI;

    fn tables_of(vcpus: u8, serial: bool) -> Vec<u8> {
        let layout = Layout::new(5 << 30, 0, 46).unwrap();
        tables(&Hardware { layout: &layout, vcpus, max_vcpus: vcpus, serial }, BASE)
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    /// The table at a guest address, as long as its header says and with the right checksum.
    fn table(tables: &[u8], address: u64) -> &[u8] {
        let at = (address - BASE) as usize;
        let table = &tables[at..][..u32_at(tables, at + 4) as usize];
        assert_eq!(table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        table
    }

    /// The table with a signature, found as a guest finds it.
    fn find<'a>(tables: &'a [u8], signature: &[u8; 4]) -> &'a [u8] {
        assert_eq!(tables[..8], *b"RSD PTR ");
        let xsdt = table(tables, u64_at(tables, 24));
        let mut entries = (36..xsdt.len()).step_by(8).map(|at| table(tables, u64_at(xsdt, at)));
        entries.find(|table| table[..4] == *signature).unwrap()
    }

    fn contains(bytes: &[u8], part: &[u8]) -> bool {
        bytes.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn the_rsdp_has_both_checksums() {
        let tables = tables_of(1, true);
        let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!((sum(&tables[..20]), sum(&tables[..36])), (0, 0));
    }

    #[test]
    fn the_fadt_is_hardware_reduced_and_names_the_registers() {
        let tables = tables_of(1, true);
        let fadt = find(&tables, b"FACP");
        let flags = u32_at(fadt, 112);
        assert_eq!((flags >> 20 & 1, flags >> 10 & 1), (1, 1));
        assert_eq!((fadt[116], u64_at(fadt, 120), fadt[128]), (1, 0x602, 1));
        assert_eq!((fadt[244], u64_at(fadt, 248)), (1, 0x600));
        assert_eq!((fadt[256], u64_at(fadt, 260)), (1, 0x601));
        assert_eq!(u16::from_le_bytes([fadt[109], fadt[110]]), 0x24);
        assert_eq!(table(&tables, u64_at(fadt, 140))[..4], *b"DSDT");
    }

    #[test]
    fn the_madt_lists_every_vcpu_and_the_ioapic() {
        let layout = Layout::new(1 << 30, 0, 46).unwrap();
        let tables = tables(&Hardware { layout: &layout, vcpus: 200, max_vcpus: 254, serial: true }, BASE);
        let madt = find(&tables, b"APIC");
        assert_eq!((u32_at(madt, 36), madt[8]), (0xfee0_0000, 5));
        let mut apics = Vec::new();
        let mut ioapics = Vec::new();
        let mut at = 44;
        while at < madt.len() {
            match madt[at] {
                0 => apics.push((madt[at + 3], u32_at(madt, at + 4))),
                1 => ioapics.push((u32_at(madt, at + 4), u32_at(madt, at + 8))),
                other => panic!("structure of type {other}"),
            }
            at += usize::from(madt[at + 1]);
        }
        let (enabled, online_capable) = (1, 2);
        let flag = |id| if id < 200 { enabled } else { online_capable };
        assert_eq!(apics, (0..254).map(|id| (id, flag(id))).collect::<Vec<_>>());
        assert_eq!(ioapics, [(0xfec0_0000, 0)]);
    }

    #[test]
    fn the_mcfg_is_of_buses_0_to_127_of_segment_0() {
        let tables = tables_of(1, true);
        let mcfg = find(&tables, b"MCFG");
        assert_eq!(mcfg.len(), 60);
        assert_eq!((u64_at(mcfg, 44), mcfg[52], mcfg[53], mcfg[54], mcfg[55]), (0xe800_0000, 0, 0, 0, 127));
    }

    #[test]
    fn the_host_bridges_windows_are_those_of_the_layout() {
        let tables = tables_of(1, true);
        let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
        // Descriptor, length, type, flags, type flags, granularity, minimum, maximum, translation, length.
        let mut buses = vec![0x88, 13, 0, 2, 0x0c, 0];
        buses.extend([0u16, 0, 127, 0, 128].iter().flat_map(|field| field.to_le_bytes()));
        let mut low = vec![0x87, 23, 0, 0, 0x0c, 1];
        low.extend([0u32, 0xc000_0000, 0xe7ff_ffff, 0, 0x2800_0000].iter().flat_map(|field| field.to_le_bytes()));
        let mut high = vec![0x8a, 43, 0, 0, 0x0c, 1];
        let (start, end) = (8u64 << 30, (1 << 46) - (1 << 20));
        high.extend([0, start, end - 1, 0, end - start].iter().flat_map(|field| field.to_le_bytes()));
        for descriptor in [buses, low, high] {
            assert!(contains(dsdt, &descriptor), "{descriptor:x?}");
        }
        assert!(contains(dsdt, &[0x86, 9, 0, 1, 0, 0, 0, 0xe8, 0, 0, 0, 0x10]), "the ECAM is reserved");
    }

    #[test]
    fn a_serial_port_is_described_only_if_there_is_one() {
        for serial in [false, true] {
            let tables = tables_of(1, serial);
            let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
            assert_eq!(contains(dsdt, b"COM1"), serial);
            assert!(contains(dsdt, b"_S5_"));
        }
    }

    #[test]
    fn every_slot_but_the_host_bridges_can_be_ejected_and_is_never_device_checked() {
        let tables = tables_of(1, false);
        let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
        assert!(!contains(dsdt, b"S000") && !contains(dsdt, b"S032"));
        for slot in 1..32 {
            let name = format!("S{slot:03}");
            let notified: Vec<_> = notifications(dsdt, name.as_bytes()).collect();
            assert_eq!(notified, [0, 3], "{name}");
        }
        assert!(contains(dsdt, b"_EJ0") && contains(dsdt, b"ACPI0013"));
    }

    /// What a device of the host bridge is notified of: the operator, the root, a path of three names, and a byte.
    fn notifications<'a>(dsdt: &'a [u8], name: &'a [u8]) -> impl Iterator<Item = u8> + 'a {
        let notify = [b"\x86\\\x2f\x03_SB_PCI0", name].concat();
        let at = (0..dsdt.len()).filter(move |at| dsdt[*at..].starts_with(&notify));
        at.map(move |at| match dsdt[at + 16..][..2] {
            [0x0a, value] => value,
            [value @ (0 | 1), _] => value,
            ref other => panic!("{other:x?}"),
        })
    }

    #[test]
    fn the_tables_of_the_largest_machine_fit() {
        assert!(tables_of(254, true).len() as u64 <= layout::ACPI_END - layout::ACPI);
    }
}
