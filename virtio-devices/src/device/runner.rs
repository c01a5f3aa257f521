//! The worker of a device whose backend runs the queues: it starts, stops and recovers the backend, and passes on
//! changes by the driver. The parts that depend on the kind of device are behind [`RunnerDevice`].

mod device;
mod lent_queue;
mod progress;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::{info, warn};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use crate::backend::{Attention, Health, MemoryMailbox, QueueRun, QueueRunner, RunnerError, RunnerQueue, StartError};
use crate::device::worker::own;
use crate::os::eventfd::borrow;
use crate::os::thread::drop_after_work;
use crate::queue::ring;
use crate::{DmaSpace, Interrupts, Start};
pub(crate) use device::RunnerDevice;
pub(crate) use lent_queue::LentQueue;
use lent_queue::{look_ahead, settle_position};
pub(crate) use progress::Progress;

/// The time to wait before a lost backend is tried again.
const PATIENCE: Duration = Duration::from_secs(1);

/// The worker's data, for every kind of device.
pub(crate) struct RunnerWorker {
    /// The device's id.
    id: String,
    /// The guest's memory.
    memory: DmaSpace,
    /// The negotiated features.
    features: u64,
    /// The interrupts of the driver.
    interrupts: Arc<Interrupts>,
    /// The queues that the backend runs.
    lent: Vec<LentQueue>,
    /// The backend.
    backend: SharedRunner,
    /// The state of the backend.
    health: Arc<Health>,
    /// The mailbox for changes of the guest's memory.
    mailbox: Arc<MemoryMailbox>,
    /// The event that wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops the worker.
    pub stop: Arc<AtomicBool>,
}

/// A backend that outlives the worker.
pub(crate) type SharedRunner = Arc<Mutex<Box<dyn QueueRunner>>>;
/// A backend while the worker owns it.
pub(crate) type OwnedRunner<'q> = MutexGuard<'q, Box<dyn QueueRunner>>;

/// The state of the backend.
enum Service {
    /// Stopped: not started yet, or the host has taken the link down.
    Idle,
    /// Running the queues.
    Runs,
    /// Stopped until the driver resets the device, because the backend refused the driver's setup.
    Refused,
    /// Lost, with the time of the next attempt to recover it.
    Lost(Instant),
}

/// A run of the worker.
struct Session<'q, D> {
    worker: &'q RunnerWorker,
    device: D,
    backend: OwnedRunner<'q>,
    /// The queues with valid rings, in the order of `started`.
    queues: Vec<(&'q LentQueue, MutexGuard<'q, Queue>)>,
    /// The parameters of the backend's start.
    started: Vec<RunnerQueue>,
    /// Signalled for queues without a vector: the driver polls the ISR status.
    unmapped: Arc<EventFd>,
    active_pairs: u16,
    service: Service,
    /// The backend was lost and may have returned buffers since, so positions must be read from the rings before the
    /// next start.
    recovering: bool,
    /// The driver has been asked to reset the device.
    broken: bool,
}

impl RunnerWorker {
    /// The worker of the device `id` for a driver's start, with the queues that are `lent`.
    ///
    /// # Errors
    ///
    /// Fails if the host has no eventfd left.
    pub(crate) fn new(
        id: &str,
        start: &Start,
        lent: Vec<LentQueue>,
        backend: &SharedRunner,
        (health, mailbox): (&Arc<Health>, &Arc<MemoryMailbox>),
    ) -> io::Result<Self> {
        Ok(Self {
            id: id.to_owned(),
            memory: start.memory.clone(),
            features: start.features,
            interrupts: Arc::clone(&start.interrupts),
            lent,
            backend: Arc::clone(backend),
            health: Arc::clone(health),
            mailbox: Arc::clone(mailbox),
            kick: Arc::new(EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?),
            stop: Arc::new(AtomicBool::new(false)),
        })
    }

    /// The doorbells of the lent queues, which the backend receives.
    pub(crate) fn doorbells(&self) -> Vec<(u16, Arc<EventFd>)> {
        self.lent.iter().map(|lent| (lent.index, Arc::clone(&lent.kick))).collect()
    }

