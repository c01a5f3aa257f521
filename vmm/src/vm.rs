//! A booted VM, from power-on to power-off.
//!
//! Host resources (files, memory, terminal, taps) are acquired once and kept as long as the [`Vm`] lives. The KVM VM
//! lives from one power-on or reset to the next: a reboot creates a new one, so that no state of the old guest remains.

mod addresses;
mod announcing;
pub mod boot;
mod consoles;
mod error;
mod hardware;
pub(crate) mod host_limits;
mod hotplug;
pub mod memory;
mod memory_size;
mod numa;
mod open_files;
mod origin;
mod pause;
mod plug_slots;
mod power;
mod powered;
mod reclaiming;
mod saved;
mod taken;
mod threads_needed;
mod watchdog;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_devices::{BalloonSize, Cancel, ChannelEnd, Iommu, Memory};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::EventFd;

use crate::acpi::ged::GenericEventDevice;
use crate::acpi::tables;
use crate::acpi::vcpu_hotplug::VcpuHotplug;
use crate::arch::x86_64::amx;
use crate::arch::x86_64::cpuid::{self, Template};
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::legacy::LegacyHardware;
use crate::arch::x86_64::mp_table;
use crate::arch::x86_64::topology::Topology;
use crate::config::numa::NumaNode;
use crate::config::{ConsoleMode, CpusConfig, MemoryConfig, PayloadConfig, VmConfig, VmPlan};
use crate::devices::mem_regions::MemRegions;
use crate::devices::places::{self, Place};
use crate::devices::{self, DeviceError, Devices};
use crate::exits::MmioHandler;
use crate::firmware::FirmwarePorts;
use crate::kvm::{Kvm, KvmError};
use crate::lazy_memory::page_faults::{PageFaults, Progress};
use crate::machine_state::clock::ClockState;
use crate::pci_host::memory_slots::plugged;
use crate::pci_layout::{RootBus, Weights};
use crate::serial::SerialConsole;
use crate::serial::debug::DebugConsole;
use crate::serial::end::ConsoleEnd;
use crate::telemetry::events::Events;
use crate::tpm::Tpm;
use crate::vcpu::cpu::{self, Stop, StopSignal, Vcpus};
use crate::vcpu::pio::IoPorts;
use crate::vcpu::placement::Placement;
use crate::vfio::VfioHost;
use crate::vm::addresses::{apertures, layout_of};
use crate::vm::announcing::{Announcing, Round};
use crate::vm::boot::Payload;
pub use crate::vm::error::VmError;
use crate::vm::host_limits::HostLimits;
use crate::vm::memory::GuestRam;
pub(crate) use crate::vm::origin::{Origin, Passed};
use crate::vm::powered::Powered;
use crate::vm::reclaiming::Reclaiming;
#[cfg(test)]
pub(crate) use crate::vm::saved::guest::elf;

/// A booted VM with its host resources. Dropping it ends the guest and releases everything that was opened or created.
pub struct Vm {
    // Drop order: the guest ends before its devices, and the devices before the memory that they use.
    running: Option<Running>,
    devices: Devices,
    serial: Option<SerialConsole>,
    console: Option<ConsoleEnd>,
    debug_console: Option<DebugConsole>,
    tpm: Option<Tpm>,
    balloon: Arc<BalloonSize>,
    channel: Option<Arc<ChannelEnd>>,
    mem_regions: MemRegions,
    ram: GuestRam,
    /// Payload to boot; `None` in a restored VM whose payload could not be opened.
    payload: Option<Payload>,
    /// Place of the payload.
    payload_config: PayloadConfig,
    /// True for firmware.
    is_firmware: bool,
    /// The hardware of older PCs that the guest has.
    legacy: LegacyHardware,
    /// True if each guest gets all of the legacy hardware.
    has_all_legacy: bool,
    smbios: Vec<u8>,
    layout: Layout,
    /// The guest's memory; its size is that of the next start.
    memory: MemoryConfig,
    /// The guest's physical address bits.
    address_bits: u8,
    /// Weight of each PCI segment in the addresses.
    segments: Vec<Weights>,
    /// The NUMA nodes.
    numa: Vec<NumaNode>,
    cpuid: Template,
    /// The vCPUs as configured.
    cpus: CpusConfig,
    placement: Arc<Placement>,
    /// The number of vCPUs, now and after a reboot.
    vcpus: u8,
    max_vcpus: u8,
    kvm: Kvm,
    stop: Arc<StopSignal>,
    ged: Arc<GenericEventDevice>,
    triple_faults: u64,
    /// The announcements that are pending since the guest resumed at a new place.
    announcing: Option<Announcing>,
    reclaiming: Reclaiming,
    /// True while a host device may be pinning the guest's memory before it is plugged in.
    is_being_pinned: bool,
    /// Limits of open files, threads and memory mappings.
    limits: HostLimits,
}

