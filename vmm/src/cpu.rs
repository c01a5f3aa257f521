//! The vCPUs: a thread each, which runs the guest and serves its exits.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::gate::{Gate, Passage};
use crate::kvm::{self, Exit, Vcpu};
use crate::pio::{Ports, Request};

/// The stack of a vCPU's thread, in bytes: far more than a device needs, and too little to become a huge page of its own.
const STACK: usize = 512 << 10;

/// Guest addresses that are not memory.
pub trait MmioHandler: Send + Sync {
    /// Reads `data.len()` bytes, 1 to 8; what is not there reads all-ones.
    fn read(&self, address: u64, data: &mut [u8]);

    /// Writes `data`, 1 to 8 bytes; what is not there ignores it.
    fn write(&self, address: u64, data: &[u8]);
}

/// Why the vCPUs cannot go on.
#[derive(Debug, Error)]
pub enum Error {
    /// KVM fails.
    #[error("vCPU {vcpu}: {error}")]
    Kvm {
        /// The vCPU.
        vcpu: u32,
        /// How it fails.
        error: kvm::Error,
    },
    /// KVM cannot run the guest's code any further.
    #[error(
        "vCPU {vcpu}: KVM cannot run the guest any further (internal error {suberror}; 1 is an instruction that it cannot \
         emulate); -vv logs the registers"
    )]
    Internal {
        /// The vCPU.
        vcpu: u32,
        /// KVM's suberror.
        suberror: u32,
    },
    /// The CPU refuses the guest's state.
    #[error("vCPU {vcpu}: the CPU refuses to run the guest (reason {reason:#x}); -vv logs the registers")]
    FailedEntry {
        /// The vCPU.
        vcpu: u32,
        /// The CPU's reason.
        reason: u64,
    },
    /// A vCPU's thread cannot be had.
    #[error("vCPU {vcpu}: cannot start its thread: {error}")]
    Spawn {
        /// The vCPU.
        vcpu: u32,
        /// Why not.
        error: io::Error,
    },
    /// A vCPU's thread panicked, which is a fault of this program's.
    #[error("vCPU {0}: its thread panicked; please report this")]
    Panicked(u32),
    /// The signal that stops vCPUs cannot be had.
    #[error("cannot install the handler of the signal that stops vCPUs: {0}")]
    Signal(io::Error),
}

/// Why a guest stopped.
#[derive(Debug)]
pub enum Stop {
    /// It switched its machine off.
    PowerOff,
    /// It wants to start again.
    Reset,
    /// A vCPU of it had a triple fault, which a machine answers with a reset.
    TripleFault,
    /// It cannot go on.
    Failed(Error),
}

/// Where vCPUs say that the guest stopped: the first to say so is heard.
#[derive(Debug)]
pub struct StopSignal {
    event: Arc<EventFd>,
    first: Mutex<Option<Stop>>,
}

impl StopSignal {
    /// Nobody has said anything.
    ///
    /// # Errors
    ///
    /// When there is no file descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?), first: Mutex::new(None) })
    }

    /// Readable once somebody said something. Others may signal it, too.
    pub fn event(&self) -> &Arc<EventFd> {
        &self.event
    }

    /// What was said first, if anything; afterwards it is as if nothing had been.
    pub fn take(&self) -> Option<Stop> {
        let _ = self.event.read();
        self.first.lock().take()
    }

    fn send(&self, stop: Stop) {
        self.first.lock().get_or_insert(stop);
        // It is not full: it is read before a VM starts again.
        let _ = self.event.write(1);
    }
}

/// What the vCPUs of a VM share.
pub struct Machine {
    /// Guest addresses that are not memory.
    pub mmio: Arc<dyn MmioHandler>,
    /// The I/O ports.
    pub ports: Ports,
    /// Where the guest's end is told.
    pub stop: Arc<StopSignal>,
}

