//! Saving a machine, and restoring one from a saved state.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_devices::{BackendKind, Cancel, HexBytes, MemoryUser};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use crate::acpi::memory_hotplug::SLOTS;
use crate::arch::x86_64::cpuid::Template;
use crate::arch::x86_64::layout::LAST_BUS;
use crate::arch::x86_64::legacy::LegacyHardware;
use crate::arch::x86_64::topology::Topology;
use crate::config::root_buses::RootBuses;
use crate::config::{VmConfig, VmPlan, bytes};
use crate::devices::saved::places;
use crate::dirty::{Backends, DirtySource, OwnThreads, StoppedBackends, Vcpus as VcpuWrites};
use crate::firmware::{FirmwarePorts, LegacyState};
use crate::kvm::{self, KvmError, Vcpu};
use crate::machine_state::clock::{ClockState, NoFrequency};
use crate::machine_state::compatibility::{CpuidLeaf, Incompatible, MAX_LEAVES, check};
use crate::machine_state::error::{RestoreError, SaveError};
use crate::machine_state::guest_options;
use crate::machine_state::irqchip::IrqchipState;
use crate::machine_state::output::ConsolesState;
use crate::machine_state::vcpu_state::{Extent, VcpuState};
use crate::machine_state::version::{MACHINE_STATE_VERSION, is_read};
use crate::machine_state::{LayoutState, MachineState, StopState};
use crate::pci_host::memory_slots::LAST_MEMORY;
use crate::pci_layout::RootBus;
use crate::telemetry::events::Events;
use crate::vcpu::cpu::{Stop, Vcpus};
use crate::vm::boot::Payload;
use crate::vm::host_limits::HostLimits;
use crate::vm::{Origin, Parts, Running, Vm, VmError};

/// Time that workers may take that are already ending.
const ENDING: Duration = Duration::from_secs(1);

impl Vm {
    /// The state of the paused machine, except its memory and its configuration. Its vCPUs have finished their accesses
    /// and its devices' workers have ended, so no operation is in progress.
    ///
    /// # Errors
    ///
    /// Fails if the machine is not paused, or a part of it cannot be saved. It can be resumed in any case.
    pub fn save_machine(&self) -> Result<MachineState, SaveError> {
        let running = self.running.as_ref().filter(|running| running.paused).ok_or(SaveError::NotPaused)?;
        if self.tpm.is_some() {
            let why = "what the guest has stored in it is with swtpm, and cannot be saved; leave it out";
            return Err(SaveError::Refused { option: "--tpm".to_string(), why });
        }
        let unstopped = self.devices.memory_users().unstopped(Instant::now() + ENDING);
        if let Some(option) = unstopped.into_iter().next() {
            let why = "its backend did not stop when it was asked to, and may still write to the guest's memory; try \
                       again once it is back, or restart it";
            return Err(SaveError::Refused { option, why });
        }
        let devices = self.devices.save()?;
        let (clock, vcpus) = self.save_vcpus(running)?;
        // The guest has not run since it was restored, so its clock is the restored one.
        let clock = running.restored.clone().unwrap_or(clock);
        let stop = self.stop.look(|stop| match stop {
            None => Ok(None),
            Some(Stop::PowerOff) => Ok(Some(StopState::PowerOff)),
            Some(Stop::Reset) => Ok(Some(StopState::Reset)),
            Some(Stop::TripleFault) => Ok(Some(StopState::TripleFault)),
            Some(Stop::Failed(_)) => Err(SaveError::Stopped),
        })?;
        let ports = running.firmware.as_ref().map(FirmwarePorts::save);
        Ok(MachineState {
            version: MACHINE_STATE_VERSION,
            layout: self.layout_state(),
            cpuid: self.cpuid.entries().iter().map(CpuidLeaf::from).collect(),
            clock,
            irqchip: IrqchipState::save(&running.powered.vm)?,
            vcpus,
            wanted_vcpus: self.vcpus,
            wanted_memory: self.memory.size,
            events: self.ged.save(),
            serial: self.serial.as_ref().map(|serial| serial.port().save()),
            consoles: self.save_consoles(),
            firmware: ports.clone().filter(|_| self.is_firmware),
            legacy: ports.filter(|_| !self.is_firmware).map(|ports| LegacyState { hardware: self.legacy, ports }),
            devices,
            empty_root_buses: self.devices.empty_root_buses(),
            stop,
            triple_faults: self.triple_faults,
            told: self.told(),
            guest_vfs: Vec::new(),
        })
    }