impl Vm {
    /// Acquires all host resources of the VM except the terminal: first those that can only be missing, last those that
    /// others can see.
    ///
    /// `plan` is that of `config` ([`VmPlan::of`]), which found every mistake in the configuration alone. What the
    /// guest does to its devices is reported to `events`. `limits` are those of the host for this process. `cancel`
    /// ends the wait for vhost-user backends.
    ///
    /// # Errors
    ///
    /// Fails if the host lacks something. Everything is released then.
    pub fn new(
        config: &VmConfig,
        plan: &VmPlan,
        events: Events,
        limits: HostLimits,
        cancel: Option<&Cancel>,
    ) -> Result<Self, VmError> {
        let payload = |layout: &Layout| Payload::open(&config.payload, layout).map(Some);
        let places = places::of_new(&plan.devices);
        let (roots, origin) = (plan.roots_in_use(), Origin::Snapshot(None));
        let parts = Parts { payload: &payload, places: &places, roots, regions: &[], origin };
        Self::with(config, plan, parts, events, limits, cancel)
    }

    /// A VM of these parts.
    fn with(
        config: &VmConfig,
        plan: &VmPlan,
        parts: Parts<'_>,
        events: Events,
        limits: HostLimits,
        cancel: Option<&Cancel>,
    ) -> Result<Self, VmError> {
        limits.reserve(&plan.devices, config.cpus.max_vcpus)?;
        limits.excess(config.memory.wanted()).iter().for_each(|line| log::warn!("{line}"));
        let kvm = Kvm::open()?;
        let (vcpus, max_vcpus) = vcpus(&kvm, &config.cpus)?;
        if config.cpus.features.amx {
            amx::allow().map_err(|error| VmError::Amx(Some(error)))?;
        }
        if config.cpus.kvm_hyperv && !kvm.has_hyperv() {
            return Err(VmError::HyperV);
        }
        let supported = kvm.supported_cpuid()?;
        if config.cpus.features.amx && !cpuid::has_amx(&supported) {
            return Err(VmError::Amx(None));
        }
        let features = cpuid::Features::of(&config.cpus, &supported, kvm.has_tsc_deadline());
        let cpuid = Template::new(&supported, &features);
        let address_bits = features.address_bits;
        let layout = layout_of(&config.memory, address_bits)?;
        let payload = (parts.payload)(&layout)?;
        let host = |error| VmError::Host { action: "make an eventfd", error };
        let stop = Arc::new(StopSignal::new().map_err(host)?);
        let ged = Arc::new(GenericEventDevice::new(Arc::clone(stop.event())).map_err(host)?);
        let ram = GuestRam::of(&config.memory, &layout, plan.needs_shared_memory(), parts.origin.image())?;
        for region in parts.regions {
            ram.set(ram.grown_of(region, parts.origin.image())?);
        }
        let shared = [&config.serial, &config.console].map(|console| console.mode) == [ConsoleMode::Tty; 2];
        if shared {
            log::warn!(
                "the serial port and the virtio console share this terminal, and the serial port reads it; give \
                 --console off or --serial off, or another mode"
            );
        }
        let sockets = parts.origin.sockets();
        let console = ConsoleEnd::open_with("--console", &config.console, !shared, &sockets)?;
        let balloon = Arc::<BalloonSize>::default();
        let channel = plan.has_channel().then(ChannelEnd::new).transpose().map_err(host)?.map(Arc::new);
        let slots = plugged(kvm.memory_slots()).len();
        let mem_regions = memory::places::regions(&config.memory, &layout, slots);
        let host = devices::HostResources {
            memory: ram.memory().clone(),
            apertures: apertures(&layout, &plan.segments),
            roots: parts.roots,
            console: console.as_ref().map(|end| (Arc::clone(end.device()), end.window().cloned())),
            balloon: Arc::clone(&balloon),
            channel: channel.clone(),
            expiry: watchdog::expiry(Arc::clone(&stop)),
            mem_regions: mem_regions.clone(),
            events,
            limit_groups: devices::LimitGroups::default(),
            locks_later: parts.origin.is_running(),
            sockets: Arc::clone(&sockets),
            iommu: plan.iommu().map(|spec| Iommu::new(spec.address_width)),
            vfio: Arc::new(VfioHost::new(config.platform.as_ref().is_none_or(|platform| platform.vfio_p2p_dma))),
        };
        let devices = Devices::new(&plan.devices, parts.places, host, parts.origin.taps(), cancel)?;
        let serial = SerialConsole::open_with(&config.serial, &sockets)?;
        let debug_console = DebugConsole::open(&config.debug_console)?;
        let tpm = config.tpm.as_ref().map(|tpm| Tpm::open(&tpm.socket)).transpose()?;
        let running = None;
        let triple_faults = 0;
        let reclaiming = Reclaiming::begin(mem_regions.all().count());
        let vm = Self {
            running,
            devices,
            serial,
            console,
            debug_console,
            tpm,
            balloon,
            channel,
            mem_regions,
            ram,
            is_firmware: payload.as_ref().is_some_and(Payload::is_firmware),
            payload,
            payload_config: config.payload.clone(),
            legacy: LegacyHardware::NONE,
            has_all_legacy: config.platform.as_ref().is_some_and(|platform| platform.legacy_hardware),
            smbios: plan.smbios.clone(),
            layout,
            memory: config.memory.clone(),
            address_bits,
            segments: plan.segments.clone(),
            numa: plan.numa.clone(),
            cpuid,
            cpus: config.cpus.clone(),
            placement: Arc::new(Placement::of(&config.cpus)),
            vcpus,
            max_vcpus,
            kvm,
            stop,
            ged,
            triple_faults,
            announcing: None,
            reclaiming,
            is_being_pinned: false,
            limits,
        };
        vm.keep_pages();
        for (option, pty) in ["--serial", "--console", "--debug-console"].into_iter().zip(vm.ptys()) {
            if let Some(pty) = pty {
                log::info!("{option} pty: {}", pty.display());
            }
        }
        Ok(vm)
    }

