//! A vDPA device that is open, owned by this process, and reaches the guest's memory.

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_ACCESS_PLATFORM,
};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::EventFd;

use super::VdpaSpec;
use super::error::VdpaFault;
use super::identity::{self, Identity};
use super::kernel::{BackendFeature, Kernel};
use super::mapping::{self, Locking, Mapping};
use crate::Memory;
use crate::backend::{Ability, Attention, DoorbellPage, OffloadError, OffloadQueue, OffloadRun, StartError};
use crate::features::has;

const DRIVER: u8 = (VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER) as u8;
const FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
const DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
const NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET as u8;

/// The first Linux in which a driver that still forgets mappings at a reset offers not to ([`BackendFeature::IotlbPersist`]).
const PERSISTENT: (u32, u32) = (6, 7);

/// An open device.
pub struct Device {
    kernel: Box<dyn Kernel>,
    features: u64,
    backend_features: u64,
    queue_pairs: u16,
    control_queue: bool,
    /// See [`Self::goes_on_after_stop`].
    goes_on: bool,
    mappings: Vec<Mapping>,
    /// The doorbells of all queues, if the device lets others ring them.
    doorbells: Vec<Arc<DoorbellPage>>,
    /// The address that it was given here: a reset may bring its own back.
    given_mac: Option<[u8; 6]>,
    /// A reset may make it forget its mappings.
    forgets: bool,
    /// It may have forgotten them.
    forgotten: bool,
    state: State,
}

/// What the device does.
enum State {
    /// Nothing: it has been reset.
    Reset,
    /// It runs its queues.
    Runs(Setup),
    /// It stands still, with all that it knows.
    Suspended(Setup),
}

/// How it was set up.
#[derive(PartialEq, Eq)]
struct Setup {
    features: u64,
    queues: Vec<Place>,
}

/// A queue: its index, its size, and its rings.
type Place = (u16, u16, [GuestAddress; 3]);

impl Device {
    /// Takes possession of a device that has just been opened, and lets it reach the guest's memory. Returns what it can do, too, which
    /// has to do for `suffices`: one that does not reaches nothing.
    ///
    /// # Errors
    ///
    /// [`VdpaFault`]. Nothing of it is left when `kernel` has been dropped.
    pub fn open(
        mut kernel: Box<dyn Kernel>,
        spec: &VdpaSpec,
        memory: &Memory,
        suffices: impl FnOnce(&Ability) -> bool,
    ) -> Result<(Self, Ability), VdpaFault> {
        let mappings = mapping::mappings(&memory.memory())?;
        kernel.set_owner().map_err(VdpaFault::of("own the device"))?;
        let mut identity = Identity::ask(&*kernel)?;
        let own_mac = identity.mac;
        identity.give_mac(&*kernel, spec.mac)?;
        let ability = identity.ability(spec)?;
        if !suffices(&ability) {
            return Err(VdpaFault::Changed);
        }
        let range = kernel.iova_range().map_err(VdpaFault::of("read the addresses that the device reaches"))?;
        mapping::check_reach(&mappings, range)?;
        let backend_features = choose(&mut *kernel)?;
        // A driver uses a control queue if there is one: what it commands there is lost by a reset, and it waits for the answer.
        let can_go_on = can_resume(backend_features) || takes_positions(&*kernel);
        let goes_on = !ability.control_queue && can_go_on;
        let locking = Locking::reserve(&mappings);
        let batch = BackendFeature::Batch.is_in(backend_features);
        // The kernel says the same (EFAULT) whatever is wrong.
        mapping::map(&*kernel, &mappings, batch).map_err(|error| {
            if locking.falls_short() { VdpaFault::MemoryLock(locking) } else { VdpaFault::Map(error) }
        })?;
        let forgets = !BackendFeature::IotlbPersist.is_in(backend_features) && kernel.release() < PERSISTENT;
        let queues = 2 * ability.queue_pairs + u16::from(ability.control_queue);
        // Most devices have none.
        let doorbells = (0..queues).map(|queue| kernel.doorbell_page(queue).map(Arc::new)).collect::<io::Result<_>>();
        let device = Self {
            features: identity.features,
            backend_features,
            queue_pairs: ability.queue_pairs,
            control_queue: ability.control_queue,
            goes_on,
            mappings,
            doorbells: doorbells.unwrap_or_default(),
            given_mac: identity.mac.filter(|_| identity.mac != own_mac),
            forgets,
            forgotten: false,
            state: State::Reset,
            kernel,
        };
        Ok((device, ability))
    }