    /// The state of all vCPUs, and the guest's time.
    fn save_vcpus(&self, running: &Running) -> Result<(ClockState, Vec<VcpuState>), SaveError> {
        let vm = &running.powered.vm;
        let extent = Extent::new(vm.abilities(), &self.kvm.msr_indices()?, self.cpus.kvm_hyperv);
        let (kvmclock, realtime) = vm.clock()?;
        let timer = running.firmware.as_ref().map_or(Duration::ZERO, FirmwarePorts::timer);
        let pm_timer = u64::try_from(timer.as_nanos()).unwrap_or(u64::MAX);
        let mut clock = ClockState { kvmclock, realtime, tsc: 0, tsc_khz: 0, pm_timer };
        let (mut vcpus, mut first_offset) = (Vec::new(), None);
        let vcpu = |id, error| SaveError::Vcpu { vcpu: id, error };
        running.vcpus.each_paused(|id, held| {
            if first_offset.is_none() {
                (clock.tsc, clock.tsc_khz) = (held.tsc()?, held.tsc_khz()?);
            }
            let first_offset = *first_offset.get_or_insert(held.tsc_offset()?);
            // KVM has at most 254.
            let number = u8::try_from(id).unwrap_or(u8::MAX);
            vcpus.push(VcpuState::save(held, number, first_offset, &extent).map_err(|error| vcpu(id, error))?);
            Ok::<_, SaveError>(())
        })?;
        Ok((clock, vcpus))
    }

    /// The machine without its state, running or not: its addresses, its devices and their places, and what vCPUs read
    /// from CPUID. A VM can be made for it ([`Self::for_restore`]).
    pub(crate) fn outline(&self) -> MachineState {
        MachineState {
            version: MACHINE_STATE_VERSION,
            layout: self.layout_state(),
            cpuid: self.cpuid.entries().iter().map(CpuidLeaf::from).collect(),
            clock: ClockState { kvmclock: 0, realtime: None, tsc: 0, tsc_khz: 0, pm_timer: 0 },
            irqchip: IrqchipState { chips: Default::default() },
            vcpus: Vec::new(),
            wanted_vcpus: self.vcpus,
            wanted_memory: self.memory.size,
            events: self.ged.save(),
            serial: None,
            consoles: ConsolesState::default(),
            firmware: None,
            legacy: None,
            devices: self.devices.outline(),
            empty_root_buses: self.devices.empty_root_buses(),
            stop: None,
            triple_faults: self.triple_faults,
            told: self.told(),
            guest_vfs: Vec::new(),
        }
    }

    /// The guest-visible options, with their values.
    fn told(&self) -> Vec<(String, String)> {
        let told = guest_options::guest_options(&self.cpus, self.segments.len());
        told.into_iter().map(|(option, value)| (option.to_string(), value)).collect()
    }

