//! A device in its place on the bus, and the VM's services for it.
//!
//! A guest's access changes the device's registers under the device's lock. Its effects outside the device (MMIO
//! windows, ioeventfds, irqfds and their routes) are then applied without that lock: the slot reads the wiring that the
//! device wants now, compares it with the existing wiring, and makes the difference. Of two accesses, the one that
//! reads last also applies last: the record of the wiring is locked from before the read until the changes are made.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use pci::spec::ALL_ONES;
use pci::{ConfigTarget, Dword, DwordWrite, Effects, Placement, Reach, ResetKind, Rid, VfIndex, Window, WindowId};
use virtio_devices::{
    DeviceState, DoorbellObserver, Fault, FaultError, NotResumed, Outcome, Panicked, StateError, Thread, VirtioPci,
};

use crate::arch::x86_64::layout;
use crate::pci_host::config_pages::ConfigPages;
use crate::pci_host::device_memory::DeviceMemory;
use crate::pci_host::irq_routes::Routes;
use crate::pci_host::memory_slots::{MemorySlots, config_slots};
use crate::pci_host::mmio::MmioMap;
use crate::pci_host::pin_wire::PinWire;
use crate::pci_host::shown_pages::ShownPages;
use crate::pci_host::wires::{Tools, Wants, Wires};
use crate::pci_host::wiring::Wiring;

/// Host errors that a slot logs before it stops logging: a guest can repeat their cause.
const MAX_COMPLAINTS: u32 = 16;

/// Time before a resume that the host refused is retried; it doubles with each attempt.
const FIRST_WAIT: Duration = Duration::from_millis(10);
/// Interval of checks for a worker's end.
const TICK: Duration = Duration::from_micros(200);
/// The longest wait before a retry of a resume.
const LAST_WAIT: Duration = Duration::from_millis(640);

/// State that all slots share.
#[derive(Default)]
pub struct PciHost {
    /// The windows of all devices.
    pub mmio: MmioMap<Arc<Slot>>,
    routes: Routes,
    memory_slots: MemorySlots,
    /// The VM, while there is one.
    wiring: ArcSwapOption<Box<dyn Wiring>>,
}

impl PciHost {
    /// Sets the VM that devices are wired to, or none. The former VM and its wires must be closed, or about to be
    /// closed with no vCPU running.
    pub fn set_wiring(&self, wiring: Option<Box<dyn Wiring>>) {
        self.routes.clear();
        self.memory_slots.clear();
        self.wiring.store(wiring.map(Arc::new));
    }
}

/// Observer of each access to a device, called without the device's lock.
pub trait Watch: Send + Sync {
    /// Called after an access to the functions in `reach`, with its `effects`.
    fn note(&self, reach: Reach, effects: Effects);
}

/// A device and its configuration space as pages, which change together.
struct Inner {
    /// `None` once the slot is retired: reads return all-ones, and writes are ignored.
    device: Option<Box<dyn VirtioPci>>,
    pages: ConfigPages,
}

/// Wiring that exists for a device.
#[derive(Default)]
struct Wired {
    windows: Vec<Window>,
    wires: Wires,
    pin: PinWire,
    memory: DeviceMemory,
    pages: ShownPages,
}

/// A device and its wiring.
pub struct Slot {
    inner: Mutex<Inner>,
    placement: Placement,
    wired: Mutex<Wired>,
    host: Arc<PciHost>,
    complaints: AtomicU32,
    watch: OnceLock<Arc<dyn Watch>>,
    this: Weak<Self>,
}

impl Slot {
    /// Puts `device`, which was made for `placement`, into a slot of `host`.
    ///
    /// # Errors
    ///
    /// Fails if this machine has no address space for the pages of its configuration space.
    pub fn new(device: Box<dyn VirtioPci>, placement: Placement, host: Arc<PciHost>) -> io::Result<Arc<Self>> {
        let mut pages = ConfigPages::new(placement)?;
        let _ = pages.refresh(device.as_ref(), Reach::Device);
        Ok(Arc::new_cyclic(|this: &Weak<Self>| {
            let slot = this.clone();
            let observer = move |rid| slot.upgrade().iter().for_each(|slot| slot.reconcile_in(Reach::Function(rid)));
            let observer: Arc<DoorbellObserver> = Arc::new(observer);
            device.observe_doorbells(&observer);
            Self {
                inner: Mutex::new(Inner { device: Some(device), pages }),
                placement,
                wired: Mutex::new(Wired::default()),
                host,
                complaints: AtomicU32::new(0),
                watch: OnceLock::new(),
                this: this.clone(),
            }
        }))
    }

    /// The device's place on the bus.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Sets the observer of accesses from now on. The first one stays.
    pub fn set_watch(&self, watch: Arc<dyn Watch>) {
        let _ = self.watch.set(watch);
    }