    /// Starts the queues of `run`, or has them go on if it has stood still since and nothing has changed. `config_call` is signalled
    /// when its configuration changes.
    ///
    /// # Errors
    ///
    /// When it does not do it. It is to be reset then. It refuses to go on after a reset if it cannot be told where its queues stood, or if
    /// it was given commands, by its own control queue, that nobody else knows.
    pub fn start(&mut self, run: &OffloadRun<'_>, config_call: &EventFd) -> Result<(), StartError> {
        if let State::Suspended(setup) = &self.state {
            if !run.untouched && *setup == Setup::of(run) && self.go_on(run).is_ok() {
                self.state = State::Runs(Setup::of(run));
                return Ok(());
            }
            self.reset().map_err(OffloadError::of("reset the device"))?;
        }
        if !run.untouched && self.was_commanded(run) {
            let what = "bring back what its driver had commanded, which has to reset the device";
            return Err(StartError::Refused(OffloadError {
                what,
                source: io::Error::other("the device has been reset"),
            }));
        }
        self.set_up(run, config_call)?;
        self.state = State::Runs(Setup::of(run));
        Ok(())
    }

    /// Whether the driver has given commands to the device itself.
    fn was_commanded(&self, run: &OffloadRun<'_>) -> bool {
        let pairs = if has(run.features, VIRTIO_NET_F_MQ) { self.queue_pairs } else { 1 };
        self.control_queue && run.queues.iter().any(|queue| queue.index == 2 * pairs && queue.position != 0)
    }

    fn set_up(&mut self, run: &OffloadRun<'_>, config_call: &EventFd) -> Result<(), StartError> {
        let kernel = &*self.kernel;
        if self.forgotten {
            let batch = BackendFeature::Batch.is_in(self.backend_features);
            let mapped = mapping::map_again(kernel, &self.mappings, batch);
            mapped.map_err(OffloadError::of("give the device the guest's memory again"))?;
            self.forgotten = false;
        }
        if let Some(mac) = self.given_mac {
            kernel.set_config(0, &mac).map_err(OffloadError::of("give the device its address"))?;
        }
        // A driver that negotiates it not would have the device bypass the host's protection of memory.
        let features = run.features & self.features | 1 << VIRTIO_F_ACCESS_PLATFORM;
        reach(kernel, DRIVER).map_err(OffloadError::of("start the device"))?;
        kernel.set_features(features).map_err(OffloadError::of("choose the device's features"))?;
        reach(kernel, DRIVER | FEATURES_OK).map_err(OffloadError::of("agree on features with the device"))?;
        kernel.set_config_call(config_call).map_err(OffloadError::of("hear of the device's configuration"))?;
        for queue in run.queues {
            kernel.set_queue_size(queue).map_err(OffloadError::of("set the size of a queue"))?;
            kernel.set_queue_rings(queue).map_err(OffloadError::of("set the rings of a queue"))?;
            kernel.set_queue_position(queue.index, queue.position).map_err(|source| unplaced(queue, source))?;
            connect(kernel, queue)?;
        }
        for queue in run.queues {
            kernel.enable_queue(queue.index).map_err(OffloadError::of("enable a queue"))?;
        }
        Ok(reach(kernel, DRIVER | FEATURES_OK | DRIVER_OK).map_err(OffloadError::of("let the device run"))?)
    }

    /// After a time of standing still.
    fn go_on(&self, run: &OffloadRun<'_>) -> Result<(), OffloadError> {
        run.queues.iter().try_for_each(|queue| connect(&*self.kernel, queue))?;
        self.kernel.resume().map_err(OffloadError::of("have the device go on"))
    }

    /// Has the device stand still, with all that it knows if it can, so that what its driver has commanded is not lost.
    ///
    /// # Errors
    ///
    /// When it does not do it.
    pub fn stop(&mut self) -> io::Result<()> {
        let State::Runs(setup) = std::mem::replace(&mut self.state, State::Reset) else { return Ok(()) };
        let suspended = BackendFeature::Suspend.is_in(self.backend_features) && self.kernel.suspend().is_ok();
        if suspended && can_resume(self.backend_features) {
            self.state = State::Suspended(setup);
            return Ok(());
        }
        self.reset()
    }

    /// Whether it can be expected to go on after [`Self::stop`], and no driver waits for it meanwhile.
    pub fn goes_on_after_stop(&self) -> bool {
        self.goes_on
    }

    /// The doorbells of its queues, in the order of these, if it has pages for them. They keep it open.
    pub fn doorbells(&self) -> &[Arc<DoorbellPage>] {
        &self.doorbells
    }

