//! An open vDPA device, which this process owns and which accesses the guest's memory.

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_ACCESS_PLATFORM,
};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::error::{MemoryFault, VdpaFault};
use super::follower::{Follower, Follows};
use super::identity::{self, Identity};
use super::kernel::{BackendFeature, Kernel};
use super::locking::Locking;
use super::reach;
use super::spec::VdpaSpec;
use crate::GuestMap;
use crate::backend::mapping::Mapping;
use crate::backend::{Ability, Attention, DoorbellPage, QueueRun, RunnerError, RunnerQueue, StartError};
use crate::transport::features::has;

const DRIVER: u8 = (VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER) as u8;
const FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
const DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
const NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET as u8;

/// The first Linux in which a driver that still forgets mappings at a reset offers not to
/// ([`BackendFeature::IotlbPersist`]).
const PERSISTENT: (u32, u32) = (6, 7);

/// An open device.
pub(crate) struct Device {
    /// The path, for messages.
    name: String,
    kernel: Arc<dyn Kernel>,
    features: u64,
    backend_features: u64,
    queue_pairs: u16,
    control_queue: bool,
    /// See [`Self::goes_on_after_stop`].
    goes_on: bool,
    /// The memory that the device accesses, unless it follows an IOMMU.
    mappings: Vec<Mapping>,
    /// Set once its function has been started behind an IOMMU.
    follows: Option<Follows>,
    /// The device could not follow the IOMMU, and its mappings are unknown.
    is_astray: bool,
    /// The doorbell pages of all queues, if the device has them.
    doorbells: Vec<Arc<DoorbellPage>>,
    /// The address that this process has set: a reset may restore the device's own.
    given_mac: Option<[u8; 6]>,
    /// A reset may drop the device's mappings.
    forgets: bool,
    /// The mappings may have been dropped.
    forgotten: bool,
    state: State,
    /// The memory, which stays mapped until `kernel`, dropped first, has closed the device.
    _memory: GuestMap,
}

/// The state of the device.
enum State {
    /// Reset.
    Reset,
    /// Running its queues.
    Runs(Setup),
    /// Stopped, with all its state.
    Suspended(Setup),
}

/// The parameters of a start.
#[derive(PartialEq, Eq)]
struct Setup {
    features: u64,
    queues: Vec<QueuePlacement>,
}

/// A queue: its index, its size, and its rings.
type QueuePlacement = (u16, u16, [GuestAddress; 3]);

impl Device {
    /// Takes ownership of a device that has just been opened, and maps the guest's memory for it. Also returns its
    /// abilities, which `suffices` checks before any memory is mapped.
    ///
    /// # Errors
    ///
    /// [`VdpaFault`]. Dropping `kernel` undoes everything.
    pub(crate) fn open(
        mut kernel: Box<dyn Kernel>,
        spec: &VdpaSpec,
        memory: &GuestMap,
        suffices: impl FnOnce(&Ability) -> bool,
    ) -> Result<(Self, Ability), VdpaFault> {
        let mappings = reach::mappings(memory)?;
        kernel.set_owner().map_err(VdpaFault::of("own the device"))?;
        let mut identity = Identity::ask(&*kernel)?;
        let own_mac = identity.mac;
        identity.give_mac(&*kernel, spec.mac)?;
        let ability = identity.ability(spec)?;
        if !suffices(&ability) {
            return Err(VdpaFault::Changed);
        }
        let range = kernel.iova_range().map_err(VdpaFault::of("read the addresses that the device reaches"))?;
        reach::check_reach(&mappings, range)?;
        let backend_features = choose(&mut *kernel)?;
        let kernel: Arc<dyn Kernel> = Arc::from(kernel);
        // A reset loses the settings of the control queue, and the driver may be waiting for an answer there.
        let can_go_on = can_resume(backend_features) || takes_positions(&*kernel);
        let goes_on = !ability.control_queue && can_go_on;
        let locking = Locking::reserve(mappings.iter().map(Mapping::size).sum(), "VmPin:");
        let batch = BackendFeature::Batch.is_in(backend_features);
        // The kernel answers EFAULT for every error.
        reach::map(&*kernel, &mappings, batch).map_err(|error| {
            if locking.falls_short() { VdpaFault::MemoryLock(locking) } else { VdpaFault::Map(error) }
        })?;
        let forgets = !BackendFeature::IotlbPersist.is_in(backend_features) && kernel.release() < PERSISTENT;
        let queues = 2 * ability.queue_pairs + u16::from(ability.control_queue);
        // Most devices have no pages.
        let doorbells = (0..queues).map(|queue| kernel.doorbell_page(queue).map(Arc::new)).collect::<io::Result<_>>();
        let device = Self {
            name: spec.path.display().to_string(),
            features: identity.features,
            backend_features,
            queue_pairs: ability.queue_pairs,
            control_queue: ability.control_queue,
            goes_on,
            mappings,
            follows: None,
            is_astray: false,
            doorbells: doorbells.unwrap_or_default(),
            given_mac: identity.mac.filter(|_| identity.mac != own_mac),
            forgets,
            forgotten: false,
            state: State::Reset,
            kernel,
            _memory: memory.clone(),
        };
        Ok((device, ability))
    }

