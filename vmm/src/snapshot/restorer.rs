//! A VM that is made of a snapshot, on any thread: everything is read, checked and opened before the guest's memory is.

use std::time::Instant;

use virtio_devices::Cancel;
use vm_memory::GuestAddressSpace as _;

use super::error::SnapshotError;
use super::memory_mode::{self, MemoryMode};
use super::overrides;
use super::source::Source;
use super::state_file::SavedLink;
use crate::config::{PlannedVm, RestoreConfig};
use crate::landlock::{self, Rule};
use crate::lazy_memory::memory_image;
use crate::lazy_memory::page_faults::PageFaults;
use crate::machine_state::MachineState;
use crate::telemetry::events::Events;
use crate::vm::host_limits::HostLimits;
use crate::vm::{Origin, Vm};

/// Maker of a VM from a snapshot.
pub(crate) struct Restorer {
    /// Request of the client. Descriptors are this process's.
    pub config: RestoreConfig,
    /// Destination of events.
    pub events: Events,
    /// Limits of the host for this process.
    pub limits: HostLimits,
    /// The files that this program needs whatever its VM is.
    pub own_files: Vec<Rule>,
}

/// A VM with its memory, whose machine is still to be restored.
pub(crate) struct Restored {
    /// Plan of the VM.
    pub planned: PlannedVm,
    /// The VM, never powered on.
    pub vm: Box<Vm>,
    /// State of its machine.
    pub machine: MachineState,
    /// The links of VFs that clients had set.
    pub links: Vec<SavedLink>,
}

impl Restorer {
    /// Makes the VM. `cancel` ends that.
    ///
    /// # Errors
    ///
    /// The snapshot is damaged, does not fit this host, or something cannot be opened. Nothing is left then.
    pub(crate) fn restore(self, cancel: Option<&Cancel>) -> Result<Restored, SnapshotError> {
        let source = Source::open(&self.config.source_url)?;
        let planned = self.plan(&source)?;
        let rules = [&self.own_files[..], &landlock::rules_of_snapshot(source.folder())].concat();
        landlock::enter(&planned, &rules)?;
        let (mode, why) =
            memory_mode::choose(&self.config, &planned.config().memory, planned.plan().needs_shared_memory())
                .map_err(SnapshotError::Unsuitable)?;
        let (mode, vm) = self.open(&source, &planned, (mode, why), cancel)?;
        let vm = self.fill(&source, mode, vm, cancel)?;
        let Source { state, machine, .. } = source;
        Ok(Restored { planned, vm: Box::new(vm), machine, links: state.links })
    }

    /// The configuration for this host, with the devices where they were.
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

    /// Opens all that the VM has. Its memory is empty, unless it is mapped.
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

    /// Gives the guest its memory.
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
        // Whatever was read or mapped of it, and when.
        source.check_unchanged()?;
        Ok(vm)
    }
}
