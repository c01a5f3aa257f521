//! The table of the MultiProcessor Specification (MP 1.4), from which a kernel without ACPI gets CPUs and interrupts.

use super::layout::{IOAPIC, LAST_BUS, LOCAL_APIC, MP_TABLE, MP_TABLE_END, pin_gsi};

/// The length of the floating pointer structure (`MP 1.4 §4.1`).
pub const POINTER_LEN: usize = 16;
/// The length of the configuration table's header (`MP 1.4 §4.2`).
const HEADER_LEN: usize = 44;
/// MP 1.4 (`MP 1.4 §4.1`).
const REVISION: u8 = 4;
/// The version of an integrated local APIC, and that of KVM's IOAPIC.
const LOCAL_APIC_VERSION: u8 = 0x14;
const IOAPIC_VERSION: u8 = 0x11;
/// The numbers of both buses. A PCI bus has PCI's number, so the ISA bus gets one that no PCI bus has.
const PCI_BUS: u8 = 0;
const ISA_BUS: u8 = LAST_BUS + 1;
/// All local APICs (`MP 1.4 §4.3.5`).
const ALL: u8 = 0xff;
/// The slots of a PCI bus.
const SLOTS: u8 = 32;
/// The interrupts of the ISA bus, except the second PIC's.
const ISA_INTERRUPTS: [u8; 15] = [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Entry types (`MP 1.4 §4.3`).
mod entry {
    pub(super) const PROCESSOR: u8 = 0;
    pub(super) const BUS: u8 = 1;
    pub(super) const IOAPIC: u8 = 2;
    pub(super) const INTERRUPT: u8 = 3;
    pub(super) const LOCAL_INTERRUPT: u8 = 4;
}

/// Interrupt types (`MP 1.4 §4.3.4`).
mod interrupt {
    pub(super) const VECTORED: u8 = 0;
    pub(super) const NMI: u8 = 1;
    pub(super) const EXTERNAL: u8 = 3;
}

/// Polarity and trigger mode are those of the source's bus (`MP 1.4 §4.3.4`).
const CONFORMING: u16 = 0;
/// Active low and level-triggered, like PCI pins.
const LOW_LEVEL: u16 = 3 << 2 | 3;

/// The CPUs, and the values that software reads from each through CPUID.
#[derive(Debug)]
pub struct Processors {
    /// The local APIC IDs. The first is the boot CPU's.
    pub apic_ids: Vec<u8>,
    /// The stepping, model and family: EAX of CPUID leaf 1.
    pub signature: u32,
    /// The features: EDX of CPUID leaf 1.
    pub features: u32,
}

/// The floating pointer structure, which must be where software searches for it (`MP 1.4 §4`), and the configuration
/// table, which must be at [`MP_TABLE`].
pub fn tables(processors: &Processors) -> ([u8; POINTER_LEN], Vec<u8>) {
    let table = configuration_table(processors);
    debug_assert!(table.len() as u64 <= MP_TABLE_END - MP_TABLE);
    (pointer(), table)
}

fn pointer() -> [u8; POINTER_LEN] {
    let [a, b, c, d] = (MP_TABLE as u32).to_le_bytes();
    // The length in paragraphs, the revision, the checksum. No default configuration; virtual wire mode.
    let mut bytes = [b'_', b'M', b'P', b'_', a, b, c, d, 1, REVISION, 0, 0, 0, 0, 0, 0];
    bytes[10] = checksum(&bytes);
    bytes
}

fn configuration_table(processors: &Processors) -> Vec<u8> {
    let mut table = Table::default();
    for (number, apic_id) in processors.apic_ids.iter().enumerate() {
        const ENABLED: u8 = 1;
        const BOOT: u8 = 2;
        let flags = if number == 0 { ENABLED | BOOT } else { ENABLED };
        let [signature, features] = [processors.signature, processors.features].map(u32::to_le_bytes);
        table.add(entry::PROCESSOR, &[&[*apic_id, LOCAL_APIC_VERSION, flags], &signature, &features, &[0; 8]]);
    }
    table.add(entry::BUS, &[&[PCI_BUS], b"PCI   "]);
    table.add(entry::BUS, &[&[ISA_BUS], b"ISA   "]);
    // A number that no local APIC has: software gives it to the IOAPIC.
    let ioapic = (0..ALL).find(|id| !processors.apic_ids.contains(id)).unwrap_or_default();
    const USABLE: u8 = 1;
    table.add(entry::IOAPIC, &[&[ioapic, IOAPIC_VERSION, USABLE], &IOAPIC.to_le_bytes()]);
    for irq in ISA_INTERRUPTS {
        table.interrupt(interrupt::VECTORED, CONFORMING, ISA_BUS, irq, [ioapic, irq]);
    }
    for slot in 0..SLOTS {
        // The pin INTA of the slot.
        table.interrupt(interrupt::VECTORED, LOW_LEVEL, PCI_BUS, slot << 2, [ioapic, pin_gsi(slot)]);
    }
    for (number, kind) in (0..).zip([interrupt::EXTERNAL, interrupt::NMI]) {
        let [low, high] = CONFORMING.to_le_bytes();
        table.add(entry::LOCAL_INTERRUPT, &[&[kind, low, high, ISA_BUS, 0, ALL, number]]);
    }
    table.finish()
}

/// Entries, and how many.
#[derive(Default)]
struct Table {
    bytes: Vec<u8>,
    count: u16,
}

impl Table {
    fn add(&mut self, kind: u8, parts: &[&[u8]]) {
        self.bytes.push(kind);
        parts.iter().for_each(|part| self.bytes.extend(*part));
        self.count += 1;
    }

    /// Adds the connection of a bus's interrupt to an input of an IOAPIC.
    fn interrupt(&mut self, kind: u8, flags: u16, bus: u8, irq: u8, [ioapic, input]: [u8; 2]) {
        let [low, high] = flags.to_le_bytes();
        self.add(entry::INTERRUPT, &[&[kind, low, high, bus, irq, ioapic, input]]);
    }

    /// The entries after their header.
    fn finish(self) -> Vec<u8> {
        let len = (HEADER_LEN + self.bytes.len()) as u16;
        let mut bytes = b"PCMP".to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([REVISION, 0]);
        bytes.extend(b"CLOUDHYP");
        bytes.extend(b"cloud-hyperv");
        // No table of the manufacturer.
        bytes.extend([0; 6]);
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(LOCAL_APIC.to_le_bytes());
        // No extended entries.
        bytes.extend([0; 4]);
        bytes.extend(self.bytes);
        let sum = checksum(&bytes);
        if let Some(byte) = bytes.get_mut(7) {
            *byte = sum;
        }
        bytes
    }
}

/// The byte that makes the sum of all bytes 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().copied().fold(0, u8::wrapping_add).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::topology::Topology;

    /// The tables of these CPUs: the header, and the entries by type.
    fn parsed(apic_ids: &[u8]) -> (Vec<u8>, Vec<(u8, Vec<u8>)>) {
        let processors = Processors { apic_ids: apic_ids.to_vec(), signature: 0x0080_0f12, features: 0x178b_fbff };
        let (pointer, table) = tables(&processors);
        let sum = |bytes: &[u8]| bytes.iter().copied().fold(0, u8::wrapping_add);
        assert_eq!((sum(&pointer), sum(&table)), (0, 0));
        assert_eq!((&pointer[..4], pointer[8], pointer[9]), (&b"_MP_"[..], 1, 4));
        assert_eq!(pointer[4..8], 0x000e_3000_u32.to_le_bytes());
        assert_eq!((&table[..4], table[6]), (&b"PCMP"[..], 4));
        assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
        assert_eq!(table[36..40], 0xfee0_0000_u32.to_le_bytes());
        let (header, mut rest) = table.split_at(44);
        let mut entries = Vec::new();
        while let Some(kind) = rest.first() {
            let (entry, further) = rest.split_at(if *kind == 0 { 20 } else { 8 });
            entries.push((*kind, entry[1..].to_vec()));
            rest = further;
        }
        assert_eq!(usize::from(u16::from_le_bytes([header[34], header[35]])), entries.len());
        assert!(entries.is_sorted_by_key(|(kind, _)| *kind), "by ascending types");
        (header.to_vec(), entries)
    }

    fn of(entries: &[(u8, Vec<u8>)], kind: u8) -> Vec<Vec<u8>> {
        entries.iter().filter(|(other, _)| *other == kind).map(|(_, entry)| entry.clone()).collect()
    }

    #[test]
    fn each_cpu_has_an_entry_and_the_first_boots() {
        let (_, entries) = parsed(&[0, 1, 4]);
        let cpus: Vec<_> = of(&entries, 0).iter().map(|cpu| (cpu[0], cpu[1], cpu[2])).collect();
        assert_eq!(cpus, [(0, 0x14, 3), (1, 0x14, 1), (4, 0x14, 1)]);
        assert_eq!(of(&entries, 0)[2][3..11], [0x12, 0x0f, 0x80, 0, 0xff, 0xfb, 0x8b, 0x17]);
    }

    #[test]
    fn the_ioapic_has_a_number_of_its_own() {
        for (apic_ids, number) in [(&[0][..], 1), (&[0, 1, 2, 4], 3), (&[0, 2], 1)] {
            let (_, entries) = parsed(apic_ids);
            assert_eq!(of(&entries, 2), [[&[number, 0x11, 1][..], &0xfec0_0000_u32.to_le_bytes()].concat()]);
            let interrupts = of(&entries, 3);
            assert!(interrupts.iter().all(|entry| entry[5] == number), "{interrupts:?}");
        }
    }

    #[test]
    fn interrupts_are_wired_as_the_ioapic_has_them() {
        let (_, entries) = parsed(&[0, 1]);
        let buses = of(&entries, 1);
        assert_eq!(buses, [b"\x00PCI   ", b"\x80ISA   "]);
        let interrupts = of(&entries, 3);
        let of_bus = |bus: u8| interrupts.iter().filter(move |entry| entry[3] == bus);
        // The serial port's, edge-triggered as the bus's are.
        let serial: Vec<_> = of_bus(0x80).filter(|entry| entry[4] == 4).collect();
        assert_eq!(serial, [&[0, 0, 0, 0x80, 4, 2, 4]]);
        assert_eq!((of_bus(0x80).count(), of_bus(0).count()), (15, 32));
        assert!(of_bus(0x80).all(|entry| entry[4] == entry[6] && entry[4] != 2));
        for entry in of_bus(0) {
            let slot = entry[4] >> 2;
            assert_eq!(entry[..], [0, 0xf, 0, 0, slot << 2, 2, 16 + slot % 8]);
        }
        assert_eq!(of(&entries, 4), [[3, 0, 0, 0x80, 0, 0xff, 0], [1, 0, 0, 0x80, 0, 0xff, 1]]);
    }

    #[test]
    fn the_table_of_the_largest_machine_fits() {
        let topology = Topology::flat(254);
        let apic_ids: Vec<_> = (0..254).map(|vcpu| topology.apic_id(vcpu) as u8).collect();
        let (header, entries) = parsed(&apic_ids);
        let len = u64::from(u16::from_le_bytes([header[4], header[5]]));
        assert!(len <= MP_TABLE_END - MP_TABLE, "{len}");
        assert_eq!(of(&entries, 2)[0][0], 254);
    }
}