    /// Starts the queues of `run`, or resumes them if the device was suspended and nothing has changed. The device
    /// signals `config_call` when its configuration changes.
    ///
    /// # Errors
    ///
    /// Fails if the device fails or refuses; the caller then resets it. Continuing after a reset is refused if the
    /// device takes no queue positions, or if its own control queue has received commands, whose state only the device
    /// has.
    pub(crate) fn start(&mut self, run: &QueueRun<'_>, config_call: &EventFd) -> Result<(), StartError> {
        self.follow(run)?;
        self.start_queues(run, config_call)?;
        // It may have been reset in the meantime, or before.
        if self.has_failed() { Err(failed().into()) } else { Ok(()) }
    }

    fn start_queues(&mut self, run: &QueueRun<'_>, config_call: &EventFd) -> Result<(), StartError> {
        if let State::Suspended(setup) = &self.state {
            if !run.untouched && *setup == Setup::of(run) && self.go_on(run).is_ok() {
                self.state = State::Runs(Setup::of(run));
                return Ok(());
            }
            self.reset().map_err(RunnerError::of("reset the device"))?;
        }
        if !run.untouched && self.was_commanded(run) {
            let what = "bring back what its driver had commanded, which has to reset the device";
            return Err(StartError::Refused(RunnerError {
                what,
                source: io::Error::other("the device has been reset"),
            }));
        }
        self.set_up(run, config_call)?;
        self.state = State::Runs(Setup::of(run));
        Ok(())
    }

    /// Gives the device the mappings of its function, if that is behind an IOMMU.
    fn follow(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        let Some(iommu) = run.dma.iommu() else { return Ok(()) };
        let what = "give the device what its function reaches";
        if self.follows.is_none() {
            let follower =
                Follower::new(&self.kernel, &self.name, self.backend_features, (&self._memory, &self.mappings));
            let follows = Follows { iommu: Arc::clone(iommu), follower: follower.map_err(RunnerError::of(what))? };
            if let Err(error) = follows.begin() {
                (self.mappings, self.is_astray) = (follows.follower.mappings(), follows.follower.has_failed());
                return Err(RunnerError::of(what)(error).into());
            }
            self.follows = Some(follows);
        }
        if self.has_failed() {
            return Err(failed().into());
        }
        let settled = self.follows.as_ref().map_or(Ok(()), |follows| follows.follower.settle());
        Ok(settled.map_err(RunnerError::of(what))?)
    }

    /// True if the device did not drop a mapping on request, and has to be closed.
    pub(crate) fn has_failed(&self) -> bool {
        self.is_astray || self.follower().is_some_and(Follower::has_failed)
    }

    /// The follower, whose event reports that the device's mappings must be changed with its queues stopped.
    pub(crate) fn follower(&self) -> Option<&Follower> {
        self.follows.as_ref().map(|follows| &*follows.follower)
    }

    /// True if the driver has sent commands to the device itself.
    fn was_commanded(&self, run: &QueueRun<'_>) -> bool {
        let pairs = if has(run.features, VIRTIO_NET_F_MQ) { self.queue_pairs } else { 1 };
        self.control_queue && run.queues.iter().any(|queue| queue.index == 2 * pairs && queue.position != 0)
    }

