//! A device in its place, and what the machine does for it.
//!
//! A guest's access changes the device's registers under the device's lock. What follows from that in the world outside — MMIO
//! windows, ioeventfds, irqfds and their routes — is then made good without it: the device is asked what it wants now, and the
//! difference to what has been done is applied. Who asks last applies last, because the record of what has been done is locked
//! from before the question to after the answer is applied.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use pci::{ConfigTarget, Dword, DwordWrite, Effects, Placement, ResetKind, Rid, Window, WindowId};
use virtio_devices::{Doorbell, Message, VirtioPci};
use vmm_sys_util::eventfd::EventFd;

use crate::config_pages::{ConfigPages, Shown, Touched};
use crate::interrupt::{RouteChange, Routes, Wiring};
use crate::kvm::MsiRoute;
use crate::mmio::MmioMap;

/// Complaints about the host that a slot logs before it falls silent: a guest can repeat what causes them.
const MAX_COMPLAINTS: u32 = 16;

/// What all slots of a machine share.
#[derive(Default)]
pub struct Machine {
    /// The windows of all devices.
    pub mmio: MmioMap<Arc<Slot>>,
    routes: Routes,
    /// The VM, while there is one.
    wiring: ArcSwapOption<Box<dyn Wiring>>,
}

impl Machine {
    /// Sets the VM that devices are wired to, or none; the wires of the former one must be gone with it.
    pub fn set_wiring(&self, wiring: Option<Box<dyn Wiring>>) {
        self.routes.clear();
        self.wiring.store(wiring.map(Arc::new));
    }
}

/// A message's wire: its eventfd raises `route.gsi`.
struct Wire {
    eventfd: Arc<EventFd>,
    route: MsiRoute,
}

/// A device and its configuration space as pages, which change together.
struct Inner {
    device: Box<dyn VirtioPci>,
    pages: ConfigPages,
}

/// What has been done for a device so far.
#[derive(Default)]
struct Wired {
    windows: Vec<Window>,
    /// By guest address.
    doorbells: BTreeMap<u64, Arc<EventFd>>,
    /// By the eventfd's number.
    messages: BTreeMap<i32, Wire>,
    /// The pages of configuration space that are shown: the device's own, and its VFs'.
    shown: [Option<Shown>; 2],
    /// The VM shows no pages: every read is an exit.
    shows_nothing: bool,
}

/// A device and what has been done for it.
pub struct Slot {
    inner: Mutex<Inner>,
    placement: Placement,
    wired: Mutex<Wired>,
    machine: Arc<Machine>,
    complaints: AtomicU32,
    this: Weak<Self>,
}

impl Slot {
    /// Puts `device`, which was made for `placement`, into a slot of `machine`.
    ///
    /// # Errors
    ///
    /// When the host does not give the addresses for pages of its configuration space.
    pub fn new(device: Box<dyn VirtioPci>, placement: Placement, machine: Arc<Machine>) -> io::Result<Arc<Self>> {
        let mut inner = Inner { device, pages: ConfigPages::new(placement)? };
        let _ = inner.pages.refresh(inner.device.as_ref(), Touched::All);
        Ok(Arc::new_cyclic(|this| Self {
            inner: Mutex::new(inner),
            placement,
            wired: Mutex::new(Wired::default()),
            machine,
            complaints: AtomicU32::new(0),
            this: this.clone(),
        }))
    }

    /// Reads from a window.
    pub fn mmio_read(&self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.inner.lock().device.mmio_read(window, offset, data);
    }

    /// Writes to a window.
    pub fn mmio_write(&self, window: WindowId, offset: u64, data: &[u8]) {
        self.access(Touched::Nothing, |device| device.mmio_write(window, offset, data));
    }

    /// Resets the device as a power cycle does.
    pub fn reset(&self) {
        self.access(Touched::All, |device| device.reset(ResetKind::Conventional));
    }

    /// Makes an access that touches registers of configuration space as `touched` says, and all of its effects, before it
    /// returns.
    fn access(&self, touched: Touched, access: impl FnOnce(&mut dyn VirtioPci) -> Effects) {
        let (changed, stopping) = {
            let mut inner = self.inner.lock();
            let Inner { device, pages } = &mut *inner;
            let effects = access(device.as_mut());
            // What a PF's register changes may be in its VFs, too.
            let touched = match touched {
                Touched::Function(rid) if rid == self.placement.rid && !effects.is_none() => Touched::All,
                touched => touched,
            };
            let shown = pages.refresh(device.as_ref(), touched);
            (shown || !effects.is_none(), device.take_stopping())
        };
        join(stopping);
        if changed {
            self.reconcile();
        }
    }

    /// Makes windows, doorbells, messages and shown pages what the device wants them to be.
    pub fn reconcile(&self) {
        let mut wired = self.wired.lock();
        let (mut windows, mut doorbells, mut messages) = (Vec::new(), Vec::new(), Vec::new());
        let shown = {
            let inner = self.inner.lock();
            inner.device.windows(&mut windows);
            inner.device.doorbells(&mut doorbells);
            inner.device.messages(&mut messages);
            inner.pages.shown(inner.device.as_ref())
        };
        if windows != wired.windows
            && let Some(this) = self.this.upgrade()
        {
            self.machine.mmio.replace(&this, |owner| Arc::ptr_eq(owner, &this), &windows);
        }
        if let Some(wiring) = &*self.machine.wiring.load() {
            let doorbells = addresses(&windows, doorbells);
            self.wire_doorbells(&mut wired.doorbells, doorbells, wiring.as_ref().as_ref());
            self.wire_messages(&mut wired.messages, messages, wiring.as_ref().as_ref());
            self.show(&mut wired, shown, wiring.as_ref().as_ref());
        }
        wired.windows = windows;
    }

