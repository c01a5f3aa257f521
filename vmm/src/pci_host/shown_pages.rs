//! The pages of configuration space that the VM shows, and their memory slots.

use std::collections::BTreeMap;
use std::io;

use pci::Rid;

use crate::pci_host::config_pages::Shown;
use crate::pci_host::memory_slots::MemorySlots;
use crate::pci_host::wires::Tools;

/// Pages of a device's configuration space that the VM shows.
#[derive(Default)]
pub(crate) struct ShownPages {
    /// By the first function, with the memory slot.
    rows: BTreeMap<Rid, (u32, Shown)>,
    /// True if the VM shows no pages: every read is an exit.
    refused: bool,
}

impl ShownPages {
    /// Shows exactly the pages `wanted`, in the order of the functions. The device has the memory slots `own`; further
    /// ones are taken as needed, and pages without a free one are not shown.
    pub(crate) fn update(&mut self, wanted: &[Shown], own: [u32; 2], tools: &Tools<'_>) {
        let wanted = if self.refused { &[] } else { wanted };
        let result = self
            .hide_all_but(wanted, own, tools)
            .and_then(|()| wanted.iter().try_for_each(|shown| self.show(shown, own, tools)));
        let Err(error) = result else { return };
        log::debug!("the VM does not show configuration space: {error}");
        self.refused = true;
        // From now on all reads are exits, which return the same. Each update tries again to hide the pages.
        if let Err(error) = self.hide_all_but(&[], own, tools) {
            (tools.complain)("hide configuration space", &error);
        }
    }

    fn hide_all_but(&mut self, wanted: &[Shown], own: [u32; 2], tools: &Tools<'_>) -> io::Result<()> {
        let mut result = Ok(());
        self.rows.retain(|first, (memory_slot, shown)| {
            let found = wanted.binary_search_by_key(first, |wanted| wanted.first).ok().and_then(|n| wanted.get(n));
            if found == Some(shown) {
                return true;
            }
            match tools.wiring.show_config(*memory_slot, None) {
                Ok(()) => give_back(*memory_slot, own, tools.memory_slots),
                Err(error) => result = Err(error),
            }
            // A page that could not be hidden is still there.
            result.is_err()
        });
        result
    }

    fn show(&mut self, shown: &Shown, own: [u32; 2], tools: &Tools<'_>) -> io::Result<()> {
        if self.rows.contains_key(&shown.first) {
            return Ok(());
        }
        let is_free = |memory_slot: &u32| self.rows.values().all(|(taken, _)| taken != memory_slot);
        let free = own.into_iter().find(is_free);
        let Some(memory_slot) = free.or_else(|| tools.memory_slots.take()) else { return Ok(()) };
        match tools.wiring.show_config(memory_slot, Some(shown)) {
            Ok(()) => _ = self.rows.insert(shown.first, (memory_slot, shown.clone())),
            // A kernel may have fewer memory slots than this device needs.
            Err(_) if free.is_none() => give_back(memory_slot, own, tools.memory_slots),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

fn give_back(memory_slot: u32, own: [u32; 2], memory_slots: &MemorySlots) {
    if !own.contains(&memory_slot) {
        memory_slots.give_back(memory_slot);
    }
}
