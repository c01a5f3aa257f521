//! A virtual machine from power-on to power-off.
//!
//! What the host gave — files, memory, terminal, taps — is had once and lasts as long as the [`Vm`]. What is KVM's lasts from one
//! power-on or reset of the guest to the next: a machine that starts again gets a new KVM VM, and nothing of the old one's state.

use std::path::Path;
use std::sync::Arc;

use pci::Rid;
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::acpi;
use crate::arch::x86_64::cpuid::{self, Template};
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::regs::{self, Entry};
use crate::boot::Payload;
use crate::bus::Bus;
use crate::config::{DevicePlan, VmConfig, VmPlan};
use crate::console::{Console, SerialPort};
use crate::console_end::ConsoleEnd;
use crate::cpu::{self, Stop, StopSignal, Vcpus};
use crate::devices::{self, Devices, Plugged};
use crate::error::Error;
use crate::event_device::EventDevice;
use crate::events::Events;
use crate::firmware::Apertures;
use crate::kvm::{self, Kvm, Vcpu};
use crate::memory::GuestRam;
use crate::open_files;
use crate::pio::Ports;

/// A virtual machine with all that it has from the host. Dropping it ends it: whatever was opened or created is closed and gone.
pub struct Vm {
    // Dropped in this order: the guest ends before its devices, and devices end before the memory that they use.
    running: Option<Running>,
    devices: Devices,
    serial: Option<Console>,
    console: Option<ConsoleEnd>,
    ram: GuestRam,
    payload: Payload,
    acpi: Vec<u8>,
    layout: Layout,
    cpuid: Template,
    vcpus: u8,
    kvm: Kvm,
    stop: Arc<StopSignal>,
    events: Arc<EventDevice>,
    triple_faults: u64,
    /// How many files were open before there was this VM.
    other_files: u64,
}

impl Vm {
    /// Gets from the host all that the guest needs, but for the terminal: first what can only be missing, last what others can
    /// see.
    ///
    /// `plan` is what [`VmConfig::plan`] made of `config`, which found all that a configuration alone can have wrong. What the
    /// guest does to its devices is told to `told`.
    ///
    /// # Errors
    ///
    /// When the host lacks something. Nothing is left behind then.
    pub fn new(config: &VmConfig, plan: &VmPlan, told: Events) -> Result<Self, Error> {
        let plans = plan.devices();
        let other_files = open_files::already_open();
        open_files::reserve(&plans, config.cpus.boot_vcpus, other_files)?;
        let kvm = Kvm::open()?;
        let vcpus = vcpus(&kvm, config.cpus.boot_vcpus)?;
        let supported = kvm.supported_cpuid()?;
        let cpuid = Template::new(&supported, vcpus.into(), kvm.has_tsc_deadline());
        let (size, bits) = (config.memory.size, cpuid::address_bits(&supported));
        let layout = Layout::new(size, bits).ok_or(Error::AddressBits { size, bits })?;
        let payload = Payload::open(&config.payload, &layout)?;
        let host = |error| Error::Host { action: "make an eventfd", error };
        let stop = Arc::new(StopSignal::new().map_err(host)?);
        let events = Arc::new(EventDevice::new(Arc::clone(stop.event())).map_err(host)?);
        let ram = GuestRam::new(&config.memory, &layout, false)?;
        let console = ConsoleEnd::open("--console", &config.console)?;
        let host = devices::Host {
            memory: ram.memory().clone(),
            apertures: Apertures { mem32: layout::MMIO32, mem64: layout.mmio64.clone() },
            console: console.as_ref().map(|end| (Arc::clone(end.device()), end.size())),
            events: told,
        };
        let devices = Devices::new(&plans, host)?;
        let serial = Console::open(&config.serial)?;
        let described = acpi::Machine { layout: &layout, vcpus, serial: serial.is_some() };
        let acpi = acpi::tables(&described, layout::ACPI);
        let running = None;
        let triple_faults = 0;
        Ok(Self {
            running,
            devices,
            serial,
            console,
            ram,
            payload,
            acpi,
            layout,
            cpuid,
            vcpus,
            kvm,
            stop,
            events,
            triple_faults,
            other_files,
        })
    }

