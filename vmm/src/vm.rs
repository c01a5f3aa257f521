//! A virtual machine from power-on to power-off.
//!
//! What the host gave — files, memory, terminal, taps — is had once and lasts for the whole run. What is KVM's lasts from one
//! power-on or reset of the guest to the next: a machine that starts again gets a new KVM VM, and nothing of the old one's state.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use crate::acpi;
use crate::arch::x86_64::cpuid::{self, Template};
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::regs::{self, Entry};
use crate::boot::Payload;
use crate::config::{NetPlan, VmConfig};
use crate::console::Console;
use crate::cpu::{self, Stop, StopSignal, Vcpus};
use crate::devices::Devices;
use crate::error::Error;
use crate::firmware::Apertures;
use crate::kvm::{self, Kvm, Vcpu, Vm};
use crate::memory::GuestRam;
use crate::open_files;
use crate::pio::Ports;

/// Runs a virtual machine until its guest switches it off, or SIGINT, SIGTERM, SIGHUP or SIGQUIT ends it. Before it has its
/// memory, devices and console these signals do what they did before.
///
/// `nets` is what [`VmConfig::plan`] made of `config`, which found all that a configuration alone can have wrong.
///
/// # Errors
///
/// When the host lacks something, or the guest cannot go on. Whatever was opened or created is closed and gone when this
/// returns.
pub fn run(config: &VmConfig, nets: &[NetPlan]) -> Result<(), Error> {
    let machine = Machine::new(config, nets)?;
    let mut triple_faults = 0;
    loop {
        match machine.power_on()? {
            End::Off => return Ok(()),
            End::Reset => log::info!("the guest starts again"),
            End::TripleFault => {
                triple_faults += 1;
                complain(triple_faults);
            }
        }
        machine.ram.clear()?;
    }
}

/// Tells of a guest's triple faults, which may be how it reboots, and may go on for ever: of the 1st, 2nd, 4th, 8th and so on.
fn complain(triple_faults: u64) {
    if triple_faults.is_power_of_two() {
        log::warn!(
            "the guest starts again after a triple fault (number {triple_faults}); if it never comes up, see what it says \
             last: --serial tty --cmdline \"console=ttyS0 earlyprintk=ttyS0\""
        );
    }
}

/// How a guest's life ended.
enum End {
    Off,
    Reset,
    TripleFault,
}

/// What lasts over resets. Dropped in this order: devices end before the memory that they use, and the terminal is restored
/// before the signals are let through again.
struct Machine {
    devices: Arc<Devices>,
    console: Option<Console>,
    ram: GuestRam,
    payload: Payload,
    acpi: Vec<u8>,
    layout: Layout,
    cpuid: Template,
    vcpus: u8,
    kvm: Kvm,
    stop: Arc<StopSignal>,
    signals: Signals,
}

impl Machine {
    /// Gets from the host all that the guest needs: first what can only be missing, last what others can see.
    fn new(config: &VmConfig, nets: &[NetPlan]) -> Result<Self, Error> {
        open_files::reserve(nets, config.cpus.boot_vcpus)?;
        let kvm = Kvm::open()?;
        let vcpus = vcpus(&kvm, config.cpus.boot_vcpus)?;
        let supported = kvm.supported_cpuid()?;
        let cpuid = Template::new(&supported, vcpus.into(), kvm.has_tsc_deadline());
        let (size, bits) = (config.memory.size, cpuid::address_bits(&supported));
        let layout = Layout::new(size, bits).ok_or(Error::AddressBits { size, bits })?;
        let payload = Payload::open(&config.payload, &layout)?;
        let host = |action| move |error| Error::Host { action, error };
        let stop = Arc::new(StopSignal::new().map_err(host("make an eventfd"))?);
        let ram = GuestRam::new(&config.memory, &layout, false)?;
        let apertures = Apertures { mem32: layout::MMIO32, mem64: layout.mmio64.clone() };
        let devices = Arc::new(Devices::new(nets, ram.memory(), apertures)?);
        let mut console = Console::open(&config.serial)?;
        // Until here, which may take long, a signal ends the process, and what was opened goes with it. From here on there is a
        // terminal to restore.
        let signals = Signals::catch().map_err(host("catch signals"))?;
        if let Some(console) = &mut console {
            console.take_terminal()?;
        }
        let described = acpi::Machine { layout: &layout, vcpus, serial: console.is_some() };
        let acpi = acpi::tables(&described, layout::ACPI);
        Ok(Self { devices, console, ram, payload, acpi, layout, cpuid, vcpus, kvm, stop, signals })
    }

