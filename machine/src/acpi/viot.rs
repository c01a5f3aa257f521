//! The table of functions behind the virtual IOMMU (`ACPI 6.5 §5.2.37`).

use acpi_tables::Aml;
use acpi_tables::sdt::Sdt;
use pci::Bdf;

use crate::acpi::oem::{OEM_ID, OEM_REVISION, OEM_TABLE};
use crate::arch::x86_64::layout::last_bus;

/// Most functions of [`Viot::devices`]: the tables have no room for more.
pub const MOST_SINGLE_DEVICES: u16 = 512;
/// The length of the table without nodes, and so the offset of the first.
const HEADER: u16 = 48;
/// The kinds of nodes: functions in a range of routing IDs, and an IOMMU that is a virtio function.
const PCI_RANGE: u8 = 1;
const VIRTIO_IOMMU_PCI: u8 = 3;
/// The lengths of these nodes.
const PCI_RANGE_LEN: u16 = 24;
const VIRTIO_IOMMU_PCI_LEN: u16 = 16;

/// Functions behind the IOMMU of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Viot {
    /// The IOMMU itself.
    pub iommu: Bdf,
    /// Functions of root buses that are behind it, on segments whose other devices are not.
    pub devices: Vec<Bdf>,
    /// The segments with all devices behind the IOMMU.
    pub segments: Vec<u16>,
    /// Further root buses of segment 0, by ascending numbers.
    pub roots: Vec<u8>,
}

impl Viot {
    /// Renders the table. All VF buses of segment 0 are behind the IOMMU, so the VFs of a PF that is plugged later are
    /// as well.
    pub(super) fn table(&self) -> impl Aml {
        const REVISION: u8 = 0;
        let mut nodes = vec![iommu_node(self.iommu)];
        let mut segments = self.segments.clone();
        segments.sort_unstable();
        segments.dedup();
        if !segments.contains(&0) {
            nodes.extend(vf_buses(&self.roots).map(|(first, last)| range_node(0, first << 8, last << 8 | 0xff)));
        }
        nodes.extend(segments.iter().map(|segment| range_node(*segment, 0, last(*segment))));
        let single = self.devices.iter().filter(|device| !segments.contains(&device.segment));
        nodes.extend(single.map(|device| range_node(device.segment, device.rid.to_bits(), device.rid.to_bits())));
        let mut viot = Sdt::new(*b"VIOT", 36, REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
        // A machine has far fewer devices and segments.
        viot.append_slice(&u16::try_from(nodes.len()).unwrap_or(u16::MAX).to_le_bytes());
        viot.append_slice(&HEADER.to_le_bytes());
        viot.append_slice(&[0; 8]);
        nodes.iter().for_each(|node| viot.append_slice(node));
        viot
    }
}

/// The buses for VFs behind each root bus of segment 0: the first and the last.
fn vf_buses(roots: &[u8]) -> impl Iterator<Item = (u16, u16)> {
    let roots = roots.iter().copied().map(u16::from);
    let ends = roots.clone().chain([u16::from(last_bus(0)) + 1]);
    let buses = [0].into_iter().chain(roots).zip(ends).map(|(root, end)| (root + 1, end.saturating_sub(1)));
    buses.filter(|(first, last)| first <= last)
}

/// The routing ID of the last function that a segment can have.
fn last(segment: u16) -> u16 {
    u16::from(last_bus(segment)) << 8 | 0xff
}

fn iommu_node(at: Bdf) -> Vec<u8> {
    let mut node = vec![VIRTIO_IOMMU_PCI, 0];
    let fields = [VIRTIO_IOMMU_PCI_LEN, at.segment, at.rid.to_bits()];
    fields.iter().for_each(|field| node.extend(field.to_le_bytes()));
    node.resize(VIRTIO_IOMMU_PCI_LEN.into(), 0);
    node
}

/// The functions `first` to `last` of a segment. The number of an endpoint is its segment and its routing ID.
fn range_node(segment: u16, first: u16, last: u16) -> Vec<u8> {
    let mut node = vec![PCI_RANGE, 0];
    node.extend(PCI_RANGE_LEN.to_le_bytes());
    node.extend((u32::from(segment) << 16 | u32::from(first)).to_le_bytes());
    // The IOMMU is the first node.
    let fields = [segment, segment, first, last, HEADER];
    fields.iter().for_each(|field| node.extend(field.to_le_bytes()));
    node.resize(PCI_RANGE_LEN.into(), 0);
    node
}

#[cfg(test)]
mod tests {
    use pci::Rid;

