//! The kernel's descriptions of a device and of a container: structures followed by a chain of capabilities
//! (`linux/vfio.h`, `struct vfio_info_cap_header`).

use std::mem::{offset_of, size_of};
use std::ops::{Range, RangeInclusive};

use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, VFIO_REGION_INFO_CAP_MSIX_MAPPABLE,
    VFIO_REGION_INFO_CAP_SPARSE_MMAP, vfio_info_cap_header, vfio_iommu_type1_info,
    vfio_iommu_type1_info_cap_iova_range, vfio_iommu_type1_info_dma_avail, vfio_iova_range, vfio_region_info,
    vfio_region_info_cap_sparse_mmap, vfio_region_sparse_mmap_area,
};

/// The most entries of a list: no device has so many areas, and no IOMMU so many holes.
const MOST: usize = 4096;

/// A region of a device: a BAR, or configuration space.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RegionInfo {
    /// `VFIO_REGION_INFO_FLAG_*`.
    pub flags: u32,
    /// Bytes; 0 if there is no such region.
    pub size: u64,
    /// Offset in the device's file.
    pub offset: u64,
    /// The areas that can be mapped; `None` for all of the region.
    pub sparse: Option<Vec<Range<u64>>>,
    /// True if the page with the MSI-X table can be mapped as well.
    pub msix_mappable: bool,
}

/// A kind of interrupt of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct IrqInfo {
    /// `VFIO_IRQ_INFO_*`.
    pub flags: u32,
    /// The number of interrupts.
    pub count: u32,
}

/// Properties of an open device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct DeviceInfo {
    /// True if it can be reset.
    pub resets: bool,
    /// The BARs, the ROM and configuration space, by VFIO's numbers.
    pub regions: [RegionInfo; 8],
    /// The kinds of interrupts, by VFIO's numbers.
    pub irqs: [IrqInfo; 5],
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    bytes.get(offset..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u16::from_ne_bytes(*bytes))
}

pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// The capabilities of `info`, the first of which is at `first`: their ids and the bytes from their starts on.
fn capabilities(info: &[u8], first: u32) -> Vec<(u32, &[u8])> {
    let mut found = Vec::new();
    let mut offset = first as usize;
    while let Some(bytes) = info.get(offset..).filter(|bytes| bytes.len() >= size_of::<vfio_info_cap_header>()) {
        if offset == 0 || found.len() >= MOST {
            break;
        }
        found.push((u16_at(bytes, offset_of!(vfio_info_cap_header, id)).into(), bytes));
        offset = u32_at(bytes, offset_of!(vfio_info_cap_header, next)) as usize;
    }
    found
}

/// Parses the reply of `VFIO_DEVICE_GET_REGION_INFO`.
pub(crate) fn region(info: &[u8]) -> RegionInfo {
    let capabilities = capabilities(info, u32_at(info, offset_of!(vfio_region_info, cap_offset)));
    let with = |id: u32| capabilities.iter().find(|(found, _)| *found == id).map(|(_, bytes)| *bytes);
    let areas = |bytes: &[u8]| {
        let count = u32_at(bytes, offset_of!(vfio_region_info_cap_sparse_mmap, nr_areas)) as usize;
        let list = bytes.get(size_of::<vfio_region_info_cap_sparse_mmap>()..).unwrap_or_default();
        let area = |bytes: &[u8]| {
            let start = u64_at(bytes, offset_of!(vfio_region_sparse_mmap_area, offset));
            start..start.saturating_add(u64_at(bytes, offset_of!(vfio_region_sparse_mmap_area, size)))
        };
        list.chunks_exact(size_of::<vfio_region_sparse_mmap_area>()).take(count.min(MOST)).map(area).collect()
    };
    RegionInfo {
        flags: u32_at(info, offset_of!(vfio_region_info, flags)),
        size: u64_at(info, offset_of!(vfio_region_info, size)),
        offset: u64_at(info, offset_of!(vfio_region_info, offset)),
        sparse: with(VFIO_REGION_INFO_CAP_SPARSE_MMAP).map(areas),
        msix_mappable: with(VFIO_REGION_INFO_CAP_MSIX_MAPPABLE).is_some(),
    }
}

