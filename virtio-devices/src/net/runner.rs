//! A NIC on the worker of a backend that runs its queues: its link, its pairs of queues, and its control queue unless
//! the backend runs that, too.

use std::sync::Arc;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::control::Control;
use super::counters::{Counter, Tally};
use super::pass::{Pass, Shared, give_up};
use super::rarp;
use crate::SharedQueue;
use crate::backend::{QueueRunner, RunnerError};
use crate::device::runner::{Progress, RunnerDevice, RunnerWorker};
use crate::frames::net_protocol::Offloads;
use crate::queue::ring::Ring;
use crate::transport::features::has;

/// The state of the thread of a NIC whose backend runs the queues.
pub(crate) struct NicWorker {
    /// The worker of its backend.
    pub runner: RunnerWorker,
    /// The control queue, unless the backend runs it.
    pub control: Option<(u16, SharedQueue)>,
    /// The data that it shares with the device.
    pub shared: Arc<Shared>,
}

impl NicWorker {
    /// Runs until it must stop. First waits until its predecessor has ended.
    pub(crate) fn run(self) {
        let Some(backend) = self.runner.own() else { return };
        let mut tally = Tally::new();
        let control = self.open_control(&mut tally);
        self.runner.run(backend, Nic { shared: &self.shared, control, tally });
    }

    fn open_control<'q>(&'q self, tally: &mut Tally) -> Option<Control<'q>> {
        let (index, queue) = self.control.as_ref()?;
        let shared = &self.shared;
        let event_idx = has(shared.features, VIRTIO_RING_F_EVENT_IDX);
        // The backend is locked, so the predecessor has ended and released the queue.
        let ring = Ring::open(*index, queue.lock(), event_idx, &shared.memory.pass());
        let ring = ring.inspect_err(|_| give_up(tally, &shared.interrupts)).ok()?;
        Some(Control::new(ring, shared.features, shared.pairs, Vec::new()))
    }
}

/// A NIC during a run of the worker.
struct Nic<'q> {
    shared: &'q Shared,
    control: Option<Control<'q>>,
    tally: Tally,
}

impl RunnerDevice for Nic<'_> {
    fn progress(&self) -> &Progress {
        self.shared.state.progress()
    }

    fn is_wanted(&self) -> bool {
        self.shared.state.link_up()
    }

    fn active_pairs(&self) -> u16 {
        self.shared.state.active_pairs()
    }

    fn offloads(&self) -> Offloads {
        self.shared.state.offloads()
    }

    fn changed(&self) {
        self.shared.state.changed();
    }

    fn shows_loss(&self) -> bool {
        true
    }

    /// Executes the driver's commands.
    fn serve(&mut self, backend: &mut (dyn QueueRunner + 'static)) -> Result<bool, RunnerError> {
        let state = &self.shared.state;
        if state.take_rarp() && state.link_up() {
            let frames = rarp::frames(&state.filter(), &self.shared.policy.load().policy);
            backend.announce(state.mac(), &frames)?;
        }
        let more = self.command(backend);
        self.tally.flush(&self.shared.counters);
        Ok(more)
    }

    fn count_kick(&mut self) {
        self.tally.count(Counter::Kicks);
    }

    fn count_broken_ring(&mut self) {
        self.tally.count(Counter::BrokenRings);
    }
}

impl Nic<'_> {
    fn command(&mut self, backend: &(dyn QueueRunner + 'static)) -> bool {
        let Some(running) = &mut self.control else { return false };
        let memory = self.shared.memory.pass();
        let mut pass = Pass {
            memory: &memory,
            backend,
            state: &self.shared.state,
            policy: &self.shared.policy,
            tally: &mut self.tally,
            failures: &self.shared.failures,
            interrupts: &self.shared.interrupts,
            log: self.shared.log.as_deref(),
        };
        running.run(&mut pass).unwrap_or_else(|_| {
            self.control = None;
            give_up(&mut self.tally, &self.shared.interrupts);
            false
        })
    }
}

impl Drop for Nic<'_> {
    fn drop(&mut self) {
        self.tally.flush(&self.shared.counters);
    }
}