/// The vCPUs of a VM: those that run, and those that do not any more. Dropping them stops them.
pub struct Vcpus {
    cpus: BTreeMap<u32, Cpu>,
    machine: Arc<Machine>,
    gate: Arc<Gate>,
    /// How many threads were ever started. One that has ended stands at the gate for ever.
    started: usize,
}

/// A vCPU that KVM has, which is until the VM's end.
struct Cpu {
    /// Locked by its thread.
    vcpu: Arc<Mutex<Vcpu>>,
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread of a vCPU is told.
#[derive(Default)]
struct Orders {
    /// It is to get a non-maskable interrupt.
    nmi: AtomicBool,
    /// It is to end.
    dismissed: AtomicBool,
}

impl Vcpus {
    /// Runs each of `vcpus` in a thread of its own, `vcpu0` and so on.
    ///
    /// # Errors
    ///
    /// When a thread cannot be had; those that were started are stopped again.
    pub fn start(vcpus: Vec<Vcpu>, machine: &Arc<Machine>) -> Result<Self, Error> {
        register_signal_handler(SIGRTMIN(), leave_guest).map_err(|error| Error::Signal(error.into()))?;
        let cpus = (0..).zip(vcpus).map(|(id, vcpu)| (id, Cpu::new(vcpu))).collect();
        let mut vcpus = Self { cpus, machine: Arc::clone(machine), gate: Arc::default(), started: 0 };
        let ids: Vec<_> = vcpus.cpus.keys().copied().collect();
        ids.into_iter().try_for_each(|id| vcpus.spawn(id))?;
        Ok(vcpus)
    }

    /// Whether there is a vCPU `id`, which runs or does not any more.
    pub fn has(&self, id: u32) -> bool {
        self.cpus.contains_key(&id)
    }

    /// Keeps a vCPU that does not run yet.
    pub fn keep(&mut self, id: u32, vcpu: Vcpu) {
        self.cpus.insert(id, Cpu::new(vcpu));
    }

    /// Runs vCPU `id`, which does not run. It waits for the guest to wake it; until then, nothing has changed for the guest.
    ///
    /// # Errors
    ///
    /// When it is not there, its thread cannot be had, or KVM fails.
    pub fn add(&mut self, id: u32) -> Result<(), Error> {
        if let Some(cpu) = self.cpus.get(&id) {
            cpu.vcpu.lock().await_startup().map_err(|error| Error::Kvm { vcpu: id, error })?;
        }
        self.spawn(id)
    }

    /// Ends the thread of vCPU `id`, whatever the guest does there. The vCPU is kept, since KVM keeps it, too.
    pub fn remove(&mut self, id: u32) {
        if let Some(cpu) = self.cpus.get_mut(&id) {
            self.gate.dismiss(&cpu.orders.dismissed);
            cpu.kick();
            cpu.join();
        }
    }

    fn spawn(&mut self, id: u32) -> Result<(), Error> {
        let failed = |error| Error::Spawn { vcpu: id, error };
        let cpu = self.cpus.get_mut(&id).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        cpu.orders = Arc::default();
        let (vcpu, orders) = (Arc::clone(&cpu.vcpu), Arc::clone(&cpu.orders));
        let (machine, gate) = (Arc::clone(&self.machine), Arc::clone(&self.gate));
        let thread = std::thread::Builder::new().name(format!("vcpu{id}")).stack_size(STACK);
        cpu.thread = Some(thread.spawn(move || run(id, &mut vcpu.lock(), &machine, &gate, &orders)).map_err(failed)?);
        self.started += 1;
        Ok(())
    }

    /// Stops the guest between two instructions, and returns when it stands still.
    pub fn pause(&self) {
        self.gate.hold(self.started, || self.kick());
    }

    /// Lets the guest go on after [`Self::pause`].
    pub fn resume(&self) {
        self.gate.release();
    }

    /// Gives each vCPU that runs a non-maskable interrupt.
    pub fn nmi(&self) {
        for cpu in self.cpus.values() {
            cpu.orders.nmi.store(true, Ordering::SeqCst);
        }
        self.kick();
    }

