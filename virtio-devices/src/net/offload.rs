//! The thread of a NIC whose backend runs its queues: it starts and stops them, hears what the backend has to say, gets one that was
//! lost back, and serves the control queue.

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
use super::features::has;
use super::given::{Given, settle_position};
use super::worker::{Pass, Shared, give_up};
use crate::SharedQueue;
use crate::backend::{Attention, Health, Offload, OffloadError, OffloadQueue, OffloadRun, StartError};
use crate::eventfd::borrow;
use crate::ring::{self, Ring};
use crate::worker::own;

/// How long to wait before a backend that was lost is tried again.
const PATIENCE: Duration = Duration::from_secs(1);

/// A NIC's queues, and what runs them.
pub struct Offloaded {
    /// The NIC's id.
    pub id: String,
    /// The queues that the backend runs.
    pub given: Vec<Given>,
    /// The control queue, unless the backend runs it.
    pub control: Option<(u16, SharedQueue)>,
    /// The backend.
    pub backend: Arc<Mutex<Box<dyn Offload>>>,
    /// Whether the backend is there.
    pub health: Arc<Health>,
    /// What wakes the worker.
    pub kick: Arc<EventFd>,
    /// Set when it shall end.
    pub stop: Arc<AtomicBool>,
}

/// What the backend does.
enum Service {
    /// Nothing: it has not been started yet, or the host has taken the link down and it can go on after that.
    Idle,
    /// It runs the queues.
    Runs,
    /// Nothing, until the driver resets the device: what it has set up makes no sense to the backend.
    Refused,
    /// It was lost; when to try again.
    Lost(Instant),
}

/// A run of the worker.
struct Session<'q> {
    offloaded: &'q Offloaded,
    shared: &'q Shared,
    backend: MutexGuard<'q, Box<dyn Offload>>,
    /// The queues whose rings make sense, in the order of `started`.
    queues: Vec<(&'q Given, MutexGuard<'q, Queue>)>,
    /// What the backend was started with.
    started: Vec<OffloadQueue>,
    /// Signalled for queues that have no vector: the driver polls, and finds it in the ISR status.
    unmapped: Arc<EventFd>,
    active_pairs: u16,
    service: Service,
    /// The backend was lost, and may have given buffers back since: where the queues go on is to be read before the next start.
    adrift: bool,
    /// The driver has been told that what it has set up makes no sense to the backend.
    broken: bool,
}

impl Offloaded {
    /// Runs until told to stop. Waits for a predecessor's end first.
    pub fn run(self, shared: &Shared) {
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
        // Who owned it had the backend, too.
        let ring = Ring::open(*index, queue.lock(), event_idx, &shared.memory.memory());
        let ring = ring.inspect_err(|_| give_up(tally, &shared.interrupts)).ok()?;
        Some(Control::new(ring, shared.features, shared.pairs, Vec::new()))
    }
}

impl<'q> Session<'q> {
    /// Locks the queues, and leaves out those that make no sense. `None` without an eventfd: the driver has to try again.
    fn new(
        offloaded: &'q Offloaded,
        shared: &'q Shared,
        backend: MutexGuard<'q, Box<dyn Offload>>,
        tally: &mut Tally,
    ) -> Option<Self> {
        let memory = shared.memory.memory();
        let mut queues = Vec::with_capacity(offloaded.given.len());
        for given in &offloaded.given {
            let queue = given.queue.lock();
            match ring::check(&queue, &memory) {
                Ok(()) => queues.push((given, queue)),
                Err(_) => give_up(tally, &shared.interrupts),
            }
        }
        let unmapped = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        let unmapped = Arc::new(unmapped.inspect_err(|_| shared.interrupts.ask_for_reset()).ok()?);
        // One that was lost before this driver came is tried at once.
        let adrift = offloaded.health.is_lost();
        let service = if adrift { Service::Lost(Instant::now()) } else { Service::Idle };
        let (started, active_pairs, broken) = (Vec::new(), 0, false);
        Some(Self { offloaded, shared, backend, queues, started, unmapped, active_pairs, service, adrift, broken })
    }

    /// Whether the backend shall run the queues: with a link that is down, too, if it could not go on once that is up. Linux's driver does
    /// not hear that it has to reset the device.
    fn is_wanted(&self) -> bool {
        self.shared.state.link_up() || !self.backend.goes_on_after_stop()
    }

