//! The worker of a NIC whose backend runs the queues: it starts, stops and recovers the backend, and serves the control
//! queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::{info, warn};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::Queue;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::EventFd;

use super::control::Control;
use super::counters::{Counter, Tally};
use super::lent_queue::{LentQueue, settle_position};
use super::pass::{Pass, Shared, give_up};
use crate::SharedQueue;
use crate::backend::{Attention, Health, QueueRun, QueueRunner, RunnerError, RunnerQueue, StartError};
use crate::eventfd::borrow;
use crate::features::has;
use crate::ring::{self, Ring};
use crate::worker::own;

/// How long to wait before a lost backend is tried again.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the worker needs.
pub(crate) struct RunnerWorker {
    /// The NIC's id.
    pub id: String,
    /// The queues that the backend runs.
    pub lent: Vec<LentQueue>,
    /// The control queue, unless the backend runs it.
    pub control: Option<(u16, SharedQueue)>,
    /// The backend.
    pub backend: Arc<Mutex<Box<dyn QueueRunner>>>,
    /// Whether the backend works.
    pub health: Arc<Health>,
    /// What wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops it.
    pub stop: Arc<AtomicBool>,
}

/// The state of the backend.
enum Service {
    /// Stopped: not started yet, or the host has taken the link down.
    Idle,
    /// Running the queues.
    Runs,
    /// Stopped until the driver resets the device, because the backend refused what the driver has set up.
    Refused,
    /// Lost, with the time of the next attempt to recover it.
    Lost(Instant),
}

/// A run of the worker.
struct Session<'q> {
    worker: &'q RunnerWorker,
    shared: &'q Shared,
    backend: MutexGuard<'q, Box<dyn QueueRunner>>,
    /// The queues with valid rings, in the order of `started`.
    queues: Vec<(&'q LentQueue, MutexGuard<'q, Queue>)>,
    /// What the backend was started with.
    started: Vec<RunnerQueue>,
    /// Signalled for queues without a vector: the driver polls the ISR status.
    unmapped: Arc<EventFd>,
    active_pairs: u16,
    service: Service,
    /// The backend was lost and may have returned buffers since, so positions must be read from the rings before the
    /// next start.
    adrift: bool,
    /// The driver has been told to reset the device.
    broken: bool,
}

impl RunnerWorker {
    /// Runs until told to stop. First waits until its predecessor has ended.
    pub(crate) fn run(self, shared: &Shared) {
        if !*shared.complete.lock() {
            return;
        }
        let Some(backend) = own(&self.backend, &self.stop) else { return };
        let mut tally = Tally::new();
        let Some(mut session) = Session::new(&self, shared, backend, &mut tally) else { return };
        let mut control = self.open_control(shared, &mut tally);
        while !self.stop.load(Ordering::Acquire) {
            session.settle(&mut tally);
            let busy = session.serve(&mut control, &mut tally);
            tally.flush(&shared.counters);
            if !busy {
                session.wait(&mut tally);
            }
        }
        session.stop();
        tally.flush(&shared.counters);
    }

    fn open_control<'q>(&'q self, shared: &Shared, tally: &mut Tally) -> Option<Control<'q>> {
        let (index, queue) = self.control.as_ref()?;
        let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
        // The backend is locked, so the predecessor has ended and released the queue.
        let ring = Ring::open(*index, queue.lock(), event_idx, &shared.memory.memory());
        let ring = ring.inspect_err(|_| give_up(tally, &shared.interrupts)).ok()?;
        Some(Control::new(ring, shared.features, shared.pairs, Vec::new()))
    }
}

