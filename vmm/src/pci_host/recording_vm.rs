//! A VM that records the PCI host's requests, for tests.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::{DoorbellPage, FileMapping};
use vmm_sys_util::eventfd::EventFd;

use crate::kvm::{IOAPIC_PINS, MsiRoute};
use crate::pci_host::config_pages::Shown;
use crate::pci_host::wiring::Wiring;

/// Record of the requests to a VM.
#[derive(Default)]
pub struct Record {
    /// By GSI.
    pub routes: BTreeMap<u32, MsiRoute>,
    /// Number of writes of the routing table.
    pub commits: usize,
    /// Eventfds and the GSIs that they raise.
    pub irqfds: BTreeSet<(i32, u32)>,
    /// Eventfds and the guest addresses that signal them.
    pub ioeventfds: BTreeSet<(i32, u64)>,
    /// The guest addresses of doorbell pages and their addresses in this process, by memory slot.
    pub doorbells: BTreeMap<u32, (u64, usize)>,
    /// The guest addresses of devices' memory and its addresses in this process, by memory slot.
    pub memory: BTreeMap<u32, (u64, usize)>,
    /// By memory slot.
    pub pages: BTreeMap<u32, Shown>,
    /// Requests that the VM refuses.
    pub refuse: Refuse,
}

/// Requests that a VM refuses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Refuse {
    /// Nothing.
    #[default]
    Nothing,
    /// Attaching and detaching irqfds.
    Irqfds,
    /// Showing and hiding doorbells and devices' memory.
    Doorbells,
    /// Everything.
    All,
}

/// A VM that records its requests, and panics at a duplicate one.
pub struct RecordingVm(pub Arc<Mutex<Record>>);

impl RecordingVm {
    fn told(&self, tell: impl FnOnce(&mut Record) -> bool) -> io::Result<()> {
        let mut record = self.0.lock();
        if record.refuse == Refuse::All {
            return Err(io::Error::other("refused"));
        }
        assert!(tell(&mut record), "sent twice, or to undo what was never done");
        Ok(())
    }

    fn told_of_irqfds(&self, tell: impl FnOnce(&mut Record) -> bool) -> io::Result<()> {
        if self.0.lock().refuse == Refuse::Irqfds {
            return Err(io::Error::other("refused"));
        }
        self.told(tell)
    }
}

impl Wiring for RecordingVm {
    fn set_irq_routes(&self, routes: &[MsiRoute]) -> io::Result<()> {
        self.told(|record| {
            record.commits += 1;
            record.routes = routes.iter().map(|route| (route.gsi, *route)).collect();
            record.routes.len() == routes.len()
        })
    }

    fn attach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        self.told_of_irqfds(|record| record.irqfds.insert((eventfd.as_raw_fd(), gsi)))
    }

    fn attach_pin(&self, trigger: &EventFd, _resample: &EventFd, gsi: u32) -> io::Result<()> {
        self.told_of_irqfds(|record| gsi < IOAPIC_PINS && record.irqfds.insert((trigger.as_raw_fd(), gsi)))
    }

    fn detach_irqfd(&self, eventfd: &EventFd, gsi: u32) -> io::Result<()> {
        self.told_of_irqfds(|record| record.irqfds.remove(&(eventfd.as_raw_fd(), gsi)))
    }

    fn attach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()> {
        self.told(|record| record.ioeventfds.insert((eventfd.as_raw_fd(), address)))
    }

    fn detach_ioeventfd(&self, eventfd: &EventFd, address: u64) -> io::Result<()> {
        self.told(|record| record.ioeventfds.remove(&(eventfd.as_raw_fd(), address)))
    }

    fn show_doorbell(&self, memory_slot: u32, page: Option<(u64, &Arc<DoorbellPage>)>) -> io::Result<()> {
        if self.0.lock().refuse == Refuse::Doorbells {
            return Err(io::Error::other("refused"));
        }
        self.told(|record| match page {
            Some((address, page)) => {
                let free = record.doorbells.values().all(|(other, _)| *other != address);
                free && record.doorbells.insert(memory_slot, (address, page.address() as usize)).is_none()
            }
            None => record.doorbells.remove(&memory_slot).is_some(),
        })
    }

    fn show_memory(&self, memory_slot: u32, memory: Option<(u64, &Arc<FileMapping>)>) -> io::Result<()> {
        if self.0.lock().refuse == Refuse::Doorbells {
            return Err(io::Error::other("refused"));
        }
        self.told(|record| match memory {
            Some((address, memory)) => {
                record.memory.insert(memory_slot, (address, memory.address() as usize)).is_none()
            }
            None => record.memory.remove(&memory_slot).is_some(),
        })
    }

    fn show_config(&self, memory_slot: u32, pages: Option<&Shown>) -> io::Result<()> {
        self.told(|record| match pages {
            Some(pages) => {
                record.pages.insert(memory_slot, pages.clone());
                true
            }
            None => record.pages.remove(&memory_slot).is_some(),
        })
    }
}
