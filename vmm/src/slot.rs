//! A device in its place, and what the machine does for it.
//!
//! A guest's access changes the device's registers under the device's lock. What follows from that in the world outside — MMIO
//! windows, ioeventfds, irqfds and their routes — is then made good without it: the device is asked what it wants now, and the
//! difference to what has been done is applied. Who asks last applies last, because the record of what has been done is locked
//! from before the question to after the answer is applied.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use pci::{ConfigTarget, Dword, DwordWrite, Effects, HostBridge, Placement, ResetKind, Rid, Window, WindowId};
use virtio_devices::{DoorbellObserver, VirtioPci};

use crate::config_pages::{ConfigPages, Shown, Touched};
use crate::device_events::DeviceWatch;
use crate::doorbell_slots::DoorbellSlots;
use crate::interrupt::{Routes, Wiring};
use crate::mmio::MmioMap;
use crate::wires::{Scope, Tools, Wants, Wires};

/// The queues began or ceased to run.
const QUEUES: Effects = Effects { queues: true, ..Effects::NONE };

/// What is in a slot whose device is gone: a function without windows and queues, which nobody can reach.
const NOBODY: HostBridge = HostBridge::new(0xffff, 0xffff);

/// Complaints about the host that a slot logs before it falls silent: a guest can repeat what causes them.
const MAX_COMPLAINTS: u32 = 16;

/// What all slots of a machine share.
#[derive(Default)]
pub struct Machine {
    /// The windows of all devices.
    pub mmio: MmioMap<Arc<Slot>>,
    routes: Routes,
    doorbell_slots: DoorbellSlots,
    /// The VM, while there is one.
    wiring: ArcSwapOption<Box<dyn Wiring>>,
}

impl Machine {
    /// Sets the VM that devices are wired to, or none; the wires of the former one must be gone with it.
    pub fn set_wiring(&self, wiring: Option<Box<dyn Wiring>>) {
        self.routes.clear();
        self.doorbell_slots.clear();
        self.wiring.store(wiring.map(Arc::new));
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
    wires: Wires,
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
    watch: OnceLock<Arc<DeviceWatch>>,
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
        Ok(Arc::new_cyclic(|this: &Weak<Self>| {
            let slot = this.clone();
            let observer = move |rid| slot.upgrade().iter().for_each(|slot| slot.reconcile_in(slot.scope(rid)));
            let observer: Arc<DoorbellObserver> = Arc::new(observer);
            inner.device.observe_doorbells(&observer);
            Self {
                inner: Mutex::new(inner),
                placement,
                wired: Mutex::new(Wired::default()),
                machine,
                complaints: AtomicU32::new(0),
                watch: OnceLock::new(),
                this: this.clone(),
            }
        }))
    }

    /// What a change of the function `rid` may touch: one of a VF that VF alone, one of its PF them all.
    fn scope(&self, rid: Rid) -> Scope {
        if rid == self.placement.rid { Scope::Device } else { Scope::Vf(rid) }
    }

    /// Lets `watch` hear of changes from now on. The first one stays.
    pub fn set_watch(&self, watch: Arc<DeviceWatch>) {
        let _ = self.watch.set(watch);
    }

    /// Reads from a window.
    pub fn mmio_read(&self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.inner.lock().device.mmio_read(window, offset, data);
    }

    /// Writes to a window.
    pub fn mmio_write(&self, window: WindowId, offset: u64, data: &[u8]) {
        self.access(Touched::Nothing, |device| {
            let scope = device.vf_at(window, offset).map_or(Scope::Device, Scope::Vf);
            (device.mmio_write(window, offset, data), scope)
        });
    }

    /// Resets the device as a power cycle does.
    pub fn reset(&self) {
        self.access(Touched::All, |device| (device.reset(ResetKind::Conventional), Scope::Device));
    }

    /// Looks at the device, or changes what is the host's to change and needs no wires.
    pub fn with<T>(&self, look: impl FnOnce(&mut dyn VirtioPci) -> T) -> T {
        look(self.inner.lock().device.as_mut())
    }

    /// The windows that the device decodes now.
    pub fn windows(&self) -> Vec<Window> {
        let mut windows = Vec::new();
        self.inner.lock().device.windows(&mut windows);
        windows
    }