    /// Makes each vCPU leave the guest for a moment.
    fn kick(&self) {
        self.cpus.values().for_each(Cpu::kick);
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.gate.quit();
        self.kick();
        self.cpus.values_mut().for_each(Cpu::join);
    }
}

impl Cpu {
    fn new(vcpu: Vcpu) -> Self {
        Self { vcpu: Arc::new(Mutex::new(vcpu)), orders: Arc::default(), thread: None }
    }

    /// Makes it leave the guest for a moment, if it runs.
    fn kick(&self) {
        if let Some(thread) = &self.thread {
            // SAFETY: the handle was not joined, so that it is valid also if the thread has ended by itself.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
        }
    }

    /// Returns when its thread has ended.
    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

thread_local! {
    /// Where a 1 makes KVM_RUN of this thread's vCPU return; null while it has none.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Makes the thread's vCPU leave the guest, or not enter it if it is just about to.
extern "C" fn leave_guest(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let immediate_exit = IMMEDIATE_EXIT.get();
    if !immediate_exit.is_null() {
        // SAFETY: it points into the vCPU's mapping, as `InGuest` keeps it; the handler runs in the thread of the vCPU.
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
            self.stop.send(Stop::Failed(Error::Panicked(self.id)));
        }
    }
}

fn run(id: u32, vcpu: &mut Vcpu, machine: &Machine, gate: &Gate, orders: &Orders) {
    // Dropped before the vCPU is left to others, also in a panic.
    let _in_guest = InGuest::new(id, vcpu, &machine.stop, gate);
    // Who gives an order does so before the signal: either it is seen here, or the signal finds the pointer that is set.
    while let Some(passage) = gate.pass(&orders.dismissed) {
        if passage == Passage::AfterPause {
            vcpu.tell_pause();
        }
        if orders.nmi.swap(false, Ordering::SeqCst)
            && let Err(error) = vcpu.nmi()
        {
            log::warn!("vCPU {id}: no non-maskable interrupt: {error}");
        }
        if let Some(stop) = step(id, vcpu, machine) {
            if let Stop::Failed(_) = &stop {
                log::debug!("vCPU {id}: {:x?} {:x?}", vcpu.regs(), vcpu.sregs());
            }
            machine.stop.send(stop);
            return;
        }
    }
    // Whoever runs it next would complete the access.
    vcpu.settle();
}

/// Runs the guest up to its next exit and serves that.
fn step(id: u32, vcpu: &mut Vcpu, machine: &Machine) -> Option<Stop> {
    match vcpu.run() {
        Ok(Exit::MmioRead(address, data)) => machine.mmio.read(address, data),
        Ok(Exit::MmioWrite(address, data)) => machine.mmio.write(address, data),
        Ok(Exit::PioRead(port, size, data)) => {
            for item in data.chunks_mut(size.max(1)) {
                machine.ports.read(port, item);
            }
        }
        Ok(Exit::PioWrite(port, size, data)) => {
            let mut request = None;
            for item in data.chunks(size.max(1)) {
                request = machine.ports.write(port, item).or(request);
            }
            return request.map(|request| match request {
                Request::PowerOff => Stop::PowerOff,
                Request::Reset => Stop::Reset,
            });
        }
        Ok(Exit::Interrupted) => {}
        Ok(Exit::Shutdown) => return Some(Stop::TripleFault),
        Ok(Exit::InternalError(suberror)) => return Some(Stop::Failed(Error::Internal { vcpu: id, suberror })),
        Ok(Exit::FailedEntry(reason)) => return Some(Stop::Failed(Error::FailedEntry { vcpu: id, reason })),
        Ok(Exit::Other(reason)) => log::trace!("vCPU {id}: exit {reason} is ignored"),
        Err(error) => return Some(Stop::Failed(Error::Kvm { vcpu: id, error })),
    }
    None
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