    use super::*;

    fn at(segment: u16, rid: u16) -> Bdf {
        Bdf { segment, rid: Rid::from_bits(rid) }
    }

    fn nodes(viot: &Viot) -> Vec<Vec<u8>> {
        let mut bytes = Vec::new();
        viot.table().to_aml_bytes(&mut bytes);
        assert_eq!(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!((&bytes[..4], &bytes[38..48]), (&b"VIOT"[..], &[48, 0, 0, 0, 0, 0, 0, 0, 0, 0][..]));
        let (count, mut at, mut nodes) = (bytes[36], 48, Vec::new());
        while at < bytes.len() {
            let len = usize::from(bytes[at + 2]);
            nodes.push(bytes[at..at + len].to_vec());
            at += len;
        }
        assert_eq!(nodes.len(), usize::from(count));
        nodes
    }

    #[test]
    fn viot_covers_all_vf_buses_and_the_named_devices_of_bus_0() {
        let viot = Viot {
            iommu: at(0, 0x28),
            devices: vec![at(0, 0x08), at(3, 0x10)],
            segments: Vec::new(),
            roots: Vec::new(),
        };
        let nodes = nodes(&viot);
        assert_eq!(nodes[0], [3, 0, 16, 0, 0, 0, 0x28, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let range = |endpoint: [u8; 4], segment: u8, first: [u8; 2], last: [u8; 2]| {
            let places = [[segment, 0], [segment, 0], first, last, [48, 0]].concat();
            [&[1, 0, 24, 0][..], &endpoint, &places, &[0; 6]].concat()
        };
        assert_eq!(nodes[1], range([0, 1, 0, 0], 0, [0, 1], [0xff, 0x7f]));
        assert_eq!(nodes[2], range([8, 0, 0, 0], 0, [8, 0], [8, 0]));
        assert_eq!(nodes[3], range([0x10, 0, 3, 0], 3, [0x10, 0], [0x10, 0]));
    }

    #[test]
    fn the_vf_buses_of_each_root_bus_are_a_range() {
        let viot = Viot { iommu: at(0, 8), devices: vec![at(0, 0x4008)], segments: vec![], roots: vec![64, 96, 127] };
        let nodes = nodes(&viot);
        let ranges = nodes[1..].iter().map(|node| (node[12..14].to_vec(), node[14..16].to_vec()));
        let bytes = |first: u16, last: u16| (first.to_le_bytes().to_vec(), last.to_le_bytes().to_vec());
        let expected = [(0x100, 0x3fff), (0x4100, 0x5fff), (0x6100, 0x7eff), (0x4008, 0x4008)];
        assert_eq!(ranges.collect::<Vec<_>>(), expected.map(|(first, last)| bytes(first, last)));
    }

    #[test]
    fn a_whole_segment_is_one_range() {
        let viot =
            Viot { iommu: at(0, 8), devices: vec![at(2, 8), at(0, 0x10)], segments: vec![2, 0, 2], roots: vec![64] };
        let nodes = nodes(&viot);
        let ranges: Vec<_> = nodes[1..].iter().map(|node| (&node[4..8], &node[12..16])).collect();
        assert_eq!(
            ranges,
            [(&[0, 0, 0, 0][..], &[0, 0, 0xff, 0x7f][..]), (&[0, 0, 2, 0][..], &[0, 0, 0xff, 0][..])],
            "segments after the first have bus 0 alone"
        );
    }
}
