//! The plans of virtio memory devices.

use virtio_devices::MemSpec;
use vm_api::config::{MemoryConfig, MemoryZoneConfig};

use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::numa::{NumaNode, of_part};

/// Plans a device for each part of the memory that can grow. The devices have no keys of their own: their ids are _mem0
/// and so on, and they get free slots.
pub(crate) fn plan(memory: &MemoryConfig, nodes: &[NumaNode]) -> Vec<DevicePlan> {
    let parts = memory.parts();
    let growing = (0..).zip(&parts).filter(|(_, part)| part.room().is_some());
    let device = |(n, (part, zone)): (usize, (usize, &MemoryZoneConfig))| {
        let id = format!("_mem{n}");
        let kind = DeviceKind::Mem { spec: MemSpec { id: id.clone(), node: of_part(nodes, part) }, part };
        let flag = if zone.id.is_empty() { "--memory" } else { "--memory-zone" };
        DevicePlan { flag, id, pci_segment: 0, pci_device_id: None, iommu: false, kind }
    };
    (0..).zip(growing).map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_that_can_grow_has_a_device() {
        let nodes = [NumaNode::default(), NumaNode { parts: vec![2], ..NumaNode::default() }];
        let parts = |memory: &MemoryConfig| {
            let part = |plan: DevicePlan| match plan.kind {
                DeviceKind::Mem { spec, part } => {
                    assert_eq!((&spec.id, spec.node), (&plan.id, (part == 2).then_some(1)));
                    (plan.id, part)
                }
                other => panic!("{other:?}"),
            };
            plan(memory, &nodes).into_iter().map(part).collect::<Vec<_>>()
        };
        let of = |text: &str| parts(&text.parse().unwrap());
        assert_eq!(of("size=1G,hotplug_size=1G"), []);
        assert_eq!(of("size=1G,hotplug_method=virtio-mem,hotplug_size=0"), []);
        let first = ("_mem0".to_string(), 0);
        assert_eq!(of("size=1G,hotplug_method=virtio-mem,hotplug_size=1G"), [first]);
        let mut zones: MemoryConfig = "size=0,hotplug_method=virtio-mem".parse().unwrap();
        for zone in ["id=a,size=1G,hotplug_size=1G", "id=b,size=1G", "id=c,size=1G,hotplug_size=1G"] {
            zones.zones.push(zone.parse().unwrap());
        }
        assert_eq!(parts(&zones), [("_mem0".to_string(), 0), ("_mem1".to_string(), 2)]);
    }
}