    fn set_up(&mut self, run: &QueueRun<'_>, config_call: &EventFd) -> Result<(), StartError> {
        let kernel = &*self.kernel;
        if self.forgotten {
            let batch = BackendFeature::Batch.is_in(self.backend_features);
            let mapped = match &self.follows {
                Some(follows) => follows.follower.map_again(),
                None => reach::map_again(kernel, &self.mappings, batch),
            };
            mapped.map_err(RunnerError::of("give the device the guest's memory again"))?;
            self.forgotten = false;
        }
        if let Some(mac) = self.given_mac {
            kernel.set_config(0, &mac).map_err(RunnerError::of("give the device its address"))?;
        }
        // Without it, the device would bypass the host's memory protection.
        let features = run.features & self.features | 1 << VIRTIO_F_ACCESS_PLATFORM;
        set_status(kernel, DRIVER).map_err(RunnerError::of("start the device"))?;
        kernel.set_features(features).map_err(RunnerError::of("choose the device's features"))?;
        set_status(kernel, DRIVER | FEATURES_OK).map_err(RunnerError::of("agree on features with the device"))?;
        kernel.set_config_call(config_call).map_err(RunnerError::of("watch the device's configuration"))?;
        for queue in run.queues {
            kernel.set_queue_size(queue).map_err(RunnerError::of("set the size of a queue"))?;
            kernel.set_queue_rings(queue).map_err(RunnerError::of("set the rings of a queue"))?;
            kernel.set_queue_position(queue.index, queue.position).map_err(|source| unplaced(queue, source))?;
            connect(kernel, queue)?;
        }
        for queue in run.queues {
            kernel.enable_queue(queue.index).map_err(RunnerError::of("enable a queue"))?;
        }
        Ok(set_status(kernel, DRIVER | FEATURES_OK | DRIVER_OK).map_err(RunnerError::of("let the device run"))?)
    }

    /// Continues after a stop.
    fn go_on(&self, run: &QueueRun<'_>) -> Result<(), RunnerError> {
        run.queues.iter().try_for_each(|queue| connect(&*self.kernel, queue))?;
        self.kernel.resume().map_err(RunnerError::of("resume the device"))
    }

    /// Stops the device. Suspends it if possible, so that the driver's settings are kept.
    ///
    /// # Errors
    ///
    /// Fails if the device fails or refuses.
    pub(crate) fn stop(&mut self) -> io::Result<()> {
        let State::Runs(setup) = std::mem::replace(&mut self.state, State::Reset) else { return Ok(()) };
        let suspended = BackendFeature::Suspend.is_in(self.backend_features) && self.kernel.suspend().is_ok();
        if suspended && can_resume(self.backend_features) {
            self.state = State::Suspended(setup);
            return Ok(());
        }
        self.reset()
    }

    /// True if the device can continue after [`Self::stop`], and no driver waits for an answer in the meantime.
    pub(crate) fn goes_on_after_stop(&self) -> bool {
        self.goes_on
    }

    /// The doorbell pages of the queues, in queue order, if there are any. They keep the device open.
    pub(crate) fn doorbells(&self) -> &[Arc<DoorbellPage>] {
        &self.doorbells
    }

    /// Gives the device access to `memory` and nothing else, whether or not it runs.
    ///
    /// # Errors
    ///
    /// [`MemoryFault`]; the device may have to be closed.
    pub(crate) fn set_memory(&mut self, memory: &GuestMap) -> Result<(), MemoryFault> {
        let refused = |fault| MemoryFault { fault, is_as_before: true };
        let new = reach::mappings(memory).map_err(refused)?;
        let range = self.kernel.iova_range().map_err(VdpaFault::of("read the addresses that the device reaches"));
        reach::check_reach(&new, range.map_err(refused)?).map_err(refused)?;
        if let Some(follows) = &self.follows {
            follows.set_memory(memory)?;
            (self.mappings, self._memory) = (new, memory.clone());
            return Ok(());
        }
        let only_in = |these: &[Mapping], those: &[Mapping]| -> Vec<Mapping> {
            these.iter().filter(|mapping| !those.contains(mapping)).copied().collect()
        };
        let (gone, came) = (only_in(&self.mappings, &new), only_in(&new, &self.mappings));
        let locking = Locking::reserve(came.iter().map(Mapping::size).sum(), "VmPin:");
        let batch = BackendFeature::Batch.is_in(self.backend_features);
        if let Err(error) = reach::change(&*self.kernel, &gone, &came, batch) {
            let is_as_before = reach::change_back(&*self.kernel, &came, &gone, batch).is_ok();
            let fault = if locking.falls_short() { VdpaFault::MemoryLock(locking) } else { VdpaFault::Map(error) };
            return Err(MemoryFault { fault, is_as_before });
        }
        (self.mappings, self._memory) = (new, memory.clone());
        Ok(())
    }

    /// Resets the device.
    ///
    /// # Errors
    ///
    /// Fails if the device is lost.
    pub(crate) fn reset(&mut self) -> io::Result<()> {
        self.state = State::Reset;
        self.forgotten |= self.forgets;
        self.kernel.set_status(0)
    }

