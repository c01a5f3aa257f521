//! The VM of a target, made by a thread of its own: everything is read, checked and opened before any page comes.

use std::os::unix::net::UnixStream;

use virtio_devices::{Cancel, WorkerKind};

use super::empty_files;
use super::error::MigrationError;
use super::offer::{self, Offer};
use super::passed;
use crate::config::{BackendPlan, NetPlan, NicPlan, PlannedVm, RestoreConfig, Vhost};
use crate::landlock::{self, Rule};
use crate::snapshot::state_file::SavedLink;
use crate::telemetry::events::Events;
use crate::threads::{self, ThreadKind};
use crate::vm::host_limits::HostLimits;
use crate::vm::memory::Image;
use crate::vm::{Origin, Vm};

/// Maker of a VM for a guest that arrives.
#[derive(Clone)]
pub(crate) struct Preparer {
    /// Differences on this host.
    pub given: RestoreConfig,
    /// Destination of events.
    pub events: Events,
    /// Limits of the host for this process.
    pub limits: HostLimits,
    /// The files that this program needs whatever its VM is.
    pub own_files: Vec<Rule>,
}

/// A VM without its memory's contents.
pub(crate) struct Made {
    /// Plan of the VM.
    pub planned: PlannedVm,
    /// The VM, never powered on.
    pub vm: Box<Vm>,
    /// The links of VFs that clients had set.
    pub links: Vec<SavedLink>,
    /// True if its guest ran at the source.
    pub runs: bool,
    /// True if its memory is the source's.
    pub is_local: bool,
}

/// The threads that run a function's queues when its driver is up. Ports of a switch share the switch's.
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
    /// Makes the VM that `offer` describes, of the descriptors that come by `passing`. `cancel` ends that.
    ///
    /// # Errors
    ///
    /// It does not fit this host, or something cannot be opened. Nothing is left then.
    pub(crate) fn make(
        &self,
        offer: &[u8],
        passing: Option<&UnixStream>,
        cancel: &Cancel,
    ) -> Result<Made, MigrationError> {
        let offer = Offer::read(offer)?;
        let planned = offer.plan(&self.given)?;
        let fds = offer.receive(planned.plan(), planned.config(), passing)?;
        landlock::enter(&planned, &self.own_files)?;
        if offer.passed.is_none() {
            empty_files::check(&planned.config().memory.zones).map_err(MigrationError::Unsuitable)?;
        }
        let mut config = planned.config().clone();
        config.cpus.boot_vcpus = offer.outline.wanted_vcpus.into();
        let hosts = (self.events.clone(), self.limits);
        let passed = offer.passed.as_ref().map(|passed| passed.open(fds)).transpose();
        let passed = passed.map_err(MigrationError::Unsuitable)?.map(|(memory, taps)| {
            let image = Image::Passed(memory.clone().into());
            (memory, image, offer::not_replaced(taps, &self.given))
        });
        let origin = Origin::Running(passed.as_ref().map(|(_, image, taps)| (image, taps)));
        let vm = Vm::for_restore_from(&config, planned.plan(), &offer.outline, origin, hosts, Some(cancel))
            .map_err(MigrationError::from)?;
        vm.check_cpuid(&offer.outline.cpuid).map_err(MigrationError::from)?;
        let is_all = passed.iter().try_for_each(|(memory, ..)| passed::check(&vm, memory));
        is_all.map_err(MigrationError::Unsuitable)?;
        vm.devices().check_stateful(&offer.stateful).map_err(MigrationError::Unsuitable)?;
        // When they are needed, the guest stands still. Which of its drivers are up is not known yet.
        threads::keep_spares(planned.plan().nets().flat_map(NetPlan::functions).flat_map(workers));
        Ok(Made { planned, vm: Box::new(vm), links: offer.links, runs: offer.runs, is_local: offer.passed.is_some() })
    }
}
