//! Interface of a VM for the PCI host: interrupts, ioeventfds and memory slots.

use std::io;
use std::sync::Arc;

use virtio_devices::{DoorbellPage, FileMapping};
use vmm_sys_util::eventfd::EventFd;

use crate::arch::x86_64::layout;
use crate::kvm::{MsiRoute, Vm};
use crate::pci_host::config_pages::{PAGE, Shown};

/// Services of a VM for the devices of its PCI host.
pub trait Wiring: Send + Sync {
    /// Makes `routes` the VM's whole table of messages.
    fn set_irq_routes(&self, routes: &[MsiRoute]) -> io::Result<()>;
    /// Makes a signal on `eventfd` raise `gsi` from now on.
    fn attach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Makes a signal on `trigger` assert `gsi` from now on, until the guest has served it, which signals `resample`.
    fn attach_pin(&self, trigger: &EventFd, resample: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`Self::attach_irqfd`] or [`Self::attach_pin`].
    fn detach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Makes a guest's write to `address` signal `eventfd` from now on.
    fn attach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()>;
    /// Undoes [`Self::attach_ioeventfd`].
    fn detach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()>;
    /// Makes `memory_slot` show `page` at a guest address, for the guest to write to, or nothing.
    fn show_doorbell(&self, memory_slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()>;
    /// Makes `memory_slot` show `memory` at a guest address, for the guest to read and write, or nothing.
    fn show_memory(&self, memory_slot: u32, memory: Option<(u64, &Arc<FileMapping>)>) -> io::Result<()>;
    /// Makes `memory_slot` show `pages` in the ECAM, read-only, or nothing.
    fn show_config(&self, memory_slot: u32, pages: Option<&Shown>) -> io::Result<()>;
}

impl Wiring for Arc<Vm> {
    fn set_irq_routes(&self, routes: &[MsiRoute]) -> io::Result<()> {
        Vm::set_irq_routes(self, routes)
    }

    fn attach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        Vm::attach_irqfd(self, eventfd, gsi)
    }

    fn attach_pin(&self, trigger: &EventFd, resample: &EventFd, gsi: u32) -> io::Result<()> {
        Vm::attach_pin(self, trigger, resample, gsi)
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

    fn show_doorbell(&self, memory_slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()> {
        self.set_doorbell_page(memory_slot, page)
    }

    fn show_memory(&self, memory_slot: u32, memory: Option<(u64, &Arc<FileMapping>)>) -> io::Result<()> {
        self.set_device_memory(memory_slot, memory)
    }

    fn show_config(&self, memory_slot: u32, pages: Option<&Shown>) -> io::Result<()> {
        let address = pages
            .map_or(0, |Shown { segment, first, .. }| layout::ecam(*segment).start + u64::from(first.to_bits()) * PAGE);
        self.set_read_only(
            memory_slot,
            address,
            pages.map(|pages| (&pages.memory, pages.offset..pages.offset.saturating_add(pages.len))),
        )
    }
}
