//! Memory of a device, which the guest finds in one of its windows: a KVM memory slot at the window's beginning.

use std::sync::Arc;

use pci::{Window, WindowId};
use virtio_devices::FileMapping;

use crate::pci_host::wires::Tools;

/// The memory of a device, as it is shown at the moment.
#[derive(Default)]
pub(crate) struct DeviceMemory(Option<Shown>);

struct Shown {
    address: u64,
    memory: Arc<FileMapping>,
    memory_slot: u32,
}

impl DeviceMemory {
    /// Shows `memory` at its window, if the device has any and decodes the window. What the host refuses, as memory
    /// over other memory, is tried again when the device is looked at the next time; an access exits until then, and
    /// finds nothing.
    pub(crate) fn update(
        &mut self,
        memory: Option<(WindowId, Arc<FileMapping>)>,
        windows: &[Window],
        tools: &Tools<'_>,
    ) {
        let placed = |(id, memory): (WindowId, _)| {
            windows.iter().find(|window| window.id == id).map(|window| (window.base, memory))
        };
        let wanted = memory.and_then(placed);
        if wanted.as_ref().map(|(address, _)| *address) == self.0.as_ref().map(|shown| shown.address) {
            return;
        }
        if let Some(shown) = self.0.take() {
            if let Err(error) = tools.wiring.show_memory(shown.memory_slot, None) {
                (tools.complain)("take a device's memory from the guest", &error);
                self.0 = Some(shown);
                return;
            }
            tools.memory_slots.give_back(shown.memory_slot);
        }
        if let Some((address, memory)) = wanted
            && let Some(memory_slot) = tools.memory_slots.take()
        {
            match tools.wiring.show_memory(memory_slot, Some((address, &memory))) {
                Ok(()) => self.0 = Some(Shown { address, memory, memory_slot }),
                Err(error) => {
                    tools.memory_slots.give_back(memory_slot);
                    (tools.complain)("give the guest a device's memory", &error);
                }
            }
        }
    }

    /// Forgets what was shown by a VM that is gone. What its guest wrote to memory that is not kept is gone with it.
    pub(crate) fn clear(&mut self, memory: Option<(WindowId, Arc<FileMapping>)>) {
        if let Some((_, memory)) = memory {
            memory.forget_writes();
        }
        if let Some(shown) = self.0.take() {
            shown.memory.forget_writes();
        }
    }
}