    /// Waits until the predecessor has ended. `None` if the worker must stop before that.
    pub(crate) fn own(&self) -> Option<OwnedRunner<'_>> {
        own(&self.backend, &self.stop)
    }

    /// Runs until it must stop.
    pub(crate) fn run<'q, D: RunnerDevice>(&'q self, backend: OwnedRunner<'q>, device: D) {
        let Some(mut session) = Session::new(self, backend, device) else { return };
        while !self.stop.load(Ordering::Acquire) {
            session.follow_memory();
            session.settle();
            if !session.serve() {
                session.wait();
            }
        }
        // The thread that stops this worker waits for the stop, but not for closing resources.
        session.halt().into_iter().for_each(drop_after_work);
    }
}

impl<'q, D: RunnerDevice> Session<'q, D> {
    /// Locks the queues, and leaves out those with invalid rings. `None` without an eventfd: the driver must try again.
    fn new(worker: &'q RunnerWorker, backend: OwnedRunner<'q>, mut device: D) -> Option<Self> {
        let memory = worker.memory.pass();
        let mut queues = Vec::with_capacity(worker.lent.len());
        for lent in &worker.lent {
            let queue = lent.queue.lock();
            match ring::check(&queue, &memory) {
                Ok(()) => queues.push((lent, queue)),
                Err(_) => {
                    device.count_broken_ring();
                    worker.interrupts.ask_for_reset();
                }
            }
        }
        let unmapped = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        let unmapped = Arc::new(unmapped.inspect_err(|_| worker.interrupts.ask_for_reset()).ok()?);
        // A backend that was lost before this driver started is tried at once.
        let recovering = worker.health.is_lost();
        let service = if recovering { Service::Lost(Instant::now()) } else { Service::Idle };
        let (started, active_pairs, broken) = (Vec::new(), 0, false);
        Some(Self { worker, device, backend, queues, started, unmapped, active_pairs, service, recovering, broken })
    }

    /// True if the queues should run. They also run while the link is down if the backend could not continue after a
    /// stop, because Linux's driver ignores DEVICE_NEEDS_RESET.
    fn is_wanted(&self) -> bool {
        self.device.is_wanted() || !self.backend.goes_on_after_stop()
    }

    /// Starts or stops the queues according to the host's link, and tries to recover a lost backend.
    fn settle(&mut self) {
        match self.service {
            Service::Idle if self.is_wanted() => self.start(),
            Service::Runs if !self.is_wanted() => {
                self.stop();
                self.device.progress().set_fresh(true);
            }
            Service::Runs => self.follow(),
            Service::Lost(again) if again <= Instant::now() => match self.backend.recover() {
                Ok(()) => {
                    // It is started in the next turn: the driver's commands, which have waited long enough, go first.
                    self.service = Service::Idle;
                    if !self.is_wanted() {
                        self.restored();
                    }
                }
                Err(_) => self.service = Service::Lost(Instant::now() + PATIENCE),
            },
            _ => {}
        }
    }

    fn start(&mut self) {
        let touched = self.device.progress().is_touched();
        if std::mem::take(&mut self.recovering) && touched {
            let memory = self.worker.memory.pass();
            self.queues.iter_mut().for_each(|(_, queue)| settle_position(queue, None, &memory));
        }
        // No pass is held from here on: the backend may wait for a thread that waits for passes.
        let memory = self.worker.memory.map();
        let calls: Vec<_> = self.queues.iter().map(|(lent, _)| self.call(lent.index)).collect();
        self.started = self.queues.iter().zip(calls).map(|((lent, queue), call)| lent.describe(queue, call)).collect();
        self.active_pairs = self.device.active_pairs();
        let run = QueueRun {
            queues: &self.started,
            features: self.worker.features,
            memory: &memory,
            dma: &self.worker.memory,
            offloads: self.device.offloads(),
            active_pairs: self.active_pairs,
            fresh: self.device.progress().is_fresh(),
            untouched: !touched,
        };
        // A start that fails may have taken buffers.
        self.device.progress().set_touched();
        match self.backend.start(&run) {
            Ok(()) => {}
            Err(StartError::Lost(error)) => {
                self.service = Service::Idle;
                return self.lose(&error);
            }
            Err(StartError::Refused(error)) => return self.refuse(&error),
        }
        self.service = Service::Runs;
        self.device.progress().set_fresh(false);
        if touched {
            // A lost backend may have returned buffers without a signal. A spurious signal is harmless.
            self.started.iter().for_each(|queue| drop(queue.call.write(1)));
        }
        self.restored();
        self.refresh();
        // For buffers that the driver made available while the queues were stopped.
        self.kick();
        self.attend();
    }