    /// Lets the device's queues stand still until [`Self::resume`].
    pub fn pause(&self) {
        self.access(Touched::Nothing, |device| {
            device.pause();
            (QUEUES, Scope::Device)
        });
    }

    /// Lets the device's queues go on.
    pub fn resume(&self) {
        self.access(Touched::Nothing, |device| {
            device.resume();
            (QUEUES, Scope::Device)
        });
    }

    /// Ends all that the device does, for good, and closes what it has of the host: accesses that are on their way to it find nothing,
    /// and nothing is ever wired to it again.
    pub fn retire(&self) {
        self.wired.lock().retired = true;
        self.reset();
        // A device that was in its state of power-on already has no effects.
        self.reconcile();
        // Not when the last access ends that found the slot: who is told that the device is gone may use its tap.
        let device = std::mem::replace(&mut self.inner.lock().device, Box::new(NOBODY));
        drop(device);
    }

    /// Makes an access that touches registers of configuration space as `touched` says, and all of its effects, before it
    /// returns. The access says what effects it had, and on which functions.
    fn access(&self, touched: Touched, access: impl FnOnce(&mut dyn VirtioPci) -> (Effects, Scope)) {
        let (effects, shown, scope, stopping) = {
            let mut inner = self.inner.lock();
            let Inner { device, pages } = &mut *inner;
            let (effects, scope) = access(device.as_mut());
            // Which VFs there are is the only thing of theirs that a PF's registers change.
            let touched = if effects.vfs.is_some() { Touched::All } else { touched };
            let shown = pages.refresh(device.as_ref(), touched);
            (effects, shown, scope, device.take_stopping())
        };
        join(stopping);
        if shown || !effects.is_none() {
            self.reconcile_in(scope);
        }
        if let Some(watch) = self.watch.get() {
            watch.note(effects);
        }
    }

    /// Makes windows, doorbells, messages and shown pages what the device wants them to be.
    pub fn reconcile(&self) {
        self.reconcile_in(Scope::Device);
    }

    /// As [`Self::reconcile`], where only doorbells and messages of the functions in `scope` may have changed.
    fn reconcile_in(&self, mut scope: Scope) {
        let mut wired = self.wired.lock();
        let (mut windows, mut wants) = (Vec::new(), Wants::default());
        let shown = if wired.retired {
            scope = Scope::Device;
            [None, None]
        } else {
            let inner = self.inner.lock();
            inner.device.windows(&mut windows);
            if windows != wired.windows {
                // Another vCPU has changed them, and has not come here yet.
                scope = Scope::Device;
            }
            match scope {
                Scope::Device => {
                    inner.device.doorbells(&mut wants.doorbells);
                    inner.device.messages(&mut wants.messages);
                }
                Scope::Vf(rid) => inner.device.vf_wants(rid, &mut wants.doorbells, &mut wants.messages),
            }
            inner.pages.shown(inner.device.as_ref())
        };
        if windows != wired.windows
            && let Some(this) = self.this.upgrade()
        {
            self.machine.mmio.replace(&this, |owner| Arc::ptr_eq(owner, &this), &windows);
        }
        if let Some(wiring) = &*self.machine.wiring.load() {
            let wiring = wiring.as_ref().as_ref();
            let complain = |what: &str, error: &io::Error| self.complain(what, error);
            let Machine { routes, doorbell_slots: slots, .. } = &*self.machine;
            let tools = Tools { routes, slots, wiring, complain: &complain };
            wired.wires.update(scope, wants, &windows, &tools);
            self.show(&mut wired, shown, wiring);
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

    /// Forgets what was done with a VM that is gone.
    pub fn forget_wiring(&self) {
        let mut wired = self.wired.lock();
        let Wired { windows: _, wires, shown, shows_nothing, retired: _ } = &mut *wired;
        wires.clear();
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
        let scope = self.scope(rid);
        self.access(Touched::Function(rid), |device| (device.config_write(rid, reg, write), scope));
    }
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

#[cfg(test)]
#[path = "slot_race_tests.rs"]
mod race_tests;
