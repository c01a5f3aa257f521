//! Memory of a device, mapped into the guest at the device's windows: one KVM memory slot for each area. Peer devices
//! may reach it as long as the guest does.

use std::sync::Arc;

use pci::{Window, WindowId};
use virtio_devices::{FileMapping, MemoryArea, MemoryPeers};

use crate::pci_host::wires::Tools;

/// The memory of a device that is shown now.
#[derive(Default)]
pub(crate) struct DeviceMemory(Vec<Shown>);

struct Shown {
    place: (WindowId, u64),
    address: u64,
    memory: Arc<FileMapping>,
    memory_slot: u32,
    /// Peers that have it mapped.
    peers: Option<Arc<dyn MemoryPeers>>,
}

impl Shown {
    /// Unmaps the memory from peer devices before the guest loses it, so that no peer keeps a mapping of whatever is
    /// placed there next.
    fn take_from_peers(&mut self) {
        if let Some(peers) = self.peers.take() {
            peers.unmap(self.address, &self.memory);
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.take_from_peers();
    }
}

impl DeviceMemory {
    /// Shows `areas` in those of their windows that are decoded. If the host refuses, for example because of an
    /// overlap, the next update tries again; until then accesses exit.
    pub(crate) fn update(&mut self, areas: Vec<MemoryArea>, windows: &[Window], tools: &Tools<'_>) {
        let placed = |area: MemoryArea| {
            let window = windows.iter().find(|window| window.id == area.window)?;
            Some((window.base.checked_add(area.offset)?, area))
        };
        let wanted: Vec<_> = areas.into_iter().filter_map(placed).collect();
        let is_wanted = |shown: &Shown| {
            let is = |(address, area): &(u64, MemoryArea)| {
                (*address, (area.window, area.offset)) == (shown.address, shown.place)
            };
            wanted.iter().any(is)
        };
        // Remove all of them first: another area may have their address next.
        self.0.retain_mut(|shown| {
            if is_wanted(shown) {
                return true;
            }
            shown.take_from_peers();
            if let Err(error) = tools.wiring.show_memory(shown.memory_slot, None) {
                (tools.complain)("take a device's memory from the guest", &error);
                return true;
            }
            tools.memory_slots.give_back(shown.memory_slot);
            false
        });
        for (address, area) in wanted {
            let place = (area.window, area.offset);
            if self.0.iter().all(|shown| shown.place != place) {
                self.0.extend(show(address, area, tools));
            }
        }
    }

    /// Forgets the memory shown by a former VM. Guest writes to memory that is not kept are discarded with it.
    pub(crate) fn clear(&mut self, areas: Vec<MemoryArea>) {
        areas.iter().for_each(|area| area.memory.forget_writes());
        self.0.drain(..).for_each(|shown| shown.memory.forget_writes());
    }
}

/// Shows `area` at `address`, if the host has a free memory slot.
fn show(address: u64, area: MemoryArea, tools: &Tools<'_>) -> Option<Shown> {
    let memory_slot = tools.memory_slots.take()?;
    let MemoryArea { window, offset, memory, peers } = area;
    match tools.wiring.show_memory(memory_slot, Some((address, &memory))) {
        Ok(()) => {
            if let Some(peers) = &peers {
                peers.map(address, &memory);
            }
            Some(Shown { place: (window, offset), address, memory, memory_slot, peers })
        }
        Err(error) => {
            tools.memory_slots.give_back(memory_slot);
            (tools.complain)("give the guest a device's memory", &error);
            None
        }
    }
}
