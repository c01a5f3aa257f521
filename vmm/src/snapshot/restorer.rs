//! Creation of a VM from a snapshot, on any thread: all is read, checked and opened before memory is filled.

use std::time::Instant;

use virtio_devices::Cancel;
use vm_memory::GuestAddressSpace as _;

use super::error::SnapshotError;
use super::memory_mode::{self, MemoryMode};
use super::overrides;
use super::source::Source;
use super::state_file::SavedLink;
use crate::config::{PlannedVm, RestoreConfig};
use crate::devices::kind;
use crate::landlock::{self, Rule};
use crate::lazy_memory::memory_image;
use crate::lazy_memory::page_faults::PageFaults;
use crate::machine_state::MachineState;
use crate::telemetry::events::Events;
use crate::vm::host_limits::HostLimits;
use crate::vm::{Origin, Vm};

/// Creates a VM from a snapshot.
pub(crate) struct Restorer {
    /// Request of the client, with descriptors of this process.
    pub config: RestoreConfig,
    /// Receiver of events.
    pub events: Events,
    /// Resource limits of this process.
    pub limits: HostLimits,
    /// Files that the program needs with any VM.
    pub own_files: Vec<Rule>,
}

/// A VM with its memory, before its machine is restored.
pub(crate) struct Restored {
    /// Plan of the VM.
    pub planned: PlannedVm,
    /// The VM, not powered on.
    pub vm: Box<Vm>,
    /// State of the machine.
    pub machine: MachineState,
    /// VF links that clients had set.
    pub links: Vec<SavedLink>,
}

impl Restorer {
    /// Creates the VM. `cancel` ends it early.
    ///
    /// # Errors
    ///
    /// Fails if the snapshot is damaged or does not fit this host, or something cannot be opened. Nothing is left then.
    pub(crate) fn restore(self, cancel: Option<&Cancel>) -> Result<Restored, SnapshotError> {
        let source = Source::open(&self.config.source_url)?;
        let planned = self.plan(&source)?;
        let rules = [&self.own_files[..], &landlock::rules_of_snapshot(source.folder())].concat();
        landlock::enter(planned.config(), || kind::all_files(&planned.plan().devices), &rules)?;
        let (mode, why) =
            memory_mode::choose(&self.config, &planned.config().memory, planned.plan().needs_shared_memory())
                .map_err(SnapshotError::Unsuitable)?;
        let (mode, vm) = self.open(&source, &planned, (mode, why), cancel)?;
        let vm = self.fill(&source, mode, vm, cancel)?;
        let Source { state, machine, .. } = source;
        Ok(Restored { planned, vm: Box::new(vm), machine, links: state.links })
    }

    /// Plans the VM for this host, with devices in their former slots.
    fn plan(&self, source: &Source) -> Result<PlannedVm, SnapshotError> {
        let mut config = source.config.clone();
        overrides::apply(&mut config, &self.config, &source.state.descriptors).map_err(SnapshotError::Unsuitable)?;
        let mut planned = PlannedVm::new(config)?;
        overrides::allow_missing(&mut planned, &self.config, &source.state.descriptors)
            .map_err(SnapshotError::Unsuitable)?;
        for device in &source.machine.devices {
            planned.set_slot(&device.id, device.slot);
        }
        Ok(planned)
    }

    /// Opens all resources of the VM. Its memory is empty unless mapped.
    fn open(
        &self,
        source: &Source,
        planned: &PlannedVm,
        (mode, why): (MemoryMode, String),
        cancel: Option<&Cancel>,
    ) -> Result<(MemoryMode, Vm), SnapshotError> {
        let mut config = planned.config().clone();
        config.cpus.boot_vcpus = source.machine.wanted_vcpus.into();
        log::info!("memory is restored by {mode:?}: {why}");
        let image = if mode == MemoryMode::Map { source.image() } else { None };
        let hosts = (self.events.clone(), self.limits);
        let vm = Vm::for_restore_from(
            &config,
            planned.plan(),
            &source.machine,
            Origin::Snapshot(image.as_ref()),
            hosts,
            cancel,
        )
        .map_err(SnapshotError::from)?;
        Ok((mode, vm))
    }

    /// Fills the guest's memory.
    fn fill(&self, source: &Source, mode: MemoryMode, vm: Vm, cancel: Option<&Cancel>) -> Result<Vm, SnapshotError> {
        let mut vm = vm;
        let (began, layout, file) = (Instant::now(), &source.state.memory, &source.memory);
        let memory = vm.memory().memory();
        source.check_elsewhere(&memory)?;
        if mode == MemoryMode::Copy && self.config.prefault {
            vm.populate().map_err(|error| SnapshotError::Host { action: "allocate all memory", error })?;
        }
        let Some(file) = file else { return Ok(vm) };
        match mode {
            MemoryMode::Map => {}
            MemoryMode::OnDemand => {
                let faults = PageFaults::begin(&memory, layout, file)
                    .map_err(|error| SnapshotError::Host { action: "have memory read on demand", error })?;
                drop(memory);
                vm.fill_by(faults);
            }
            MemoryMode::Copy => {
                let stop = || cancel.is_some_and(Cancel::is_cancelled);
                let read = memory_image::load(file, layout, &memory, &stop);
                let read = read.map_err(|error| SnapshotError::Host { action: "read the guest's memory", error })?;
                log::info!("{read} bytes of memory were read in {:?}", began.elapsed());
            }
        }
        // In every mode: the file must not have changed while it was read or mapped.
        source.check_unchanged()?;
        Ok(vm)
    }
}