    fn show(&self, wired: &mut Wired, wanted: [Option<Shown>; 2], wiring: &dyn Wiring) {
        let first = 2 * u32::from(self.placement.rid.device());
        for ((slot, shown), wanted) in (first..).zip(&mut wired.shown).zip(wanted) {
            if wired.shows_nothing || *shown == wanted {
                continue;
            }
            match wiring.show_config(slot, wanted.as_ref()) {
                Ok(()) => *shown = wanted,
                Err(error) => {
                    // Reads are exits then, which find the same.
                    log::debug!("the VM does not show configuration space: {error}");
                    *shown = None;
                    wired.shows_nothing = true;
                }
            }
        }
    }

    fn wire_doorbells(
        &self,
        wired: &mut BTreeMap<u64, Arc<EventFd>>,
        wanted: BTreeMap<u64, Arc<EventFd>>,
        wiring: &dyn Wiring,
    ) {
        wired.retain(|address, eventfd| {
            let keep = wanted.get(address).is_some_and(|wanted| Arc::ptr_eq(wanted, eventfd));
            if !keep && let Err(error) = wiring.detach_ioeventfd(eventfd, *address) {
                self.complain("remove a doorbell", &error);
            }
            keep
        });
        for (address, eventfd) in wanted {
            if wired.contains_key(&address) {
                continue;
            }
            match wiring.attach_ioeventfd(&eventfd, address) {
                Ok(()) => drop(wired.insert(address, eventfd)),
                // The guest's writes come as exits then, which signal the same eventfd.
                Err(error) => self.complain("make a doorbell of an address", &error),
            }
        }
    }

    fn wire_messages(&self, wired: &mut BTreeMap<i32, Wire>, wanted: Vec<Message>, wiring: &dyn Wiring) {
        let wanted: BTreeMap<_, _> = wanted.into_iter().map(|message| (message.eventfd.as_raw_fd(), message)).collect();
        let mut change = RouteChange::default();
        // Detach first: an eventfd that is detached keeps its signal, one that is routed elsewhere loses it.
        wired.retain(|fd, wire| {
            let keep = wanted.get(fd).is_some_and(|message| Arc::ptr_eq(&message.eventfd, &wire.eventfd));
            if !keep {
                change.remove.push(wire.route.gsi);
                if let Err(error) = wiring.detach_irqfd(&wire.eventfd, wire.route.gsi) {
                    self.complain("detach an interrupt", &error);
                }
            }
            keep
        });
        let mut new = Vec::new();
        for (fd, message) in wanted {
            let route =
                |gsi| MsiRoute { gsi, address: message.address, data: message.data, requester: message.requester };
            match wired.get(&fd) {
                Some(wire) if wire.route == route(wire.route.gsi) => {}
                Some(wire) => change.change.push(route(wire.route.gsi)),
                None => {
                    change.add.push(route(0));
                    new.push(message);
                }
            }
        }
        let changed: BTreeMap<_, _> = change.change.iter().map(|route| (route.gsi, *route)).collect();
        match self.machine.routes.commit(change, wiring) {
            Ok(gsis) => {
                for wire in wired.values_mut() {
                    wire.route = changed.get(&wire.route.gsi).copied().unwrap_or(wire.route);
                }
                for (gsi, message) in gsis.into_iter().zip(new) {
                    self.attach(wired, gsi, message, wiring);
                }
            }
            Err(error) => self.complain("route interrupts", &error),
        }
    }

    fn attach(&self, wired: &mut BTreeMap<i32, Wire>, gsi: u32, message: Message, wiring: &dyn Wiring) {
        let Message { requester, address, data, eventfd } = message;
        if let Err(error) = wiring.attach_irqfd(&eventfd, gsi) {
            self.complain("attach an interrupt", &error);
        }
        // Recorded either way, so that its GSI is freed in the end.
        wired.insert(eventfd.as_raw_fd(), Wire { eventfd, route: MsiRoute { gsi, address, data, requester } });
    }

    /// Forgets what was done with a VM that is gone.
    pub fn forget_wiring(&self) {
        let mut wired = self.wired.lock();
        let Wired { windows: _, doorbells, messages, shown, shows_nothing } = &mut *wired;
        doorbells.clear();
        messages.clear();
        *shown = [None, None];
        *shows_nothing = false;
    }

    fn complain(&self, what: &str, error: &io::Error) {
        match self.complaints.fetch_add(1, Ordering::Relaxed) {
            n if n < MAX_COMPLAINTS => log::warn!("cannot {what}: {error}"),
            MAX_COMPLAINTS => log::warn!("cannot {what}: {error}; further complaints about this device are not shown"),
            _ => {}
        }
    }
}

impl ConfigTarget for Slot {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.inner.lock().device.config_read(rid, reg)
    }

    fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite) {
        self.access(Touched::Function(rid), |device| device.config_write(rid, reg, write));
    }
}

/// The guest address of each doorbell whose window is decoded.
fn addresses(windows: &[Window], doorbells: Vec<Doorbell>) -> BTreeMap<u64, Arc<EventFd>> {
    let address = |doorbell: &Doorbell| {
        let window = windows.iter().find(|window| window.id == doorbell.window)?;
        (doorbell.offset < window.len).then(|| window.base + doorbell.offset)
    };
    doorbells.into_iter().filter_map(|doorbell| Some((address(&doorbell)?, doorbell.eventfd))).collect()
}

/// Waits for workers that were told to stop.
fn join(workers: Vec<JoinHandle<()>>) {
    for worker in workers {
        if worker.join().is_err() {
            log::error!("a queue's worker ended by a panic");
        }
    }
}

#[cfg(test)]
#[path = "slot_tests.rs"]
mod tests;
