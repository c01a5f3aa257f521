//! Creation of the target's VM in a thread: all is read, checked and opened before pages arrive.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use virtio_devices::{Cancel, WorkerKind};

use super::empty_files;
use crate::config::{BackendPlan, NetPlan, NicPlan, PlannedVm, RestoreConfig, Vhost};
use crate::devices::kind;
use crate::landlock::{self, Rule};
use crate::migration::error::MigrationError;
use crate::migration::offer::{self, Offer};
use crate::migration::passed_memory;
use crate::snapshot::state_file::SavedLink;
use crate::telemetry::events::Events;
use crate::threads::{self, ThreadKind};
use crate::vm::host_limits::HostLimits;
use crate::vm::memory::Image;
use crate::vm::{Origin, Passed, Vm};

/// Creates the VM of an arriving guest.
#[derive(Clone)]
pub(crate) struct Preparer {
    /// Overrides of the configuration on this host.
    pub given: RestoreConfig,
    /// Receiver of events.
    pub events: Events,
    /// Resource limits of this process.
    pub limits: HostLimits,
    /// Files that the program needs with any VM.
    pub own_files: Vec<Rule>,
}

/// A created VM, whose memory is still empty.
pub(crate) struct PreparedVm {
    /// Plan of the VM.
    pub planned: PlannedVm,
    /// The VM, not powered on.
    pub vm: Box<Vm>,
    /// VF links that clients had set.
    pub links: Vec<SavedLink>,
    /// True if the guest ran at the source.
    pub runs: bool,
    /// True if the memory is the source's.
    pub is_local: bool,
}

/// Threads that run a function's queues once its driver is up. Ports of a switch use the switch's threads.
fn workers(function: &NicPlan) -> impl Iterator<Item = ThreadKind> {
    let (kind, count) = match &function.backend {
        BackendPlan::Tap { vhost: Vhost::Off, .. } | BackendPlan::Fds { vhost: Vhost::Off, .. } => {
            (WorkerKind::Net, function.spec.queue_pairs)
        }
        BackendPlan::Tap { .. } | BackendPlan::Fds { .. } => (WorkerKind::VhostNet, 1),
        BackendPlan::VhostUser { .. } => (WorkerKind::VhostUser, 1),
        BackendPlan::Vdpa(_) => (WorkerKind::Vdpa, 1),
        BackendPlan::Port(_) => (WorkerKind::Switch, 0),
    };
    std::iter::repeat_n(ThreadKind::Worker(kind), count.into())
}

impl Preparer {
    /// Creates the VM that `offer` describes, with descriptors from `fd_passing`. `cancel` ends it early.
    ///
    /// # Errors
    ///
    /// Fails if the VM does not fit this host, or something cannot be opened. Nothing is left then.
    pub(crate) fn prepare(
        &self,
        offer: &[u8],
        fd_passing: Option<&UnixStream>,
        cancel: &Cancel,
    ) -> Result<PreparedVm, MigrationError> {
        let offer = Offer::read(offer)?;
        let planned = offer.plan(&self.given)?;
        let fds = offer.receive(planned.plan(), planned.config(), fd_passing)?;
        landlock::enter(planned.config(), || kind::all_files(&planned.plan().devices), &self.own_files)?;
        if offer.passed.is_none() {
            empty_files::check(&planned.config().memory.zones).map_err(MigrationError::Unsuitable)?;
        }
        let mut config = planned.config().clone();
        config.cpus.boot_vcpus = offer.outline.wanted_vcpus.into();
        let hosts = (self.events.clone(), self.limits);
        let passed = offer.passed.as_ref().map(|passed| passed.open(fds)).transpose();
        let passed = passed.map_err(MigrationError::Unsuitable)?.map(|(memory, taps, sockets)| {
            let image = Image::Passed(memory.clone().into());
            let taps = offer::not_replaced(taps, &self.given);
            (memory, Passed { image, taps, sockets: Arc::new(sockets) })
        });
        let origin = Origin::Running(passed.as_ref().map(|(_, passed)| passed));
        let vm = Vm::for_restore_from(&config, planned.plan(), &offer.outline, origin, hosts, Some(cancel))
            .map_err(|error| MigrationError::of(error, passed.is_some()))?;
        vm.check_cpuid(&offer.outline.cpuid).map_err(MigrationError::from)?;
        let is_all = passed.iter().try_for_each(|(memory, _)| passed_memory::check(&vm, memory));
        is_all.map_err(MigrationError::Unsuitable)?;
        vm.devices().check_stateful(&offer.stateful).map_err(MigrationError::Unsuitable)?;
        // Started now, to keep them out of the downtime. The drivers that are up are not known yet.
        threads::keep_spares(planned.plan().nets().flat_map(NetPlan::functions).flat_map(workers));
        Ok(PreparedVm {
            planned,
            vm: Box::new(vm),
            links: offer.links,
            runs: offer.runs,
            is_local: offer.passed.is_some(),
        })
    }
}