    /// Readable when the guest has stopped or released a device: see [`Self::take_stop`] and [`Self::take_ejected`].
    pub fn event(&self) -> &EventFd {
        self.stop.event()
    }

    /// The host's end of the guest's channel, if it has one.
    pub(crate) const fn channel(&self) -> Option<&Arc<ChannelEnd>> {
        self.channel.as_ref()
    }

    /// Reason why the guest stopped, if it has.
    pub fn take_stop(&self) -> Option<Stop> {
        self.stop.take()
    }

    /// Boots the guest. Its memory must be zero.
    ///
    /// # Errors
    ///
    /// Fails if the payload cannot be read, or KVM fails. The guest does not run then.
    pub fn power_on(&mut self) -> Result<(), VmError> {
        // Devices hold their storage locks, unless a migration gave them up.
        self.storage_locks().take().map_err(DeviceError::from)?;
        self.open_payload()?;
        let viot = self.devices.viot();
        let hardware = tables::Hardware {
            apertures: self.devices.apertures(),
            roots: self.devices.roots(),
            vcpus: self.vcpus,
            max_vcpus: self.max_vcpus,
            topology: Topology::of(&self.cpus),
            has_pptt: self.cpus.topology.is_some(),
            memory_slots: self.memory.room().is_some(),
            serial: self.serial.is_some(),
            numa: &numa::nodes(&self.numa, &self.memory, &self.layout, &self.devices),
            tpm: self.tpm.is_some(),
            viot: viot.as_ref(),
            legacy: self.legacy,
        };
        let acpi = tables::tables(&hardware, layout::ACPI);
        let memory = self.ram.memory().memory();
        let payload = self.payload.as_ref().ok_or(boot::BootError::NoKernel)?;
        let mp = self.legacy.mp_table.then(|| mp_table::tables(&self.processors()));
        let tables = boot::Tables { acpi: &acpi, smbios: &self.smbios, mp: mp.as_ref() };
        let entry = payload.load(&memory, &self.layout, &tables)?;
        self.ged.with_vcpus(|hotplug| *hotplug = VcpuHotplug::new(self.vcpus, self.max_vcpus));
        let powered = self.power()?;
        let vcpus = self.vcpus(&powered.vm, entry)?;
        let firmware = self.firmware_ports();
        let handlers = self.exit_handlers(firmware.as_ref());
        let vcpus = Vcpus::start(vcpus, &handlers, &self.placement)?;
        self.running = Some(Running { vcpus, powered, paused: false, firmware, restored: None });
        Ok(())
    }

