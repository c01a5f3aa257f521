//! The vCPUs: a thread each, which runs the guest and serves its exits.

use std::cell::Cell;
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

use crate::gate::Gate;
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

/// The running vCPUs of a VM. Dropping them stops them.
pub struct Vcpus {
    threads: Vec<JoinHandle<()>>,
    orders: Arc<Orders>,
}

/// What the threads are told.
struct Orders {
    gate: Gate,
    /// For each vCPU, whether it is to get a non-maskable interrupt.
    nmis: Box<[AtomicBool]>,
}

impl Vcpus {
    /// Runs each of `vcpus` in a thread of its own, `vcpu0` and so on.
    ///
    /// # Errors
    ///
    /// When a thread cannot be had; those that were started are stopped again.
    pub fn start(vcpus: Vec<Vcpu>, machine: &Arc<Machine>) -> Result<Self, Error> {
        register_signal_handler(SIGRTMIN(), leave_guest).map_err(|error| Error::Signal(error.into()))?;
        let orders = Orders { gate: Gate::default(), nmis: vcpus.iter().map(|_| AtomicBool::new(false)).collect() };
        let mut running = Self { threads: Vec::with_capacity(vcpus.len()), orders: Arc::new(orders) };
        for (id, vcpu) in (0..).zip(vcpus) {
            let (machine, orders) = (Arc::clone(machine), Arc::clone(&running.orders));
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{id}"))
                .stack_size(STACK)
                .spawn(move || run(id, vcpu, &machine, &orders))
                .map_err(|error| Error::Spawn { vcpu: id, error })?;
            running.threads.push(thread);
        }
        Ok(running)
    }

    /// Stops the guest between two instructions, and returns when it stands still.
    pub fn pause(&self) {
        self.orders.gate.hold(self.threads.len(), || self.kick());
    }

    /// Lets the guest go on after [`Self::pause`].
    pub fn resume(&self) {
        self.orders.gate.release();
    }

    /// Gives each vCPU a non-maskable interrupt.
    pub fn nmi(&self) {
        for nmi in &self.orders.nmis {
            nmi.store(true, Ordering::SeqCst);
        }
        self.kick();
    }

    /// Makes each vCPU leave the guest for a moment.
    fn kick(&self) {
        for thread in &self.threads {
            // SAFETY: a thread is joined only by the drop, so that its handle is valid also if it has ended by itself.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
        }
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.orders.gate.quit();
        self.kick();
        for thread in self.threads.drain(..) {
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

fn run(id: u32, mut vcpu: Vcpu, machine: &Machine, orders: &Orders) {
    let Orders { gate, nmis } = orders;
    // Dropped before the vCPU, also in a panic.
    let _in_guest = InGuest::new(id, &mut vcpu, &machine.stop, gate);
    let nmi = nmis.get(id as usize);
    // Who gives an order does so before the signal: either it is seen here, or the signal finds the pointer that is set.
    while gate.pass() {
        if nmi.is_some_and(|nmi| nmi.swap(false, Ordering::SeqCst))
            && let Err(error) = vcpu.nmi()
        {
            log::warn!("vCPU {id}: no non-maskable interrupt: {error}");
        }
        if let Some(stop) = step(id, &mut vcpu, machine) {
            if let Stop::Failed(_) = &stop {
                log::debug!("vCPU {id}: {:x?} {:x?}", vcpu.regs(), vcpu.sregs());
            }
            machine.stop.send(stop);
            break;
        }
    }
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
mod tests {
    use std::time::Duration;

    use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};

    use super::*;
    use crate::arch::x86_64::layout::{self, Layout};
    use crate::arch::x86_64::regs::Entry;
    use crate::config::MemoryConfig;
    use crate::event_device::EventDevice;
    use crate::memory::GuestRam;

    /// Memory that panics when it is touched.
    struct Broken;

    impl MmioHandler for Broken {
        fn read(&self, _: u64, _: &mut [u8]) {
            panic!("on purpose");
        }

        fn write(&self, _: u64, _: &[u8]) {}
    }

    /// A VM of 2 MiB with a vCPU that is about to run `code`.
    fn vcpu(code: &[u8]) -> (GuestRam, Vcpu) {
        let config = MemoryConfig { size: 2 << 20, ..MemoryConfig::default() };
        let ram = GuestRam::new(&config, &Layout::new(config.size, 46).unwrap(), false).unwrap();
        let vm = kvm::Kvm::open().unwrap().create_vm(layout::KVM_TSS).unwrap();
        let memory = ram.memory().memory();
        memory.write_slice(code, GuestAddress(0x1000)).unwrap();
        // SAFETY: the memory is returned together with the vCPU, and lasts for as long as the tests use that.
        unsafe { vm.set_memory(0, 0, memory.get_host_address(GuestAddress(0)).unwrap(), config.size) }.unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.sregs().unwrap();
        Entry::Pvh(0x1000).set_sregs(&mut sregs);
        vcpu.set_sregs(&sregs).unwrap();
        vcpu.set_regs(&Entry::Pvh(0x1000).regs()).unwrap();
        (ram, vcpu)
    }

    #[test]
    fn a_panic_of_a_vcpus_thread_ends_the_guest() {
        // mov eax, [0xd0000000]
        let (_ram, vcpu) = vcpu(&[0xa1, 0x00, 0x00, 0x00, 0xd0]);
        let stop = Arc::new(StopSignal::new().unwrap());
        let ports = Ports::new(None, Arc::new(EventDevice::new(Arc::clone(stop.event())).unwrap()));
        let machine = Arc::new(Machine { mmio: Arc::new(Broken), ports, stop: Arc::clone(&stop) });
        let _vcpus = Vcpus::start(vec![vcpu], &machine).unwrap();
        let stopped = std::iter::repeat_with(|| {
            std::thread::sleep(Duration::from_millis(1));
            stop.take()
        });
        let reason = stopped.take(60_000).flatten().next().unwrap();
        assert!(matches!(reason, Stop::Failed(Error::Panicked(0))), "{reason:?}");
    }

    #[test]
    fn a_paused_guest_stands_still_and_goes_on() {
        // again: inc dword [0x2000]; jmp again
        let (ram, vcpu) = vcpu(&[0xff, 0x05, 0x00, 0x20, 0x00, 0x00, 0xeb, 0xf8]);
        let stop = Arc::new(StopSignal::new().unwrap());
        let ports = Ports::new(None, Arc::new(EventDevice::new(Arc::clone(stop.event())).unwrap()));
        let machine = Arc::new(Machine { mmio: Arc::new(Broken), ports, stop });
        let count = || ram.memory().memory().read_obj::<u32>(GuestAddress(0x2000)).unwrap();
        let moves_on_from = |before| {
            std::iter::repeat_with(|| {
                std::thread::sleep(Duration::from_millis(1));
                count()
            })
            .take(60_000)
            .any(|now| now != before)
        };
        let vcpus = Vcpus::start(vec![vcpu], &machine).unwrap();
        for _ in 0..5 {
            assert!(moves_on_from(count()));
            vcpus.pause();
            let before = count();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(count(), before);
            vcpus.resume();
        }
    }

    #[test]
    fn the_first_to_stop_is_heard_once() {
        let signal = StopSignal::new().unwrap();
        assert!(signal.take().is_none());
        signal.send(Stop::PowerOff);
        signal.send(Stop::Reset);
        assert!(matches!(signal.take(), Some(Stop::PowerOff)));
        assert!(signal.take().is_none());
        assert!(signal.event().read().is_err());
        signal.send(Stop::Reset);
        assert!(matches!(signal.take(), Some(Stop::Reset)));
    }
}
