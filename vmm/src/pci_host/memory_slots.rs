//! KVM's memory slots and their uses.
//!
//! | memory slots | show the guest |
//! |---|---|
//! | 0 to 15 | its memory |
//! | 16 to 79 | configuration space of each device of bus 0 of segment 0: its own function's, and its VFs' |
//! | 80 to 127 | plugged memory of virtio memory devices, on Linux before 5.12 |
//! | 128 to 10,239 | doorbell pages of host devices, once they are given to the guest, and memory of devices |
//! | 10,240 to 10,751 | plugged memory of virtio memory devices |
//! | 10,752 to 18,879 | configuration space of the devices of further root buses of segment 0 |
//! | 26,624 and up | configuration space of the devices of other segments |

use std::collections::BTreeSet;
use std::ops::Range;

use parking_lot::Mutex;
use pci::Bdf;

/// The last memory slot of the guest's memory.
pub(crate) const LAST_MEMORY: u32 = 15;
/// The first memory slot of configuration space of bus 0 of segment 0.
const CONFIG: u32 = LAST_MEMORY + 1;

/// The first memory slot of configuration space of other segments.
const OTHER_SEGMENTS: u32 = 26_624;

/// The first memory slot of configuration space of further root buses of segment 0.
const FURTHER_ROOTS: u32 = PLUGGED.end;

/// Memory slots of a root bus: two for each of its 32 slots.
const PER_ROOT: u32 = 64;

/// The memory slots of doorbells and of devices' memory. Linux has 32,764 memory slots since 5.12, and 509 before. A
/// doorbell without a free memory slot stays an eventfd.
const DOORBELLS: Range<u32> = 128..PLUGGED.start;

/// The memory slots of plugged memory. For each slot removed, KVM drops all of a guest's translations, and a dirty log
/// starts slot by slot: so there are few.
const PLUGGED: Range<u32> = 10_240..10_752;
/// The memory slots of plugged memory on hosts with fewer memory slots.
const FEW_PLUGGED: Range<u32> = 80..128;

/// The memory slots for the plugged memory of all virtio memory devices, on a host with this number of memory slots.
pub(crate) const fn plugged(host: u32) -> Range<u32> {
    if host >= PLUGGED.end { PLUGGED } else { FEW_PLUGGED }
}

/// The memory slots that show configuration space of the device whose own function is at this address, on bus 0 or
/// another root bus of segment 0: of its own function, and of its VFs.
pub(crate) fn config_slots(address: Bdf) -> [u32; 2] {
    let bus = match (address.segment, address.rid.bus()) {
        (0, 0) => CONFIG,
        (0, bus) => FURTHER_ROOTS + PER_ROOT * (u32::from(bus) - 1),
        (segment, _) => OTHER_SEGMENTS + PER_ROOT * (u32::from(segment) - 1),
    };
    let first = bus + 2 * u32::from(address.rid.device());
    [first, first + 1]
}

/// The used memory slots of doorbells and of devices' memory.
#[derive(Debug, Default)]
pub(crate) struct MemorySlots {
    taken: Mutex<BTreeSet<u32>>,
}

impl MemorySlots {
    /// Takes the lowest free memory slot for a doorbell or a device's memory, if there is one.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut taken = self.taken.lock();
        let mut used = taken.iter().peekable();
        let slot = DOORBELLS.into_iter().find(|slot| used.next_if_eq(&slot).is_none())?;
        taken.insert(slot);
        Some(slot)
    }

    /// Frees a memory slot that shows nothing.
    pub(crate) fn give_back(&self, slot: u32) {
        self.taken.lock().remove(&slot);
    }

    /// Frees all memory slots, for a new VM.
    pub(crate) fn clear(&self) {
        self.taken.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use pci::Rid;

    use super::*;
    use crate::arch::x86_64::layout::{LAST_BUS, MOST_SEGMENTS};

    /// The slots of all root buses that there may be: bus 0, then further ones, then other segments.
    fn all_config_slots() -> Vec<u32> {
        let roots = (0..=LAST_BUS).map(|bus| (0, bus)).chain((1..MOST_SEGMENTS).map(|segment| (segment, 0)));
        let at = |(segment, bus)| (0..32).map(move |slot| Bdf { segment, rid: Rid::from_bus_devfn(bus, slot << 3) });
        roots.flat_map(at).flat_map(config_slots).collect()
    }

    #[test]
    fn the_lowest_free_memory_slot_is_taken_and_none_twice() {
        let slots = MemorySlots::default();
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(128), Some(129), Some(130)]);
        slots.give_back(129);
        assert_eq!([slots.take(), slots.take()], [Some(129), Some(131)]);
        while slots.take().is_some() {}
        assert_eq!(slots.taken.lock().last(), Some(&10_239));
        slots.clear();
        assert_eq!(slots.take(), Some(128));
    }

    #[test]
    fn plugged_memory_shares_no_memory_slot() {
        let config = all_config_slots();
        for host in [509, 10_751, 10_752, 26_624, 32_764] {
            let plugged = plugged(host);
            assert!(plugged.start > LAST_MEMORY && plugged.end <= host && !plugged.is_empty(), "{host}");
            let taken = |slot: &u32| config.contains(slot) || DOORBELLS.contains(slot);
            assert!(!plugged.clone().any(|slot| taken(&slot)), "{host}");
        }
    }

    #[test]
    fn no_two_devices_share_a_memory_slot() {
        let slots = all_config_slots();
        assert!(slots.is_sorted_by(|a, b| a < b));
        assert!(slots.iter().all(|slot| *slot >= CONFIG && !DOORBELLS.contains(slot) && *slot < 32_764));
    }
}