    /// Stops the queues and records their positions.
    fn stop(&mut self) {
        drop(self.halt());
    }

    /// Stops the queues as [`Self::stop`], and returns the resources that must be closed.
    fn halt(&mut self) -> Option<Box<dyn Any>> {
        if !matches!(self.service, Service::Runs) {
            return None;
        }
        self.service = Service::Idle;
        let positions = self.backend.stop();
        let memory = self.worker.memory.pass();
        let positions = positions.into_iter().chain(std::iter::repeat(None));
        for ((_, queue), position) in self.queues.iter_mut().zip(positions) {
            settle_position(queue, position, &memory);
        }
        self.started.clear();
        self.backend.take_stopped()
    }

    /// Handles the loss of the backend: nothing runs until it is back.
    fn lose(&mut self, error: &RunnerError) {
        self.stop();
        (self.service, self.recovering) = (Service::Lost(Instant::now() + PATIENCE), true);
        if self.worker.health.set_lost(true) {
            let losses = self.worker.health.losses();
            // Logged at powers of two, so that a flapping backend cannot fill the log.
            if losses.is_power_of_two() {
                let (id, name) = (&self.worker.id, self.backend.ability().name);
                let until = if self.device.shows_loss() { "its link is down" } else { "its requests wait" };
                warn!("{id}: {name} is lost ({losses} so far): {error}; {until} until it is back");
            }
            self.tell_loss();
        }
    }

    /// Handles a refusal: the backend works, but does not accept the driver's setup.
    fn refuse(&mut self, error: &RunnerError) {
        self.service = Service::Refused;
        let refusals = self.worker.health.count_refusal();
        // Logged at powers of two, so that a driver cannot fill the log.
        if refusals.is_power_of_two() {
            let name = self.backend.ability().name;
            warn!("{}: {name} refuses what the driver has set up ({refusals} so far): {error}", self.worker.id);
        }
        self.restored();
        self.need_reset();
    }

    /// Asks the driver, once, to reset the device.
    fn need_reset(&mut self) {
        if !std::mem::replace(&mut self.broken, true) {
            self.device.count_broken_ring();
            self.worker.interrupts.ask_for_reset();
        }
    }

    /// Records that the backend works; it may have been lost before.
    fn restored(&self) {
        if self.worker.health.set_lost(false) {
            if self.worker.health.losses().is_power_of_two() {
                info!("{}: {} is back", self.worker.id, self.backend.ability().name);
            }
            self.tell_loss();
        }
    }

    /// Passes a change of the guest's memory, if there is one, to the backend.
    fn follow_memory(&mut self) {
        let Some(change) = self.worker.mailbox.take() else { return };
        if change.asks_to_stand() {
            self.settle();
            if matches!(self.service, Service::Runs) {
                return change.refuse();
            }
        }
        if change.is_of_memory() && self.backend.stands_for_memory() {
            // The queues are started again in this turn.
            self.stop();
        }
        change.apply(&mut **self.backend);
        if matches!(self.service, Service::Runs) {
            // The backend may be lost now.
            self.attend();
        }
    }

    /// Receives a report of the backend.
    fn attend(&mut self) {
        match self.backend.attend() {
            Ok(Attention::Nothing) => {}
            Ok(Attention::Link(up)) => {
                if self.worker.health.set_link(up) {
                    self.tell_config();
                }
            }
            Ok(Attention::Config) => self.refresh(),
            Ok(Attention::BrokenRing) => {
                if self.worker.memory.has_iommu() {
                    self.give_up();
                    self.report_faults();
                }
                self.need_reset();
            }
            Ok(Attention::Unreachable) => {
                self.give_up();
                self.need_reset();
            }
            Ok(Attention::Restart) => self.stop(),
            Err(error) => self.lose(&error),
        }
    }

    /// Stops the queues until the driver resets the device: at each doorbell the backend would fail in the same way.
    fn give_up(&mut self) {
        self.stop();
        self.service = Service::Refused;
    }