    /// Reads from a window.
    pub fn mmio_read(&self, window: WindowId, offset: u64, data: &mut [u8]) {
        match &mut self.inner.lock().device {
            Some(device) => device.mmio_read(window, offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes to a window.
    pub fn mmio_write(&self, window: WindowId, offset: u64, data: &[u8]) {
        self.access(|device| device.mmio_write(window, offset, data));
    }

    /// Resets the device as a power cycle does.
    pub fn reset(&self) {
        self.config_access(Reach::Device, |device| device.reset(ResetKind::Conventional));
    }

    /// Inspects the device, or changes settings of the host that need no wires; `None` if the device was removed.
    pub fn with<T>(&self, look: impl FnOnce(&mut dyn VirtioPci) -> T) -> Option<T> {
        Some(look(self.inner.lock().device.as_deref_mut()?))
    }

    /// The windows that the device decodes now.
    pub fn windows(&self) -> Vec<Window> {
        let mut windows = Vec::new();
        self.with(|device| device.windows(&mut windows));
        windows
    }

    /// Stops the device's queues until [`Self::resume`].
    pub fn pause(&self) {
        self.access(|device| device.pause());
    }

    /// As [`Self::pause`], until `deadline` at the latest. Returns true if the queues have stopped. Otherwise requests
    /// in flight, such as a disk's, continue, and the device must be resumed: its queues then wait for these requests.
    pub fn pause_by(&self, deadline: Instant) -> bool {
        let Some(mut outcome) = self.with(|device| device.pause()) else { return true };
        let stopping = std::mem::take(&mut outcome.stopping);
        let late = |worker: &Thread| {
            while !worker.is_finished() && !worker.is_end() && Instant::now() < deadline {
                std::thread::sleep(TICK);
            }
            !worker.is_finished() && !worker.is_end()
        };
        // Late workers end by themselves, without being joined.
        let (late, ended): (Vec<_>, Vec<_>) = stopping.into_iter().partition(late);
        end(ended, Thread::leave);
        self.settle(Some(outcome), false);
        late.is_empty()
    }

    /// Resumes the device's queues. Waits up to 1.3 s for resources that the host lacks for a moment.
    ///
    /// # Errors
    ///
    /// Fails if the host has no thread or file for a function, which stays paused.
    pub fn resume(&self) -> Result<(), NotResumed> {
        self.go_on(|device| device.resume())
    }

    fn go_on(&self, resume: impl Fn(&mut dyn VirtioPci) -> Outcome) -> Result<(), NotResumed> {
        let mut wait = FIRST_WAIT;
        loop {
            let mut not_resumed = None;
            self.access(|device| {
                let outcome = resume(device);
                not_resumed = device.take_not_resumed();
                outcome
            });
            match not_resumed {
                None => return Ok(()),
                Some(not_resumed) if wait > LAST_WAIT => return Err(not_resumed),
                Some(_) => std::thread::sleep(wait),
            }
            wait *= 2;
        }
    }

    /// Stops the queues of one function, the device's own or a VF's, applies `change`, and resumes the queues if the
    /// guest `runs`; otherwise they resume with the guest. Other functions are not disturbed. Returns the result of
    /// `change`, `None` if the device was removed, and the result of resuming, as [`Self::resume`].
    pub fn exchange<T>(
        &self,
        vf: Option<VfIndex>,
        runs: bool,
        change: impl FnOnce(&mut dyn VirtioPci) -> T,
    ) -> (Option<T>, Result<(), NotResumed>) {
        self.access(|device| device.pause_function(vf));
        let changed = self.with(change);
        let resumed = if runs { self.go_on(|device| device.resume_function(vf)) } else { Ok(()) };
        (changed, resumed)
    }

    /// Makes or arms `fault` in one function, for tests of its driver. All of its effects are applied on return.
    ///
    /// # Errors
    ///
    /// Fails as [`virtio_devices::Lifecycle::inject`] does, without any change.
    pub fn inject(&self, vf: Option<VfIndex>, fault: Fault) -> Result<(), FaultError> {
        let mut result = Err(FaultError::NotVirtio);
        self.config_access(Reach::Device, |device| {
            let injected = device.inject(vf, fault);
            result = injected.as_ref().map(|_| ()).map_err(|error| *error);
            injected.unwrap_or_else(|_| Outcome::none())
        });
        result
    }

    /// The state of the device, which is paused; `None` if it has no state that a driver can change.
    ///
    /// # Errors
    ///
    /// Fails as [`virtio_devices::Lifecycle::save`] does.
    pub fn save(&self) -> Result<Option<DeviceState>, StateError> {
        self.with(|device| device.save()).unwrap_or(Ok(None))
    }

    /// Restores `state` in the device, which is paused or never ran, and leaves it paused. Its wiring to the VM, if
    /// there is one, is complete when this returns.
    ///
    /// # Errors
    ///
    /// Fails as [`virtio_devices::Lifecycle::restore`] does.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let mut result = Ok(());
        self.config_access(Reach::Device, |device| {
            result = device.restore(state);
            // Queues, windows and VFs may all have changed.
            Outcome {
                effects: Effects::WINDOWS.and(Effects::MESSAGES).and(Effects::QUEUES),
                reach: Reach::Device,
                stopping: Vec::new(),
            }
        });
        result
    }

    /// Ends all operations of the device permanently, and closes its host resources. Accesses in progress find no
    /// device, and the slot is never wired again.
    pub fn retire(&self) {
        self.reset();
        // Closed now, not when the last access that found the slot ends: a client that is notified of the removal may
        // use its tap.
        let device = self.inner.lock().device.take();
        drop(device);
        self.reconcile();
    }

    /// Makes an access that changes no register of configuration space, and applies all of its effects before it
    /// returns.
    fn access(&self, access: impl FnOnce(&mut dyn VirtioPci) -> Outcome) {
        let outcome = self.with(access);
        self.settle(outcome, false);
    }

    /// Makes an access that may change registers of the functions in `rendered`, and renders their pages under the same
    /// lock. Other functions' pages change only when VFs are enabled or disabled: a PF's power state, for example, is
    /// in no register of its VFs.
    fn config_access(&self, rendered: Reach, access: impl FnOnce(&mut dyn VirtioPci) -> Outcome) {
        let (outcome, shown) = {
            let mut inner = self.inner.lock();
            let Inner { device: Some(device), pages } = &mut *inner else { return };
            let outcome = access(device.as_mut());
            let rendered = if outcome.effects.vfs.is_some() { Reach::Device } else { rendered };
            let shown = pages.refresh(device.as_ref(), rendered);
            (outcome, shown)
        };
        self.settle(Some(outcome), shown);
    }

    /// Waits for the workers that an access stopped, and applies its effects. `shown` is true if pages appear or
    /// disappear.
    fn settle(&self, outcome: Option<Outcome>, shown: bool) {
        let Some(Outcome { effects, reach, stopping }) = outcome else { return };
        join(stopping);
        if shown || !effects.is_none() {
            self.reconcile_in(reach);
        }
        if let Some(watch) = self.watch.get() {
            watch.note(reach, effects);
        }
    }

    /// Updates windows, doorbells, messages and shown pages to what the device wants.
    pub fn reconcile(&self) {
        self.reconcile_in(Reach::Device);
    }

    /// As [`Self::reconcile`], if only the functions in `reach` may want other doorbells and messages.
    fn reconcile_in(&self, mut reach: Reach) {
        let mut wired = self.wired.lock();
        let (mut windows, mut wants, mut shown) = (Vec::new(), Wants::default(), Vec::new());
        let (mut memory, mut pin) = (Vec::new(), None);
        match &*self.inner.lock() {
            Inner { device: Some(device), pages } => {
                device.windows(&mut windows);
                if windows != wired.windows {
                    // Doorbells move with their window. Or another vCPU has changed windows, and has not applied this
                    // yet.
                    reach = Reach::Device;
                }
                device.doorbells(reach, &mut wants.doorbells);
                device.messages(reach, &mut wants.messages);
                shown = pages.shown(device.as_ref());
                device.memory(&mut memory);
                pin = device.pin();
            }
            Inner { device: None, .. } => reach = Reach::Device,
        }
        if windows != wired.windows
            && let Some(this) = self.this.upgrade()
        {
            self.host.mmio.replace(&this, |owner| Arc::ptr_eq(owner, &this), &windows);
        }
        if let Some(wiring) = &*self.host.wiring.load() {
            let wiring = wiring.as_ref().as_ref();
            let complain = |what: &str, error: &io::Error| self.complain(what, error);
            let PciHost { routes, memory_slots, .. } = &*self.host;
            let tools = Tools { routes, memory_slots, wiring, complain: &complain };
            wired.memory.update(memory, &windows, &tools);
            wired.wires.update(reach, wants, &windows, &tools);
            wired.pin.update(pin, layout::pin_gsi(self.placement.rid.device()).into(), &tools);
            let own = config_slots(self.placement.bdf(self.placement.rid));
            wired.pages.update(&shown, own, &tools);
        }
        wired.windows = windows;
    }

    /// Forgets the wires to a former VM.
    pub fn forget_wiring(&self) {
        let mut wired = self.wired.lock();
        let Wired { windows: _, wires, pin, memory, pages } = &mut *wired;
        wires.clear();
        pin.clear();
        let mut areas = Vec::new();
        self.with(|device| device.memory(&mut areas));
        memory.clear(areas);
        *pages = ShownPages::default();
    }

    fn complain(&self, what: &str, error: &io::Error) {
        let device = self.placement.rid;
        match self.complaints.fetch_add(1, Ordering::Relaxed) {
            n if n < MAX_COMPLAINTS => log::warn!("{device}: cannot {what}: {error}"),
            MAX_COMPLAINTS => log::warn!("{device}: cannot {what}: {error}; further complaints about it are not shown"),
            _ => {}
        }
    }
}

impl ConfigTarget for Slot {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.inner.lock().device.as_ref().map_or(ALL_ONES, |device| device.config_read(rid, reg))
    }

    fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite) {
        self.config_access(Reach::Function(rid), |device| device.config_write(rid, reg, write));
    }
}

/// Waits for workers that were requested to stop.
fn join(workers: Vec<Thread>) {
    end(workers, Thread::join);
}

fn end(workers: Vec<Thread>, end: fn(Thread) -> Result<(), Panicked>) {
    for worker in workers {
        if end(worker).is_err() {
            log::error!("a queue's worker panicked; please report this");
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod race_tests;
