//! The layout of guest physical addresses and I/O ports.

use std::ops::Range;

use pci::ECAM_BUS_LEN;
use vm_api::config::MemoryConfig;
/// The global descriptor table that the boot CPU starts with.
pub const GDT: u64 = 0x500;
/// The PVH start info.
pub const PVH_START_INFO: u64 = 0x6000;
/// The PVH module list, with the initramfs as its only entry.
pub const PVH_MODULES: u64 = 0x6040;
/// The zero page of the Linux boot protocol, or the memory map of the PVH one.
pub const ZERO_PAGE: u64 = 0x7000;
/// The page tables of a 64-bit entry: PML4, PDPT and four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// The command line.
pub const CMDLINE: u64 = 0x2_0000;
/// The longest command line, with its terminating NUL.
pub const CMDLINE_MAX: u64 = 0x1_0000;
/// The end of the memory below 640 KiB.
pub const LOW_MEMORY_END: u64 = 0xa_0000;
/// The ACPI tables, with the RSDP as the first.
pub const ACPI: u64 = LOW_MEMORY_END;
/// The end of the ACPI tables.
pub const ACPI_END: u64 = 0xe_2000;
/// A copy of the RSDP, where a kernel searches for it (`ACPI 6.5 §5.2.5.1`).
pub const RSDP_COPY: u64 = ACPI_END;
/// The configuration table of the MultiProcessor Specification, in the room of a ROM (`MP 1.4 §4`).
pub const MP_TABLE: u64 = 0xe_3000;
/// The end of the room for that table.
pub const MP_TABLE_END: u64 = SMBIOS;
/// The SMBIOS tables, with the entry point as the first (`DSP0134 §5.2`).
pub const SMBIOS: u64 = 0xf_0000;
/// The end of the SMBIOS tables.
pub const SMBIOS_END: u64 = RESET_VECTOR;
/// The floating pointer structure, in the room of a ROM below 1 MiB, where software searches for it (`MP 1.4 §4`). Left
/// out if the SMBIOS tables are so long that they reach it.
pub const MP_POINTER: u64 = RESET_VECTOR - 16;
/// Address at which a CPU starts after a reset, in real mode: the firmware.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// The start of memory above 1 MiB, with the kernel and everything else.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// The end of memory below 4 GiB. The rest continues at [`FOUR_GIB`].
pub const HOLE: u64 = 0xc000_0000;
/// Address at which memory continues.
pub const FOUR_GIB: u64 = 1 << 32;

/// The window for PCI memory below 4 GiB, from the start of the hole to the ECAM.
pub const MMIO32: Range<u64> = HOLE..ECAM.start;
/// The ECAM of all segments (`PCIe 6.2 §7.2.2`): the lower half is buses 0 to 127 of segment 0, the upper half has one
/// bus for each further segment.
pub const ECAM: Range<u64> = 0xe800_0000..0xf800_0000;
/// The last bus of segment 0.
pub const LAST_BUS: u8 = 127;
/// The most segments, as in Cloud Hypervisor.
pub const MOST_SEGMENTS: u16 = 96;
/// Address of the other segments' buses in the ECAM.
const OTHER_SEGMENTS: u64 = ECAM.start + (LAST_BUS as u64 + 1) * ECAM_BUS_LEN;

/// The last bus of a segment.
pub const fn last_bus(segment: u16) -> u8 {
    if segment == 0 { LAST_BUS } else { 0 }
}

/// The ECAM of a segment, which is below [`MOST_SEGMENTS`].
pub const fn ecam(segment: u16) -> Range<u64> {
    match segment {
        0 => ECAM.start..OTHER_SEGMENTS,
        other => {
            let start = OTHER_SEGMENTS + (other as u64 - 1) * ECAM_BUS_LEN;
            start..start + ECAM_BUS_LEN
        }
    }
}