    /// Handlers of the exits of vCPUs.
    fn exit_handlers(&self, firmware: Option<&FirmwarePorts>) -> Arc<cpu::ExitHandlers> {
        let (mmio, ports) = (self.mmio(), self.ports(firmware));
        Arc::new(cpu::ExitHandlers { mmio, ports, stop: Arc::clone(&self.stop) })
    }

    /// Handler of addresses that are not memory.
    fn mmio(&self) -> Arc<dyn MmioHandler> {
        let bus = Arc::clone(self.devices.bus()) as _;
        match &self.tpm {
            Some(tpm) => tpm.over(bus),
            None => bus,
        }
    }

    /// The I/O ports.
    fn ports(&self, firmware: Option<&FirmwarePorts>) -> IoPorts {
        let serial = self.serial.as_ref().map(|serial| Arc::clone(serial.port()));
        let ports = IoPorts::new(serial, Arc::clone(&self.ged));
        let debug = self.debug_console.as_ref().map(DebugConsole::device);
        ports.with_devices(firmware.into_iter().flat_map(FirmwarePorts::devices).chain(debug))
    }

    /// Reboots the guest with its current devices.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::power_on`] does. The guest does not run then.
    pub fn reset(&mut self) -> Result<(), VmError> {
        self.end_guest();
        // Another vCPU may have reported a stop in the meantime.
        self.stop.take();
        self.tpm.iter().for_each(Tpm::reset);
        self.ram.forget_filling();
        self.settle_memory();
        self.mem_regions.unplug_all();
        self.ram.clear(self.pins_memory())?;
        self.power_on()
    }

    /// Reboots the guest after a triple fault. Some guests reboot that way, and some loop forever, so only the 1st,
    /// 2nd, 4th, 8th... are logged.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::reset`] does.
    pub fn reset_after_triple_fault(&mut self) -> Result<(), VmError> {
        self.triple_faults += 1;
        let triple_faults = self.triple_faults;
        if triple_faults.is_power_of_two() {
            log::warn!(
                "vm: the guest reboots after a triple fault (number {triple_faults}); if it never comes up, look at \
                 its last output: {}",
                self.way_to_output()
            );
        }
        self.reset()
    }

    /// Time until addresses must be announced again ([`Self::announce`]), if they must.
    pub(crate) fn wait_to_announce(&self) -> Option<Duration> {
        self.announcing.as_ref()?.wait(Instant::now())
    }

    /// Announces addresses once more, if that is due.
    pub(crate) fn announce(&mut self) {
        let Some(announcing) = &mut self.announcing else { return };
        let due = announcing.take(Instant::now(), |function| self.devices.is_link_up(function));
        if let Some(Round { is_for_all, late }) = due {
            if is_for_all {
                self.devices.announce_again();
            }
            late.iter().for_each(|function| self.devices.announce_function(function));
        }
    }