    /// Runs the guest from its first instruction to its end, in memory that is zero.
    fn power_on(&self) -> Result<End, Error> {
        let entry = self.payload.load(&self.ram.memory().memory(), &self.layout, &self.acpi)?;
        let powered = Powered::new(self)?;
        let vcpus = self.vcpus(&powered.vm, entry)?;
        let machine = Arc::new(cpu::Machine {
            mmio: Arc::clone(&self.devices) as _,
            ports: Ports::new(self.console.as_ref().map(|console| Arc::clone(console.port()))),
            stop: Arc::clone(&self.stop),
        });
        let running = Vcpus::start(vcpus, &machine)?;
        let stopped = self.wait();
        drop(running);
        drop(powered);
        // Another vCPU may have said something until it was stopped.
        self.stop.take();
        stopped
    }

    /// The vCPUs of `vm`, the first of which is to start at `entry`, and the others when that one wakes them.
    fn vcpus(&self, vm: &Vm, entry: Entry) -> Result<Vec<Vcpu>, Error> {
        let msrs = regs::msrs().ok_or(kvm::Error::Capability("room for two MSRs"))?;
        (0..u32::from(self.vcpus))
            .map(|id| {
                let vcpu = vm.create_vcpu(id)?;
                let cpuid = self.cpuid.vcpu(id).ok_or(kvm::Error::Capability("room for its own CPUID leaves"))?;
                vcpu.set_cpuid(&cpuid)?;
                vcpu.set_msrs(&msrs)?;
                if id == 0 {
                    let mut sregs = vcpu.sregs()?;
                    entry.set_sregs(&mut sregs);
                    vcpu.set_sregs(&sregs)?;
                    vcpu.set_regs(&entry.regs())?;
                }
                Ok(vcpu)
            })
            .collect()
    }

    /// Waits for the guest's end, or for a signal.
    fn wait(&self) -> Result<End, Error> {
        loop {
            // SAFETY: the eventfd is open as long as `self` is borrowed.
            let stop = unsafe { BorrowedFd::borrow_raw(self.stop.event().as_raw_fd()) };
            let mut fds = [stop, self.signals.receiver.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::Host { action: "wait for the guest", error: error.into() }),
            }
            if !fds[1].revents().is_empty() {
                log::info!("stopped by a signal");
                return Ok(End::Off);
            }
            match self.stop.take() {
                Some(Stop::PowerOff) => return Ok(End::Off),
                Some(Stop::Reset) => return Ok(End::Reset),
                Some(Stop::TripleFault) => return Ok(End::TripleFault),
                Some(Stop::Failed(error)) => return Err(error.into()),
                None => {}
            }
        }
    }
}

/// How many vCPUs there are, if this host can run so many.
fn vcpus(kvm: &Kvm, requested: u32) -> Result<u8, Error> {
    let limit = kvm.max_vcpus().min(cpuid::MAX_VCPUS);
    let possible = u8::try_from(requested).ok().filter(|vcpus| u32::from(*vcpus) <= limit && *vcpus > 0);
    Ok(possible.ok_or(kvm::Error::Vcpus { requested, limit })?)
}

/// A KVM VM with the machine's memory and devices, until it is dropped.
struct Powered<'a> {
    machine: &'a Machine,
    vm: Arc<Vm>,
}

impl<'a> Powered<'a> {
    fn new(machine: &'a Machine) -> Result<Self, Error> {
        let vm = Arc::new(machine.kvm.create_vm(layout::KVM_TSS)?);
        for (slot, region) in (0..).zip(machine.ram.memory().memory().iter()) {
            // SAFETY: the region is a mapping of guest memory, of which nobody makes references; the machine keeps it mapped
            // for longer than this VM and its vCPUs last.
            unsafe { vm.set_memory(slot, region.start_addr().0, region.as_ptr(), region.len())? };
        }
        if let Some(console) = &machine.console {
            let wired = vm.attach_irqfd(console.port().interrupt(), layout::SERIAL_GSI);
            wired.map_err(|error| kvm::Error::Ioctl { action: "wire the serial port's interrupt", error })?;
        }
        // From here on dropping it detaches the devices, also when they cannot be attached.
        let powered = Self { machine, vm };
        machine.devices.attach(Arc::clone(&powered.vm))?;
        Ok(powered)
    }
}

impl Drop for Powered<'_> {
    fn drop(&mut self) {
        self.machine.devices.detach();
        if let Some(console) = &self.machine.console {
            // The VM goes in a moment, and the wire with it.
            let _ = self.vm.detach_irqfd(console.port().interrupt(), layout::SERIAL_GSI);
            console.port().reset();
        }
    }
}

/// The signals that end a VM, as something to wait for.
struct Signals {
    receiver: UnixStream,
    caught: Vec<SigId>,
}

impl Signals {
    fn catch() -> io::Result<Self> {
        let (receiver, sender) = UnixStream::pair()?;
        let mut signals = Self { receiver, caught: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            // A program that is started with a signal ignored, as by nohup, leaves it so.
            if !is_ignored(signal) {
                signals.caught.push(signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?);
            }
        }
        Ok(signals)
    }
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: all-zeros is a valid value of this plain struct, which the call then fills in; nothing else is changed.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action
    };
    action.sa_sigaction == libc::SIG_IGN
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.caught.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}