    /// Looks up the next buffers of the backend, which has failed without a reason. The IOMMU reports unmapped ones.
    fn report_faults(&mut self) {
        let memory = self.worker.memory.pass();
        self.queues.iter_mut().for_each(|(_, queue)| look_ahead(queue, &memory));
    }

    /// Re-reads the backend's configuration; sends a configuration-change interrupt if it differs.
    fn refresh(&self) {
        if self.device.take_config(self.backend.config()) {
            self.tell_config();
        }
    }

    /// Notifies the driver that its backend was lost or is back, if the device can show that.
    fn tell_loss(&self) {
        if self.device.shows_loss() {
            self.tell_config();
        }
    }

    fn tell_config(&self) {
        self.device.changed();
        self.worker.interrupts.signal_config();
    }

    /// Passes on changes by the driver: vectors of queues, and the number of pairs in use.
    fn follow(&mut self) {
        for n in 0..self.started.len() {
            // A vCPU may be waiting for this worker to end.
            if self.worker.stop.load(Ordering::Acquire) {
                return;
            }
            let Some(call) = self.started.get(n).map(|started| self.call(started.index)) else { continue };
            let Some(started) = self.started.get_mut(n) else { continue };
            if !Arc::ptr_eq(&call, &started.call) {
                started.call = call;
                if let Err(error) = self.backend.set_call(started.index, &started.call) {
                    return self.lose(&error);
                }
            }
        }
        let pairs = self.device.active_pairs();
        if pairs != self.active_pairs {
            self.active_pairs = pairs;
            match self.backend.set_active_pairs(pairs) {
                // A doorbell may have come earlier, for a queue that the backend did not run then.
                Ok(()) => self.kick(),
                Err(error) => self.lose(&error),
            }
        }
    }

    /// Makes the backend check its queues.
    fn kick(&self) {
        // A full counter means that it is awake already.
        self.queues.iter().for_each(|(lent, _)| drop(lent.kick.write(1)));
    }

    /// The eventfd that the backend signals for `queue`.
    fn call(&self, queue: u16) -> Arc<EventFd> {
        let interrupts = &self.worker.interrupts;
        interrupts.eventfd(interrupts.queue_vector(queue)).unwrap_or_else(|| Arc::clone(&self.unmapped))
    }

    /// Lets the device do its part. Returns true if there may be more.
    fn serve(&mut self) -> bool {
        match self.device.serve(&mut **self.backend) {
            // A changed number of pairs must be passed on.
            Ok(more) => {
                more || self.device.active_pairs() != self.active_pairs && matches!(self.service, Service::Runs)
            }
            Err(error) => {
                self.lose(&error);
                false
            }
        }
    }

    /// Waits for the driver, the backend, a stop, or the time to try again.
    fn wait(&mut self) {
        let kick = borrow(&self.worker.kick);
        let unmapped = borrow(&self.unmapped);
        let watched = self.backend.watched();
        let mut fds = vec![PollFd::new(&kick, PollFlags::IN), PollFd::new(&unmapped, PollFlags::IN)];
        fds.extend(watched.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = match self.service {
            Service::Lost(again) => Timespec::try_from(again.saturating_duration_since(Instant::now())).ok(),
            // The backend has come back, and is started next.
            Service::Idle if self.is_wanted() => Some(Timespec::default()),
            Service::Idle | Service::Runs | Service::Refused => None,
        };
        // If this fails (a signal, no memory), everything is checked and the wait is repeated.
        let _ = poll(&mut fds, timeout.as_ref());
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        drop(watched);
        let [kicked, polled, spoken @ ..] = ready.as_slice() else { return };
        if *kicked && self.worker.kick.read().is_ok() {
            self.device.count_kick();
        }
        if *polled && self.unmapped.read().is_ok() {
            self.queues.iter().for_each(|(lent, _)| self.tell_unmapped(lent.index));
        }
        if spoken.contains(&true) {
            match self.service {
                Service::Lost(_) => self.service = Service::Lost(Instant::now()),
                // A stopped backend can be lost, too; an unread report would stay readable.
                Service::Runs | Service::Idle | Service::Refused => self.attend(),
            }
        }
    }

    fn tell_unmapped(&self, queue: u16) {
        if Arc::ptr_eq(&self.call(queue), &self.unmapped) {
            self.worker.interrupts.signal_queue(queue);
        }
    }
}