    /// The writers to the guest's memory while it runs, each with a dirty log. Backends in `stopped` have their links
    /// down, and are stopped.
    ///
    /// # Errors
    ///
    /// Fails with the name of a writer without a dirty log.
    pub(crate) fn writers(&self, stopped: Vec<(String, MemoryUser)>) -> Result<Vec<Box<dyn DirtySource>>, String> {
        let running = self.running.as_ref().ok_or("the guest shut down")?;
        let users = self.devices.memory_users().find();
        match &Backends::without_log(&users)[..] {
            [option, ..] if stopped.is_empty() => {
                return Err(format!(
                    "{option}: what this backend writes to the guest's memory is not known, so that it cannot be \
                     copied while the guest runs; have its link taken down for that time \
                     (on_unlogged_backend=link-down), or pause the guest first (vm.pause)"
                ));
            }
            _ => {}
        }
        let memory = self.ram.memory().memory();
        let mut writers: Vec<Box<dyn DirtySource>> = Vec::new();
        if !stopped.is_empty() {
            // First in the list: what these backends wrote until they stopped is in the first pass over the memory.
            writers.push(Box::new(StoppedBackends::new(stopped)));
        }
        writers.push(Box::new(VcpuWrites::new(Arc::clone(&running.powered.vm))));
        writers.push(Box::new(OwnThreads::new(&memory)));
        for kind in [BackendKind::VhostNet, BackendKind::VhostUser] {
            if users.iter().any(|(_, user)| user.kind() == kind) {
                let all = self.devices.memory_users();
                writers.push(Box::new(Backends::new(kind, Box::new(move || all.find()), &memory)));
            }
        }
        #[cfg(debug_assertions)]
        leave_out(&mut writers);
        Ok(writers)
    }

    /// True if the guest has requested a reset that was not carried out yet.
    pub(crate) fn awaits_reset(&self) -> bool {
        self.stop.look(|stop| matches!(stop, Some(Stop::Reset | Stop::TripleFault)))
    }

    /// Checks that this host has the CPU features that the guest has seen.
    ///
    /// # Errors
    ///
    /// Fails with the first missing feature.
    pub(crate) fn check_cpuid(&self, saved: &[CpuidLeaf]) -> Result<(), RestoreError> {
        if saved.len() > MAX_LEAVES {
            return Err(RestoreError::Value("CPUID"));
        }
        let host: Vec<_> = self.cpuid.entries().iter().map(CpuidLeaf::from).collect();
        Ok(check(saved, &host)?)
    }

    /// Unread output of consoles.
    fn save_consoles(&self) -> ConsolesState {
        let [serial, console, debug] =
            self.ends().map(|end| HexBytes(end.map_or(Vec::new(), |end| end.device().kept())));
        ConsolesState { serial, console, debug }
    }

    fn restore_consoles(&self, state: &ConsolesState) {
        let ConsolesState { serial, console, debug } = state;
        for (end, HexBytes(bytes)) in self.ends().into_iter().zip([serial, console, debug]) {
            // A console that is configured otherwise now has no reader for the old output.
            end.filter(|_| !bytes.is_empty()).into_iter().for_each(|end| end.device().keep(bytes));
        }
    }

    fn layout_state(&self) -> LayoutState {
        let pair = |range: &Range<u64>| (range.start, range.end);
        LayoutState {
            address_bits: self.address_bits,
            memory_at_boot: self.layout.low.end + (self.layout.high.end - self.layout.high.start),
            regions: self.regions(),
            plugged: pair(&self.layout.plugged),
            mmio64: pair(&self.layout.mmio64),
        }
    }

    /// The regions of the guest's memory: first address and length.
    fn regions(&self) -> Vec<(u64, u64)> {
        let memory = self.ram.memory().memory();
        memory.iter().map(|region| (region.start_addr().0, region.len())).collect()
    }

    /// Makes a VM for a guest that was saved in `state`, from its configuration `config` and the plan of that, with the
    /// same addresses, and with devices where they were. Its memory is empty, and no vCPU runs.
    /// [`Self::restore_machine`] restores the state once the memory has its contents.
    ///
    /// The payload for the guest's next restart need not exist yet. For the rest see [`Self::new`].
    ///
    /// # Errors
    ///
    /// Fails if the state is of another machine, or the host lacks something. Everything is released then.
    pub fn for_restore(
        config: &VmConfig,
        plan: &VmPlan,
        state: &MachineState,
        events: Events,
        limits: HostLimits,
        cancel: Option<&Cancel>,
    ) -> Result<Self, RestoreError> {
        Self::for_restore_from(config, plan, state, Origin::Snapshot(None), (events, limits), cancel)
    }