/// The segment and the offset in its ECAM that an address belongs to; `None` outside of the ECAM.
pub fn ecam_offset(address: u64) -> Option<(u16, u64)> {
    if !ECAM.contains(&address) {
        return None;
    }
    match address.checked_sub(OTHER_SEGMENTS) {
        None => Some((0, address - ECAM.start)),
        Some(offset) => {
            let segment = u16::try_from(offset / ECAM_BUS_LEN + 1).ok()?;
            Some((segment, offset % ECAM_BUS_LEN))
        }
    }
}
/// Three pages that KVM needs on Intel hosts, and a fourth after them.
pub const KVM_TSS: u32 = 0xf800_0000;
/// The end of KVM's pages.
pub const KVM_TSS_END: u64 = KVM_TSS as u64 + 4 * 4096;
/// The IOAPIC.
pub const IOAPIC: u32 = 0xfec0_0000;
/// The local APIC.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// The registers of the TPM, if there is one.
pub const TPM: Range<u64> = 0xfed4_0000..0xfed4_1000;

/// The size and alignment of memory that can be added, in bytes: the unit in which Linux adds memory on x86-64 (a
/// memory section).
pub const MEMORY_BLOCK: u64 = MemoryConfig::STEP;

/// Bytes at the top of the address space reserved for the platform's registers.
const PLATFORM: u64 = 1 << 20;

/// Ports of the first serial port.
pub const SERIAL_PORT: u16 = 0x3f8;
/// The interrupt of the first serial port.
pub const SERIAL_GSI: u32 = 4;
/// The registers of the generic event device.
pub const EVENT_PORT: u16 = 0x610;
/// The vCPU hot-plug registers.
pub const PROCESSOR_PORT: u16 = 0xb000;
/// The hot-plug registers of the slots of all root buses.
pub const SLOTS_PORT: u16 = 0xa000;
/// The memory hot-plug registers.
pub const MEMORY_PORT: u16 = 0xb100;
/// The interrupt of the generic event device.
pub const EVENT_GSI: u32 = 5;
/// The interrupt of the pin INTA of the device in this slot of bus 0, of any segment: 16 to 23, the inputs of the
/// IOAPIC that the PICs do not have. Slots share them.
pub const fn pin_gsi(slot: u8) -> u8 {
    16 + slot % 8
}

/// The port of the ACPI sleep control register (`ACPI 6.5 §4.8.3.7`).
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// The port of the ACPI sleep status register.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// The port of the ACPI reset register (`ACPI 6.5 §4.8.3.6`).
pub const RESET_PORT: u16 = 0x602;
/// The port of the ACPI power management timer (`ACPI 6.5 §4.8.3.3`), at the address that firmware for Cloud Hypervisor
/// uses.
pub const PM_TIMER_PORT: u16 = 0x608;
/// Value that software writes to the reset register.
pub const RESET_VALUE: u8 = 1;
/// The NMI status and control port.
pub const NMI_STATUS_PORT: u16 = 0x61;
/// Neither SERR# nor IOCHK#: an NMI reports no hardware error. The output of timer 2, which does not exist, is high, as
/// after a count that software waits for.
pub const NMI_STATUS: u8 = 1 << 5;
/// The command port of the keyboard controller; only its reset line exists.
pub const KEYBOARD_COMMAND_PORT: u16 = 0x64;
/// The command that pulses the reset line.
pub const KEYBOARD_RESET: u8 = 0xfe;
/// The sleep type of S5, soft off.
pub const S5_SLEEP_TYPE: u8 = 5;

/// True if the I/O port belongs to a device that VMs always or sometimes have.
pub const fn is_device_port(port: u16) -> bool {
    const SERIAL_LAST: u16 = SERIAL_PORT + 7;
    // The hot-plug registers take up to 0xdf0 ports each.
    const MEMORY_LAST: u16 = MEMORY_PORT + 0xfff;
    matches!(port, NMI_STATUS_PORT | KEYBOARD_COMMAND_PORT | SERIAL_PORT..=SERIAL_LAST)
        || matches!(port, SLEEP_CONTROL_PORT..=EVENT_PORT | SLOTS_PORT..=MEMORY_LAST)
        // The clock, and the ports of configuration space.
        || matches!(port, 0x70 | 0x71 | 0xcf8..=0xcff)
}

