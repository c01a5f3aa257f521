//! The regions of virtio memory devices, shared by the devices and by the code that resizes them.

use std::ops::Range;
use std::sync::Arc;

use virtio_devices::MemRegion;

use crate::config::MemoryConfig;

/// The regions of all devices.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemRegions(Vec<(usize, Arc<MemRegion>)>);

impl MemRegions {
    /// Regions by the index of their part of `memory`, with their addresses, the size of their blocks in bytes, and the
    /// number of blocks in a memory slot. Each device requests from its driver the size that the part has.
    pub(crate) fn new(memory: &MemoryConfig, places: impl Iterator<Item = (usize, Range<u64>, u64, usize)>) -> Self {
        let region = |range, block, per_slot| Arc::new(MemRegion::new(&range, block, per_slot));
        let regions = Self(places.map(|(n, range, block, per_slot)| (n, region(range, block, per_slot))).collect());
        regions.resize(memory);
        regions
    }

    /// The region of the device of the part with this index.
    pub(crate) fn of(&self, part: usize) -> Option<&Arc<MemRegion>> {
        self.0.iter().find(|(index, _)| *index == part).map(|(_, region)| region)
    }

    /// All regions, by their addresses.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<MemRegion>> {
        self.0.iter().map(|(_, region)| region)
    }

    /// Requests from the drivers the sizes that the parts have.
    pub(crate) fn resize(&self, memory: &MemoryConfig) {
        for (n, part) in memory.parts().iter().enumerate() {
            self.of(n).into_iter().for_each(|region| region.resize(part.hotplugged_size.unwrap_or(0)));
        }
    }

    /// Number of bytes that are plugged.
    pub(crate) fn plugged(&self) -> u64 {
        self.0.iter().map(|(_, region)| region.plugged()).sum()
    }

    /// Unplugs everything, for a reset of the machine. No driver runs.
    pub(crate) fn unplug_all(&self) {
        self.0.iter().for_each(|(_, region)| region.unplug_all());
    }

    /// Records that host devices may have pinned pages of the guest's memory.
    pub(crate) fn keep_pages(&self) {
        self.0.iter().for_each(|(_, region)| region.keep_pages());
    }

    /// True if all regions keep their pages.
    #[cfg(test)]
    pub(crate) fn all_keep_pages(&self) -> bool {
        self.0.iter().all(|(_, region)| region.keeps_pages())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn drivers_are_asked_for_what_the_parts_are_to_have() {
        let mut memory: MemoryConfig = "size=0,hotplug_method=virtio-mem".parse().unwrap();
        for zone in ["id=a,size=1G,hotplug_size=1G", "id=b,size=1G", "id=c,size=1G,hotplug_size=1G,hotplugged_size=4M"]
        {
            memory.zones.push(zone.parse().unwrap());
        }
        let places = [(0, 4 * GIB..5 * GIB, 2 * MIB, 1), (2, 5 * GIB..6 * GIB, 2 * MIB, 1)];
        let regions = MemRegions::new(&memory, places.into_iter());
        let requested = |part| regions.of(part).unwrap().requested();
        assert_eq!((requested(0), requested(2), regions.plugged()), (0, 4 * MIB, 0));
        memory.zones[0].hotplugged_size = Some(GIB);
        memory.zones[2].hotplugged_size = None;
        regions.resize(&memory);
        assert_eq!((requested(0), requested(2)), (GIB, 0));
        assert!(regions.of(1).is_none());
    }
}