    /// As [`Self::for_restore`], with memory and disks from `origin`.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::for_restore`] does.
    pub(crate) fn for_restore_from(
        config: &VmConfig,
        plan: &VmPlan,
        state: &MachineState,
        origin: Origin<'_>,
        (events, limits): (Events, HostLimits),
        cancel: Option<&Cancel>,
    ) -> Result<Self, RestoreError> {
        if !is_read(state.version) {
            return Err(RestoreError::Version(state.version));
        }
        let (config_size, saved) = (config.memory.size, state.wanted_memory);
        if config_size != saved {
            return Err(RestoreError::MemorySize { config: bytes(config_size), saved: bytes(saved) });
        }
        guest_options::compare(&state.told, guest_options::guest_options(&config.cpus, plan.segments.len()))?;
        guest_options::compare_interface(&state.cpuid, &config.cpus)?;
        let layout = &state.layout;
        let places = places(&plan.devices, &state.devices)?;
        let roots = root_buses(config, plan, &state.empty_root_buses)?;
        let mut fitted = config.clone();
        fitted.cpus.max_phys_bits = layout.address_bits;
        if config.memory.zones.is_empty() {
            fitted.memory.size = layout.memory_at_boot;
        }
        let earlier = layout.plugged.0..layout.plugged.1;
        let added = added_regions(layout, &state.events.memory.regions, &earlier)?;
        let payload = |layout: &_| {
            Payload::open(&config.payload, layout).map(Some).or_else(|error| {
                log::warn!("{error}: the guest runs without it, and needs it when it restarts");
                Ok(None)
            })
        };
        let parts = Parts { payload: &payload, places: &places, roots, regions: &added, origin };
        let mut vm = Self::with(&fitted, plan, parts, events, limits, cancel)?;
        vm.memory = config.memory.clone();
        vm.cpus = config.cpus.clone();
        vm.layout.plugged = earlier;
        vm.check_layout(layout)?;
        Ok(vm)
    }

    /// Checks that the addresses are those of the saved guest.
    fn check_layout(&self, saved: &LayoutState) -> Result<(), RestoreError> {
        let own = self.layout_state();
        if own.address_bits != saved.address_bits {
            let (guest, host) = (saved.address_bits, own.address_bits);
            return Err(Incompatible::AddressBits { guest, host }.into());
        }
        if own != *saved {
            let size = |layout: &LayoutState| {
                let total = layout.regions.iter().fold(0, |total: u64, (_, len)| total.saturating_add(*len));
                let (start, end) = layout.mmio64;
                format!("{} of memory in {} regions, BARs at {start:#x}-{end:#x}", bytes(total), layout.regions.len())
            };
            return Err(RestoreError::Shape { state: size(saved), config: size(&own) });
        }
        Ok(())
    }

    /// Restores `state` in a VM that [`Self::for_restore`] made from the same state, and whose memory has its contents:
    /// creates the KVM VM, all vCPUs and all wires. The guest is paused then; [`Self::resume`] runs it, and repeats the
    /// interrupts that it has not handled yet of the serial port and the event device.
    ///
    /// # Errors
    ///
    /// Fails if the state is invalid, or this host cannot run it. The VM is unusable then, and must be dropped.
    pub fn restore_machine(&mut self, state: &MachineState) -> Result<(), RestoreError> {
        if !is_read(state.version) {
            return Err(RestoreError::Version(state.version));
        }
        self.check_layout(&state.layout)?;
        self.restore_platform(state)?;
        self.devices.restore(&state.devices)?;
        let vm = self.kvm_vm()?;
        // The clock is set before any vCPU exists that could read it.
        let abilities = vm.abilities();
        vm.set_clock(state.clock.kvmclock, state.clock.realtime.filter(|_| abilities.realtime))?;
        let vcpus = self.restore_vcpus(&vm, state)?;
        // The local APICs can accept the interrupt controllers' pending interrupts now.
        state.irqchip.restore(&vm)?;
        let (now, _) = vm.clock()?;
        let firmware = self.restore_firmware(state, now)?;
        // From here on, pending eventfds become interrupts.
        let powered = self.connect(vm)?;
        self.devices.attach_as_is(Arc::clone(&powered.vm));
        let handlers = self.exit_handlers(firmware.as_ref());
        let vcpus = Vcpus::start_paused(vcpus, &handlers, &self.placement).map_err(VmError::from)?;
        let restored = Some(state.clock.clone());
        self.running = Some(Running { vcpus, powered, paused: true, firmware, restored });
        match state.stop {
            None => {}
            Some(StopState::PowerOff) => self.stop.send(Stop::PowerOff),
            Some(StopState::Reset) => self.stop.send(Stop::Reset),
            Some(StopState::TripleFault) => self.stop.send(Stop::TripleFault),
        }
        Ok(())
    }

