//! A part of the guest's memory that a backend accesses by itself.

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, Permissions};

use crate::GuestMap;
use crate::memory::DmaMapping;

/// A part of the guest's memory. [`Self::of`] is the only constructor, so that no backend gets access to anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    iova: u64,
    size: u64,
    host: u64,
    access: Permissions,
}

impl Mapping {
    /// The parts of `mapping`'s target that are memory and may be accessed, each contiguous in this process.
    pub(crate) fn of(mapping: DmaMapping, memory: &GuestMap) -> impl Iterator<Item = Self> {
        let DmaMapping { first, last, target, access } = mapping;
        let of_region = move |region: &<GuestMap as GuestMemoryBackend>::R| {
            let (start, end) = (region.start_addr().raw_value(), region.last_addr().raw_value());
            // The part of the region that is mapped, by guest physical addresses, both ends included.
            let from = start.max(target);
            let until = end.min(target.saturating_add(last - first));
            (from <= until).then(|| Self {
                iova: first + (from - target),
                size: until - from + 1,
                host: region.as_ptr() as u64 + (from - start),
                access,
            })
        };
        let accessible = access != Permissions::No;
        memory.iter().filter(move |_| accessible).filter_map(of_region)
    }

    /// All of `memory`, by guest physical addresses.
    pub(crate) fn all_of(memory: &GuestMap) -> Vec<Self> {
        Self::of(DmaMapping::IDENTITY, memory).collect()
    }

    /// The first address at which the device sees the part: its guest physical address if there is no translation.
    pub(crate) fn iova(&self) -> u64 {
        self.iova
    }

    /// The last of these addresses.
    pub(crate) fn last(&self) -> u64 {
        self.iova + (self.size - 1)
    }

    /// The length in bytes, not 0.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The address in this process.
    pub(crate) fn host(&self) -> u64 {
        self.host
    }

    /// The permitted accesses, at least one.
    pub(crate) fn access(&self) -> Permissions {
        self.access
    }

    #[cfg(test)]
    pub(crate) fn for_test(iova: u64, size: u64) -> Self {
        Self { iova, size, host: 0x7f00_0000_0000, access: Permissions::ReadWrite }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    #[test]
    fn a_mapping_has_one_part_per_host_piece_and_omits_holes() {
        let regions = [(GuestAddress(0), 0x1_0000), (GuestAddress(0x2_0000), 0x1_0000)];
        let memory = GuestMap::from_ranges(&regions).unwrap();
        let parts = |first, last, target, access| {
            let all = Mapping::of(DmaMapping { first, last, target, access }, &memory);
            all.map(|part| (part.iova(), part.last())).collect::<Vec<_>>()
        };
        let both = Permissions::ReadWrite;
        let across = parts(0x100_0000, 0x102_7fff, 0x8000, both);
        assert_eq!(across, [(0x100_0000, 0x100_7fff), (0x101_8000, 0x102_7fff)]);
        assert_eq!(parts(0x5000, 0x5fff, 0x1000, Permissions::Read), [(0x5000, 0x5fff)]);
        assert_eq!(parts(0x5000, 0x5fff, 0x1_1000, both), []);
        assert_eq!(parts(0x5000, 0x5fff, 0x1000, Permissions::No), []);
        assert_eq!(parts(0, u64::MAX, 0, both), [(0, 0xffff), (0x2_0000, 0x2_ffff)]);
        assert_eq!(parts(u64::MAX - 0xfff, u64::MAX, 0x2_f000, both), [(u64::MAX - 0xfff, u64::MAX)]);
        let part = Mapping::of(DmaMapping { first: 0, last: 0xfff, target: 0x2_1000, access: both }, &memory);
        let region = memory.iter().nth(1).unwrap();
        assert_eq!(part.map(|part| part.host()).collect::<Vec<_>>(), [region.as_ptr() as u64 + 0x1000]);
    }
}
