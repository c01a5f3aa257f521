//! vCPUs: one thread each, which runs the guest and handles its exits.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use parking_lot::{Mutex, MutexGuard};
use virtio_devices::{NewThread, Thread};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::exits::MmioHandler;
use crate::kvm::{Exit, KvmError, Vcpu};
use crate::threads::{self, ThreadKind};
pub use crate::vcpu::error::VcpuError;
use crate::vcpu::gate::{Gate, Passage};
use crate::vcpu::pio::{IoPorts, PowerRequest};
use crate::vcpu::placement::Placement;
pub use crate::vcpu::stop::{Stop, StopSignal};

/// Stack of a vCPU's thread, in bytes: far more than devices need, but too small for a transparent huge page.
const STACK: usize = 512 << 10;

/// Handlers of the exits of a VM's vCPUs.
pub struct ExitHandlers {
    /// Handler of MMIO.
    pub mmio: Arc<dyn MmioHandler>,
    /// The I/O ports.
    pub ports: IoPorts,
    /// Signal that reports the guest's stop.
    pub stop: Arc<StopSignal>,
}

/// The vCPUs of a VM, running or not. Dropping them stops them.
pub struct Vcpus {
    cpus: BTreeMap<u32, Cpu>,
    handlers: Arc<ExitHandlers>,
    gate: Arc<Gate>,
    placement: Arc<Placement>,
    /// Number of threads ever started. An ended thread counts as held at the gate.
    started: usize,
}

/// A vCPU of KVM, which lasts until the VM is closed.
struct Cpu {
    /// Locked by the vCPU's thread, except while it waits at the gate.
    vcpu: Arc<Mutex<Vcpu>>,
    orders: Arc<Orders>,
    thread: Option<Thread>,
}

/// Requests to a vCPU's thread.
#[derive(Default)]
struct Orders {
    /// Inject a non-maskable interrupt.
    nmi: AtomicBool,
    /// Exit.
    dismissed: AtomicBool,
}

impl Vcpus {
    /// Runs each of `vcpus` in its own thread: `vcpu0`, `vcpu1`, ...
    ///
    /// # Errors
    ///
    /// Fails if a thread cannot be started or placed. All threads are stopped again.
    pub fn start(
        vcpus: Vec<Vcpu>,
        handlers: &Arc<ExitHandlers>,
        placement: &Arc<Placement>,
    ) -> Result<Self, VcpuError> {
        Self::begin((0..).zip(vcpus), Arc::default(), handlers, placement)
    }

    /// As [`Self::start`], for vCPUs with these numbers, initially paused.
    ///
    /// # Errors
    ///
    /// As [`Self::start`].
    pub fn start_paused(
        vcpus: Vec<(u32, Vcpu)>,
        handlers: &Arc<ExitHandlers>,
        placement: &Arc<Placement>,
    ) -> Result<Self, VcpuError> {
        let gate = Gate::default();
        gate.close();
        Self::begin(vcpus.into_iter(), Arc::new(gate), handlers, placement)
    }

    fn begin(
        vcpus: impl Iterator<Item = (u32, Vcpu)>,
        gate: Arc<Gate>,
        handlers: &Arc<ExitHandlers>,
        placement: &Arc<Placement>,
    ) -> Result<Self, VcpuError> {
        register_signal_handler(SIGRTMIN(), leave_guest).map_err(|error| VcpuError::Signal(error.into()))?;
        let cpus = vcpus.map(|(id, vcpu)| (id, Cpu::new(vcpu))).collect();
        let (handlers, placement) = (Arc::clone(handlers), Arc::clone(placement));
        let mut vcpus = Self { cpus, handlers, gate, placement, started: 0 };
        let ids: Vec<_> = vcpus.cpus.keys().copied().collect();
        if let Some(vcpu) = ids.first().copied() {
            vcpus.placement.begin().map_err(|error| VcpuError::Placement { vcpu, error })?;
        }
        ids.into_iter().try_for_each(|id| vcpus.spawn(id))?;
        Ok(vcpus)
    }

    /// Returns the handlers of exits.
    pub fn handlers(&self) -> &ExitHandlers {
        &self.handlers
    }

    /// Calls `look` for each paused vCPU with a thread, by ascending number. No access is pending, and its requests are
    /// done.
    ///
    /// # Errors
    ///
    /// Fails with the first error of `look`, or if KVM fails.
    pub fn each_paused<E: From<KvmError>>(&self, mut look: impl FnMut(u32, &Vcpu) -> Result<(), E>) -> Result<(), E> {
        for (id, cpu) in self.cpus.iter().filter(|(_, cpu)| cpu.thread.is_some()) {
            // Not locked by its thread, which waits at the gate.
            let vcpu = cpu.vcpu.lock();
            if cpu.orders.nmi.swap(false, Ordering::SeqCst) {
                vcpu.nmi()?;
            }
            look(*id, &vcpu)?;
        }
        Ok(())
    }

