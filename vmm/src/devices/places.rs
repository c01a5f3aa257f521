//! Places at which devices are plugged.

use std::collections::HashSet;

use crate::config::DevicePlan;

/// The requested place of a device on its segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In this slot, or in the lowest free one, with its VFs on the lowest free buses.
    Slot(Option<u8>),
    /// Former place.
    At {
        /// Slot.
        slot: u8,
        /// The first bus of its VFs, if it has any.
        first_vf_bus: Option<u8>,
    },
}

/// The places of the devices of a new machine: each gets its chosen slot, or the lowest slot from 1 of its root
/// bus that no other device chose; `None` if none is left.
pub(crate) fn of_new(plans: &[DevicePlan]) -> Vec<Place> {
    let chosen = plans.iter().filter_map(DevicePlan::chosen_slot);
    let mut taken: HashSet<_> = chosen.collect();
    let slot = |plan: &DevicePlan| {
        plan.pci_device_id.or_else(|| (1..32).find(|slot| taken.insert((plan.pci_segment, plan.root_bus(), *slot))))
    };
    plans.iter().map(slot).map(Place::Slot).collect()
}

#[cfg(test)]
mod tests {
    use crate::config::{NetConfig, PlatformConfig, VmConfig, VmPlan};

    use super::*;

    #[test]
    fn devices_without_a_chosen_slot_take_the_free_ones() {
        let net = |pci_device_id| NetConfig { pci_device_id, ..NetConfig::default() };
        let mut config =
            VmConfig { net: vec![net(None), net(Some(1)), net(Some(3)), net(None)], ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        let places = of_new(&VmPlan::of(&config).unwrap().devices);
        let slot = |slot| Place::Slot(Some(slot));
        // The virtio console comes first, and the entropy device last.
        assert_eq!(places, [2, 4, 1, 3, 5, 6].map(slot));
        let on = |pci_segment| NetConfig { pci_segment, ..net(None) };
        config.net.extend([on(1), on(2), on(1)]);
        config.platform = Some(PlatformConfig { num_pci_segments: 3, ..PlatformConfig::default() });
        let places = of_new(&VmPlan::of(&config).unwrap().devices);
        assert_eq!(places, [2, 4, 1, 3, 5, 1, 1, 2, 6].map(slot));
    }

    #[test]
    fn each_root_bus_has_slots_of_its_own() {
        let config = VmConfig {
            numa: ["guest_numa_id=0", "guest_numa_id=1"].map(|node| node.parse().unwrap()).into(),
            net: ["numa=0", "numa=0,pci_device_id=1", "id=c", "numa=1"].map(|net| net.parse().unwrap()).into(),
            ..VmConfig::default()
        };
        let plan = VmPlan::of(&config).unwrap();
        let places = plan.devices.iter().zip(of_new(&plan.devices)).filter(|(device, _)| device.net().is_some());
        let places: Vec<_> = places.map(|(_, place)| place).collect();
        // The virtio console has slot 1 of bus 0.
        assert_eq!(places, [2, 1, 2, 1].map(|slot| Place::Slot(Some(slot))));
    }
}