    /// Resets it.
    ///
    /// # Errors
    ///
    /// When it does not do it: it is gone.
    pub fn reset(&mut self) -> io::Result<()> {
        self.state = State::Reset;
        self.forgotten |= self.forgets;
        self.kernel.set_status(0)
    }

    /// Has the device signal `call` for `queue`.
    ///
    /// # Errors
    ///
    /// When it does not do it.
    pub fn set_call(&self, queue: u16, call: &EventFd) -> Result<(), OffloadError> {
        self.kernel.set_queue_call(queue, call).map_err(OffloadError::of("change an interrupt of the device"))
    }

    /// What the device, which runs, has to say: of its link, or that a driver's ring makes no sense to it.
    ///
    /// # Errors
    ///
    /// When it does not run any more.
    pub fn attend(&self) -> Result<Attention, OffloadError> {
        let status = self.kernel.status().map_err(OffloadError::of("read the device's status"))?;
        if status & DRIVER_OK == 0 {
            return Err(OffloadError { what: "go on with the device", source: broken() });
        }
        if status & NEEDS_RESET != 0 {
            // The driver has to reset it, and is told so. Opened anew it would go on with the same ring.
            return Ok(Attention::BrokenRing);
        }
        let negotiated = match &self.state {
            State::Runs(setup) => setup.features & self.features,
            _ => self.features,
        };
        let link_up = identity::link_up(&*self.kernel, negotiated);
        link_up.map(Attention::Link).map_err(OffloadError::of("read the device's configuration"))
    }

    /// Asks whoever runs the device for a sign of life. May wait for it as long as the kernel does.
    ///
    /// # Errors
    ///
    /// When there is nobody. That the device cannot answer such a question is none.
    pub fn probe(&self) -> Result<(), OffloadError> {
        let State::Runs(Setup { queues, .. }) = &self.state else { return Ok(()) };
        let Some((first, ..)) = queues.first() else { return Ok(()) };
        match self.kernel.queue_position(*first) {
            Err(source) if is_gone(&source) => Err(OffloadError { what: "reach the device", source }),
            _ => Ok(()),
        }
    }
}

impl Setup {
    fn of(run: &OffloadRun<'_>) -> Self {
        let place = |queue: &OffloadQueue| (queue.index, queue.size, [queue.descriptors, queue.available, queue.used]);
        Self { features: run.features, queues: run.queues.iter().map(place).collect() }
    }
}

/// Chooses what the kernel shall do for the device: all that is of use and that it can.
fn choose(kernel: &mut dyn Kernel) -> Result<u64, VdpaFault> {
    let what = "agree with the kernel on features";
    let features = kernel.backend_features().map_err(VdpaFault::of(what))? & BackendFeature::wanted();
    kernel.set_backend_features(features).map_err(VdpaFault::of(what))?;
    Ok(features)
}

/// Whether the device can stand still and go on.
fn can_resume(backend_features: u64) -> bool {
    BackendFeature::Suspend.is_in(backend_features) && BackendFeature::Resume.is_in(backend_features)
}

/// Whether the device can be told where a queue goes on. No feature bit says so, so that it is told now, while none runs, and then to begin
/// at the beginning, as each start does anyway.
fn takes_positions(kernel: &dyn Kernel) -> bool {
    kernel.set_queue_position(0, 1).and_then(|()| kernel.set_queue_position(0, 0)).is_ok()
}

/// Sets the status. The kernel does not tell when the device does not take it.
fn reach(kernel: &dyn Kernel, status: u8) -> io::Result<()> {
    kernel.set_status(status)?;
    if kernel.status()? & status == status { Ok(()) } else { Err(broken()) }
}

/// The device does not take a queue's position. One that never does can only begin at the beginning (`virtio 1.4` has no register for it).
fn unplaced(queue: &OffloadQueue, source: io::Error) -> StartError {
    if queue.position != 0 && source.raw_os_error() == Some(libc::EOPNOTSUPP) {
        let what = "have the device go on where a queue stood before a pause or a loss; its driver has to reset it";
        return StartError::Refused(OffloadError { what, source });
    }
    OffloadError { what: "have the device go on where a queue stood", source }.into()
}

fn connect(kernel: &dyn Kernel, queue: &OffloadQueue) -> Result<(), OffloadError> {
    kernel.set_queue_kick(queue).map_err(OffloadError::of("connect a doorbell with the device"))?;
    kernel.set_queue_call(queue.index, &queue.call).map_err(OffloadError::of("connect an interrupt with the device"))
}

fn broken() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV | libc::ENXIO | libc::ETIMEDOUT))
}
