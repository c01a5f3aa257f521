//! Converts the plan of NUMA nodes to the nodes in the guest's tables.

use std::ops::Range;

use crate::acpi::numa::Node;
use crate::arch::x86_64::layout::Layout;
use crate::config::MemoryConfig;
use crate::config::numa::NumaNode;
use crate::devices::Devices;
use crate::vm::memory::places::places;

/// The nodes of a guest with this memory and these devices. A device that was removed has no node.
pub(super) fn nodes(plan: &[NumaNode], memory: &MemoryConfig, layout: &Layout, devices: &Devices) -> Vec<Node> {
    let address = |id: &String| devices.find(id).map(|plugged| plugged.address());
    let node = |plan: &NumaNode| Node {
        vcpus: plan.vcpus.clone(),
        memory: memory_of(plan, memory, layout),
        segments: plan.segments.clone(),
        device: plan.device.as_ref().and_then(address),
        distances: plan.distances.clone(),
    };
    plan.iter().map(node).collect()
}

/// The addresses of a node's memory, each with true if it can be hot-plugged there.
fn memory_of(plan: &NumaNode, memory: &MemoryConfig, layout: &Layout) -> Vec<(Range<u64>, bool)> {
    let sizes: Vec<_> = memory.parts().iter().map(|part| part.size).collect();
    let at_boot = layout.parts(&sizes);
    let at_boot = plan.parts.iter().filter_map(|part| at_boot.get(*part)).flatten().map(|range| (range.clone(), false));
    let by_devices = places(memory, layout).into_iter().filter(|place| plan.parts.contains(&place.part));
    let by_devices = by_devices.map(|place| (place.range, true));
    // With ACPI hot-plug there are no zones: all memory is one part.
    let by_acpi = (memory.room().is_some() && plan.parts.contains(&0)).then(|| (layout.hotplug.clone(), true));
    at_boot.chain(by_devices).chain(by_acpi).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::memory::places::addresses;

    const GIB: u64 = 1 << 30;

    fn of(memory: &MemoryConfig, parts: &[usize]) -> Vec<(Range<u64>, bool)> {
        let room = memory.room().unwrap_or(0) + addresses(memory);
        let layout = Layout::new(memory.total(), room, 46).unwrap();
        memory_of(&NumaNode { parts: parts.to_vec(), ..NumaNode::default() }, memory, &layout)
    }

    #[test]
    fn numa_node_has_its_zones_memory_and_their_hotplug_ranges() {
        let mut memory: MemoryConfig = "size=0,hotplug_method=virtio-mem".parse().unwrap();
        for zone in ["id=a,size=1G,hotplug_size=1G", "id=b,size=3G,hotplug_size=2G"] {
            memory.zones.push(zone.parse().unwrap());
        }
        assert_eq!(of(&memory, &[0]), [(0..GIB, false), (5 * GIB..6 * GIB, true)]);
        assert_eq!(of(&memory, &[1]), [(GIB..3 * GIB, false), (4 * GIB..5 * GIB, false), (6 * GIB..8 * GIB, true)]);
        assert_eq!(of(&memory, &[]), []);
    }

    #[test]
    fn the_node_of_all_memory_has_what_acpi_can_add() {
        let memory: MemoryConfig = "size=1G,hotplug_size=1G".parse().unwrap();
        assert_eq!(of(&memory, &[0]), [(0..GIB, false), (4 * GIB..5 * GIB, true)]);
        assert_eq!(of(&memory, &[]), []);
    }
}
