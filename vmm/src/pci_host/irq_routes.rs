//! Devices' messages as interrupts of the VM: global system interrupts (GSIs), and their routing table.

use std::collections::BTreeMap;
use std::io;

use parking_lot::Mutex;

use crate::kvm::{IOAPIC_PINS, MsiRoute};
use crate::pci_host::wiring::Wiring;

/// The entries of KVM's routing table (`KVM_MAX_IRQ_ROUTES`). Each GSI of a message takes one.
const TABLE: u32 = 4096;
/// The entries used by the pins of the PICs and of the IOAPIC.
const PIN_ENTRIES: u32 = 40;
/// The most messages.
pub(crate) const MESSAGES: usize = (TABLE - PIN_ENTRIES) as usize;

/// The messages that are routed now, each under a GSI of its own.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    table: Mutex<BTreeMap<u32, MsiRoute>>,
}

/// A change of the routes, committed as a whole.
#[derive(Debug, Default)]
pub(crate) struct RouteChange {
    /// GSIs that are no longer used, and whose eventfds are detached already.
    pub remove: Vec<u32>,
    /// Messages that change under their GSI.
    pub change: Vec<MsiRoute>,
    /// Messages that need a GSI; the one in the route is ignored.
    pub add: Vec<MsiRoute>,
}

impl Routes {
    /// Makes the change with one write of the VM's table, and returns the GSIs of the added messages, in order: fewer
    /// than requested if the table is full.
    ///
    /// Removals alone do not write the table: a route without an eventfd does nothing.
    ///
    /// # Errors
    ///
    /// Fails if the write fails. Only the removals have been made then.
    pub(crate) fn commit(&self, change: RouteChange, wiring: &dyn Wiring) -> io::Result<Vec<u32>> {
        let RouteChange { remove, change, add } = change;
        let mut table = self.table.lock();
        for gsi in remove {
            table.remove(&gsi);
        }
        let room = add.len().min(MESSAGES.saturating_sub(table.len()));
        if change.is_empty() && room == 0 {
            return Ok(Vec::new());
        }
        let mut used = table.keys().peekable();
        let gsis: Vec<_> = (IOAPIC_PINS..TABLE).filter(|gsi| used.next_if_eq(&gsi).is_none()).take(room).collect();
        let new = gsis.iter().zip(add).map(|(&gsi, route)| MsiRoute { gsi, ..route });
        let before: Vec<_> =
            change.into_iter().chain(new).map(|route| (route.gsi, table.insert(route.gsi, route))).collect();
        let routes: Vec<_> = table.values().copied().collect();
        if let Err(error) = wiring.set_irq_routes(&routes) {
            for (gsi, route) in before.into_iter().rev() {
                match route {
                    Some(route) => table.insert(gsi, route),
                    None => table.remove(&gsi),
                };
            }
            return Err(error);
        }
        Ok(gsis)
    }

    /// Forgets all routes, for a new VM.
    pub(crate) fn clear(&self) {
        self.table.lock().clear();
    }

    /// The number of messages routed.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.table.lock().len()
    }
}