/// The layout of a VM, determined by its memory sizes and by the CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Memory below the hole, from 0.
    pub low: Range<u64>,
    /// Memory from 4 GiB on; empty if all of it fits below the hole.
    pub high: Range<u64>,
    /// The addresses reserved for memory that may be added, above all memory and from 4 GiB on. Aligned to
    /// [`MEMORY_BLOCK`]; empty if none can be added.
    pub hotplug: Range<u64>,
    /// The part of [`Self::hotplug`] that was filled before the guest's present start: memory like any other to the
    /// guest.
    pub plugged: Range<u64>,
    /// The window for PCI memory above 4 GiB and above all memory, including memory that may be added.
    pub mmio64: Range<u64>,
}

impl Layout {
    /// The layout of `memory` bytes, and `hotplug` bytes that may be added, on a CPU with physical addresses of
    /// `address_bits` bits.
    ///
    /// `None` if the CPU cannot address so much memory and a 64-bit window of at least 4 GiB.
    pub fn new(memory: u64, hotplug: u64, address_bits: u8) -> Option<Self> {
        let low = 0..memory.min(HOLE);
        let high_end = FOUR_GIB.checked_add(memory - low.end)?;
        let hotplug_start = high_end.checked_next_multiple_of(MEMORY_BLOCK)?;
        let hotplug_end = hotplug_start.checked_add(hotplug.checked_next_multiple_of(MEMORY_BLOCK)?)?;
        let start = hotplug_end.checked_next_multiple_of(FOUR_GIB)?;
        let end = 1u64.checked_shl(address_bits.into())?.checked_sub(PLATFORM)?;
        (start.checked_add(FOUR_GIB - PLATFORM)? <= end).then_some(Self {
            low,
            high: FOUR_GIB..high_end,
            hotplug: hotplug_start..hotplug_end,
            plugged: hotplug_start..hotplug_start,
            mmio64: start..end,
        })
    }
}

impl Layout {
    /// Address ranges of memory parts of these sizes, one after the other: the hole may split a part.
    pub fn parts(&self, sizes: &[u64]) -> Vec<Vec<Range<u64>>> {
        let mut free = [self.low.clone(), self.high.clone()];
        let place = |size: &u64| {
            let mut left = *size;
            let mut ranges = Vec::new();
            for range in &mut free {
                let len = left.min(range.end - range.start);
                if len > 0 {
                    ranges.push(range.start..range.start + len);
                    range.start += len;
                    left -= len;
                }
            }
            ranges
        };
        sizes.iter().map(place).collect()
    }
}

/// The type of an address range in the memory map (E820).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// Usable memory.
    Ram = 1,
    /// Reserved.
    Reserved = 2,
    /// ACPI tables; usable once the guest has read them.
    Acpi = 3,
}

/// An entry of the memory map (E820).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapEntry {
    /// The addresses.
    pub range: Range<u64>,
    /// Their type.
    pub kind: MemoryKind,
}