    /// Restores what is neither a device in a slot nor in the kernel.
    fn restore_platform(&mut self, state: &MachineState) -> Result<(), RestoreError> {
        if !(1..=self.max_vcpus).contains(&state.wanted_vcpus) {
            return Err(RestoreError::Value("the number of vCPUs"));
        }
        if !self.ged.restore(&state.events, self.max_vcpus) {
            return Err(RestoreError::Value("the event device"));
        }
        let running = self.ged.running_vcpus();
        if !state.vcpus.iter().map(|vcpu| vcpu.id).eq(running) {
            return Err(RestoreError::Value("the numbers of vCPUs"));
        }
        match (&self.serial, &state.serial) {
            (Some(serial), Some(state)) if serial.port().restore(state) => {}
            (Some(_), Some(_)) => return Err(RestoreError::Value("the serial port")),
            (None, None) => {}
            (own, _) => {
                let name = |is: bool| if is { "a serial port" } else { "no serial port" }.to_string();
                let (state, config) = (name(own.is_none()), name(own.is_some()));
                return Err(RestoreError::Shape { state, config });
            }
        }
        self.restore_consoles(&state.consoles);
        self.vcpus = state.wanted_vcpus;
        self.triple_faults = state.triple_faults;
        self.is_firmware = state.firmware.is_some();
        self.legacy = match (&state.firmware, &state.legacy) {
            (Some(_), None) => LegacyHardware::ALL,
            (None, Some(legacy)) if legacy.hardware != LegacyHardware::NONE => legacy.hardware,
            (None, None) => LegacyHardware::NONE,
            _ => return Err(RestoreError::Value("the ports of firmware")),
        };
        Ok(())
    }

    /// The ports of older PCs, at the time `now` of KVM's clock in nanoseconds.
    fn restore_firmware(&self, state: &MachineState, now: u64) -> Result<Option<FirmwarePorts>, RestoreError> {
        let saved = state.firmware.as_ref().or(state.legacy.as_ref().map(|legacy| &legacy.ports));
        let (Some(ports), Some(saved)) = (self.firmware_ports(), saved) else { return Ok(None) };
        let elapsed = now.saturating_sub(state.clock.kvmclock);
        let timer = Duration::from_nanos(state.clock.pm_timer.saturating_add(elapsed));
        if ports.restore(saved, timer) { Ok(Some(ports)) } else { Err(RestoreError::Value("the ports of firmware")) }
    }

    /// The vCPUs of `vm`, whose clock is set, with their numbers.
    fn restore_vcpus(&mut self, vm: &kvm::Vm, state: &MachineState) -> Result<Vec<(u32, Vcpu)>, RestoreError> {
        self.restore_cpuid(&state.cpuid)?;
        let extent = Extent::new(vm.abilities(), &[], false);
        let (mut vcpus, mut first_offset) = (Vec::new(), None);
        for saved in &state.vcpus {
            let id = u32::from(saved.id);
            let vcpu = self.bare_vcpu(vm, id)?;
            let error = |error| RestoreError::Vcpu { vcpu: id, error };
            let frequency = state.clock.frequency(vcpu.tsc_khz().map_err(error)?, extent.abilities.tsc_scaling);
            let frequency = frequency.map_err(|NoFrequency { guest, host }| Incompatible::Frequency { guest, host })?;
            frequency.map_or(Ok(()), |khz| vcpu.set_tsc_khz(khz)).map_err(error)?;
            let first_offset = match first_offset {
                Some(offset) => offset,
                None => *first_offset.insert(offset_now(vm, &vcpu, &state.clock).map_err(error)?),
            };
            saved.restore(&vcpu, first_offset, &extent)?;
            vcpus.push((id, vcpu));
        }
        Ok(vcpus)
    }