    /// Has the backend run the queues or let them be, as the host's link says, and tries to get back one that was lost.
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
                    // Started next, if it is wanted: a driver's commands go first, which have waited long enough.
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
        let calls: Vec<_> = self.queues.iter().map(|(given, _)| self.call(given.index)).collect();
        self.started =
            self.queues.iter().zip(calls).map(|((given, queue), call)| given.describe(queue, call)).collect();
        self.active_pairs = self.shared.state.active_pairs();
        let run = OffloadRun {
            queues: &self.started,
            features: self.shared.features,
            memory: &memory,
            offloads: self.shared.state.offloads(),
            active_pairs: self.active_pairs,
            fresh: self.shared.state.is_fresh(),
            untouched: !touched,
        };
        // One that fails may do so after it has begun.
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
            // One that was lost may have given buffers back without saying so. A signal too many is harmless.
            self.started.iter().for_each(|queue| drop(queue.call.write(1)));
        }
        self.restored();
        // What the driver made available while nobody ran the queue.
        self.kick();
        self.attend(tally);
    }

    /// Stops the queues and keeps where they go on.
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

    /// The backend is gone. Its link is down until it is back.
    fn lose(&mut self, error: &OffloadError) {
        self.stop();
        (self.service, self.adrift) = (Service::Lost(Instant::now() + PATIENCE), true);
        if self.offloaded.health.set_lost(true) {
            let losses = self.offloaded.health.losses();
            // A backend can come and go as often as it likes; the log grows with the logarithm of that.
            if losses.is_power_of_two() {
                let name = self.backend.ability().name;
                warn!(
                    "{}: {name} is lost ({losses} times so far): {error}; its link is down until it is back",
                    self.offloaded.id
                );
            }
            self.tell_link();
        }
    }

    /// The backend is there, and does not run what the driver has set up.
    fn refuse(&mut self, error: &OffloadError, tally: &mut Tally) {
        self.service = Service::Refused;
        let refusals = self.offloaded.health.count_refusal();
        // A driver can try as often as it likes; the log grows with the logarithm of that.
        if refusals.is_power_of_two() {
            let name = self.backend.ability().name;
            warn!(
                "{}: {name} refuses what the driver has set up ({refusals} times so far): {error}",
                self.offloaded.id
            );
        }
        self.restored();
        self.need_reset(tally);
    }

    /// Has the driver told, once, that it has to reset the device.
    fn need_reset(&mut self, tally: &mut Tally) {
        if !std::mem::replace(&mut self.broken, true) {
            give_up(tally, &self.shared.interrupts);
        }
    }

    /// The backend is there, and may have been lost.
    fn restored(&self) {
        if self.offloaded.health.set_lost(false) {
            if self.offloaded.health.losses().is_power_of_two() {
                info!("{}: {} is back", self.offloaded.id, self.backend.ability().name);
            }
            self.tell_link();
        }
    }

    /// Hears what the backend has to say.
    fn attend(&mut self, tally: &mut Tally) {
        match self.backend.attend() {
            Ok(Attention::Nothing) => {}
            Ok(Attention::Link(up)) => {
                if self.offloaded.health.set_link(up) {
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

    /// Has the backend know what the driver has changed: the vectors of its queues, and how many pairs it uses.
    fn follow(&mut self) {
        for n in 0..self.started.len() {
            // Whoever waits for the end need not wait for all of it.
            if self.offloaded.stop.load(Ordering::Acquire) {
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
                // A doorbell may have come before the command was carried out, to a queue that the backend did not run then.
                Ok(()) => self.kick(),
                Err(error) => self.lose(&error),
            }
        }
    }

    /// Has the backend look at its queues.
    fn kick(&self) {
        // A full counter has woken it already.
        self.queues.iter().for_each(|(given, _)| drop(given.kick.write(1)));
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
            // How many pairs it uses is to be followed.
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
        let kick = borrow(&self.offloaded.kick);
        let unmapped = borrow(&self.unmapped);
        let watched = self.backend.watched();
        let mut fds = vec![PollFd::new(&kick, PollFlags::IN), PollFd::new(&unmapped, PollFlags::IN)];
        fds.extend(watched.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = match self.service {
            Service::Lost(again) => Timespec::try_from(again.saturating_duration_since(Instant::now())).ok(),
            // It has come back, and is started next.
            Service::Idle if self.is_wanted() => Some(Timespec::default()),
            Service::Idle | Service::Runs | Service::Refused => None,
        };
        // Interrupted by a signal, or without memory for the call: all is looked at, and it is tried again.
        let _ = poll(&mut fds, timeout.as_ref());
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        drop(watched);
        let [kicked, polled, spoken @ ..] = ready.as_slice() else { return };
        if *kicked && self.offloaded.kick.read().is_ok() {
            tally.count(Counter::Kicks);
        }
        if *polled && self.unmapped.read().is_ok() {
            self.queues.iter().for_each(|(given, _)| self.tell_unmapped(given.index));
        }
        if spoken.contains(&true) {
            match self.service {
                Service::Lost(_) => self.service = Service::Lost(Instant::now()),
                // One whose queues stand still can be lost, too; what is not heard would be readable for ever.
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
