//! Messages of devices as interrupts of the VM: global system interrupts and the table that routes them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::DoorbellPage;
use vmm_sys_util::eventfd::EventFd;

use crate::arch::x86_64::layout;
use crate::config_pages::{PAGE, Shown};
use crate::kvm::{IOAPIC_PINS, MsiRoute, Vm};

/// What connects eventfds with a VM.
pub trait Wiring: Send + Sync {
    /// Makes `routes` all the messages that the VM knows.
    fn set_irq_routes(&self, routes: &[MsiRoute]) -> io::Result<()>;
    /// From now on a signal on `eventfd` raises `gsi`.
    fn attach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`Self::attach_irqfd`].
    fn detach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// From now on a guest's write to `address` signals `eventfd`.
    fn attach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()>;
    /// Undoes [`Self::attach_ioeventfd`].
    fn detach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()>;
    /// Shows `page` at a guest address, for the guest to write to, instead of what `slot` showed before, or nothing.
    fn show_doorbell(&self, slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()>;
    /// Shows `pages` in the ECAM instead of what `slot` showed before, or nothing.
    fn show_config(&self, slot: u32, pages: Option<&Shown>) -> io::Result<()>;
}

impl Wiring for Arc<Vm> {
    fn set_irq_routes(&self, routes: &[MsiRoute]) -> io::Result<()> {
        Vm::set_irq_routes(self, routes)
    }

    fn attach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        Vm::attach_irqfd(self, eventfd, gsi)
    }

    fn detach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        Vm::detach_irqfd(self, eventfd, gsi)
    }

    fn attach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()> {
        Vm::attach_ioeventfd(self, eventfd, address)
    }

    fn detach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()> {
        Vm::detach_ioeventfd(self, eventfd, address)
    }

    fn show_doorbell(&self, slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()> {
        self.set_doorbell_page(slot, page)
    }

    fn show_config(&self, slot: u32, pages: Option<&Shown>) -> io::Result<()> {
        let address = pages.map_or(0, |pages| layout::ECAM.start + u64::from(pages.first.to_bits()) * PAGE);
        self.set_read_only(CONFIG_SLOTS + slot, address, pages.map(|pages| (&pages.memory, pages.len)))
    }
}

/// The first of KVM's memory slots that show configuration space. Those of the guest's memory come before.
const CONFIG_SLOTS: u32 = 16;

/// The entries of KVM's routing table (`KVM_MAX_IRQ_ROUTES`). Each GSI of a message takes one.
const TABLE: u32 = 4096;
/// The entries that the pins of the PICs and of the IOAPIC take.
const PIN_ENTRIES: u32 = 40;
/// How many messages there can be.
pub const MESSAGES: usize = (TABLE - PIN_ENTRIES) as usize;

/// The messages that are routed now, each under a GSI of its own.
#[derive(Debug, Default)]
pub struct Routes {
    table: Mutex<BTreeMap<u32, MsiRoute>>,
}

/// A change of the routes, committed as a whole.
#[derive(Debug, Default)]
pub struct RouteChange {
    /// GSIs that are no longer used; their eventfds are detached already.
    pub remove: Vec<u32>,
    /// Messages that change under their GSI.
    pub change: Vec<MsiRoute>,
    /// Messages to give a GSI to; theirs is not looked at.
    pub add: Vec<MsiRoute>,
}

impl Routes {
    /// Makes the change with one write of the VM's table, and returns the GSIs of what was added, in order: fewer than asked for
    /// if there are no more.
    ///
    /// The table is not written when nothing but removals was asked for: a route without an eventfd does nothing.
    ///
    /// # Errors
    ///
    /// When the write fails. The removals have been made then, and nothing else.
    pub fn commit(&self, change: RouteChange, wiring: &dyn Wiring) -> io::Result<Vec<u32>> {
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
    pub fn clear(&self) {
        self.table.lock().clear();
    }

    /// The number of messages routed.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }
}