impl<'q> Session<'q> {
    /// Locks the queues, and leaves out those with invalid rings. `None` without an eventfd: the driver has to try
    /// again.
    fn new(
        worker: &'q RunnerWorker,
        shared: &'q Shared,
        backend: MutexGuard<'q, Box<dyn QueueRunner>>,
        tally: &mut Tally,
    ) -> Option<Self> {
        let memory = shared.memory.memory();
        let mut queues = Vec::with_capacity(worker.lent.len());
        for lent in &worker.lent {
            let queue = lent.queue.lock();
            match ring::check(&queue, &memory) {
                Ok(()) => queues.push((lent, queue)),
                Err(_) => give_up(tally, &shared.interrupts),
            }
        }
        let unmapped = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        let unmapped = Arc::new(unmapped.inspect_err(|_| shared.interrupts.ask_for_reset()).ok()?);
        // A backend that was lost before this driver came is tried at once.
        let adrift = worker.health.is_lost();
        let service = if adrift { Service::Lost(Instant::now()) } else { Service::Idle };
        let (started, active_pairs, broken) = (Vec::new(), 0, false);
        Some(Self { worker, shared, backend, queues, started, unmapped, active_pairs, service, adrift, broken })
    }

    /// Whether the queues should run. They also run while the link is down if the backend could not continue after a
    /// stop, because Linux's driver ignores DEVICE_NEEDS_RESET.
    fn is_wanted(&self) -> bool {
        self.shared.state.link_up() || !self.backend.goes_on_after_stop()
    }

