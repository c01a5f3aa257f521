//! The tables as a guest finds and reads them.

use super::*;
use crate::acpi::viot::MOST_SINGLE_DEVICES;
use crate::arch::x86_64::layout::Layout;
use crate::pci_layout::{RootBus, Weights};

const BASE: u64 = layout::ACPI;

/// Tables of a machine of 5 GiB with this number of segments; with memory slots if it has several vCPUs.
fn with_segments(segments: usize, vcpus: u8, max_vcpus: u8, serial: bool) -> Vec<u8> {
    with_roots(segments, &[], vcpus, max_vcpus, serial)
}

/// As [`with_segments`], with further root buses of segment 0.
fn with_roots(segments: usize, roots: &[RootBus], vcpus: u8, max_vcpus: u8, serial: bool) -> Vec<u8> {
    let layout = Layout::new(5 << 30, 0, 46).unwrap();
    let apertures = Apertures { mem32: layout::MMIO32, mem64: layout.mmio64 };
    let apertures = apertures.split(&vec![Weights { mem32: 1, mem64: 1 }; segments]);
    let memory_slots = vcpus > 1;
    let topology = Topology::flat(max_vcpus.into());
    let hardware = Hardware {
        apertures: &apertures,
        roots,
        vcpus,
        max_vcpus,
        topology,
        has_pptt: false,
        memory_slots,
        serial,
        numa: &[],
        tpm: serial,
        viot: None,
        legacy: LegacyHardware::NONE,
    };
    tables(&hardware, BASE)
}