    /// Sends each vCPU a non-maskable interrupt.
    pub fn nmi(&self) {
        if let Some(running) = &self.running {
            running.vcpus.nmi();
        }
    }

    /// Interrupts the guest again if it has not read its pending ACPI events: its driver may not have been up. Returns
    /// true if there are unread events.
    pub fn remind_guest(&self) -> bool {
        self.running.is_some() && self.ged.remind()
    }

    /// Asks the guest to power off.
    pub fn press_power_button(&self) {
        self.ged.press_power_button();
    }

    /// Size of the balloon; 0 without a balloon.
    pub fn balloon(&self) -> &BalloonSize {
        &self.balloon
    }

    /// Memory that the drivers of memory devices have plugged, in bytes.
    pub fn plugged_memory(&self) -> u64 {
        self.mem_regions.plugged()
    }

    /// The devices.
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// The guest's memory.
    pub(crate) fn memory(&self) -> &Memory {
        self.ram.memory()
    }

    /// Starts to fill the guest's memory from `faults`, until it is full or the VM is dropped.
    pub(crate) fn fill_by(&mut self, faults: PageFaults) {
        self.ram.fill_by(faults);
    }

    /// Progress of the filler of the guest's memory, if there is one.
    pub(crate) fn filling(&self) -> Option<&Arc<Progress>> {
        self.ram.filling()
    }

    /// Allocates all of the guest's memory, except that of memory devices.
    ///
    /// # Errors
    ///
    /// Fails if the host has too little memory.
    pub(crate) fn populate(&self) -> io::Result<()> {
        self.ram.populate()
    }

    /// The guest's memory, if it is shared, so that devices can be added that need this.
    pub(crate) fn shared_memory(&self) -> Option<&Memory> {
        self.ram.is_shared().then(|| self.ram.memory())
    }

    /// Ends the guest, running or paused. Its devices are reset, and not paused, so that the next guest's queues run.
    fn end_guest(&mut self) {
        let paused = self.is_paused();
        self.quit();
        self.running = None;
        if paused && let Err(error) = self.devices.resume() {
            // The devices have been reset, and no queue may run.
            log::warn!("{error}");
        }
    }
}

impl Vm {
    /// Requests the end of the guest without waiting. From now on no vCPU or worker waits for memory that cannot be
    /// read: waiting for that thread would never end.
    fn quit(&self) {
        self.running.iter().for_each(|running| running.vcpus.quit());
        self.ram.give_up_on_failure();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.quit();
    }
}

/// The number of vCPUs at boot and the maximum, if this host can run that many.
fn vcpus(kvm: &Kvm, cpus: &CpusConfig) -> Result<(u8, u8), VmError> {
    let limit = kvm.max_vcpus().min(cpuid::MAX_VCPUS);
    let possible = |key, requested| {
        let possible = u8::try_from(requested).ok().filter(|vcpus| u32::from(*vcpus) <= limit && *vcpus > 0);
        possible.ok_or(KvmError::Vcpus { key, requested, limit })
    };
    Ok((possible("boot", cpus.boot_vcpus)?, possible("max", cpus.max_vcpus)?))
}

/// A running or paused guest. Dropping it ends the guest.
struct Running {
    // Drop order: the vCPUs end before their VM.
    vcpus: Vcpus,
    powered: Powered,
    paused: bool,
    /// The ports of older PCs, if there are any.
    firmware: Option<FirmwarePorts>,
    /// Clock of the guest when it was saved, until it runs again.
    restored: Option<ClockState>,
}

/// Parts of a VM that may be new or kept.
struct Parts<'p> {
    /// Opens the payload.
    payload: &'p dyn Fn(&Layout) -> Result<Option<Payload>, boot::BootError>,
    /// Places of the devices.
    places: &'p [Place],
    /// Further root buses of segment 0.
    roots: Vec<RootBus>,
    /// Memory that was added while the guest ran.
    regions: &'p [Range<u64>],
    /// Origin of the memory and the disks.
    origin: Origin<'p>,
}