    /// Sets the CPUID that the guest has seen for all vCPUs, also of later starts.
    fn restore_cpuid(&mut self, saved: &[CpuidLeaf]) -> Result<(), RestoreError> {
        self.check_cpuid(saved)?;
        self.cpuid = Template::saved(saved.iter().map(Into::into).collect(), Topology::of(&self.cpus));
        Ok(())
    }
}

/// Removes one of the writers, for a test that shows that each is needed. Release builds do not do this.
#[cfg(debug_assertions)]
fn leave_out(writers: &mut Vec<Box<dyn DirtySource>>) {
    if let Some(name) = std::env::var("CH_TEST_LEAVE_OUT").ok().filter(|name| !name.is_empty()) {
        writers.retain(|writer| !writer.name().starts_with(&name));
    }
}

/// The offset of the first vCPU's TSC to the host's with which it shows the value that the guest expects now.
fn offset_now(vm: &kvm::Vm, vcpu: &Vcpu, clock: &ClockState) -> Result<u64, KvmError> {
    let (now, _) = vm.clock()?;
    // The host's TSC at the guest's frequency. It is read after the clock, so that the guest's TSC never goes
    // backwards.
    let host = vcpu.tsc()?.wrapping_sub(vcpu.tsc_offset()?);
    Ok(clock.tsc_at(now).wrapping_sub(host))
}

/// The regions added to the memory of the guest's start: before its last restart, and since.
fn added_regions(
    layout: &LayoutState,
    since: &[(u64, u64)],
    earlier: &Range<u64>,
) -> Result<Vec<Range<u64>>, RestoreError> {
    // Each region is searched for among the others and then mapped, so impossible numbers are refused first.
    if since.len() > usize::from(SLOTS) || layout.regions.len() > LAST_MEMORY as usize + 1 {
        return Err(RestoreError::Value("the number of regions of memory"));
    }
    let is_added = |range: &Range<u64>| {
        since.contains(&(range.start, range.end))
            || earlier.start <= range.start && range.end <= earlier.end && !range.is_empty()
    };
    let mut added = Vec::new();
    for (start, len) in &layout.regions {
        let end = start.checked_add(*len).ok_or(RestoreError::Value("the regions of memory"))?;
        if is_added(&(*start..end)) {
            added.push(*start..end);
        }
    }
    if since.iter().all(|(start, end)| added.contains(&(*start..*end))) {
        Ok(added)
    } else {
        Err(RestoreError::Value("the memory that was added"))
    }
}

/// The further root buses of the saved guest: those of its devices, or `empty` ones.
fn root_buses(config: &VmConfig, plan: &VmPlan, empty: &[u8]) -> Result<Vec<RootBus>, RestoreError> {
    if empty.is_empty() {
        return Ok(plan.roots_in_use());
    }
    if empty.len() > usize::from(LAST_BUS) {
        return Err(RestoreError::Value("the root buses"));
    }
    let roots = RootBuses::of_nodes(&config.numa).into_buses();
    if !roots.iter().map(|root| root.bus).eq(empty.iter().copied()) {
        let list = |buses: &[u8]| buses.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
        let here: Vec<_> = roots.iter().map(|root| root.bus).collect();
        let state = format!("root buses {}", list(empty));
        let config = if here.is_empty() { "none (--numa)".to_string() } else { format!("{} (--numa)", list(&here)) };
        return Err(RestoreError::Shape { state, config });
    }
    Ok(roots)
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod driver;
#[cfg(test)]
pub(super) mod guest;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod numa_tests;
#[cfg(test)]
mod platform_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod told_tests;