fn tables_of(vcpus: u8, serial: bool) -> Vec<u8> {
    with_segments(1, vcpus, vcpus, serial)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The table at a guest address, with the length in its header and the right checksum.
fn table(tables: &[u8], address: u64) -> &[u8] {
    let at = (address - BASE) as usize;
    let table = &tables[at..][..u32_at(tables, at + 4) as usize];
    assert_eq!(table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    table
}

/// The table with a signature, found as by a guest.
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
fn the_fadt_names_the_timer_and_the_clock_that_there_are() {
    let of = |legacy: LegacyHardware| {
        let fadt = bytes(&fadt(BASE, legacy));
        let timer = (u32_at(&fadt, 76), fadt[91], fadt[208], fadt[209], fadt[211], u64_at(&fadt, 212));
        (timer, u32_at(&fadt, 112) >> 8 & 1, fadt[109] >> 5 & 1)
    };
    assert_eq!(of(LegacyHardware::NONE), ((0, 0, 0, 0, 0, 0), 0, 1));
    assert_eq!(of(LegacyHardware::ALL), ((0x608, 4, 1, 32, 3, 0x608), 1, 0));
    assert_eq!(of(LegacyHardware { clock: true, ..LegacyHardware::NONE }), ((0, 0, 0, 0, 0, 0), 0, 0));
}

#[test]
fn the_tpm_is_found_by_its_table_and_its_device() {
    let tables = tables_of(1, true);
    let tpm2 = find(&tables, b"TPM2");
    assert_eq!((tpm2.len(), tpm2[8], u64_at(tpm2, 40), u32_at(tpm2, 48)), (76, 4, 0xfed4_0040, 7));
    assert!(contains(&tables, b"MSFT0101"));
    // Memory32Fixed: read and write, the address, the length.
    assert!(contains(&tables, &[0x86, 9, 0, 1, 0, 0, 0xd4, 0xfe, 0, 0x10, 0, 0]));
    let without = tables_of(1, false);
    assert!(!contains(&without, b"TPM2") && !contains(&without, b"MSFT0101"));
}

#[test]
fn the_madt_lists_every_vcpu_and_the_ioapic() {
    let tables = with_segments(1, 200, 254, true);
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

/// Tables of a machine with this shape of vCPUs.
fn shaped(topology: Topology) -> Vec<u8> {
    let vcpus = topology.vcpus() as u8;
    let hardware = Hardware {
        apertures: &[],
        roots: &[],
        vcpus,
        max_vcpus: vcpus,
        topology,
        has_pptt: true,
        memory_slots: false,
        serial: false,
        numa: &[],
        tpm: false,
        viot: None,
        legacy: LegacyHardware::NONE,
    };
    tables(&hardware, BASE)
}

#[test]
fn the_madt_has_the_apic_ids_of_the_topology() {
    let tables = shaped(Topology { threads: 1, cores: 3, dies: 1, packages: 2 });
    let madt = find(&tables, b"APIC");
    let ids: Vec<_> = madt[44..].chunks(8).take(6).map(|apic| (apic[2], apic[3])).collect();
    assert_eq!(ids, [(0, 0), (1, 1), (2, 2), (3, 4), (4, 5), (5, 6)]);
}

/// The leaves of the PPTT: each vCPU's number, and the number of parents up to its package.
fn leaves(tables: &[u8]) -> Vec<(u32, u32, u32)> {
    let (valid, leaf, physical) = (1 << 1, 1 << 3, 1);
    let pptt = find(tables, b"PPTT");
    let mut leaves = Vec::new();
    for at in (36..pptt.len()).step_by(20) {
        assert_eq!((pptt[at], pptt[at + 1]), (0, 20));
        if u32_at(pptt, at + 4) & leaf == 0 {
            continue;
        }
        assert_eq!(u32_at(pptt, at + 4) & valid, valid);
        let (mut node, mut parents) = (at, 0);
        while u32_at(pptt, node + 8) != 0 {
            (node, parents) = (u32_at(pptt, node + 8) as usize, parents + 1);
        }
        assert_eq!(u32_at(pptt, node + 4) & physical, physical);
        leaves.push((u32_at(pptt, at + 12), parents, node as u32));
    }
    leaves
}

#[test]
fn the_pptt_has_a_leaf_of_each_vcpu_in_its_package() {
    for (threads, cores, dies, packages, parents) in [(1, 2, 1, 1, 1), (2, 3, 1, 2, 2), (2, 1, 2, 2, 3)] {
        let topology = Topology { threads, cores, dies, packages };
        let leaves = leaves(&shaped(topology));
        let ids: Vec<_> = leaves.iter().map(|(vcpu, ..)| *vcpu).collect();
        assert_eq!(ids, (0..topology.vcpus() as u32).collect::<Vec<_>>());
        assert!(leaves.iter().all(|leaf| leaf.1 == parents), "{leaves:?}");
        let roots: std::collections::BTreeSet<_> = leaves.iter().map(|(.., root)| *root).collect();
        assert_eq!(roots.len(), packages as usize);
    }
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
fn every_slot_of_every_segment_has_a_pin_wired_to_the_ioapic() {
    let tables = with_segments(3, 1, 1, false);
    let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
    // A package of four elements: the address of all functions, the pin INTA, no link device, and the input.
    let wired = |slot: u8, input: u8| [0x12, 11, 4, 0x0c, 0xff, 0xff, slot, 0, 0, 0, 0x0a, input];
    // The address of slot 0 is a word.
    let first = [0x12, 9, 4, 0x0b, 0xff, 0xff, 0, 0, 0x0a, 16];
    let all: Vec<_> = first.into_iter().chain((1..32).flat_map(|slot| wired(slot, 16 + slot % 8))).collect();
    assert_eq!(count(dsdt, &all), 1);
    // The name and the package's operator; its length in two bytes, and its number of elements.
    let at = (0..dsdt.len()).find(|at| dsdt[*at..].starts_with(&all)).unwrap();
    assert_eq!((&dsdt[at - 8..at - 4], dsdt[at - 4], dsdt[at - 1]), (&b"PINS"[..], 0x12, 32));
    // A method without arguments that returns it.
    let method = [b"_PRT\x00\xa4".as_slice(), b"\\\x2e_SB_PINS"].concat();
    assert_eq!((count(dsdt, &method), count(dsdt, b"_PRT")), (3, 3));
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

fn count(bytes: &[u8], part: &[u8]) -> usize {
    bytes.windows(part.len()).filter(|window| *window == part).count()
}

#[test]
fn memory_devices_are_described_only_if_memory_can_be_added() {
    for (vcpus, memory) in [(1, false), (2, true)] {
        let tables = tables_of(vcpus, true);
        let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
        assert_eq!((contains(dsdt, b"M007"), contains(dsdt, b"MSCN")), (memory, memory));
    }
}

#[test]
fn slots_except_the_host_bridge_eject_without_device_check() {
    for segments in [1, 3] {
        let tables = with_segments(segments, 1, 1, false);
        let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
        assert!(!contains(dsdt, b"S032"));
        for slot in 0..32 {
            // A slot is notified in one place: the operator, its name, and the second argument.
            let notified = [b"\x86", format!("S{slot:03}").as_bytes(), b"\x69"].concat();
            // Only segment 0 has a host bridge, in slot 0.
            let bridges = usize::from(slot == 0);
            assert_eq!(count(dsdt, &notified), segments - bridges, "slot {slot}");
        }
        // That place is called with slots and an event: the prefix of a byte and 3, or only 0.
        let told: Vec<_> = (0..dsdt.len()).filter(|at| dsdt[*at..].starts_with(b"TELL\x60")).collect();
        let mut told: Vec<_> = told.into_iter().map(|at| &dsdt[at + 5..at + 7]).collect();
        told.sort();
        let event = |bytes: &[u8]| if bytes[0] == 0x0a { bytes[1] } else { bytes[0] };
        let mut events: Vec<_> = told.into_iter().map(event).collect();
        events.sort_unstable();
        assert_eq!(events, [vec![0; segments], vec![3; segments]].concat());
        assert!(contains(dsdt, b"_EJ0") && contains(dsdt, b"ACPI0013"));
    }
}

#[test]
fn every_segment_has_its_own_bridge_windows_and_ecam() {
    let tables = with_segments(96, 1, 1, true);
    let mcfg = find(&tables, b"MCFG");
    assert_eq!(mcfg.len(), 44 + 96 * 16);
    let entry = |n: usize| &mcfg[44 + n * 16..][..16];
    for (n, address, last) in [(0, 0xe800_0000, 127), (1, 0xf000_0000, 0), (95, 0xf5e0_0000, 0)] {
        assert_eq!(u64_at(entry(n), 0), address);
        assert_eq!((u16::from_le_bytes([entry(n)[8], entry(n)[9]]), entry(n)[10], entry(n)[11]), (n as u16, 0, last));
    }
    let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
    for bridge in ["PCI0", "PC01", "PC5F"] {
        assert!(contains(dsdt, bridge.as_bytes()), "{bridge}");
    }
    assert!(!contains(dsdt, b"PC60") && !contains(dsdt, b"PC00"));
    assert_eq!(count(dsdt, b"_SEG"), 96);
    // Each has one window below 4 GiB and one above; no window is used twice.
    let windows: Vec<_> = (0..dsdt.len()).filter(|at| dsdt[*at..].starts_with(&[0x8a, 43, 0, 0])).collect();
    let bases: std::collections::BTreeSet<_> = windows.iter().map(|at| u64_at(dsdt, at + 14)).collect();
    assert_eq!((windows.len(), bases.len()), (96, 96));
}

#[test]
fn a_machine_of_nodes_has_their_tables_and_a_segment_its_node() {
    let layout = Layout::new(5 << 30, 0, 46).unwrap();
    let apertures = [Apertures { mem32: layout::MMIO32, mem64: layout.mmio64 }];
    let node = |segments: &[u16]| Node { distances: vec![10, 20], segments: segments.to_vec(), ..Node::default() };
    let of = |numa: &[Node]| {
        let hardware = Hardware {
            apertures: &apertures,
            roots: &[],
            vcpus: 1,
            max_vcpus: 1,
            topology: Topology::flat(1),
            has_pptt: false,
            memory_slots: false,
            serial: false,
            numa,
            tpm: false,
            viot: None,
            legacy: LegacyHardware::NONE,
        };
        tables(&hardware, BASE)
    };
    let tables = of(&[node(&[]), node(&[0])]);
    assert_eq!((find(&tables, b"SRAT").len(), find(&tables, b"SLIT").len()), (48, 48));
    let dsdt = table(&tables, u64_at(find(&tables, b"FACP"), 140));
    // A name, and the constant 1.
    assert!(contains(dsdt, b"\x08_PXM\x01"));
    let without = of(&[]);
    assert!(!contains(&without, b"SRAT") && !contains(&without, b"SLIT") && !contains(&without, b"_PXM"));
}

#[test]
fn each_root_bus_has_a_bridge_on_its_node_with_its_share() {
    let roots = RootBus::of_nodes(&[0, 1]);
    let tables = with_roots(2, &roots, 1, 1, true);
    let before = with_segments(2, 1, 1, true);
    assert_eq!(find(&tables, b"MCFG"), find(&before, b"MCFG"));
    let of = |tables| table(tables, u64_at(find(tables, b"FACP"), 140));
    let (dsdt, before) = (of(&tables), of(&before));
    // The bus ranges of PCI0, PC01, PB40 and PB60: granularity, minimum, maximum, translation and length.
    for (first, last) in [(0u16, 63u16), (0, 0), (64, 95), (96, 127)] {
        let mut buses = vec![0x88, 13, 0, 2, 0x0c, 0];
        buses.extend([0, first, last, 0, last - first + 1].iter().flat_map(|field| field.to_le_bytes()));
        assert_eq!(count(dsdt, &buses), 1, "{first} to {last}");
    }
    for (name, bus, uid, node) in [("PB40", 0x40, 0x40, b"\x00".as_slice()), ("PB60", 0x60, 0x60, b"\x01")] {
        assert_eq!((count(dsdt, name.as_bytes()), count(before, name.as_bytes())), (3, 0), "{name}");
        assert_eq!(count(dsdt, &[b"_BBN\x0a".as_slice(), &[bus]].concat()), 1);
        assert_eq!(count(dsdt, &[b"_UID\x0b".as_slice(), &[uid, 1]].concat()), 1);
        assert_eq!(count(dsdt, &[b"\x08_PXM".as_slice(), node].concat()), 1);
    }
    // All slots of the further bridges can be used, and each is notified by its own method.
    assert_eq!((count(dsdt, b"\x86S000\x69"), count(dsdt, b"\x86S031\x69")), (3, 4));
    assert_eq!((count(dsdt, b"PB40SCAN"), count(dsdt, b"PB60SCAN")), (1, 1));
    // The windows below 4 GiB follow each other, and fill segment 0's share.
    let is_window = |at: &usize| dsdt[*at..].starts_with(&[0x87, 23, 0, 0, 0x0c, 1]);
    let windows = (0..dsdt.len()).filter(is_window).map(|at| (u32_at(dsdt, at + 10), u32_at(dsdt, at + 14)));
    let mut windows: Vec<_> = windows.collect();
    windows.sort_unstable();
    assert_eq!((windows.len(), windows[0].0, windows[3].1), (4, 0xc000_0000, 0xe7ff_ffff));
    assert!(windows.windows(2).all(|pair| pair[0].1 + 1 == pair[1].0), "{windows:x?}");
}

#[test]
fn the_tables_of_the_largest_machine_fit() {
    let of = |roots: u16| {
        let nodes = RootBus::of_nodes(&Vec::from_iter(0..roots.into()));
        with_roots(usize::from(layout::MOST_SEGMENTS - roots), &nodes, 254, 254, true).len()
    };
    let len = [0, 1, 64].into_iter().map(of).max().unwrap();
    // For each vCPU and each zone's memory, the distances, and each device behind the IOMMU.
    let len = len + 256 * 16 + 32 * 40 + 64 * (32 + 64) + usize::from(MOST_SINGLE_DEVICES) * 24;
    assert!(len as u64 <= layout::ACPI_END - layout::ACPI, "{len}");
}
