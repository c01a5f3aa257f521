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

/// The queues began or ceased to run.
const QUEUES: Effects = Effects { queues: true, ..Effects::NONE };

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

/// A message's wire. It keeps its route, and its GSI, while it is masked, until its eventfd belongs to no vector any more.
struct Wire {
    eventfd: Arc<EventFd>,
    route: MsiRoute,
    /// The eventfd raises `route.gsi`.
    attached: bool,
}

impl Wire {
    fn is(&self, message: &Message) -> bool {
        Arc::ptr_eq(&self.eventfd, &message.eventfd)
    }
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
    /// The device is unplugged, and wants nothing any more.
    retired: bool,
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

    /// Lets the device's queues stand still until [`Self::resume`].
    pub fn pause(&self) {
        self.access(Touched::Nothing, |device| {
            device.pause();
            QUEUES
        });
    }

    /// Lets the device's queues go on.
    pub fn resume(&self) {
        self.access(Touched::Nothing, |device| {
            device.resume();
            QUEUES
        });
    }

    /// Ends all that the device does, for good: it is in its state of power-on, and nothing is ever wired to it again, whatever
    /// accesses are on their way to it.
    pub fn retire(&self) {
        self.wired.lock().retired = true;
        self.reset();
        // A device that was in its state of power-on already has no effects.
        self.reconcile();
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
        let shown = if wired.retired {
            [None, None]
        } else {
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

    fn show(&self, wired: &mut Wired, mut wanted: [Option<Shown>; 2], wiring: &dyn Wiring) {
        let first = 2 * u32::from(self.placement.rid.device());
        let mut show = |wanted: &[Option<Shown>; 2]| {
            let mut result = Ok(());
            for ((slot, shown), wanted) in (first..).zip(&mut wired.shown).zip(wanted) {
                if shown != wanted {
                    match wiring.show_config(slot, wanted.as_ref()) {
                        Ok(()) => shown.clone_from(wanted),
                        Err(error) => result = Err(error),
                    }
                }
            }
            result
        };
        if wired.shows_nothing {
            wanted = [None, None];
        }
        let Err(error) = show(&wanted) else { return };
        log::debug!("the VM does not show configuration space: {error}");
        wired.shows_nothing = true;
        // All reads are exits from now on, which find the same. What cannot be hidden is tried again each time.
        if let Err(error) = show(&[None, None]) {
            self.complain("hide configuration space", &error);
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
        let remove = self.detach(wired, &wanted, wiring);
        let mut change = RouteChange { remove, ..RouteChange::default() };
        let mut new = Vec::new();
        for (fd, message) in &wanted {
            match wired.get(fd) {
                Some(wire) if !wire.is(message) => {}
                Some(wire) if wire.route == route(message, wire.route.gsi) => {}
                Some(wire) => change.change.push(route(message, wire.route.gsi)),
                None => {
                    change.add.push(route(message, 0));
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
                if gsis.len() < new.len() {
                    self.complain("route all interrupts", &io::Error::other("the VM has no more interrupt routes"));
                }
                wired.extend(gsis.into_iter().zip(new).map(|(gsi, message)| {
                    let eventfd = Arc::clone(&message.eventfd);
                    (eventfd.as_raw_fd(), Wire { eventfd, route: route(message, gsi), attached: false })
                }));
            }
            Err(error) => self.complain("route interrupts", &error),
        }
        self.attach(wired, &wanted, wiring);
    }

    /// Detaches what must not be sent now, which keeps its signal in its eventfd, and returns the GSIs of what has gone for good.
    fn detach(
        &self,
        wired: &mut BTreeMap<i32, Wire>,
        wanted: &BTreeMap<i32, Message>,
        wiring: &dyn Wiring,
    ) -> Vec<u32> {
        let mut gone = Vec::new();
        wired.retain(|fd, wire| {
            if wire.attached && !wanted.get(fd).is_some_and(|message| wire.is(message)) {
                match wiring.detach_irqfd(&wire.eventfd, wire.route.gsi) {
                    Ok(()) => wire.attached = false,
                    Err(error) => self.complain("detach an interrupt", &error),
                }
            }
            // An eventfd that nobody but this record holds belongs to no vector any more.
            let keep = wire.attached || Arc::strong_count(&wire.eventfd) > 1;
            if !keep {
                gone.push(wire.route.gsi);
            }
            keep
        });
        gone
    }

    /// Attaches what may be sent now, if it has a route.
    fn attach(&self, wired: &mut BTreeMap<i32, Wire>, wanted: &BTreeMap<i32, Message>, wiring: &dyn Wiring) {
        for (fd, message) in wanted {
            let Some(wire) = wired.get_mut(fd) else { continue };
            if wire.attached || !wire.is(message) || wire.route != route(message, wire.route.gsi) {
                continue;
            }
            // KVM would send a signal that waits already, but leave it in the eventfd, to be sent once more after the next mask.
            let waits = wire.eventfd.read().is_ok();
            match wiring.attach_irqfd(&wire.eventfd, wire.route.gsi) {
                Ok(()) => wire.attached = true,
                Err(error) => self.complain("attach an interrupt", &error),
            }
            if waits {
                // Only a full counter refuses, which is a signal.
                let _ = wire.eventfd.write(1);
            }
        }
    }

    /// Forgets what was done with a VM that is gone.
    pub fn forget_wiring(&self) {
        let mut wired = self.wired.lock();
        let Wired { windows: _, doorbells, messages, shown, shows_nothing, retired: _ } = &mut *wired;
        doorbells.clear();
        messages.clear();
        *shown = [None, None];
        *shows_nothing = false;
    }

    fn complain(&self, what: &str, error: &io::Error) {
        let device = self.placement.rid;
        match self.complaints.fetch_add(1, Ordering::Relaxed) {
            n if n < MAX_COMPLAINTS => log::warn!("{device}: cannot {what}: {error}"),
            MAX_COMPLAINTS => log::warn!("{device}: cannot {what}: {error}; no more of its complaints are shown"),
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

fn route(message: &Message, gsi: u32) -> MsiRoute {
    MsiRoute { gsi, address: message.address, data: message.data, requester: message.requester }
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