    /// Starts or stops the queues according to the host's link, and tries to recover a lost backend.
    fn settle(&mut self, tally: &mut Tally) {
        match self.service {
            Service::Idle if self.is_wanted() => self.start(tally),
            Service::Runs if !self.is_wanted() => {
                self.stop();
                self.shared.state.set_fresh(true);
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

    fn start(&mut self, tally: &mut Tally) {
        let memory = self.shared.memory.memory();
        let touched = self.shared.state.is_touched();
        if std::mem::take(&mut self.adrift) && touched {
            self.queues.iter_mut().for_each(|(_, queue)| settle_position(queue, None, &memory));
        }
        let calls: Vec<_> = self.queues.iter().map(|(lent, _)| self.call(lent.index)).collect();
        self.started = self.queues.iter().zip(calls).map(|((lent, queue), call)| lent.describe(queue, call)).collect();
        self.active_pairs = self.shared.state.active_pairs();
        let run = QueueRun {
            queues: &self.started,
            features: self.shared.features,
            memory: &memory,
            offloads: self.shared.state.offloads(),
            active_pairs: self.active_pairs,
            fresh: self.shared.state.is_fresh(),
            untouched: !touched,
        };
        // A start that fails may have taken buffers.
        self.shared.state.set_touched();
        match self.backend.start(&run) {
            Ok(()) => {}
            Err(StartError::Lost(error)) => {
                self.service = Service::Idle;
                return self.lose(&error);
            }
            Err(StartError::Refused(error)) => return self.refuse(&error, tally),
        }
        self.service = Service::Runs;
        self.shared.state.set_fresh(false);
        if touched {
            // A lost backend may have returned buffers without a signal. A spurious signal is harmless.
            self.started.iter().for_each(|queue| drop(queue.call.write(1)));
        }
        self.restored();
        // For buffers that the driver made available while the queues were stopped.
        self.kick();
        self.attend(tally);
    }

    /// Stops the queues and records their positions.
    fn stop(&mut self) {
        if !matches!(self.service, Service::Runs) {
            return;
        }
        self.service = Service::Idle;
        let memory = self.shared.memory.memory();
        let positions = self.backend.stop();
        let positions = positions.into_iter().chain(std::iter::repeat(None));
        for ((_, queue), position) in self.queues.iter_mut().zip(positions) {
            settle_position(queue, position, &memory);
        }
        self.started.clear();
    }

    /// Handles the loss of the backend: the link is down until it is back.
    fn lose(&mut self, error: &RunnerError) {
        self.stop();
        (self.service, self.adrift) = (Service::Lost(Instant::now() + PATIENCE), true);
        if self.worker.health.set_lost(true) {
            let losses = self.worker.health.losses();
            // Logged at powers of two, so that a flapping backend cannot fill the log.
            if losses.is_power_of_two() {
                let name = self.backend.ability().name;
                warn!(
                    "{}: {name} is lost ({losses} times so far): {error}; its link is down until it is back",
                    self.worker.id
                );
            }
            self.tell_link();
        }
    }

    /// Handles a refusal: the backend works, and does not accept what the driver has set up.
    fn refuse(&mut self, error: &RunnerError, tally: &mut Tally) {
        self.service = Service::Refused;
        let refusals = self.worker.health.count_refusal();
        // Logged at powers of two, so that a driver cannot fill the log.
        if refusals.is_power_of_two() {
            let name = self.backend.ability().name;
            warn!("{}: {name} refuses what the driver has set up ({refusals} times so far): {error}", self.worker.id);
        }
        self.restored();
        self.need_reset(tally);
    }

    /// Asks the driver, once, to reset the device.
    fn need_reset(&mut self, tally: &mut Tally) {
        if !std::mem::replace(&mut self.broken, true) {
            give_up(tally, &self.shared.interrupts);
        }
    }

    /// Notes that the backend works; it may have been lost before.
    fn restored(&self) {
        if self.worker.health.set_lost(false) {
            if self.worker.health.losses().is_power_of_two() {
                info!("{}: {} is back", self.worker.id, self.backend.ability().name);
            }
            self.tell_link();
        }
    }

    /// Receives what the backend reports.
    fn attend(&mut self, tally: &mut Tally) {
        match self.backend.attend() {
            Ok(Attention::Nothing) => {}
            Ok(Attention::Link(up)) => {
                if self.worker.health.set_link(up) {
                    self.tell_link();
                }
            }
            Ok(Attention::BrokenRing) => self.need_reset(tally),
            Err(error) => self.lose(&error),
        }
    }

    fn tell_link(&self) {
        self.shared.state.changed();
        self.shared.interrupts.signal_config();
    }

    /// Passes on what the driver has changed: vectors of queues, and the number of pairs in use.
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
        let pairs = self.shared.state.active_pairs();
        if pairs != self.active_pairs {
            self.active_pairs = pairs;
            match self.backend.set_active_pairs(pairs) {
                // A doorbell may have come earlier, for a queue that the backend did not run then.
                Ok(()) => self.kick(),
                Err(error) => self.lose(&error),
            }
        }
    }

    /// Makes the backend look at its queues.
    fn kick(&self) {
        // A full counter means that it is awake already.
        self.queues.iter().for_each(|(lent, _)| drop(lent.kick.write(1)));
    }

    /// What the backend is to signal for `queue`.
    fn call(&self, queue: u16) -> Arc<EventFd> {
        let interrupts = &self.shared.interrupts;
        interrupts.eventfd(interrupts.queue_vector(queue)).unwrap_or_else(|| Arc::clone(&self.unmapped))
    }

    /// Carries out the driver's commands. Returns whether there may be more.
    fn serve(&mut self, control: &mut Option<Control<'_>>, tally: &mut Tally) -> bool {
        let Some(running) = control else { return false };
        let memory = self.shared.memory.memory();
        let mut pass = Pass {
            memory: &memory,
            backend: &**self.backend,
            state: &self.shared.state,
            tally,
            interrupts: &self.shared.interrupts,
        };
        match running.run(&mut pass) {
            // A changed number of pairs must be passed on.
            Ok(more) => {
                more || self.shared.state.active_pairs() != self.active_pairs && matches!(self.service, Service::Runs)
            }
            Err(_) => {
                give_up(tally, &self.shared.interrupts);
                *control = None;
                false
            }
        }
    }

    /// Waits for the driver, the backend, a stop, or the time to try again.
    fn wait(&mut self, tally: &mut Tally) {
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
            tally.count(Counter::Kicks);
        }
        if *polled && self.unmapped.read().is_ok() {
            self.queues.iter().for_each(|(lent, _)| self.tell_unmapped(lent.index));
        }
        if spoken.contains(&true) {
            match self.service {
                Service::Lost(_) => self.service = Service::Lost(Instant::now()),
                // A stopped backend can be lost, too; an unread report would stay readable.
                Service::Runs | Service::Idle | Service::Refused => self.attend(tally),
            }
        }
    }

    fn tell_unmapped(&self, queue: u16) {
        if Arc::ptr_eq(&self.call(queue), &self.unmapped) {
            self.shared.interrupts.signal_queue(queue);
        }
    }
}