    /// True if vCPU `id` exists, running or not.
    pub fn has(&self, id: u32) -> bool {
        self.cpus.contains_key(&id)
    }

    /// Adds a vCPU without running it.
    pub fn keep(&mut self, id: u32, vcpu: Vcpu) {
        self.cpus.insert(id, Cpu::new(vcpu));
    }

    /// Runs vCPU `id`, which does not run yet. The vCPU waits for a SIPI, so nothing changes for the guest yet.
    ///
    /// # Errors
    ///
    /// Fails if the vCPU does not exist, its thread cannot be started, or KVM fails.
    pub fn add(&mut self, id: u32) -> Result<(), VcpuError> {
        if let Some(cpu) = self.cpus.get(&id) {
            cpu.vcpu.lock().await_startup().map_err(|error| VcpuError::Kvm { vcpu: id, error })?;
        }
        self.spawn(id)
    }

    /// Ends the thread of vCPU `id`, whatever the guest does there. Keeps the vCPU, because KVM cannot delete it.
    pub fn remove(&mut self, id: u32) {
        if let Some(cpu) = self.cpus.get_mut(&id) {
            self.gate.dismiss(&cpu.orders.dismissed);
            cpu.kick();
            cpu.join();
        }
    }

    fn spawn(&mut self, id: u32) -> Result<(), VcpuError> {
        let failed = |error| VcpuError::Spawn { vcpu: id, error };
        let cpu = self.cpus.get_mut(&id).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        cpu.orders = Arc::default();
        let (vcpu, orders) = (Arc::clone(&cpu.vcpu), Arc::clone(&cpu.orders));
        let (handlers, gate) = (Arc::clone(&self.handlers), Arc::clone(&self.gate));
        let placement = Arc::clone(&self.placement);
        let (report, placed) = mpsc::sync_channel(1);
        let body = move || {
            let entered = placement.enter(id);
            let can_run = entered.is_ok();
            // The starting thread waits for this.
            let _ = report.send(entered);
            if can_run {
                run(id, vcpu.lock(), &handlers, &gate, &orders);
            }
        };
        let name = format!("{}{id}", ThreadKind::Vcpu.name());
        let thread = threads::start(ThreadKind::Vcpu, NewThread::new(name, STACK, body)).map_err(failed)?;
        match placed.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(VcpuError::Placement { vcpu: id, error }),
            Err(_) => return Err(VcpuError::Panicked(id)),
        }
        cpu.thread = Some(thread);
        self.started += 1;
        Ok(())
    }

    /// Pauses the guest between two instructions, and returns once all vCPUs have stopped.
    pub fn pause(&self) {
        self.gate.hold(self.started, || self.kick());
    }

    /// Continues after [`Self::pause`].
    pub fn resume(&self) {
        self.gate.release();
    }

    /// Turns throttling on or off: vCPUs are held briefly, independently of [`Self::pause`].
    pub fn slow(&self, is_slow: bool) {
        self.gate.slow(is_slow, || self.kick());
    }

    /// Sends a non-maskable interrupt to each running vCPU.
    pub fn nmi(&self) {
        for cpu in self.cpus.values() {
            cpu.orders.nmi.store(true, Ordering::SeqCst);
        }
        self.kick();
    }

    /// Requests all vCPUs to exit, without waiting: they do not enter the guest again.
    pub fn quit(&self) {
        self.gate.quit();
        self.kick();
    }

    /// Forces all vCPUs out of the guest briefly.
    fn kick(&self) {
        self.cpus.values().for_each(Cpu::kick);
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.quit();
        self.cpus.values_mut().for_each(Cpu::join);
    }
}

impl Cpu {
    fn new(vcpu: Vcpu) -> Self {
        Self { vcpu: Arc::new(Mutex::new(vcpu)), orders: Arc::default(), thread: None }
    }

    /// Forces the vCPU out of the guest briefly, if it runs.
    fn kick(&self) {
        if let Some(thread) = &self.thread {
            thread.signal(SIGRTMIN());
        }
    }

