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
use crate::config::{CpusConfig, DevicePlan, VmConfig, VmPlan};
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
use crate::processors::{Change, Processors};

/// A virtual machine with all that it has from the host. Dropping it ends it: whatever was opened or created is closed and gone.
pub struct Vm {
    // Dropped in this order: the guest ends before its devices, and devices end before the memory that they use.
    running: Option<Running>,
    devices: Devices,
    serial: Option<Console>,
    console: Option<ConsoleEnd>,
    ram: GuestRam,
    payload: Payload,
    layout: Layout,
    cpuid: Template,
    /// How many there should be, now and when the guest starts again.
    vcpus: u8,
    max_vcpus: u8,
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
        open_files::reserve(&plans, config.cpus.max_vcpus, other_files)?;
        let kvm = Kvm::open()?;
        let (vcpus, max_vcpus) = vcpus(&kvm, &config.cpus)?;
        let supported = kvm.supported_cpuid()?;
        let cpuid = Template::new(&supported, max_vcpus.into(), kvm.has_tsc_deadline());
        let (size, bits) = (config.memory.size, cpuid::address_bits(&supported));
        let layout = Layout::new(size, bits).ok_or(Error::AddressBits { size, bits })?;
        let payload = Payload::open(&config.payload, &layout)?;
        let host = |error| Error::Host { action: "make an eventfd", error };
        let stop = Arc::new(StopSignal::new().map_err(host)?);
        let events = Arc::new(EventDevice::new(Arc::clone(stop.event())).map_err(host)?);
        let ram = GuestRam::new(&config.memory, &layout, plan.needs_shared_memory())?;
        let console = ConsoleEnd::open("--console", &config.console)?;
        let host = devices::Host {
            memory: ram.memory().clone(),
            apertures: Apertures { mem32: layout::MMIO32, mem64: layout.mmio64.clone() },
            console: console.as_ref().map(|end| (Arc::clone(end.device()), end.window().cloned())),
            events: told,
        };
        let devices = Devices::new(&plans, host)?;
        let serial = Console::open(&config.serial)?;
        let running = None;
        let triple_faults = 0;
        let vm = Self {
            running,
            devices,
            serial,
            console,
            ram,
            payload,
            layout,
            cpuid,
            vcpus,
            max_vcpus,
            kvm,
            stop,
            events,
            triple_faults,
            other_files,
        };
        for (option, pty) in ["--serial", "--console"].into_iter().zip(vm.ptys()) {
            if let Some(pty) = pty {
                log::info!("{option} pty: it is {}", pty.display());
            }
        }
        Ok(vm)
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
        let Self { layout, vcpus, max_vcpus, .. } = self;
        let machine = acpi::Machine { layout, vcpus: *vcpus, max_vcpus: *max_vcpus, serial: self.serial.is_some() };
        let acpi = acpi::tables(&machine, layout::ACPI);
        let entry = self.payload.load(&self.ram.memory().memory(), layout, &acpi)?;
        self.events.with_processors(|processors| *processors = Processors::new(*vcpus, *max_vcpus));
        let powered = self.power()?;
        let vcpus = self.vcpus(&powered.vm, entry)?;
        let machine = Arc::new(cpu::Machine {
            mmio: Arc::clone(self.devices.bus()) as _,
            ports: Ports::new(self.serial.as_ref().map(|serial| Arc::clone(serial.port())), Arc::clone(&self.events)),
            stop: Arc::clone(&self.stop),
        });
        self.running = Some(Running { vcpus: Vcpus::start(vcpus, &machine)?, powered, paused: false });
        Ok(())
    }

    /// Starts the guest again, with the devices that it has now.
    ///
    /// # Errors
    ///
    /// As [`Self::power_on`]. The guest does not run then.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.end_guest();
        // Another vCPU may have said something until it was stopped.
        self.stop.take();
        self.ram.clear(self.devices.pin_memory())?;
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

    /// Interrupts the guest once more if it has not read yet what it was told last: its driver may not have been up. Returns whether
    /// that is so.
    pub fn remind_guest(&self) -> bool {
        self.running.is_some() && self.events.remind()
    }

    /// Asks the guest to switch itself off.
    pub fn press_power_button(&self) {
        self.events.press_power_button();
    }

    /// Tells the guest the size of the terminal that its virtio console is shown in, if it is shown in one.
    pub fn follow_terminal(&self) {
        self.console.iter().for_each(ConsoleEnd::follow_size);
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
        if !self.ram.is_shared() && plan.nics().any(|nic| nic.backend.needs_shared_memory()) {
            return Err(Error::PrivateMemory { option: plan.option() });
        }
        // What VFs will need that their guest has not enabled yet must be left for them.
        let plans = self.devices.iter().map(Plugged::plan).chain([plan]);
        open_files::reserve(plans, self.max_vcpus.into(), self.other_files)?;
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

    /// Gives the guest `vcpus` vCPUs, at least 1 and no more than there can be, or asks it to let some go. It has so many when it
    /// starts again, too.
    ///
    /// # Errors
    ///
    /// When vCPUs should come while the guest has not answered for one that should go, or the host cannot run more. It has those that
    /// it had then.
    pub fn resize(&mut self, vcpus: u8) -> Result<(), Error> {
        self.stop_ejected();
        match self.events.with_processors(|processors| processors.resize(vcpus)) {
            Change::Asked => {}
            Change::Add(ids) => self.add_vcpus(&ids)?,
            Change::Unanswered(vcpu) => return Err(Error::VcpuLeaving { vcpu }),
        }
        self.vcpus = vcpus;
        Ok(())
    }

    /// Runs the vCPUs `ids`, which do not run, and tells the guest. KVM's are made when they are first needed, and then kept.
    fn add_vcpus(&mut self, ids: &[u8]) -> Result<(), Error> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        let added = self.run_vcpus(&mut running, ids);
        if added.is_err() {
            ids.iter().for_each(|id| running.vcpus.remove((*id).into()));
        }
        self.running = Some(running);
        added?;
        self.events.with_processors(|processors| ids.iter().for_each(|id| processors.add(*id)));
        Ok(())
    }

    fn run_vcpus(&self, running: &mut Running, ids: &[u8]) -> Result<(), Error> {
        for id in ids.iter().copied().map(u32::from) {
            if !running.vcpus.has(id) {
                running.vcpus.keep(id, self.vcpu(&running.powered.vm, id)?);
            }
            running.vcpus.add(id)?;
        }
        Ok(())
    }

    /// Stops the vCPUs that the guest has let go.
    fn stop_ejected(&mut self) {
        let ejected = self.events.with_processors(Processors::take_ejected);
        if let Some(running) = &mut self.running {
            ejected.for_each(|id| running.vcpus.remove(id.into()));
        }
    }

    /// Stops the vCPUs and removes the devices that the guest has let go, and returns the devices' names and addresses.
    pub fn take_ejected(&mut self) -> Vec<devices::Removed> {
        self.stop_ejected();
        let slots = self.events.take_ejected();
        (0..32).filter(|slot| slots >> slot & 1 != 0).filter_map(|slot| self.devices.remove(slot)).collect()
    }

    /// Removes the devices that the guest was asked to let go, whether it has or not: nobody uses them any more.
    pub fn remove_unplugged(&mut self) -> Vec<devices::Removed> {
        self.end_guest();
        self.devices.remove_unplugged()
    }

    /// Ends the guest, whether it runs or stands still. Its devices are in their state of power-on then, and not paused: the next
    /// guest's queues run.
    fn end_guest(&mut self) {
        let paused = self.is_paused();
        self.running = None;
        if paused {
            self.devices.resume();
        }
    }

    /// The vCPUs of `vm`, the first of which is to start at `entry`, and the others when that one wakes them.
    fn vcpus(&self, vm: &kvm::Vm, entry: Entry) -> Result<Vec<Vcpu>, Error> {
        (0..u32::from(self.vcpus))
            .map(|id| {
                let vcpu = self.vcpu(vm, id)?;
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

    /// vCPU `id` of `vm` as at power-on.
    fn vcpu(&self, vm: &kvm::Vm, id: u32) -> Result<Vcpu, Error> {
        let msrs = regs::msrs().ok_or(kvm::Error::Capability("room for two MSRs"))?;
        let vcpu = vm.create_vcpu(id)?;
        let cpuid = self.cpuid.vcpu(id).ok_or(kvm::Error::Capability("room for its own CPUID leaves"))?;
        vcpu.set_cpuid(&cpuid)?;
        vcpu.set_msrs(&msrs)?;
        Ok(vcpu)
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

/// How many vCPUs there are and can be, if this host can run so many.
fn vcpus(kvm: &Kvm, cpus: &CpusConfig) -> Result<(u8, u8), Error> {
    let limit = kvm.max_vcpus().min(cpuid::MAX_VCPUS);
    let possible = |key, requested| {
        let possible = u8::try_from(requested).ok().filter(|vcpus| u32::from(*vcpus) <= limit && *vcpus > 0);
        possible.ok_or(kvm::Error::Vcpus { key, requested, limit })
    };
    Ok((possible("boot", cpus.boot_vcpus)?, possible("max", cpus.max_vcpus)?))
}

/// A guest that runs, or stands still. Dropping it ends it.
struct Running {
    // The vCPUs end before their VM.
    vcpus: Vcpus,
    powered: Powered,
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
