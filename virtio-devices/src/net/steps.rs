//! Runs a NIC's queues step by step on the caller's thread, over any file descriptor, without waiting. For tests and
//! fuzz targets of other crates.

use std::os::fd::OwnedFd;

use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VLAN;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::control::Control;
use super::counters::{Counter, NetCounters, Tally};
use super::enforced::PolicyCell;
use super::filter::{Filter, HEAD, Mac, Mode};
use super::pass::{Next, Pass};
use super::receive::Receive;
use super::state::NetState;
use super::transmit::Transmit;
use crate::backend::Tap;
use crate::device::failures::Failures;
use crate::frames::net_protocol::MAX_READ;
use crate::frames::policy::Policy;
use crate::frames::spill::Spill;
use crate::queue::ring::Ring;
use crate::transport::features::has;
use crate::{DmaView, GuestMap, Interrupts, RateLimits, SharedQueue};

/// A queue that is run step by step.
pub struct StepQueue<'q>(Kind<'q>);

enum Kind<'q> {
    Receive(Receive<'q>),
    Transmit(Transmit<'q>),
    Control(Control<'q>),
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There may be more to do.
    More,
    /// A receive queue that waits for a frame.
    Frame,
    /// Nothing to do before the driver makes a buffer available.
    Doorbell,
    /// The ring is invalid: a worker would give it up until the driver resets the device.
    Broken,
}

/// A device with a queue that is run step by step.
pub trait Stepped {
    /// The queue.
    type Queue<'q>;

    /// The queue, which is locked until it is dropped; `None` if its rings do not lie in guest memory.
    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<Self::Queue<'q>>;

    /// Does the work of one turn of a worker.
    fn step(&mut self, queue: &mut Self::Queue<'_>) -> Step;

    /// True if the driver was interrupted since the last call.
    fn take_interrupt(&self) -> bool;
}

/// The common data of a NIC's queues, in the power-on state.
pub struct NetSteps {
    memory: DmaView,
    backend: Tap,
    state: NetState,
    policy: PolicyCell,
    tally: Tally,
    counters: NetCounters,
    failures: Failures,
    interrupts: Interrupts,
    features: u64,
}

impl NetSteps {
    /// A NIC with the address `mac`, whose driver negotiated `features`. Frames are read from and written to `backend`,
    /// one per system call.
    pub fn new(memory: GuestMap, backend: OwnedFd, mac: [u8; 6], features: u64) -> Self {
        let state = NetState::new(mac, true, 0);
        if has(features, VIRTIO_NET_F_CTRL_VLAN) {
            state.change_filter(Filter::enable_vlans);
        }
        Self {
            memory: DmaView::identity(&memory),
            backend: Tap::over_sockets(vec![backend]),
            state,
            policy: PolicyCell::new(Policy::default(), RateLimits::default()),
            tally: Tally::new(),
            counters: NetCounters::new(),
            failures: Failures::new("_net0", "tap"),
            interrupts: Interrupts::new(3, 0),
            features,
        }
    }

    fn ring<'q>(&self, index: u16, queue: &'q SharedQueue) -> Option<Ring<'q>> {
        Ring::open(index, queue.lock(), has(self.features, VIRTIO_RING_F_EVENT_IDX), &self.memory).ok()
    }

    /// A receive queue, which is locked until it is dropped; `None` if its rings do not lie in guest memory.
    pub fn receive<'q>(&self, queue: &'q SharedQueue) -> Option<StepQueue<'q>> {
        Some(StepQueue(Kind::Receive(Receive::new(self.ring(0, queue)?, self.features, Spill::new(MAX_READ).ok()?))))
    }

    /// As [`Self::receive`], for a transmit queue.
    pub fn transmit<'q>(&self, queue: &'q SharedQueue) -> Option<StepQueue<'q>> {
        Some(StepQueue(Kind::Transmit(Transmit::new(self.ring(1, queue)?, self.features))))
    }

    /// As [`Self::receive`], for the control queue of a NIC with `pairs` pairs of queues.
    pub fn control<'q>(&self, queue: &'q SharedQueue, pairs: u16) -> Option<StepQueue<'q>> {
        Some(StepQueue(Kind::Control(Control::new(self.ring(2, queue)?, self.features, pairs, Vec::new()))))
    }

    /// Does the work of one turn of a worker.
    pub fn step(&mut self, queue: &mut StepQueue<'_>) -> Step {
        let Self { memory, backend, state, policy, tally, counters, failures, interrupts, features: _ } = self;
        let Some(tap) = backend.queues().first().map(|tap| tap.lock()) else { return Step::Broken };
        let mut pass = Pass { memory, backend: &*tap, state, policy, tally, failures, interrupts, log: None };
        let busy = |busy| if busy { Step::More } else { Step::Doorbell };
        let step = |next| match next {
            Next::More => Step::More,
            Next::Frame => Step::Frame,
            // A limit needs time, and no step waits.
            Next::Doorbell | Next::Limited(_) => Step::Doorbell,
        };
        let result = match &mut queue.0 {
            Kind::Receive(receive) => receive.run(&mut pass).map(step),
            Kind::Transmit(transmit) => transmit.run(&mut pass).map(step),
            Kind::Control(control) => control.run(&mut pass).map(busy),
        };
        tally.flush(counters);
        result.unwrap_or(Step::Broken)
    }

    /// The counters so far.
    pub fn count(&self, counter: Counter) -> u64 {
        self.counters.get(counter)
    }

    /// True if the driver was interrupted since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.interrupts.take_isr() != 0
    }

    /// Checks frames by `policy` from the next step on.
    pub fn set_policy(&self, policy: Policy) {
        // No batch is in progress between steps.
        drop(self.policy.replace(policy, RateLimits::default()));
    }

    /// Takes the link up or down.
    pub fn set_link(&self, up: bool) {
        self.state.set_link_up(up);
    }

    /// Makes the NIC receive every frame, or only those that the filter accepts.
    pub fn set_promiscuous(&self, on: bool) {
        self.state.change_filter(|filter| filter.set_mode(Mode::Promiscuous, on));
    }

    /// The NIC's address.
    pub fn mac(&self) -> Mac {
        self.state.mac()
    }

    /// The queue pairs that the driver uses.
    pub fn active_pairs(&self) -> u16 {
        self.state.active_pairs()
    }

    /// True if the receive filter accepts a frame that begins so.
    pub fn wants(&self, front: &[u8; 16]) -> bool {
        let mut head = [0; HEAD];
        head[..front.len()].copy_from_slice(front);
        self.state.filter().wants(&head)
    }
}

impl StepQueue<'_> {
    /// True if it is a receive queue with a frame that waits for further buffers.
    pub fn has_waiting(&self) -> bool {
        matches!(&self.0, Kind::Receive(receive) if receive.has_waiting())
    }
}
