//! Starts a NIC's workers when its driver is up.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VQ;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::counters::NetCounters;
use super::enforced::PolicyCell;
use super::engine::Engine;
use super::pass::Shared;
use super::runner::NicWorker;
use super::state::NetState;
use super::tap_watch::TapEnd;
use super::worker::Pair;
use crate::backend::{Ability, BackendKind, Health, MemoryMailbox, Tap};
use crate::device::failures::Failures;
use crate::device::runner::{LentQueue, RunnerWorker, SharedRunner};
use crate::device::worker::{WorkerKind, spawn, spawn_all, thread_name};
use crate::transport::features::has;
use crate::{Start, Worker};

/// A driver's start of a NIC.
pub(crate) struct NetStart<'n> {
    /// The engine of the queues.
    pub engine: &'n Engine,
    /// The NIC's id, which its threads are named after.
    pub id: &'n str,
    /// The queue pairs that the driver may use.
    pub pairs: u16,
    /// The state that the driver changes at run time.
    pub state: &'n Arc<NetState>,
    /// The policy in force.
    pub policy: &'n Arc<PolicyCell>,
    /// The counters.
    pub counters: &'n Arc<NetCounters>,
    /// The state of the backend.
    pub health: &'n Arc<Health>,
    /// The host's failures.
    pub failures: &'n Arc<Failures>,
    /// The mailbox for changes of the guest's memory.
    pub mailbox: &'n Arc<MemoryMailbox>,
    /// True if this is the first start since a reset.
    pub fresh: bool,
    /// The driver's setup.
    pub start: &'n Start,
}

impl NetStart<'_> {
    /// Starts the workers.
    ///
    /// # Errors
    ///
    /// Fails if the host has no eventfd or thread left. Nothing is started then.
    pub(crate) fn workers(&self) -> io::Result<Vec<Worker>> {
        match &self.engine {
            Engine::Tap(tap) => {
                let (pairs, shared) = (self.pairs_to_run(tap)?, self.shared());
                spawn_all(pairs, &shared.complete, |pair| self.spawn(pair, &shared))
            }
            Engine::Runner(ability, backend) => Ok(vec![self.start_runner(ability, backend)?]),
            Engine::Switch(port) => Ok(vec![port.carrier().open(&self.shared(), &self.start.queues)?]),
        }
    }

    /// Sorts the driver's queues by pair. The control queue follows the last pair that the driver uses
    /// (`virtio 1.4 §5.1.2`). A pair without an enabled queue has no worker.
    pub(crate) fn pairs_to_run(&self, backend: &Tap) -> io::Result<Vec<Pair>> {
        let count = self.pairs;
        let queue = |index| self.start.queues.iter().find(|(other, _)| *other == index).cloned();
        let mut pairs = Vec::with_capacity(count.into());
        for (index, tap) in (0..count).zip(backend.queues()) {
            let (receive, transmit) = (queue(2 * index), queue(2 * index + 1));
            let control = if index == 0 { queue(2 * count) } else { None };
            if receive.is_none() && transmit.is_none() && control.is_none() {
                continue;
            }
            let kick = eventfd()?;
            let end = TapEnd {
                id: self.id.to_owned(),
                search: backend.search(),
                successor: Arc::clone(backend.successor()),
                health: Arc::clone(self.health),
                kick: Arc::clone(&kick),
            };
            pairs.push(Pair {
                index,
                receive,
                transmit,
                control,
                tap: Arc::clone(tap),
                successor: Arc::clone(backend.successor()),
                end: (index == 0).then_some(end),
                kick,
                stop: Arc::new(AtomicBool::new(false)),
                peers: Vec::new(),
            });
        }
        let peers = pairs.iter().filter(|pair| pair.index > 0).map(|pair| Arc::clone(&pair.kick)).collect();
        if let Some(first) = pairs.first_mut().filter(|pair| pair.index == 0) {
            first.peers = peers;
        }
        Ok(pairs)
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::new(Shared {
            memory: self.start.memory.clone(),
            features: self.start.features,
            pairs: self.pairs,
            state: Arc::clone(self.state),
            policy: Arc::clone(self.policy),
            counters: Arc::clone(self.counters),
            failures: Arc::clone(self.failures),
            interrupts: Arc::clone(&self.start.interrupts),
            log: self.start.log.clone(),
            fresh: self.fresh,
            complete: Mutex::new(false),
        })
    }

    pub(crate) fn spawn(&self, pair: Pair, shared: &Arc<Shared>) -> io::Result<Worker> {
        let queues = [&pair.receive, &pair.transmit, &pair.control];
        let queues: Vec<_> = queues.into_iter().flatten().map(|(index, _)| *index).collect();
        let (kick, stop) = (Arc::clone(&pair.kick), Arc::clone(&pair.stop));
        let shared = Arc::clone(shared);
        let name = thread_name(self.id, "qp", pair.index);
        let thread = spawn(WorkerKind::Net, name, move || pair.run(&shared))?;
        Ok(Worker::new(queues, kick, stop, thread))
    }

    /// Starts the single worker of a backend that runs the queues itself.
    fn start_runner(&self, ability: &Ability, backend: &SharedRunner) -> io::Result<Worker> {
        let control = 2 * self.pairs;
        // Without VIRTIO_NET_F_CTRL_VQ there is no control queue, whatever the driver enables.
        let passed_on = ability.control_queue && has(self.start.features, VIRTIO_NET_F_CTRL_VQ);
        let lent = LentQueue::lend(&self.start.queues, |index| index < control || passed_on && index == control)?;
        let control = self.start.queues.iter().find(|(index, _)| *index == control && !ability.control_queue).cloned();
        let runner = RunnerWorker::new(self.id, self.start, lent, backend, (self.health, self.mailbox))?;
        let (mut doorbells, kick, stop) = (runner.doorbells(), Arc::clone(&runner.kick), Arc::clone(&runner.stop));
        doorbells.extend(control.iter().map(|(index, _)| (*index, Arc::clone(&kick))));
        let worker = NicWorker { runner, control, shared: self.shared() };
        let kind = match ability.kind {
            BackendKind::VhostNet => WorkerKind::VhostNet,
            BackendKind::VhostUser => WorkerKind::VhostUser,
            BackendKind::Vdpa => WorkerKind::Vdpa,
            // This process moves their frames without a runner, or there is no backend.
            BackendKind::Absent => WorkerKind::Absent,
            BackendKind::Tap | BackendKind::Switch => WorkerKind::Net,
        };
        let thread = spawn(kind, thread_name(self.id, "vq", 0), move || worker.run())?;
        Ok(Worker { doorbells, kick, stop, thread })
    }
}

fn eventfd() -> io::Result<Arc<EventFd>> {
    Ok(Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?))
}
