//! The ACPI tables: the hardware that the guest cannot enumerate.
//!
//! The machine is hardware-reduced (`ACPI 6.5 §4.1`): it has sleep and reset registers, but no other fixed hardware.
//! Devices that the guest can enumerate are not described. The slots of root buses are described for hot-plug; no
//! device is ever described on a VF bus, so ACPI hot-plug cannot affect VFs.

use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate, Scope};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};

use crate::acpi::bridge::{Bridge, Root};
use crate::acpi::hotplug::Hotplug;
use crate::acpi::memory_devices::MemoryDevices;
use crate::acpi::numa::{self, Node};
use crate::acpi::oem::{OEM_ID, OEM_REVISION, OEM_TABLE};
use crate::acpi::pins::Pins;
use crate::acpi::processors::Processors;
use crate::acpi::vcpus;
use crate::acpi::viot::Viot;
use crate::arch::x86_64::layout::{
    self, ECAM, PM_TIMER_PORT, RESET_PORT, RESET_VALUE, S5_SLEEP_TYPE, SERIAL_GSI, SERIAL_PORT, SLEEP_CONTROL_PORT,
    SLEEP_STATUS_PORT,
};
use crate::arch::x86_64::legacy::LegacyHardware;
use crate::arch::x86_64::topology::Topology;
use crate::pci_layout::{Apertures, RootBus};

/// The DSDT revision that makes AML integers 64 bits wide.
const DSDT_REVISION: u8 = 2;
/// No VGA. The other bits would announce hardware (`ACPI 6.5 §5.2.9.3`).
const BOOT_ARCHITECTURE: u16 = 1 << 2;
/// Boot architecture flags without a CMOS RTC.
const NO_CLOCK: u16 = BOOT_ARCHITECTURE | 1 << 5;

/// The hardware that the tables describe.
#[derive(Debug, Clone, Copy)]
pub struct Hardware<'a> {
    /// Apertures for devices, of each PCI segment.
    pub apertures: &'a [Apertures],
    /// Further root buses of segment 0, by ascending numbers.
    pub roots: &'a [RootBus],
    /// vCPUs at boot: the first of all.
    pub vcpus: u8,
    /// The maximum number of vCPUs, 1 to 254.
    pub max_vcpus: u8,
    /// Shape of the vCPUs, which determines their local APIC IDs.
    pub topology: Topology,
    /// True if a PPTT describes the shape as well.
    pub has_pptt: bool,
    /// True if memory can be added, in the slots of `acpi/memory_hotplug.rs`.
    pub memory_slots: bool,
    /// True if there is a serial port.
    pub serial: bool,
    /// The NUMA nodes; none if the machine is one.
    pub numa: &'a [Node],
    /// True if there is a TPM.
    pub tpm: bool,
    /// Hardware of older PCs.
    pub legacy: LegacyHardware,
    /// Functions behind the virtual IOMMU, if there is one.
    pub viot: Option<&'a Viot>,
}

impl Hardware<'_> {
    /// The number of PCI segments.
    fn segments(&self) -> u16 {
        u16::try_from(self.apertures.len()).unwrap_or(u16::MAX)
    }
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
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(place(&fadt(dsdt, hardware.legacy)));
    xsdt.add_entry(place(&vcpus::madt(hardware.vcpus, hardware.max_vcpus, &hardware.topology)));
    xsdt.add_entry(place(&mcfg(hardware.segments())));
    if hardware.has_pptt {
        xsdt.add_entry(place(&vcpus::pptt(&hardware.topology)));
    }
    if !hardware.numa.is_empty() {
        xsdt.add_entry(place(&numa::srat(hardware.numa, &hardware.topology)));
        xsdt.add_entry(place(&numa::slit(hardware.numa)));
    }
    if hardware.tpm {
        xsdt.add_entry(place(&tpm2()));
    }
    if let Some(viot) = hardware.viot {
        xsdt.add_entry(place(&viot.table()));
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

/// The fixed hardware. A hardware-reduced machine has no such timer, but Linux looks for it here in any case.
fn fadt(dsdt: u64, legacy: LegacyHardware) -> impl Aml {
    let port = |port: u16| GAS::new(GasSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::Wbinvd)
        // The power and sleep buttons are not fixed hardware.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = if legacy.clock { BOOT_ARCHITECTURE } else { NO_CLOCK }.into();
    if legacy.pm_timer {
        const WIDTH: u8 = 32;
        let port = PM_TIMER_PORT.into();
        fadt = fadt.flag(Flags::TmrValExt);
        fadt.pm_tmr_blk = u32::from(PM_TIMER_PORT).into();
        fadt.pm_tmr_len = WIDTH / 8;
        fadt.x_pm_tmr_blk = GAS::new(GasSpace::SystemIo, WIDTH, 0, AccessSize::DwordAccess, port);
    }
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(SLEEP_STATUS_PORT);
    fadt.finalize()
}

/// The ECAM of each PCI segment.
fn mcfg(segments: u16) -> impl Aml {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE, OEM_REVISION);
    for segment in 0..segments {
        mcfg.add_ecam(layout::ecam(segment).start, segment, 0, layout::last_bus(segment));
    }
    mcfg
}

