//! The tables of NUMA nodes: the vCPUs, memory and devices of each node (SRAT), and the distances between nodes (SLIT).

use std::ops::Range;

use acpi_tables::Aml;
use acpi_tables::sdt::Sdt;
use pci::Bdf;

use crate::acpi::oem::{OEM_ID, OEM_REVISION, OEM_TABLE};
use crate::arch::x86_64::topology::Topology;

/// The revision of the SRAT since ACPI 3.0: proximity domains have 32 bits.
const SRAT_REVISION: u8 = 3;
const SLIT_REVISION: u8 = 1;

// Structures of the SRAT (`ACPI 6.5 §5.2.16`): type and length.
const LOCAL_APIC: [u8; 2] = [0, 16];
const MEMORY: [u8; 2] = [1, 40];
const GENERIC_INITIATOR: [u8; 2] = [5, 32];
/// The structure is valid, in its flags.
const ENABLED: u32 = 1;
/// Memory can be hot-plugged.
const HOT_PLUGGABLE: u32 = 1 << 1;
/// The handle of a device is a PCI address.
const PCI_HANDLE: u8 = 1;

/// A NUMA node, which ACPI calls a proximity domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// vCPUs of the node, present or not.
    pub vcpus: Vec<u8>,
    /// The addresses of its memory, each with true if memory can be hot-plugged there.
    pub memory: Vec<(Range<u64>, bool)>,
    /// PCI segments of the node.
    pub segments: Vec<u16>,
    /// The device whose node this is.
    pub device: Option<Bdf>,
    /// The distances to all nodes, by number.
    pub distances: Vec<u8>,
}

/// The number of the node that has a PCI segment.
pub(crate) fn of_segment(nodes: &[Node], segment: u16) -> Option<u32> {
    (0..).zip(nodes).find(|(_, node)| node.segments.contains(&segment)).map(|(id, _)| id)
}

/// System Resource Affinity Table: the node of each vCPU, memory range and segment (`ACPI 6.5 §5.2.16`).
pub(crate) fn srat(nodes: &[Node], topology: &Topology) -> impl Aml {
    let mut srat = Sdt::new(*b"SRAT", 36, SRAT_REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    srat.append_slice(&1u32.to_le_bytes());
    srat.append_slice(&[0; 8]);
    for (id, node) in (0u32..).zip(nodes) {
        for vcpu in &node.vcpus {
            let [low, high @ ..] = id.to_le_bytes();
            // The plan limits APIC IDs to a byte.
            let [apic_id, ..] = topology.apic_id((*vcpu).into()).to_le_bytes();
            // The domain's lowest byte, and the local APIC ID; the domain's other bytes follow the flags.
            let mut entry = [LOCAL_APIC, [low, apic_id]].concat();
            entry.extend(ENABLED.to_le_bytes());
            entry.push(0);
            entry.extend(high);
            entry.extend([0; 4]);
            srat.append_slice(&entry);
        }
        for (range, may_change) in &node.memory {
            let flags = if *may_change { ENABLED | HOT_PLUGGABLE } else { ENABLED };
            let mut entry = MEMORY.to_vec();
            entry.extend(id.to_le_bytes());
            entry.extend([0; 2]);
            entry.extend(range.start.to_le_bytes());
            entry.extend(range.end.saturating_sub(range.start).to_le_bytes());
            entry.extend([0; 4]);
            entry.extend(flags.to_le_bytes());
            entry.extend([0; 8]);
            srat.append_slice(&entry);
        }
        if let Some(address) = node.device {
            let mut entry = GENERIC_INITIATOR.to_vec();
            entry.extend([0, PCI_HANDLE]);
            entry.extend(id.to_le_bytes());
            entry.extend(address.segment.to_le_bytes());
            // The bus is the first byte of the handle's address, and device and function are the second.
            entry.extend([address.rid.bus(), address.rid.devfn()]);
            entry.extend([0; 12]);
            entry.extend(ENABLED.to_le_bytes());
            entry.extend([0; 4]);
            srat.append_slice(&entry);
        }
    }
    srat
}

/// The distances between nodes (`ACPI 6.5 §5.2.17`).
pub(crate) fn slit(nodes: &[Node]) -> impl Aml {
    let mut slit = Sdt::new(*b"SLIT", 36, SLIT_REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    slit.append_slice(&(nodes.len() as u64).to_le_bytes());
    nodes.iter().for_each(|node| slit.append_slice(&node.distances));
    slit
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(table: &dyn Aml) -> Vec<u8> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        assert_eq!(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0, "the checksum");
        assert_eq!(u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize, bytes.len());
        bytes
    }

    #[test]
    fn the_srat_names_vcpus_memory_and_devices_of_each_node() {
        let mut nodes = vec![Node::default(); 2];
        (nodes[0].vcpus, nodes[0].memory) = (vec![0], vec![(0..0x8000_0000, false)]);
        (nodes[1].vcpus, nodes[1].memory) = (vec![200], vec![(0x1_0000_0000..0x2_0000_0000, true)]);
        nodes[1].device = Some(Bdf { segment: 2, rid: pci::Rid::new(0, 9, 0).unwrap() });
        let table = bytes(&srat(&nodes, &Topology::flat(254)));
        assert_eq!((&table[..4], table[8]), (&b"SRAT"[..], 3));
        assert_eq!(table[36..48], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(table[48..64], [0, 16, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let memory = |node, start: [u8; 5], len: [u8; 5], flags| {
            let [start, len] = [start, len].map(|bytes| [&bytes[..], &[0; 3]].concat());
            [&[1, 40, node, 0, 0, 0, 0, 0], &start[..], &len, &[0; 4], &[flags, 0, 0, 0], &[0; 8]].concat()
        };
        assert_eq!(table[64..104], memory(0, [0; 5], [0, 0, 0, 0x80, 0], 1));
        assert_eq!(table[104..120], [0, 16, 1, 200, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(table[120..160], memory(1, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], 3));
        let device = [&[5, 32, 0, 1, 1, 0, 0, 0, 2, 0, 0, 9 << 3][..], &[0; 12], &[1, 0, 0, 0], &[0; 4]].concat();
        assert_eq!((&table[160..], table.len()), (&device[..], 192));
    }

    #[test]
    fn a_vcpu_of_a_node_has_the_apic_id_that_its_place_gives_it() {
        let node = Node { vcpus: vec![3], ..Node::default() };
        let topology = Topology { threads: 1, cores: 3, dies: 1, packages: 2 };
        assert_eq!(bytes(&srat(&[node], &topology))[48..52], [0, 16, 0, 4]);
    }

    #[test]
    fn the_slit_has_the_distances_row_by_row() {
        let node = |distances: &[u8]| Node { distances: distances.to_vec(), ..Node::default() };
        let table = bytes(&slit(&[node(&[10, 30]), node(&[40, 10])]));
        assert_eq!((&table[..4], table[8]), (&b"SLIT"[..], 1));
        assert_eq!(table[36..], [2, 0, 0, 0, 0, 0, 0, 0, 10, 30, 40, 10]);
    }

    #[test]
    fn a_segment_has_the_node_that_names_it() {
        let nodes = [Node::default(), Node { segments: vec![0, 3], ..Node::default() }];
        assert_eq!([0, 1, 3].map(|segment| of_segment(&nodes, segment)), [Some(1), None, Some(1)]);
    }
}