    /// Makes the terminal the guest's, if its console is there, until the VM is dropped. Signals do not end the process any more
    /// when this is called: the terminal has to be restored.
    ///
    /// # Errors
    ///
    /// When the terminal cannot be set.
    pub fn take_terminal(&mut self) -> Result<(), Error> {
        if let Some(serial) = &mut self.serial {
            serial.take_terminal()?;
        }
        if let Some(console) = &mut self.console {
            console.take_terminal()?;
        }
        Ok(())
    }

    /// Readable when the guest has stopped or let a device go: [`Self::take_stop`] and [`Self::take_ejected`] tell which.
    pub fn event(&self) -> &EventFd {
        self.stop.event()
    }

    /// Why the guest stopped, if it has.
    pub fn take_stop(&self) -> Option<Stop> {
        self.stop.take()
    }

    /// Runs the guest from its first instruction, in memory that is zero.
    ///
    /// # Errors
    ///
    /// When the payload cannot be read, or KVM fails. The guest does not run then.
    pub fn power_on(&mut self) -> Result<(), Error> {
        let entry = self.payload.load(&self.ram.memory().memory(), &self.layout, &self.acpi)?;
        let powered = self.power()?;
        let vcpus = self.vcpus(&powered.vm, entry)?;
        let machine = Arc::new(cpu::Machine {
            mmio: Arc::clone(self.devices.bus()) as _,
            ports: Ports::new(self.serial.as_ref().map(|serial| Arc::clone(serial.port())), Arc::clone(&self.events)),
            stop: Arc::clone(&self.stop),
        });
        self.running = Some(Running { vcpus: Vcpus::start(vcpus, &machine)?, _powered: powered, paused: false });
        Ok(())
    }