    /// Waits for the thread to end.
    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

thread_local! {
    /// `immediate_exit` of this thread's vCPU: 1 forces KVM_RUN to return. Null while the thread has no vCPU.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Forces the thread's vCPU out of the guest, or keeps it from entering.
pub(crate) extern "C" fn leave_guest(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let immediate_exit = IMMEDIATE_EXIT.get();
    if !immediate_exit.is_null() {
        // SAFETY: while it is not null, `InGuest` keeps the vCPU's mapping, and the handler runs in the vCPU's own
        // thread.
        unsafe { immediate_exit.write_volatile(1) };
    }
}

/// A thread whose vCPU may be in the guest.
struct InGuest<'a> {
    id: u32,
    stop: &'a StopSignal,
    gate: &'a Gate,
}

impl<'a> InGuest<'a> {
    fn new(id: u32, vcpu: &mut Vcpu, stop: &'a StopSignal, gate: &'a Gate) -> Self {
        IMMEDIATE_EXIT.set(vcpu.immediate_exit());
        Self { id, stop, gate }
    }
}

impl Drop for InGuest<'_> {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
        self.gate.leave();
        if std::thread::panicking() {
            self.stop.send(Stop::Failed(VcpuError::Panicked(self.id)));
        }
    }
}

fn run(id: u32, mut vcpu: MutexGuard<'_, Vcpu>, handlers: &ExitHandlers, gate: &Gate, orders: &Orders) {
    // Dropped before the lock on the vCPU is released, also in a panic.
    let _in_guest = InGuest::new(id, &mut vcpu, &handlers.stop, gate);
    let mut has_run = false;
    loop {
        // Requests are set before the signal: either this check sees them, or the signal finds the pointer set.
        if !gate.is_open(&orders.dismissed) {
            // Other threads must find the vCPU between two instructions.
            if has_run && let Some(stop) = settle(id, &mut vcpu, handlers) {
                handlers.stop.send(stop);
                return;
            }
            match MutexGuard::unlocked(&mut vcpu, || gate.pass(&orders.dismissed)) {
                None => return,
                Some(Passage::AfterPause) => vcpu.tell_pause(),
                Some(Passage::Straight) => {}
            }
        }
        if orders.nmi.swap(false, Ordering::SeqCst)
            && let Err(error) = vcpu.nmi()
        {
            log::warn!("vCPU {id}: cannot inject a non-maskable interrupt: {error}");
        }
        has_run = true;
        if let ControlFlow::Break(Some(stop)) = step(id, &mut vcpu, handlers) {
            if let Stop::Failed(_) = &stop {
                log::debug!("vCPU {id}: {:x?} {:x?}", vcpu.regs(), vcpu.sregs());
            }
            handlers.stop.send(stop);
            return;
        }
    }
}

/// Completes the access of the last exit, and all accesses of the same instruction, without running the guest.
fn settle(id: u32, vcpu: &mut Vcpu, handlers: &ExitHandlers) -> Option<Stop> {
    loop {
        vcpu.stay_out();
        if let ControlFlow::Break(stop) = step(id, vcpu, handlers) {
            return stop;
        }
    }
}

/// Runs the guest until its next exit, and handles the exit. Breaks with the reason if the guest stops, and with `None`
/// if the vCPU was only interrupted.
fn step(id: u32, vcpu: &mut Vcpu, handlers: &ExitHandlers) -> ControlFlow<Option<Stop>> {
    let stop = match vcpu.run() {
        Ok(Exit::MmioRead(address, data)) => {
            handlers.mmio.read(address, data);
            return ControlFlow::Continue(());
        }
        Ok(Exit::MmioWrite(address, data)) => {
            handlers.mmio.write(address, data);
            return ControlFlow::Continue(());
        }
        Ok(Exit::PioRead(port, size, data)) => {
            for item in data.chunks_mut(size.max(1)) {
                handlers.ports.read(port, item);
            }
            return ControlFlow::Continue(());
        }
        Ok(Exit::PioWrite(port, size, data)) => {
            let mut request = None;
            for item in data.chunks(size.max(1)) {
                request = handlers.ports.write(port, item).or(request);
            }
            match request {
                None => return ControlFlow::Continue(()),
                Some(PowerRequest::PowerOff) => Stop::PowerOff,
                Some(PowerRequest::Reset) => Stop::Reset,
            }
        }
        Ok(Exit::HyperV) => return ControlFlow::Continue(()),
        Ok(Exit::Interrupted) => return ControlFlow::Break(None),
        Ok(Exit::Shutdown) => Stop::TripleFault,
        Ok(Exit::InternalError(suberror)) => Stop::Failed(VcpuError::Internal { vcpu: id, suberror }),
        Ok(Exit::FailedEntry(reason)) => Stop::Failed(VcpuError::FailedEntry { vcpu: id, reason }),
        Ok(Exit::Other(reason)) => {
            log::trace!("vCPU {id}: ignoring exit {reason}");
            return ControlFlow::Continue(());
        }
        Err(error) => Stop::Failed(VcpuError::Kvm { vcpu: id, error }),
    };
    ControlFlow::Break(Some(stop))
}

#[cfg(test)]
mod tests;
