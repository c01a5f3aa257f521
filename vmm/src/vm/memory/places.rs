//! Addresses of virtio memory devices' memory.

use std::ops::Range;

use crate::arch::x86_64::layout::{Layout, MEMORY_BLOCK};
use crate::config::memory::block;
use crate::config::{MemoryConfig, MemoryZoneConfig};
use crate::devices::mem_regions::MemRegions;
use crate::vm::memory::backing::huge_page;

/// The addresses of the memory device of a part of the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartRange {
    /// The index of the part.
    pub part: usize,
    /// The addresses.
    pub range: Range<u64>,
    /// The size of a block, in bytes.
    pub block: u64,
}

/// Size of the address range that the devices need, in bytes, for any start.
pub(crate) fn addresses(memory: &MemoryConfig) -> u64 {
    let one = |(_, part): (usize, MemoryZoneConfig)| {
        let alignment = alignment(&part);
        let len = part.room().unwrap_or(0).checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
        len.saturating_add(alignment - MEMORY_BLOCK)
    };
    growing(memory).map(one).fold(0, u64::saturating_add)
}

/// Addresses of the devices' memory in `layout`, which has room for it.
pub(crate) fn places(memory: &MemoryConfig, layout: &Layout) -> Vec<PartRange> {
    let mut start = layout.hotplug.start;
    let place = |(part, zone): (usize, MemoryZoneConfig)| {
        let first = start.next_multiple_of(alignment(&zone));
        let range = first..first.saturating_add(zone.room().unwrap_or(0));
        start = range.end;
        PartRange { part, range, block: block(huge_page(&zone)) }
    };
    growing(memory).map(place).collect()
}

/// The regions of the devices in this layout, in a VM with `slots` KVM memory slots for all that they plug.
pub(crate) fn regions(memory: &MemoryConfig, layout: &Layout, slots: usize) -> MemRegions {
    let places = places(memory, layout);
    let part = slot_size(&places, slots);
    let places = places.into_iter().map(|PartRange { part: n, range, block }| {
        let per_slot = usize::try_from(part / block).unwrap_or(usize::MAX).max(1);
        (n, range, block, per_slot)
    });
    MemRegions::new(memory, places)
}

/// The smallest power of two, in bytes, with which `slots` memory slots suffice for all of `places`; each slot has at
/// least a block. There are few places, and at least one slot for each.
fn slot_size(places: &[PartRange], slots: usize) -> u64 {
    let mut size: u64 = 1;
    loop {
        let of = |place: &PartRange| (place.range.end - place.range.start).div_ceil(place.block.max(size));
        let needed = places.iter().map(of).fold(0, u64::saturating_add);
        match size.checked_mul(2) {
            Some(next) if needed > slots as u64 => size = next,
            _ => return size,
        }
    }
}

/// The parts of the memory that a device can add to, by index.
fn growing(memory: &MemoryConfig) -> impl Iterator<Item = (usize, MemoryZoneConfig)> {
    (0..).zip(memory.parts()).filter(|(_, part)| part.room().is_some())
}

/// Linux adds memory in aligned sections, and a device plugs aligned blocks.
fn alignment(part: &MemoryZoneConfig) -> u64 {
    block(huge_page(part)).max(MEMORY_BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn memory(zones: &[&str]) -> MemoryConfig {
        let mut memory: MemoryConfig = "size=0,hotplug_method=virtio-mem".parse().unwrap();
        memory.zones = zones.iter().map(|zone| zone.parse().unwrap()).collect();
        memory
    }

    #[test]
    fn hotplug_regions_are_aligned_disjoint_and_within_their_range() {
        let memory = memory(&[
            "id=a,size=1G,hotplug_size=6M",
            "id=b,size=1G",
            "id=c,size=1G,hotplug_size=2G,hugepages=on,hugepage_size=1G",
            "id=d,size=1G,hotplug_size=130M",
        ]);
        let layout = Layout::new(memory.total(), addresses(&memory), 46).unwrap();
        assert_eq!(layout.hotplug.start, 5 * GIB);
        let places = places(&memory, &layout);
        let ranges: Vec<_> = places.iter().map(|place| (place.part, place.range.clone(), place.block)).collect();
        let expected = [
            (0, 5 * GIB..5 * GIB + 6 * MIB, 2 * MIB),
            (2, 6 * GIB..8 * GIB, GIB),
            (3, 8 * GIB..8 * GIB + 130 * MIB, 2 * MIB),
        ];
        assert_eq!(ranges, expected);
        assert!(places.last().unwrap().range.end <= layout.hotplug.end);
        assert!(layout.memory_map().iter().all(|entry| entry.range.end <= layout.hotplug.start));
    }

    #[test]
    fn a_slot_is_a_block_unless_there_are_too_many() {
        let place = |len, block| PartRange { part: 0, range: GIB..GIB + len, block };
        let size = |places: &[PartRange], slots| slot_size(places, slots).max(2 * MIB);
        assert_eq!(size(&[place(GIB, 2 * MIB)], 512), 2 * MIB);
        assert_eq!(size(&[place(GIB + 2 * MIB, 2 * MIB)], 512), 4 * MIB);
        assert_eq!(size(&[place(1 << 45, 2 * MIB)], 512), 64 * GIB);
        assert_eq!(size(&[place(GIB, 2 * MIB), place(64 * GIB, GIB), place(GIB, 2 * MIB)], 1088), 2 * MIB);
        assert_eq!(size(&[place(GIB, 2 * MIB), place(GIB, 2 * MIB)], 48), 64 * MIB);
        assert_eq!(size(&[], 48), 2 * MIB);
    }

    #[test]
    fn memory_that_acpi_adds_has_no_device() {
        let memory: MemoryConfig = "size=1G,hotplug_size=1G".parse().unwrap();
        let layout = Layout::new(GIB, GIB, 46).unwrap();
        assert_eq!((addresses(&memory), places(&memory, &layout)), (0, vec![]));
    }
}