    /// Makes the device signal `call` for `queue`.
    ///
    /// # Errors
    ///
    /// Fails if the device fails or refuses.
    pub(crate) fn set_call(&self, queue: u16, call: &EventFd) -> Result<(), RunnerError> {
        self.kernel.set_queue_call(queue, call).map_err(RunnerError::of("change an interrupt of the device"))
    }

    /// The running device's report: its link, or an invalid ring of the driver.
    ///
    /// # Errors
    ///
    /// Fails if the device no longer runs.
    pub(crate) fn attend(&self) -> Result<Attention, RunnerError> {
        let status = self.kernel.status().map_err(RunnerError::of("read the device's status"))?;
        if status & DRIVER_OK == 0 {
            return Err(RunnerError { what: "continue with the device", source: broken() });
        }
        if status & NEEDS_RESET != 0 {
            // The driver is asked to reset it. If it were reopened, it would continue with the same ring.
            return Ok(Attention::BrokenRing);
        }
        let negotiated = match &self.state {
            State::Runs(setup) => setup.features & self.features,
            _ => self.features,
        };
        let link_up = identity::link_up(&*self.kernel, negotiated);
        link_up.map(Attention::Link).map_err(RunnerError::of("read the device's configuration"))
    }

    /// Checks that the device is alive. May wait as long as the kernel does.
    ///
    /// # Errors
    ///
    /// Fails if the device is lost. A device that does not support the request is not an error.
    pub(crate) fn probe(&self) -> Result<(), RunnerError> {
        let State::Runs(Setup { queues, .. }) = &self.state else { return Ok(()) };
        let Some((first, ..)) = queues.first() else { return Ok(()) };
        match self.kernel.queue_position(*first) {
            Err(source) if is_gone(&source) => Err(RunnerError { what: "reach the device", source }),
            _ => Ok(()),
        }
    }
}

impl Setup {
    fn of(run: &QueueRun<'_>) -> Self {
        let place = |queue: &RunnerQueue| (queue.index, queue.size, [queue.descriptors, queue.available, queue.used]);
        Self { features: run.features, queues: run.queues.iter().map(place).collect() }
    }
}

/// Negotiates the kernel features that are useful and available.
fn choose(kernel: &mut dyn Kernel) -> Result<u64, VdpaFault> {
    let what = "agree with the kernel on features";
    let features = kernel.backend_features().map_err(VdpaFault::of(what))? & BackendFeature::wanted();
    kernel.set_backend_features(features).map_err(VdpaFault::of(what))?;
    Ok(features)
}

/// True if the device can be suspended and resumed.
fn can_resume(backend_features: u64) -> bool {
    BackendFeature::Suspend.is_in(backend_features) && BackendFeature::Resume.is_in(backend_features)
}

/// True if the device accepts a position at which a queue continues. There is no feature bit for this, so a position is
/// set now, while no queue runs, and then reset to 0, as each start does anyway.
fn takes_positions(kernel: &dyn Kernel) -> bool {
    kernel.set_queue_position(0, 1).and_then(|()| kernel.set_queue_position(0, 0)).is_ok()
}

/// Sets the status and reads it back, because the kernel does not report a refusal by the device.
fn set_status(kernel: &dyn Kernel, status: u8) -> io::Result<()> {
    kernel.set_status(status)?;
    if kernel.status()? & status == status { Ok(()) } else { Err(broken()) }
}

/// The error of a device that did not drop a mapping on request.
fn failed() -> RunnerError {
    RunnerError { what: "start a device that may reach memory outside its mappings", source: broken() }
}

/// The error of a device that does not accept a queue's position. `virtio 1.4` has no register for it, so some devices
/// can only start at 0.
fn unplaced(queue: &RunnerQueue, source: io::Error) -> StartError {
    if queue.position != 0 && source.raw_os_error() == Some(libc::EOPNOTSUPP) {
        let what = "continue at the position of a queue before a pause or a loss; its driver has to reset it";
        return StartError::Refused(RunnerError { what, source });
    }
    RunnerError { what: "continue at the position of a queue", source }.into()
}

fn connect(kernel: &dyn Kernel, queue: &RunnerQueue) -> Result<(), RunnerError> {
    kernel.set_queue_kick(queue).map_err(RunnerError::of("connect a doorbell with the device"))?;
    kernel.set_queue_call(queue.index, &queue.call).map_err(RunnerError::of("connect an interrupt with the device"))
}

fn broken() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV | libc::ENXIO | libc::ETIMEDOUT))
}