    /// Starts the guest again, with the devices that it has now.
    ///
    /// # Errors
    ///
    /// As [`Self::power_on`]. The guest does not run then.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.running = None;
        // Another vCPU may have said something until it was stopped.
        self.stop.take();
        self.ram.clear()?;
        self.power_on()
    }

    /// Starts the guest again after a triple fault, which may be how it reboots, and may go on for ever: the 1st, 2nd, 4th, 8th
    /// and so on are told of.
    ///
    /// # Errors
    ///
    /// As [`Self::reset`].
    pub fn reset_after_triple_fault(&mut self) -> Result<(), Error> {
        self.triple_faults += 1;
        let triple_faults = self.triple_faults;
        if triple_faults.is_power_of_two() {
            log::warn!(
                "the guest starts again after a triple fault (number {triple_faults}); if it never comes up, see what it says \
                 last: --serial tty --cmdline \"console=ttyS0 earlyprintk=ttyS0\""
            );
        }
        self.reset()
    }

    /// Whether the guest stands still between [`Self::pause`] and [`Self::resume`].
    pub fn is_paused(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.paused)
    }

    /// Stops the guest and its devices where they are.
    pub fn pause(&mut self) {
        if let Some(running) = &mut self.running
            && !running.paused
        {
            running.vcpus.pause();
            self.devices.pause();
            running.paused = true;
        }
    }

    /// Lets the guest and its devices go on.
    pub fn resume(&mut self) {
        if let Some(running) = &mut self.running
            && running.paused
        {
            self.devices.resume();
            running.vcpus.resume();
            running.paused = false;
        }
    }

    /// Gives each vCPU a non-maskable interrupt.
    pub fn nmi(&self) {
        if let Some(running) = &self.running {
            running.vcpus.nmi();
        }
    }

    /// Asks the guest to switch itself off.
    pub fn press_power_button(&self) {
        self.events.press_power_button();
    }

    /// The pseudo-terminals of the serial port and of the virtio console, where they have one.
    pub fn ptys(&self) -> [Option<&Path>; 2] {
        let serial = self.serial.as_ref().and_then(|serial| serial.end().device().pty());
        [serial, self.console.as_ref().and_then(|end| end.device().pty())]
    }

    /// The devices.
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Adds a device to the running guest, tells the guest, and returns where its own function is.
    ///
    /// # Errors
    ///
    /// When it cannot be. Nothing is left of it then.
    pub fn add(&mut self, plan: &DevicePlan) -> Result<Rid, Error> {
        // What VFs will need that their guest has not enabled yet must be left for them.
        let plans = self.devices.iter().map(Plugged::plan).chain([plan]);
        open_files::reserve(plans, self.vcpus.into(), self.other_files)?;
        let rid = self.devices.add(plan)?;
        self.events.plugged(rid.device());
        Ok(rid)
    }

    /// Asks the guest to let the device called `id` go.
    pub fn unplug(&mut self, id: &str) {
        if let Some(slot) = self.devices.unplug(id) {
            self.events.unplug(slot);
        }
    }

    /// Removes the devices that the guest has let go, and returns their names and addresses.
    pub fn take_ejected(&mut self) -> Vec<devices::Removed> {
        let slots = self.events.take_ejected();
        (0..32).filter(|slot| slots >> slot & 1 != 0).filter_map(|slot| self.devices.remove(slot)).collect()
    }

    /// Removes the devices that the guest was asked to let go, whether it has or not: nobody uses them any more.
    pub fn remove_unplugged(&mut self) -> Vec<devices::Removed> {
        self.running = None;
        self.devices.remove_unplugged()
    }

    /// The vCPUs of `vm`, the first of which is to start at `entry`, and the others when that one wakes them.
    fn vcpus(&self, vm: &kvm::Vm, entry: Entry) -> Result<Vec<Vcpu>, Error> {
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

    /// A KVM VM with the machine's memory and devices.
    fn power(&self) -> Result<Powered, Error> {
        let vm = Arc::new(self.kvm.create_vm(layout::KVM_TSS)?);
        for (slot, region) in (0..).zip(self.ram.memory().memory().iter()) {
            // SAFETY: the region is a mapping of guest memory, of which nobody makes references; `self` keeps it mapped for
            // longer than this VM and its vCPUs last.
            unsafe { vm.set_memory(slot, region.start_addr().0, region.as_ptr(), region.len())? };
        }
        let serial = self.serial.as_ref().map(|serial| Arc::clone(serial.port()));
        let wire = |what, eventfd, gsi| {
            vm.attach_irqfd(eventfd, gsi).map_err(|error| kvm::Error::Ioctl { action: what, error })
        };
        wire("wire the event device's interrupt", self.events.interrupt(), layout::EVENT_GSI)?;
        if let Some(serial) = &serial {
            wire("wire the serial port's interrupt", serial.interrupt(), layout::SERIAL_GSI)?;
        }
        // From here on dropping it detaches the devices, also when they cannot be attached.
        let powered = Powered { vm, bus: Arc::clone(self.devices.bus()), serial, events: Arc::clone(&self.events) };
        self.devices.attach(Arc::clone(&powered.vm))?;
        Ok(powered)
    }
}

/// How many vCPUs there are, if this host can run so many.
fn vcpus(kvm: &Kvm, requested: u32) -> Result<u8, Error> {
    let limit = kvm.max_vcpus().min(cpuid::MAX_VCPUS);
    let possible = u8::try_from(requested).ok().filter(|vcpus| u32::from(*vcpus) <= limit && *vcpus > 0);
    Ok(possible.ok_or(kvm::Error::Vcpus { requested, limit })?)
}

/// A guest that runs, or stands still. Dropping it ends it.
struct Running {
    // The vCPUs end before their VM.
    vcpus: Vcpus,
    _powered: Powered,
    paused: bool,
}

/// A KVM VM with the machine's memory and devices, until it is dropped.
struct Powered {
    vm: Arc<kvm::Vm>,
    bus: Arc<Bus>,
    serial: Option<Arc<SerialPort>>,
    events: Arc<EventDevice>,
}

impl Drop for Powered {
    fn drop(&mut self) {
        self.bus.detach();
        // The VM goes in a moment, and its wires with it.
        let _ = self.vm.detach_irqfd(self.events.interrupt(), layout::EVENT_GSI);
        self.events.reset();
        if let Some(serial) = &self.serial {
            let _ = self.vm.detach_irqfd(serial.interrupt(), layout::SERIAL_GSI);
            serial.reset();
        }
    }
}