impl Layout {
    /// The memory map that the guest gets at boot, in ascending order and without overlaps.
    pub fn memory_map(&self) -> Vec<MapEntry> {
        let map = [
            (0..LOW_MEMORY_END, MemoryKind::Ram),
            (ACPI..ACPI_END, MemoryKind::Acpi),
            (ACPI_END..HIGH_MEMORY, MemoryKind::Reserved),
            (HIGH_MEMORY..self.low.end, MemoryKind::Ram),
            // Linux uses the ECAM only if it is reserved here or in the DSDT.
            (ECAM, MemoryKind::Reserved),
            (u64::from(KVM_TSS)..KVM_TSS_END, MemoryKind::Reserved),
            (self.high.clone(), MemoryKind::Ram),
            (self.plugged.clone(), MemoryKind::Ram),
        ];
        map.into_iter().filter(|(range, _)| !range.is_empty()).map(|(range, kind)| MapEntry { range, kind }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_that_fits_stays_below_the_hole() {
        let layout = Layout::new(256 * MIB, 0, 40).unwrap();
        assert_eq!(layout.low, 0..256 * MIB);
        assert!(layout.high.is_empty());
        assert_eq!(layout.mmio64, FOUR_GIB..(1 << 40) - MIB);
        assert!(Layout::new(HOLE, 0, 40).unwrap().high.is_empty());
    }

    #[test]
    fn memory_continues_above_the_hole() {
        let layout = Layout::new(5 * GIB, 0, 40).unwrap();
        assert_eq!(layout.low, 0..3 * GIB);
        assert_eq!(layout.high, 4 * GIB..6 * GIB);
        assert_eq!(layout.mmio64, 8 * GIB..(1 << 40) - MIB);
    }

    #[test]
    fn more_memory_than_the_cpu_can_address_has_no_layout() {
        assert!(Layout::new(60 * GIB, 0, 36).is_none());
        assert!(Layout::new(59 * GIB, 0, 36).is_some());
        assert!(Layout::new(u64::MAX, 0, 52).is_none());
    }

    #[test]
    fn hotplug_memory_lies_between_ram_and_the_mmio_window() {
        let layout = Layout::new(512 * MIB, 16 * GIB, 46).unwrap();
        assert_eq!(layout.hotplug, 4 * GIB..20 * GIB);
        assert_eq!(layout.mmio64.start, 20 * GIB);
        let layout = Layout::new(3 * GIB + MIB, MIB, 46).unwrap();
        assert_eq!(layout.hotplug, 4 * GIB + MEMORY_BLOCK..4 * GIB + 2 * MEMORY_BLOCK);
        assert_eq!(layout.mmio64.start, 8 * GIB);
        assert!(Layout::new(GIB, 0, 46).unwrap().hotplug.is_empty());
        assert!(Layout::new(GIB, 56 * GIB, 36).is_some() && Layout::new(GIB, 57 * GIB, 36).is_none());
        assert!(Layout::new(GIB, u64::MAX, 46).is_none() && Layout::new(u64::MAX, u64::MAX, 46).is_none());
    }

    #[test]
    fn every_segment_has_its_own_ecam_and_each_address_one_segment() {
        assert_eq!(ecam(0), 0xe800_0000..0xf000_0000);
        assert_eq!(ecam(1), 0xf000_0000..0xf010_0000);
        assert_eq!(ecam(MOST_SEGMENTS - 1).end, 0xf5f0_0000);
        for segment in 0..MOST_SEGMENTS {
            let Range { start, end } = ecam(segment);
            assert_eq!(ecam_offset(start), Some((segment, 0)));
            assert_eq!(ecam_offset(end - 1), Some((segment, end - start - 1)));
            assert_eq!(end - start, (u64::from(last_bus(segment)) + 1) * ECAM_BUS_LEN);
        }
        assert_eq!((ecam_offset(ECAM.start - 1), ecam_offset(ECAM.end)), (None, None));
    }

    #[test]
    fn memory_parts_are_contiguous_and_may_span_the_hole() {
        let layout = Layout::new(5 * GIB, 0, 46).unwrap();
        let parts = layout.parts(&[GIB, 3 * GIB, GIB]);
        let ends = parts.iter().map(|part| part.iter().map(|range| (range.start / GIB, range.end / GIB)).collect());
        let ends: Vec<Vec<_>> = ends.collect();
        assert_eq!(ends, [vec![(0, 1)], vec![(1, 3), (4, 5)], vec![(5, 6)]]);
    }

    #[test]
    fn the_map_ascends_and_reserves_the_ecam() {
        for memory in [64 * MIB, 3 * GIB, 5 * GIB] {
            let map = Layout::new(memory, 0, 46).unwrap().memory_map();
            assert!(map.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start), "{map:?}");
            assert!(map.contains(&MapEntry { range: ECAM, kind: MemoryKind::Reserved }));
            let ram: u64 = map
                .iter()
                .filter(|entry| entry.kind == MemoryKind::Ram)
                .map(|entry| entry.range.end - entry.range.start)
                .sum();
            assert_eq!(ram, memory - (HIGH_MEMORY - LOW_MEMORY_END));
        }
    }
}