/// Table of the TPM: the place of its control area, through which commands are started (`TCG ACPI Specification 1.3
/// §8.4`).
fn tpm2() -> impl Aml {
    const REVISION: u8 = 4;
    const COMMAND_RESPONSE_BUFFER: u32 = 7;
    const CONTROL_AREA: u64 = layout::TPM.start + 0x40;
    let mut tpm2 = Sdt::new(*b"TPM2", 36, REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    // A client platform.
    tpm2.append_slice(&0u32.to_le_bytes());
    tpm2.append_slice(&CONTROL_AREA.to_le_bytes());
    tpm2.append_slice(&COMMAND_RESPONSE_BUFFER.to_le_bytes());
    // No parameters of the start method, and no event log from before the kernel.
    tpm2.append_slice(&[0; 24]);
    tpm2
}

/// The host bridges: of each segment's bus 0, and then of the further root buses of segment 0.
fn bridges(hardware: &Hardware) -> Vec<Bridge> {
    let of_segment = |(segment, apertures): (u16, &Apertures)| Bridge {
        root: Root { segment, bus: 0 },
        last_bus: layout::last_bus(segment),
        apertures: apertures.clone(),
        node: numa::of_segment(hardware.numa, segment),
    };
    let mut bridges: Vec<_> = (0..).zip(hardware.apertures).map(of_segment).collect();
    let Some(first) = bridges.first_mut().filter(|_| !hardware.roots.is_empty()) else { return bridges };
    let mut shares = first.apertures.split_among_roots(hardware.roots.len()).into_iter();
    first.last_bus = RootBus::last_before(hardware.roots);
    first.apertures = shares.next().unwrap_or_else(|| first.apertures.clone());
    let further = hardware.roots.iter().zip(shares).map(|(root, apertures)| Bridge {
        root: Root { segment: 0, bus: root.bus },
        last_bus: root.last,
        apertures,
        node: Some(root.node),
    });
    bridges.extend(further);
    bridges
}

fn dsdt(hardware: &Hardware) -> impl Aml {
    let mut dsdt = Sdt::new(*b"DSDT", 36, DSDT_REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    let bridges = bridges(hardware);
    bridges.iter().for_each(|bridge| dsdt.append_slice(&bytes(bridge)));
    let roots: Vec<_> = bridges.iter().map(|bridge| bridge.root).collect();
    dsdt.append_slice(&bytes(&Pins));
    dsdt.append_slice(&bytes(&Motherboard));
    dsdt.append_slice(&bytes(&Processors { count: hardware.max_vcpus, topology: hardware.topology }));
    if hardware.memory_slots {
        dsdt.append_slice(&bytes(&MemoryDevices));
    }
    dsdt.append_slice(&bytes(&Hotplug { roots: &roots, memory: hardware.memory_slots }));
    if hardware.serial {
        dsdt.append_slice(&bytes(&Com1));
    }
    if hardware.tpm {
        dsdt.append_slice(&bytes(&Tpm));
    }
    dsdt.append_slice(&bytes(&SoftOff));
    dsdt
}

fn path(name: &str) -> Path {
    Path::new(name)
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

/// The registers of the TPM.
struct Tpm;

impl Aml for Tpm {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let len = layout::TPM.end - layout::TPM.start;
        Scope::new(
            path("\\_SB_"),
            vec![&Device::new(
                path("TPM_"),
                vec![
                    &Name::new(path("_HID"), &"MSFT0101"),
                    &Name::new(
                        path("_CRS"),
                        &ResourceTemplate::new(vec![&Memory32Fixed::new(true, layout::TPM.start as u32, len as u32)]),
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
mod tests;