/// The addresses that devices of a container can reach, from the reply of `VFIO_IOMMU_GET_INFO`. `None` with a kernel
/// before 5.4, which does not report them.
pub(crate) fn reachable(info: &[u8]) -> Option<Vec<RangeInclusive<u64>>> {
    let capabilities = capabilities(info, u32_at(info, offset_of!(vfio_iommu_type1_info, cap_offset)));
    let (_, bytes) = capabilities.into_iter().find(|(id, _)| *id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE)?;
    let count = u32_at(bytes, offset_of!(vfio_iommu_type1_info_cap_iova_range, nr_iovas)) as usize;
    let list = bytes.get(size_of::<vfio_iommu_type1_info_cap_iova_range>()..).unwrap_or_default();
    let range = |bytes: &[u8]| {
        u64_at(bytes, offset_of!(vfio_iova_range, start))..=u64_at(bytes, offset_of!(vfio_iova_range, end))
    };
    Some(list.chunks_exact(size_of::<vfio_iova_range>()).take(count.min(MOST)).map(range).collect())
}

/// Number of mappings that a container has room for, from the reply of `VFIO_IOMMU_GET_INFO`. `None` with a kernel
/// before 5.10, which does not report it.
pub(crate) fn mappings_left(info: &[u8]) -> Option<u32> {
    let capabilities = capabilities(info, u32_at(info, offset_of!(vfio_iommu_type1_info, cap_offset)));
    let (_, bytes) = capabilities.into_iter().find(|(id, _)| *id == VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL)?;
    Some(u32_at(bytes, offset_of!(vfio_iommu_type1_info_dma_avail, avail)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Structures of `len` bytes, with numbers at these offsets.
    fn bytes(len: usize, fields: &[(usize, u64, usize)]) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (offset, value, width) in fields {
            bytes[*offset..offset + width].copy_from_slice(&value.to_ne_bytes()[..*width]);
        }
        bytes
    }

    #[test]
    fn a_region_has_the_areas_of_its_capability() {
        let info = bytes(
            32 + 8 + 16 + 32,
            &[
                (4, 0xf, 4),
                (12, 32, 4),
                (16, 0x10000, 8),
                (24, 0x20_0000, 8),
                (32, VFIO_REGION_INFO_CAP_MSIX_MAPPABLE.into(), 2),
                (36, 40, 4),
                (40, VFIO_REGION_INFO_CAP_SPARSE_MMAP.into(), 2),
                (48, 2, 4),
                (56, 0, 8),
                (64, 0x1000, 8),
                (72, 0x3000, 8),
                (80, 0xd000, 8),
            ],
        );
        let found = region(&info);
        assert_eq!((found.flags, found.size, found.offset, found.msix_mappable), (0xf, 0x10000, 0x20_0000, true));
        assert_eq!(found.sparse, Some(vec![0..0x1000, 0x3000..0x10000]));
        assert_eq!(region(&info[..20]).sparse, None, "what is cut off is not there");
    }

    #[test]
    fn a_chain_that_never_ends_is_left() {
        let circle = bytes(40, &[(12, 32, 4), (32, 9, 2), (36, 32, 4)]);
        assert!(!region(&circle).msix_mappable);
    }

    #[test]
    fn a_container_lists_the_addresses_that_its_devices_reach() {
        let id = u64::from(VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE);
        let fields = [
            (16, 24, 4),
            (24, id, 2),
            (32, 2, 4),
            (40, 0, 8),
            (48, 0xfedf_ffff, 8),
            (56, 0xfef0_0000, 8),
            (64, u64::MAX, 8),
        ];
        let info = bytes(72, &fields);
        assert_eq!(reachable(&info), Some(vec![0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX]));
        assert_eq!(reachable(&bytes(24, &[])), None);
        let id = u64::from(VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL);
        let info = bytes(36, &[(16, 24, 4), (24, id, 2), (32, 0xffff, 4)]);
        assert_eq!((mappings_left(&info), mappings_left(&bytes(24, &[]))), (Some(0xffff), None));
    }
}
